from __future__ import annotations

import copy
import inspect
import pickle
from typing import TYPE_CHECKING

import pytest

from blobstore import errors
from blobstore.errors import BlobstoreError, InvalidHeader, TensorNotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

CLASSES: list[type[BlobstoreError]] = [
    item
    for _, item in inspect.getmembers(errors, inspect.isclass)
    if issubclass(item, BlobstoreError)
]
EXIT_CODES = {
    "BlobstoreError": 1,
    "SourceError": 1,
    "UnsupportedSource": 1,
    "NameConflict": 1,
    "NameTaken": 1,
    "UnsupportedDType": 1,
    "StoreError": 1,
    "StoreBusy": 1,
    "UsageError": 2,
    "InvalidDigest": 2,
    "InvalidReference": 2,
    "NotFound": 3,
    "ModelNotFound": 3,
    "SourceNotFound": 3,
    "TensorNotFound": 3,
    "Damaged": 4,
    "InvalidHeader": 4,
    "InvalidManifest": 4,
    "CheckpointRefused": 4,
    "DamagedSource": 4,
    "BlobMissing": 4,
    "BlobDamaged": 4,
    "ColdDamaged": 4,
    "ArchiveDamaged": 4,
}


def test_every_class_has_its_exit_code() -> None:
    assert {item.__name__: item.exit_code for item in CLASSES} == EXIT_CODES


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


def test_errors_with_a_builtin_counterpart_can_be_caught_as_it() -> None:
    assert issubclass(UsageError, ValueError)
    assert issubclass(TensorNotFound, KeyError)
    assert issubclass(errors.UnsupportedDType, TypeError)
    assert not issubclass(InvalidHeader, ValueError)


def test_the_digest_of_a_damaged_blob_is_pickled() -> None:
    error = errors.BlobDamaged("damaged")
    error.digest = "sha256:0"
    assert pickle.loads(pickle.dumps(error)).digest == "sha256:0"
