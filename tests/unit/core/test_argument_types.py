from __future__ import annotations

import contextlib
import inspect
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import blobstore
from blobstore.core import argument_types
from blobstore.errors import BlobstoreError, UsageError
from tests.support.models import dense_tensors, write_folder
from tests.support.signing import key_files

# A call of each function that needs arguments, in a folder that :func:`prepared` makes. A % stands for a bucket.
CALLS: dict[str, tuple[Any, ...]] = {
    "check_archive": ("m.bsar",),
    "compare": ("m", "m"),
    "convert": ("x.pt", "out.safetensors"),
    "copy": ("m", "n"),
    "copy_to_store": ("m", "other"),
    "create": ("folders/m", "new"),
    "create_all": ("folders",),
    "diff": ("m", "m"),
    "export": ("m", "exported"),
    "find": ("a*",),
    "follow": ("n", "%/m"),
    "gc_remote": ("%",),
    "history": ("m",),
    "info": ("m",),
    "ingest": ([],),
    "inspect": ("x.pt",),
    "link": ("m", "linked"),
    "load": ("m",),
    "open": ("m",),
    "open_archive": ("m.bsar",),
    "open_checkpoint": ("x.pt",),
    "pack": ("m", "new.bsar"),
    "page": ("page.html",),
    "pull": ("%/m", "pulled"),
    "push": ("m", "%"),
    "push_version": ("m", "folders/m"),
    "read_file": ("m", "config.json"),
    "remove": ("pulled",),
    "rename": ("n", "k"),
    "restore": ("m",),
    "run": ("absent",),
    "save": ({"w": np.ones(3)}, "w"),
    "show": ("m",),
    "show_source": ("m",),
    "sign": ("m", "key.pem"),
    "sync": ("m.lock",),
    "thaw": ("m",),
    "unpack": ("m.bsar",),
}
ALWAYS: dict[str, dict[str, Any]] = {
    "follow": {"once": True},
    "ingest": {"executor": "threads:1"},
    "push_version": {"receiver": print},
}
ODD = (-1, ["a"], [3], {"a": 3}, b"x", object(), float("nan"), Path("y"))
FUNCTIONS = [name for name in blobstore.__all__ if inspect.isfunction(getattr(blobstore, name))]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a store and what the calls name. What calls change there does not matter."""
    folder = tmp_path_factory.mktemp("odd")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOBSTORE_HOME", "store")
        blobstore.create(write_folder(Path("folders/m"), dense_tensors()), "m")
        blobstore.pack("m", "m.bsar")
        blobstore.push("m", (folder / "bucket").as_uri())
        blobstore.lock("m", "m.lock", remote=(folder / "bucket").as_uri())
        torch.save({"a": torch.ones(2)}, "x.pt")
        key_files(folder)
    return folder


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_argument_of_any_type_is_taken_or_refused_in_one_line(
    name: str, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prepared)
    monkeypatch.setenv("BLOBSTORE_HOME", "store")
    function = getattr(blobstore, name)
    bucket = (prepared / "bucket").as_uri()
    base = [
        one.replace("%", bucket) if isinstance(one, str) else one for one in CALLS.get(name, ())
    ]
    for place, parameter in enumerate(inspect.signature(function).parameters.values()):
        for value in () if parameter.kind is parameter.VAR_KEYWORD else ODD:
            places, words = [*base], dict(ALWAYS.get(name, {}))
            if place < len(places):
                places[place] = value
            else:
                words[parameter.name] = value
            try:
                result = function(*places, **words)
            except BlobstoreError as error:
                assert "\n" not in str(error), (parameter.name, value)
                continue
            if isinstance(result, Future):
                result.result()
            elif name != "save":
                getattr(result, "close", int)()


def test_every_function_that_needs_arguments_is_called() -> None:
    needed = {
        name
        for name in FUNCTIONS
        for one in inspect.signature(getattr(blobstore, name)).parameters.values()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    }
    assert needed == set(CALLS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_types_of_all_arguments_are_known(name: str) -> None:
    function = inspect.unwrap(getattr(blobstore, name))
    assert argument_types.type_hints(function)


def test_options_of_another_type_are_refused(tmp_path: Path) -> None:
    wrong: Any = 4
    model = write_folder(tmp_path / "all" / "m", dense_tensors())
    for name in ("quantize", "source_options", "executor"):
        for function, source in ((blobstore.create, model), (blobstore.create_all, model.parent)):
            with pytest.raises(UsageError, match=rf"^{name} must be .*, got ('int'|4)$"):
                function(source, store=tmp_path / "store", **{name: wrong})
    with pytest.raises(UsageError, match=r"^registry must be .*RegistryOptions, got 'int'$"):
        blobstore.push("m", "oci://127.0.0.1:1/m", store=tmp_path / "store", registry=wrong)
