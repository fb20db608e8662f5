"""The names of the library: those of the reference, with its arguments, and more."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest
import safetensors

import blobstore.safetensors
from blobstore.errors import BlobstoreError

FUNCTIONS = {
    "": ["TensorSpec", "deserialize", "safe_open", "serialize", "serialize_file"],
    ".numpy": ["load", "load_file", "save", "save_file"],
    ".torch": [
        "load",
        "load_file",
        "load_model",
        "save",
        "save_file",
        "save_model",
        "storage_ptr",
        "storage_size",
        "_end_ptr",
        "_is_complete",
        "_remove_duplicate_names",
        "_to_ndarray",
    ],
    ".mlx": ["load", "load_file", "save", "save_file"],
}


def arguments(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in FUNCTIONS.items() for name in names]
)
def test_functions_take_the_arguments_of_the_reference(module: str, name: str) -> None:
    theirs = arguments(getattr(import_module(f"safetensors{module}"), name))
    ours = arguments(getattr(import_module(f"blobstore.safetensors{module}"), name))

    for expected, found in zip(theirs, ours, strict=False):
        assert (found.name, found.kind) == (expected.name, expected.kind)
        assert (found.default is found.empty) == (expected.default is expected.empty)
        if expected.default is not ...:  # compiled functions do not tell theirs
            assert found.default == expected.default
    assert all(more.kind is more.KEYWORD_ONLY for more in ours[len(theirs) :])


def test_all_names_of_the_reference_are_here() -> None:
    public = {name for name in vars(safetensors) if not name.startswith("_")}
    modules = {"numpy", "torch", "mlx", "flax", "paddle", "tensorflow"}

    assert public - modules <= set(blobstore.safetensors.__all__)
    assert blobstore.safetensors.__version__ == safetensors.__version__


@pytest.mark.parametrize("name", blobstore.safetensors.__all__)
def test_all_names_are_there(name: str) -> None:
    assert getattr(blobstore.safetensors, name).__name__ == name


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        _ = import_module("blobstore.safetensors").missing
    for module in "flax", "paddle", "tensorflow":
        with pytest.raises(ImportError):
            import_module(f"blobstore.safetensors.{module}")


def test_the_error_is_one_of_the_store() -> None:
    assert issubclass(blobstore.safetensors.SafetensorError, BlobstoreError)
    assert safetensors.SafetensorError.__base__ is Exception


def test_prefetch_takes_the_arguments_of_the_next_release() -> None:
    parameters = arguments(blobstore.safetensors.safe_open.prefetch)[1:]

    assert [(found.name, found.default) for found in parameters[:3]] == [
        ("plan", None),
        ("device", None),
        ("threads", 8),
    ]
    assert all(found.kind is found.KEYWORD_ONLY for found in parameters[1:])
