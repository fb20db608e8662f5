"""Which GGUF files of a folder are one model, and which of them are read."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import blobstore
from blobstore.errors import DamagedSource, SourceError
from blobstore.operations.create.create import create
from blobstore.operations.export.link import link_model
from blobstore.sources.base import SourceOptions
from blobstore.sources.file_tree import FileTree
from blobstore.sources.gguf_models import choose_gguf, gguf_files
from blobstore.sources.huggingface import HuggingFaceFolder
from blobstore.store.local import LocalStore
from tests.support.gguf_files import TEXT, U32, gguf_file, text


def write(
    path: Path, kind: str = "model", tensor: str = "t", *, part: tuple[int, int] | None = None
) -> bytes:
    """Write a small file of a ``general.type``, and return its bytes. Its tensor's value is that of the name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = [("general.architecture", TEXT, text("clip" if kind == "mmproj" else "llama"))]
    values.append(("general.type", TEXT, text(kind)))
    if part:
        number, count = part
        parts = (("split.no", number), ("split.count", count), ("split.tensors.count", count))
        values += [(key, U32, struct.pack("<I", value)) for key, value in parts]
    content = gguf_file(values, [(tensor, 0, (2,), struct.pack("<II", len(path.name), len(kind)))])
    path.write_bytes(content)
    return content


def chosen(folder: Path, weights: str | None = None) -> tuple[list[str], list[str]]:
    """Return the files that are read, and the notices."""
    notices: list[str] = []
    return choose_gguf(FileTree(folder), "", weights, (), notices), notices


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    """Two quantizations, projectors of two types, and a file that no server loads."""
    folder = tmp_path / "gemma"
    write(folder / "gemma-Q4_K_M.gguf")
    write(folder / "gemma-Q8_0.gguf")
    write(folder / "mmproj-F16.gguf", "mmproj", "v")
    write(folder / "mmproj-F32.gguf", "mmproj", "v")
    write(folder / "gemma.imatrix.gguf", "imatrix", "i")
    return folder


def test_hidden_files_deep_ones_and_those_of_another_kind_are_no_models(gemma: Path) -> None:
    write(gemma / ".gemma-Q2_K.gguf")
    write(gemma / "a" / "b" / "gemma-Q3_K.gguf")
    (gemma / "notes.txt").write_bytes(b"GGUF")
    found = [name for model in gguf_files(FileTree(gemma)).models for name in model.files]
    assert sorted(found) == ["gemma-Q4_K_M.gguf", "gemma-Q8_0.gguf"]


@pytest.mark.parametrize("weights", ["*Q4_K_M*", "Q4_K_M", "q4_k_m", "gemma-Q4_K_M.gguf"])
def test_a_quantization_brings_its_projector(gemma: Path, weights: str) -> None:
    files, notices = chosen(gemma, weights)
    assert files == ["gemma-Q4_K_M.gguf", "mmproj-F16.gguf"]
    assert [notice.partition("(")[2] for notice in notices] == [
        f"role: model); 'blobstore create --all {gemma}' imports each model",
        "role: importance matrix); --keep stores such files as they are",
        "role: projector); --exclude leaves out the one that was taken instead",
    ]


def test_a_pattern_may_name_the_projector_too(gemma: Path) -> None:
    assert chosen(gemma, "*[QF][83]*")[0] == ["gemma-Q8_0.gguf", "mmproj-F32.gguf"]
    assert chosen(gemma, "mmproj-F32*")[0] == ["mmproj-F32.gguf"]
    assert chosen(gemma, "Q5_0")[0] == []


def test_several_models_are_named_with_what_chooses_one(gemma: Path) -> None:
    for weights in (None, "*Q*"):
        with pytest.raises(SourceError, match=r"several GGUF models \('Q4_K_M', 'Q8_0'\); choose"):
            chosen(gemma, weights)
    write(gemma / "other.gguf")
    with pytest.raises(SourceError, match="models .*, 'other.gguf'"):
        chosen(gemma)


