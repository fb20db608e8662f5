from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from blobstore.errors import SourceError, SourceNotFound, UsageError
from blobstore.sources.pytorch.inspect import inspect_checkpoint


class Evil:
    def __reduce__(self) -> Any:
        return eval, ("1/0",)


def save(path: Path, value: object, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


@pytest.mark.parametrize("is_zip", [True, False])
def test_describes_a_checkpoint(tmp_path: Path, is_zip: bool) -> None:
    value = {"model": {"a": torch.ones(2, 3)}, "optimizer": {"b": torch.ones(1)}}
    path = save(tmp_path / "x.pt", value, _use_new_zipfile_serialization=is_zip)
    found = inspect_checkpoint(path)
    assert found.refusal is None
    assert found.kind == ("zip checkpoint" if is_zip else "legacy stream")
    assert found.size == path.stat().st_size
    assert [(spec.name, spec.shape) for spec in found.tensors] == [("a", (2, 3))]
    assert [part[:2] for part in found.subtrees] == [(".", 2), ("model", 1), ("optimizer", 1)]
    assert any("'optimizer' (1 tensor)" in notice for notice in found.notices)


@pytest.mark.parametrize("is_zip", [True, False])
def test_names_every_global_with_its_use_and_place(tmp_path: Path, is_zip: bool) -> None:
    path = save(tmp_path / "x.pt", {"a": torch.ones(1)}, _use_new_zipfile_serialization=is_zip)
    found = inspect_checkpoint(path).globals
    assert {(item.name, item.use) for item in found} == {
        ("torch._utils._rebuild_tensor_v2", "rebuilds a tensor"),
        ("torch.FloatStorage", "type of a storage"),
        ("collections.OrderedDict", "plain value"),
    }
    assert {item.pickle for item in found} == {"x/data.pkl" if is_zip else ""}
    if not is_zip:
        data = path.read_bytes()
        assert all(data[item.offset : item.offset + 1] == b"c" for item in found)


@pytest.mark.parametrize("is_zip", [True, False])
def test_names_the_globals_of_a_refused_file(tmp_path: Path, is_zip: bool) -> None:
    value = {"a": torch.ones(1), "b": Evil()}
    found = inspect_checkpoint(
        save(tmp_path / "x.pt", value, _use_new_zipfile_serialization=is_zip)
    )
    assert found.refusal is not None
    assert "it uses '__builtin__.eval'" in found.refusal
    assert [item.name for item in found.globals if item.use is None] == ["__builtin__.eval"]
    assert not found.tensors


def test_looks_into_a_bare_pickle(tmp_path: Path) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps([Evil()]) + pickle.dumps(Evil()))
    found = inspect_checkpoint(path)
    assert "torch.save did not write" in (found.refusal or "")
    assert [item.use for item in found.globals] == [None, None]


@pytest.mark.parametrize("data", [b"\x80\x02cos\nsystem\n\xff", b"(S'x'\nios\nsystem\n."])
def test_lists_globals_up_to_where_a_pickle_cannot_be_read(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(data)
    found = inspect_checkpoint(path).globals
    assert [(item.name, item.use) for item in found] == [("os.system", None)]


def test_looks_into_every_pickle_of_a_torchscript_archive(tmp_path: Path) -> None:
    with pytest.warns((DeprecationWarning, FutureWarning), match="deprecated"):  # by torch
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "x.pt")
    found = inspect_checkpoint(tmp_path / "x.pt")
    assert "this is a TorchScript archive, which has a program" in (found.refusal or "")
    assert any(item.pickle.endswith("data.pkl") for item in found.globals)


def test_names_the_classes_of_a_pickled_module(tmp_path: Path) -> None:
    found = inspect_checkpoint(save(tmp_path / "x.pt", torch.nn.Sequential(torch.nn.Linear(2, 2))))
    uses = {item.name: item.use for item in found.globals}
    assert uses["torch.nn.modules.linear.Linear"] == "class of a module"
    assert [spec.name for spec in found.tensors] == ["0.weight", "0.bias"]


def test_lists_unreadable_tensors(tmp_path: Path) -> None:
    value = {"a": torch.ones(1), "b": torch.ones(1, dtype=torch.complex128)}
    found = inspect_checkpoint(save(tmp_path / "x.pt", value))
    assert [spec.name for spec in found.tensors] == ["a"]
    assert "ComplexDoubleStorage" in found.unreadable["b"]


@pytest.mark.parametrize("data", [b"", b"GGUF....", b"<!DOCTYPE html>", b"PK\3\4", b"\x80\x02"])
def test_a_file_of_another_format_is_described_and_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(data)
    found = inspect_checkpoint(tmp_path / "x.pt")
    assert found.refusal is not None
    assert found.kind is None
    assert found.size == len(data)


def test_an_unknown_subtree_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        inspect_checkpoint(save(tmp_path / "x.pt", {"a": torch.ones(1)}), subtree="none")


def test_distinguishes_missing_files_from_folders(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound):
        inspect_checkpoint(tmp_path / "none")
    with pytest.raises(SourceError, match="not a regular file"):
        inspect_checkpoint(tmp_path)
