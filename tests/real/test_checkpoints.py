"""Real PyTorch checkpoints from packages give the tensors that torch's restricted reader gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import blobstore
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.export.convert import convert_checkpoint
from blobstore.safetensors.torch import as_tensor
from blobstore.sources.pytorch.checkpoint import open_checkpoint
from blobstore.store.local import LocalStore
from tests.real.packages import package

PACKAGES = {
    "lpips==0.1.4": "*.pth",
    "facenet-pytorch==2.6.0": "*.pt",
    "chgnet==0.4.2": "*.pth.tar",
    "pocketnet==0.3.0": "*.pt",
}
COUNTS = {"lpips==0.1.4": 6, "facenet-pytorch==2.6.0": 3, "chgnet==0.4.2": 3, "pocketnet==0.3.0": 5}


def files(pin: str) -> list[Path]:
    return sorted(package(pin).rglob(PACKAGES[pin]))


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True, map_location="cpu")


def flattened(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors in nested dicts and lists, named by their keys joined with dots."""
    if isinstance(value, torch.Tensor):
        return {path.removeprefix("."): value}
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return {}
    found: dict[str, torch.Tensor] = {}
    for key, item in items:
        found |= flattened(item, f"{path}.{key}")
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        same = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), same), name


@pytest.mark.parametrize("pin", PACKAGES)
def test_every_tensor_is_what_torch_loads(pin: str) -> None:
    assert len(files(pin)) == COUNTS[pin]
    for path in files(pin):
        expected = flattened(load(path))
        with open_checkpoint(path, subtree=".") as checkpoint:
            views = checkpoint.views()
            found = {
                name: as_tensor(memoryview(bytearray(view.data)), 0, view.spec)
                for name, view in views.items()
            }
        assert_equal(found, expected)


@pytest.mark.parametrize("pin", PACKAGES)
def test_the_model_is_stored_and_loaded_as_torch_loads_it(pin: str, tmp_path: Path) -> None:
    path = files(pin)[0]
    store = LocalStore(tmp_path)
    value = load(path)
    created = create(path, "m", store=store)
    if pin.startswith("chgnet"):
        value = value["model"]["state_dict"]
        assert any("'optimizer'" in notice for notice in created.notices)
    with blobstore.open("m", store=store, framework="torch") as model:
        assert_equal(dict(model.state_dict()), flattened(value))


def test_a_fine_tune_shares_what_it_did_not_change(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    first, *others = files("pocketnet==0.3.0")
    create(first, "first", store=store)
    layers = {layer.digest for layer in store.resolve(Reference.parse("first")).layers}
    tensors = load(first)
    for path in others:
        create(path, path.stem, store=store)
        again = {layer.digest for layer in store.resolve(Reference.parse(path.stem)).layers}
        expected = {
            name for name, tensor in load(path).items() if torch.equal(tensor, tensors[name])
        }
        assert len(layers & again) == len(expected)


def test_a_converted_file_is_read_by_the_safetensors_library(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for path in files("facenet-pytorch==2.6.0"):
        target = tmp_path / f"{path.stem}.safetensors"
        convert_checkpoint(path, target)
        assert_equal(load_file(target), load(path))


def test_checkpoints_are_read_with_neither_torch_nor_pickle() -> None:
    script = (
        "import sys\n"
        "class Ban:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] in ('torch', 'pickle', '_pickle', 'zipfile'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Ban())\n"
        "for name in ('pickle', '_pickle', 'zipfile'): sys.modules.pop(name, None)\n"
        "from blobstore.sources.pytorch.checkpoint import open_checkpoint\n"
        "with open_checkpoint(sys.argv[1]) as checkpoint: print(len(checkpoint.views()))\n"
    )
    path = files("pocketnet==0.3.0")[0]
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(len(load(path))), done.stderr
