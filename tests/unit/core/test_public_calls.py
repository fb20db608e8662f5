from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.cli.main import _COMMANDS
from blobstore.core import public_calls
from blobstore.core.synonyms import ALIASES, COMMANDS
from blobstore.errors import BlobstoreError, InvalidCall, UsageError
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, blob


def guess(text: str) -> str:
    """Return the error of a call that somebody guesses."""
    with pytest.raises((BlobstoreError, AttributeError)) as caught:
        eval(text, {"blobstore": blobstore, "Path": Path, "store": blobstore.LocalStore("there")})
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("list('/there')", "not a model name: '/there' is a path; store= takes a store"),
        ("remove('m*')", "no model matches 'm*'"),
        ("open('m*')", "not a model name: model 'm*' must be 1 to 80 letters, digits, '_', '-' and '.', beginning with a letter, digit or '_'; a glob stands for several models, and one is needed here"),
        ("gc(Path('there'))", "gc() takes no arguments without a name, got 1; write gc(store=PosixPath('there'))"),
        ("gc(store)", "gc() takes no arguments without a name, got 1; write gc(store=LocalStore('"),
        ("remove('a', 'org/b')", "remove() takes several names as one list; write remove(['a', 'org/b'])"),
        ("verify('a', './there')", "verify() takes 1 argument without a name, got 2; write verify(…, store='./there')"),
        ("verify(sample=5)", "'5' is not a sample; give a share such as 5%, or a part such as 2/7"),
        ("gc(3)", "gc() takes no arguments without a name, got 1; name the others: store, older_than, dry_run, "),
        ("create('a', 'b', './there')", "create() takes 2 arguments without a name, got 3; write create(…, store='./there')"),
        ("verify('/there')", "not a model name: '/there' is a path; store= takes a store"),
        ("create('tiny', './there')", "not a model name: './there' is a path; create() takes source, then reference; store= takes a store"),
        ("verify(Path('there'))", "a name is a text, got 'PosixPath'; store= takes a store"),
        ("verify(store)", "a name is a text, got 'LocalStore'; store= takes a store"),
        ("verify({'a': 1})", "a name is a text, got 'dict'; store= takes a store"),
        ("verify('a', store=3)", "a path is a text or a Path, got 'int'"),
        ("create(None, 'a')", "source must be str | os.PathLike[str], got 'NoneType'"),
        ("create_all(3)", "folder must be str | os.PathLike[str], got 'int'"),
        ("pull(['a'])", "remote must be str | blobstore.registry.reference.RemoteReference, got 'list' of 'str'"),
        ("gc_remote(b'a')", "address must be str | blobstore.objects.address.StoreAddress, got 'bytes'"),
        ("sync(3)", "models must be str | os.PathLike[str] | collections.abc.Sequence["),
        ("sync(['a'])", "models must be str | os.PathLike[str] | collections.abc.Sequence[blobstore.manifests.lock_file.LockedModel], got 'list' of 'str'"),
        ("verify(keep='a', jobs='2')", "verify() has no argument 'keep'"),
        ("verify(jobs='2')", "jobs must be int | None, got 'str'"),
        ("ingest(['a'])", "items must be collections.abc.Iterable[tuple[str, str]], got 'list' of 'str'"),
        ("start_server(allow=3)", "allow must be collections.abc.Sequence[str], got 'int'"),
        ("follow('a', 'b', interval='1h')", "interval must be float, got 'str'"),
        ("find('a', on_found=3)", "on_found must be collections.abc.Callable[[collections.abc.Sequence["),
        ("create('a', 'b', overwrite=True)", "create() has no argument 'overwrite'; a name that another model has is replaced, and restore() gives it back"),
        ("save('m', {})", "tensors is a state dict, got 'str'; the name comes after it"),
        ("create(source='a', name='b')", "create() has no argument 'name'; did you mean 'reference'?"),
        ("verify(sotre='there')", "verify() has no argument 'sotre'; did you mean 'store'?"),
        ("remove('a', zzz=1)", "remove() has no argument 'zzz'; its arguments are references, keep_last, older_than, store, dry_run"),
        ("create_all('a', as_='b')", "create_all() has no argument 'as_'; did you mean 'prefix'?"),
        ("ingest([], zzz=1)", "ingest() has no argument 'zzz'; its arguments are items, target, executor, retries, on_done, source_options,"),
        ("diff('a')", "diff() missing 1 required positional argument: 'theirs'"),
        ("create('a', 'b', source='c')", "create() got multiple values for argument 'source'"),
    ],
)  # fmt: skip
def test_a_wrong_call_says_the_right_one_in_one_line(call: str, message: str) -> None:
    assert guess(f"blobstore.{call}").startswith(message)