def test_the_header_says_which_file_is_the_projector(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", "mmproj", "v")
    write(tmp_path / "b.gguf")
    write(tmp_path / "c.GGUF", "adapter", "l")
    assert chosen(tmp_path)[0] == ["b.gguf", "a.gguf", "c.GGUF"]


def test_files_without_a_model_are_chosen_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a-lora.gguf", "adapter")
    assert chosen(tmp_path)[0] == ["a-lora.gguf"]
    write(tmp_path / "b-lora.gguf", "adapter")
    with pytest.raises(SourceError, match="no model among them; choose one with --weights a-lora"):
        chosen(tmp_path)


def test_companions_and_parts_may_lie_in_folders(tmp_path: Path) -> None:
    for quantization in ("Q4_K_M", "Q8_0"):
        for number in (1, 2):
            name = f"x-{quantization}-0000{number}-of-00002.gguf"
            write(tmp_path / quantization / name, part=(number - 1, 2))
    write(tmp_path / "projector" / "mmproj-F16.gguf", "mmproj")
    write(tmp_path / "original" / "x.gguf")
    assert chosen(tmp_path, "q8_0")[0] == [
        "Q8_0/x-Q8_0-00001-of-00002.gguf",
        "Q8_0/x-Q8_0-00002-of-00002.gguf",
        "projector/mmproj-F16.gguf",
    ]
    assert len(gguf_files(FileTree(tmp_path)).models) == 2


def test_parts_under_other_names_are_known_by_their_headers(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"model-part{number}.gguf", tensor=f"t{number}", part=(number, 3))
    write(tmp_path / "model-4.gguf")
    models = gguf_files(FileTree(tmp_path)).models
    assert [len(model.files) for model in models] == [1, 3]
    (tmp_path / "model-4.gguf").unlink()
    (tmp_path / "model-part1.gguf").unlink()
    with pytest.raises(DamagedSource, match="one of 3 parts"):
        HuggingFaceFolder(tmp_path)


def test_a_projector_goes_to_the_model_whose_name_it_has(tmp_path: Path) -> None:
    for name in ("gemma-Q4_0", "llama-Q4_0"):
        write(tmp_path / f"{name}.gguf")
    write(tmp_path / "mmproj-gemma-F16.gguf", "mmproj")
    models = {model.stem: model.companions for model in gguf_files(FileTree(tmp_path)).models}
    assert models == {"gemma": ["mmproj-gemma-F16.gguf"], "llama": []}


def test_companions_with_names_of_the_model_s_tensors_come_back(
    tmp_path: Path, store: LocalStore
) -> None:
    files = {
        "MTP/mtp-x.gguf": write(tmp_path / "in" / "MTP" / "mtp-x.gguf"),
        "a-lora.gguf": write(tmp_path / "in" / "a-lora.gguf", "adapter", "t.lora_a"),
        "b-lora.gguf": write(tmp_path / "in" / "b-lora.gguf", "adapter", "t.lora_a"),
        "x.gguf": write(tmp_path / "in" / "x.gguf"),
    }
    create(tmp_path / "in", "x", store=store)
    blobstore.export("x", tmp_path / "out", store=store)
    link_model("x", tmp_path / "linked", store=store)
    for folder in (tmp_path / "out", tmp_path / "linked"):
        assert {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        } == files
    with blobstore.open("x", store=store) as model:
        assert {"t", "mtp-x/t", "t.lora_a", "b-lora/t.lora_a"} == {*model}


def test_files_to_keep_are_no_weights(gemma: Path) -> None:
    files = gguf_files(FileTree(gemma), keep=("*Q8_0*", "*F32*"))
    assert [model.quantization for model in files.models] == ["Q4_K_M"]
    source = HuggingFaceFolder(gemma, SourceOptions(keep=("*Q8_0*", "*F32*")))
    assert {file.name for file in source.files} == {"gemma-Q8_0.gguf", "mmproj-F32.gguf"}
    source.close()
