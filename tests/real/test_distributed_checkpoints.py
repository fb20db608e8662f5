"""Folders that torch itself saves with two and with four processes give the tensors that torch reads."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import blobstore
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.sources.base import SourceOptions
from blobstore.sources.open import open_source
from blobstore.store.local import LocalStore
from tests.real.distributed_training import WORLDS
from tests.support.clients import run_python
from tests.support.saved_folders import COMPLETE, saved_folder
from tests.support.torch_files import TYPES, raw


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a folder for each number of processes."""
    folder = tmp_path_factory.mktemp("saved")
    command = (sys.executable, "-m", "tests.real.distributed_training", folder)
    ran = run_python(command, os.environ)
    assert ran.code == 0, ran.stderr[-3000:]
    return folder


def contents(path: Path, **options: Any) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Return the shape and bytes of every tensor of a source, read with a small buffer."""
    source = open_source(path, SourceOptions(**options))
    buffer = memoryview(bytearray(48))
    return {
        name: (spec.shape, b"".join(map(bytes, source.read(name, buffer))))
        for name, spec in source.specs.items()
    }


def expected(path: Path, name: str, prefix: str) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Return what torch has read below a prefix."""
    read = torch.load(path / "read.pt", weights_only=True)[name]
    found = {
        name.removeprefix(prefix): (tuple(tensor.shape), raw(tensor))
        for name, tensor in read.items()
        if name.startswith(prefix)
    }
    assert found
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_every_tensor_is_what_torch_reads(saved: Path, world: int) -> None:
    folder = saved / str(world)
    for name in ("step", "layouts"):
        assert contents(folder / name, subtree=".") == expected(folder, name, "")
        assert contents(folder / name) == expected(folder, name, "model.")
    states = contents(folder / "step", subtree="optimizer.state")
    assert len(states) == 3 * 4  # step, exp_avg and exp_avg_sq of each parameter


@pytest.mark.parametrize("world", WORLDS)
def test_the_model_is_found_in_every_layout(saved: Path, world: int) -> None:
    folder = saved / str(world)
    model = expected(folder, "step", "model.")
    assert len(model) == 4
    for name in ("flat", "trainer", "threads"):
        assert contents(folder / name) == model
    shards = contents(folder / "shards")
    layouts = expected(folder, "layouts", "model.")
    assert set(layouts) - set(shards) == {"float8", "plain", "scalar", "empty"}
    assert shards == {name: layouts[name] for name in shards}


def test_two_and_four_processes_give_the_same_blobs(saved: Path, store: LocalStore) -> None:
    found: list[dict[str, str]] = []
    for world in WORLDS:
        for name in ("layouts", "shards"):
            blobstore.create(saved / str(world) / name, f"{name}-{world}", store=store)
            layers = json.loads(store.read_manifest(f"{name}-{world}"))["layers"]
            digests = {layer.get("name"): layer["digest"] for layer in layers}
            names = ("columns", "middle", "both", "copies", "uneven", "half")
            found.append({tensor: digests[tensor] for tensor in names})
    assert found == [found[0]] * 4


@pytest.mark.parametrize("name", COMPLETE)
def test_folders_of_lightning_and_megatron_have_the_tensors_that_were_saved(
    name: str, tmp_path: Path
) -> None:
    folder = saved_folder(name, tmp_path)
    types = {str(key).removeprefix("torch."): value for key, value in TYPES.items()}
    wanted = {
        tensor: (types[dtype], tuple(shape), digest)
        for tensor, (dtype, shape, digest) in COMPLETE[name].items()
    }
    source = open_source(folder)
    found = contents(folder)
    assert {
        tensor: (source.specs[tensor].dtype.value, shape, hashlib.sha256(data).hexdigest())
        for tensor, (shape, data) in found.items()
    } == wanted
    assert any("optimizer" in notice for notice in source.notices)


def test_two_and_four_processes_of_megatron_give_the_same_blobs(
    store: LocalStore, tmp_path: Path
) -> None:
    found = []
    for name in ("megatron2", "megatron4"):
        blobstore.create(saved_folder(name, tmp_path), name, store=store)
        layers = store.resolve(Reference.parse(name)).layers
        found.append([layer for layer in layers if layer.media_type == media_types.TENSOR])
    assert len(found[0]) == len(COMPLETE["megatron2"])
    assert found[0] == found[1]