@pytest.mark.parametrize(
    ("name", "meant"),
    {
        "load": "open",
        "ls": "list",
        "import_model": "create",
        "delete_models": "remove",
        "prune": "gc",
        "tag": "copy",
        "serve": "start_server",
        "exists": "LocalStore().has_model",
        "safe_open": "safetensors.safe_open",
        "save_file": "safetensors.torch.save_file",
        "ModelNotFound": "errors.ModelNotFound",
        "ModelNotFoundError": "errors.ModelNotFound",
        "freze": "freeze",
        "snapshot_download": "create",
    }.items(),
)
def test_a_name_that_does_not_exist_says_which_one_is_meant(name: str, meant: str) -> None:
    advice = public_calls.advice_on_name(name, blobstore.__all__)
    assert advice == f"; did you mean {meant!r}?"


def test_a_name_that_is_like_no_other_is_reported_alone() -> None:
    assert (
        guess("blobstore.freze")
        == "module 'blobstore' has no attribute 'freze'; did you mean 'freeze'?"
    )
    assert guess("blobstore.zzz") == "module 'blobstore' has no attribute 'zzz'"
    assert not hasattr(blobstore, "__wrapped__")


def test_the_short_names_of_commands_are_functions_too() -> None:
    for short, name in public_calls.SHORT.items():
        assert getattr(blobstore, short) is getattr(blobstore, name)
        assert short in _COMMANDS or short in ALIASES


def test_every_synonym_leads_to_a_command_or_a_public_name() -> None:
    named = {name.partition(".")[0].removesuffix("()") for name in public_calls._NAMES.values()}
    functions = named | set(public_calls.FUNCTIONS.values())

    assert functions <= {*blobstore.__all__, "safetensors"}
    assert set(COMMANDS.values()) <= set(_COMMANDS)


def test_the_package_that_serves_is_no_function() -> None:
    import blobstore.serve

    package: Any = blobstore.serve
    with pytest.raises(InvalidCall, match=r"serve is a package; did you mean '.*start_server'"):
        package("store")


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("size", "; did you mean 'nbytes'?"),
        ("close_", "; did you mean 'close'?"),
        ("zzz", "'zzz'"),
        ("__array__", "'__array__'"),
    ],
)
def test_an_attribute_that_a_model_lacks_says_which_one_is_meant(
    store: LocalStore, name: str, end: str
) -> None:
    add_blobs(store, "m", {"x": blob(("x", "U8", (1,), b"1"))})
    with blobstore.open("m", store=store) as model, pytest.raises(AttributeError) as caught:
        getattr(model, name)
    assert str(caught.value).endswith(end)
    assert not hasattr(model, "size")


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("gc", "; did you mean 'blobstore.gc(…, store=…)'?"),
        ("rm", "; did you mean 'blobstore.remove(…, store=…)'?"),
        ("save_model", "; did you mean 'blobstore.save(…, store=…)'?"),
        ("has_modl", "; did you mean 'has_model'?"),
        ("zzz", "'zzz'"),
        ("__array__", "'__array__'"),
    ],
)
def test_a_store_without_such_a_method_says_which_function_is_meant(
    store: LocalStore, name: str, end: str
) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(blobstore.LocalStore(store.root), name)
    assert str(caught.value).endswith(end)


def test_an_error_inside_of_a_function_stays_what_it_is() -> None:
    def fails(value: Any) -> int:
        return len(value)

    call = public_calls.checked_calls("fails", fails)

    with pytest.raises(TypeError, match="no len") as caught:
        call(3)
    assert not isinstance(caught.value, InvalidCall)
    assert call("abc") == 3


def test_a_wrong_call_is_a_type_error_too() -> None:
    assert issubclass(InvalidCall, TypeError)
    assert issubclass(InvalidCall, UsageError)


def test_public_functions_are_pickled_by_their_names() -> None:
    assert pickle.loads(pickle.dumps(blobstore.list)) is blobstore.list
