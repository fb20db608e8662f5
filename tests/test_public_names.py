"""Every public name is documented, and an example in the documents that runs calls it.

Public are the names of ``blobstore`` and ``blobstore.safetensors`` with its frameworks, and what ``dir()``
lists of their classes.
"""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import blobstore
from blobstore import safetensors
from blobstore.core.fork import cached_property
from tests.support.transcripts import PYTHON_BLOCK, ROOT, outputs

SAVE_AND_LOAD = ["load", "load_file", "save", "save_file"]
MODULES = {
    "blobstore": blobstore.__all__,
    "blobstore.safetensors": safetensors.__all__,
    "blobstore.safetensors.numpy": SAVE_AND_LOAD,
}
if find_spec("torch") is not None:
    others = ["load_model", "save_model", "storage_ptr", "storage_size"]
    MODULES["blobstore.safetensors.torch"] = SAVE_AND_LOAD + others
if find_spec("mlx") is not None:
    MODULES["blobstore.safetensors.mlx"] = SAVE_AND_LOAD
PAGES = ("python", "examples", "safetensors")
CANNOT_FAIL = {
    "blobstore.ArchiveReader.references",
    "blobstore.BlobstoreError.at",
    "blobstore.BlobstoreError.copy",
    "blobstore.Checkpoint.close",
    "blobstore.Frozen.count",
    "blobstore.LocalStore.blob_path",
    "blobstore.Model.close",
    "blobstore.Model.keys",
    "blobstore.ModelPlan.decisions",
    "blobstore.SourceRecord.data",
    "blobstore.SourceRecord.to_bytes",
    "blobstore.safetensors.PrefetchLoader.close",
    "blobstore.safetensors.PrefetchLoader.names",
    "blobstore.safetensors.SafeSlice.get_dtype",
    "blobstore.safetensors.SafeSlice.get_shape",
    "blobstore.safetensors.SafetensorError.at",
    "blobstore.safetensors.SafetensorError.copy",
    "blobstore.safetensors.SafetensorsWriter.names",
    "blobstore.safetensors.safe_open.close",
}
"""Methods that only return or release what they hold."""
WRAPPERS = ("functools.py", "contextlib.py", "public_calls.py")


def members(owner: type) -> dict[str, Any]:
    """Return what ``dir()`` lists of an object of a class, if it is ours and has code."""
    listed = dir(owner) if issubclass(owner, tuple) else dir(owner.__new__(owner))
    found = {}
    for name in listed:
        home = next((base for base in owner.__mro__ if name in vars(base)), object)
        if not name.startswith("_") and home.__module__.startswith("blobstore"):
            found[name] = vars(home)[name]
    return {name: value for name, value in found.items() if code_of(value) is not None}


def code_of(value: Any) -> CodeType | None:
    """Return the code of a function, method or property; None of what has none."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    elif isinstance(value, classmethod | staticmethod):
        value = value.__func__
    code: CodeType | None = getattr(inspect.unwrap(value), "__code__", None)
    return code


def public() -> dict[str, Any]:
    """Return all public functions, methods and properties by their full names."""
    found: dict[str, Any] = {}
    for module, names in MODULES.items():
        for name in names:
            value = getattr(import_module(module), name)
            if inspect.isclass(value):
                found |= {f"{module}.{name}.{key}": item for key, item in members(value).items()}
            elif code_of(value) is not None:
                found[f"{module}.{name}"] = value
    return found


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> set[CodeType]:
    """Run the pages, each in order in a folder of its own, and return the code that their examples call."""
    for name in ("torch", "mlx.core", "cryptography", "obstore", "aiohttp"):
        pytest.importorskip(name, reason="it is in the test group")
    found: set[CodeType] = set()
    for page in PAGES:
        with pytest.MonkeyPatch.context() as patch:
            found |= run_page(page, tmp_path_factory.mktemp(page), patch)
    return found


def run_page(page: str, folder: Path, patch: pytest.MonkeyPatch) -> set[CodeType]:
    """Run the Python of a page, and return the code that it calls itself, and not what that calls."""
    place = f"docs/reference/{page}.md"
    text = (ROOT / place).read_text(encoding="utf-8")
    outputs(["python docs/examples/tiny_models.py ."], folder)
    patch.chdir(folder)
    patch.setenv("HOME", str(folder))
    patch.delenv("BLOBSTORE_HOME", raising=False)
    for name in ("safetensors", "safetensors.numpy", "safetensors.torch"):
        patch.setitem(sys.modules, name, import_module(name))  # the page replaces them
    found: set[CodeType] = set()
    names: dict[str, object] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename.endswith(WRAPPERS):
            caller = caller.f_back
        if event == "call" and caller is not None and caller.f_code.co_filename == place:
            found.add(frame.f_code)

    for block in PYTHON_BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        code = compile("\n" * line + block[1], place, "exec")
        sys.setprofile(note)
        try:
            exec(code, names)
        finally:
            sys.setprofile(None)
    return found


def test_examples_call_every_public_function_method_and_property(called: set[CodeType]) -> None:
    missing = {name: value for name, value in public().items() if code_of(value) not in called}
    text = "\n".join((ROOT / f"docs/reference/{page}.md").read_text("utf-8") for page in PAGES)
    # Their code runs once, which may be inside a function that an example called before.
    cached = [name for name, value in missing.items() if isinstance(value, cached_property)]
    seen = {name for name in cached if re.search(rf"\.{name.rpartition('.')[2]}\b", text)}

    assert len(public()) > 170
    assert sorted(missing.keys() - seen) == []


@pytest.mark.parametrize("name", public())
def test_everything_public_says_what_it_takes_returns_and_raises(name: str) -> None:
    value = public()[name]
    documentation = inspect.getdoc(value) or ""
    if isinstance(value, property | cached_property):
        assert documentation
        return
    function = getattr(value, "__func__", value)
    signature = inspect.signature(function)
    words = [word for word in signature.parameters if word not in ("self", "cls")]

    assert [word for word in words if not re.search(rf"\b{word}\b", documentation)] == []
    if signature.return_annotation not in ("None", None):
        assert re.search(r"(?i)\b(return|yield)", documentation)
    if name not in CANNOT_FAIL:
        assert re.search(r"\bRaises(:| as)", documentation)


@pytest.mark.parametrize(
    "name", [f"{module}.{name}" for module in MODULES for name in MODULES[module]]
)
def test_every_public_name_has_a_docstring_and_is_on_a_page(name: str) -> None:
    module, _, short = name.rpartition(".")
    pages = [ROOT / "docs" / "reference" / f"{page}.md" for page in PAGES]

    assert inspect.getdoc(getattr(import_module(module), short))
    assert re.search(rf"\b{short}\b", "\n".join(page.read_text("utf-8") for page in pages))


def test_docstrings_of_results_name_functions_that_are_public() -> None:
    for name in blobstore.__all__:
        text = inspect.getdoc(getattr(blobstore, name)) or ""
        for function in re.findall(r"^The result of :func:`([\w.]+)`", text):
            assert function.removeprefix("blobstore.") in blobstore.__all__, name
            assert function.startswith("blobstore."), name
