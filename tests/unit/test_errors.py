from __future__ import annotations

import copy
import copyreg
import inspect
import pickle
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from blobstore import errors
from blobstore.errors import BlobstoreError, InvalidHeader, TensorNotFound, UsageError

CLASSES: list[type[BlobstoreError]] = [
    item
    for _, item in inspect.getmembers(errors, inspect.isclass)
    if issubclass(item, BlobstoreError)
]
EXIT_CODES = {
    1: (
        "BlobstoreError SourceError UnsupportedSource CheckpointRefused CheckpointUnsupported NameConflict NameTaken ImplausibleGarbage "
        "UnsupportedDType StoreError StoreBusy TooManyMaps MissingLibrary RemoteError RemoteRefused "
        "Conflict InvalidPolicy NotTrusted SafetensorError"
    ),
    2: "UsageError InvalidCall InvalidDigest InvalidReference",
    3: "NotFound ModelNotFound SourceNotFound TensorNotFound FileNotFound",
    4: (
        "Damaged InvalidHeader InvalidManifest CheckpointDamaged DamagedSource "
        "BlobMissing BlobDamaged ColdDamaged ArchiveDamaged InvalidSignature"
    ),
}


def test_every_class_has_its_exit_code() -> None:
    expected = {name: code for code, names in EXIT_CODES.items() for name in names.split()}
    assert {item.__name__: item.exit_code for item in CLASSES} == expected


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_has_one_root_and_shows_its_message_as_it_is(
    kind: type[BlobstoreError],
) -> None:
    error = kind("tensor 'a': it's wrong")
    assert isinstance(error, BlobstoreError)
    assert str(error) == "tensor 'a': it's wrong"


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_can_be_placed_and_keeps_its_class(kind: type[BlobstoreError]) -> None:
    error = kind("too short").at("'x'")
    assert type(error) is kind
    assert str(error) == "'x': too short"
    assert str(error.at("model m")) == "model m: 'x': too short"


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_can_be_copied_and_pickled(
    kind: type[BlobstoreError], copied: Callable[[BlobstoreError], BlobstoreError]
) -> None:
    error = copied(kind("message"))
    assert type(error) is kind
    assert str(error) == "message"


@pytest.mark.parametrize("kind", CLASSES)
def test_advice_ends_the_text_and_stays_apart_from_the_message(kind: type[BlobstoreError]) -> None:
    error = kind("too short", advice="repair it").at("'x'")
    assert str(error) == "'x': too short; repair it"
    assert (error.message, error.advice) == ("'x': too short", "repair it")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_advice_that_takes_long_is_computed_when_it_is_read() -> None:
    advice = Mock(return_value="take 'b'")
    error = TensorNotFound("no tensor 'a'", advice=advice).at("m")
    assert error.message == "m: no tensor 'a'"
    assert not advice.called
    assert str(error) == "m: no tensor 'a'; take 'b'"


def test_errors_with_a_builtin_counterpart_can_be_caught_as_it() -> None:
    assert issubclass(UsageError, ValueError)
    assert issubclass(TensorNotFound, KeyError)
    assert issubclass(errors.FileNotFound, KeyError)
    assert issubclass(errors.MissingLibrary, ImportError)
    assert issubclass(errors.UnsupportedDType, TypeError)
    assert not issubclass(InvalidHeader, ValueError)


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_with_a_place_share_nothing_whatever_libraries_register(
    kind: type[BlobstoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    reduce = pytest.importorskip("tblib.pickling_support").pickle_exception
    monkeypatch.setitem(copyreg.dispatch_table, kind, reduce)
    error = kind("is missing", advice="pull it")
    first, second = error.at("model a"), error.at("model b")
    assert [str(one).partition("is")[0] for one in (error, first, second)] == [
        "",
        "model a: ",
        "model b: ",
    ]
    assert [one.args for one in (error, first)] == [("is missing",), ("model a: is missing",)]
    assert type(first) is kind
    assert first.advice == "pull it"
