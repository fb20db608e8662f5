from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from blobstore.errors import (
    BlobstoreError,
    CheckpointRefused,
    DamagedSource,
    SourceNotFound,
    UsageError,
)
from blobstore.operations.export.convert import convert_checkpoint
from tests.support.models import moe_tensors, write_folder

TENSORS = {
    "plain": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "turned": torch.arange(6.0).reshape(2, 3).T,
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 4),
}


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        found: dict[str, str] = file.metadata()
        return found


def save(path: Path, value: object) -> Path:
    torch.save(value, path)
    return path


def test_writes_the_tensors_of_a_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    copied = convert_checkpoint(save(tmp_path / "x.pt", {"model": TENSORS, "epoch": 3}), target)
    found = load_file(target)
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert copied.tensors == len(TENSORS)
    assert copied.bytes_written == target.stat().st_size
    assert copied.notices == ("left out: the values that are not tensors; create keeps them",)


def test_the_metadata_names_pytorch_as_the_format(tmp_path: Path) -> None:
    convert_checkpoint(save(tmp_path / "x.pt", TENSORS), tmp_path / "out.safetensors")
    assert metadata_of(tmp_path / "out.safetensors") == {"format": "pt"}


def test_keeps_the_metadata_of_a_safetensors_file(tmp_path: Path) -> None:
    metadata = {"ss_base_model": "sdxl", "modelspec.title": "my <LoRA>"}
    source, target = tmp_path / "x.safetensors", tmp_path / "out.safetensors"
    save_file({"a": torch.ones(2)}, source, metadata)
    convert_checkpoint(source, target)
    assert metadata_of(target) == {"format": "pt", **metadata}
    save_file({"a": torch.ones(2)}, source, {"format": "mlx"})
    convert_checkpoint(source, target, force=True)
    assert metadata_of(target) == {"format": "mlx"}


def test_keeps_the_metadata_on_which_files_agree(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, name in enumerate(names):
        metadata = {"both": "x", "number": str(number), f"only {number}": "y"}
        save_file({f"t{number}": torch.ones(2)}, folder / name, metadata)
    index = {"weight_map": {f"t{number}": name for number, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    copied = convert_checkpoint(folder, tmp_path / "out.safetensors")
    assert metadata_of(tmp_path / "out.safetensors") == {
        "format": "pt",
        "both": "x",
        "only 0": "y",
        "only 1": "y",
    }
    assert copied.notices == ("left out: metadata 'number', which differs between the files",)


def test_joins_the_shards_of_a_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", moe_tensors(), shards=2)
    copied = convert_checkpoint(tmp_path / "model", tmp_path / "out.safetensors")
    assert copied.tensors == len(moe_tensors())


def test_writes_only_the_given_subtree(tmp_path: Path) -> None:
    source = save(tmp_path / "x.pt", {"model": TENSORS, "ema": {"a": torch.ones(1)}})
    convert_checkpoint(source, tmp_path / "out.safetensors", subtree="ema")
    assert set(load_file(tmp_path / "out.safetensors")) == {"a"}
    with pytest.raises(UsageError, match="there is no subtree 'none'"):
        convert_checkpoint(source, tmp_path / "other.safetensors", subtree="none")


def test_replaces_a_file_only_with_force(tmp_path: Path) -> None:
    source = save(tmp_path / "x.pt", TENSORS)
    target = tmp_path / "out.safetensors"
    target.write_bytes(b"precious")
    with pytest.raises(BlobstoreError, match="exists already; replace it with force=True"):
        convert_checkpoint(source, target)
    assert target.read_bytes() == b"precious"
    convert_checkpoint(source, target, force=True)
    assert set(load_file(target)) == set(TENSORS)


def test_a_folder_is_never_replaced(tmp_path: Path) -> None:
    source = save(tmp_path / "x.pt", TENSORS)
    target = tmp_path / "out.safetensors"
    target.mkdir()
    with pytest.raises(BlobstoreError, match="exists already"):
        convert_checkpoint(source, target, force=True)


def test_a_damaged_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    source = save(tmp_path / "x.pt", {"a": torch.from_numpy(np.arange(4096.0))})
    data = bytearray(source.read_bytes())
    data[data.index(np.float64(4000).tobytes())] ^= 1
    source.write_bytes(data)
    with pytest.raises(CheckpointRefused, match="CRC"):
        convert_checkpoint(source, tmp_path / "out.safetensors")
    assert os.listdir(tmp_path) == ["x.pt"]


def test_rejects_a_missing_source(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound):
        convert_checkpoint(tmp_path / "none.pt", tmp_path / "out.safetensors")


def test_names_the_target_that_cannot_be_written(tmp_path: Path) -> None:
    source = save(tmp_path / "x.pt", TENSORS)
    with pytest.raises(BlobstoreError, match=f"cannot write '{tmp_path}/none/out.safetensors'"):
        convert_checkpoint(source, tmp_path / "none" / "out.safetensors")


def test_reports_progress_up_to_the_total(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    source = save(tmp_path / "x.pt", TENSORS)
    convert_checkpoint(
        source, tmp_path / "out.safetensors", progress=lambda *step: steps.append(step)
    )
    total = sum(tensor.numel() * tensor.element_size() for tensor in TENSORS.values())
    assert steps[-1][1:] == (total, total)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 3])
def test_writes_the_same_file_with_any_number_of_threads(tmp_path: Path, jobs: int) -> None:
    tensors = {f"t{number}": torch.full((1 << 21,), float(number)) for number in range(7)}
    source = save(tmp_path / "x.pt", {**tensors, **TENSORS})
    threads: set[int] = set()
    convert_checkpoint(
        source,
        tmp_path / "out.safetensors",
        jobs=jobs,
        progress=lambda *_: threads.add(threading.get_ident()),
    )
    assert 1 <= len(threads) <= jobs
    found = load_file(tmp_path / "out.safetensors")
    assert set(found) == {*tensors, *TENSORS}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_source_that_changes_while_it_is_read_leaves_nothing(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", moe_tensors())
    weights = folder / "model.safetensors"

    def save_again(_: str, done: int, __: int) -> None:
        if done:
            weights.write_bytes(weights.read_bytes())

    target = tmp_path / "out.safetensors"
    with pytest.raises(DamagedSource, match=r"model\.safetensors' changed while it was read"):
        convert_checkpoint(folder, target, progress=save_again)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_file_that_appears_while_it_works_is_not_replaced(tmp_path: Path) -> None:
    source = save(tmp_path / "x.pt", TENSORS)
    target = tmp_path / "out.safetensors"
    with pytest.raises(BlobstoreError, match="exists already; replace it with force=True"):
        convert_checkpoint(source, target, progress=lambda *_: target.touch())
    assert target.read_bytes() == b""
    assert {path.name for path in tmp_path.iterdir()} == {"x.pt", "out.safetensors"}
