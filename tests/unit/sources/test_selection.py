"""Which files of a folder are read, stored or refused, by their first bytes and by their neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from blobstore.errors import DamagedSource, SourceError, UnsupportedSource
from blobstore.sources.base import SourceOptions
from blobstore.sources.open import open_source

CTRANSLATE2 = b"\6\0\0\0\x0c\0WhisperSpec\0" + bytes(100)
UNKNOWN = b"\xc3unknown" * 20
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 4976\n"


class Found:
    """What is read of a folder or file, which is closed again."""

    def __init__(self, path: Path, **options: Any) -> None:
        source = open_source(path, SourceOptions(**options))
        self.tensors = set(source.specs)
        self.files = [file.name for file in source.files]
        self.notices = list(source.notices)
        for file in source.files:
            if file.content is None:
                source.versions.open(file.path)
        source.close()


def write(folder: Path, **content: bytes | str) -> Path:
    """Write files; ``__`` is a dot in their names. Weights named ``model`` are added unless there are some."""
    for name, data in content.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder


def model(folder: Path, **content: bytes | str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a": np.ones(3, np.float32)}, folder / "model.safetensors")
    return write(folder, config__json="{}", **content)


# First bytes


@pytest.mark.parametrize(
    "name", ["model.safetensors", "x.gguf", "pytorch_model.bin", "m.pt", "x.unknown"]
)
def test_a_pointer_is_named_whatever_its_name_is(tmp_path: Path, name: str) -> None:
    write(tmp_path, config__json="{}")
    (tmp_path / name).write_bytes(POINTER)
    for path in (tmp_path, tmp_path / name):
        if path == tmp_path and name == "x.unknown":
            continue
        for keep in ((), (name,), ("*",)):
            with pytest.raises(DamagedSource, match="this is a pointer of git-lfs.*git lfs pull"):
                Found(path, keep=keep)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "config.json", "README.md"])
def test_a_small_file_that_is_a_pointer_is_an_error(tmp_path: Path, name: str) -> None:
    (model(tmp_path) / name).write_bytes(POINTER)
    with pytest.raises(DamagedSource, match=f"{name}': this is a pointer of git-lfs"):
        Found(tmp_path)
    if name != "config.json":
        assert name not in Found(tmp_path, exclude=(name,)).files


@pytest.mark.parametrize(
    "content", [b"<!DOCTYPE html>", b'{"error": "no"}', b"Entry not found", b""]
)
def test_answers_of_servers_are_no_tokenizers(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DamagedSource, match=r"tokenizer.json': this is (a web|an error|an empty)"):
        Found(model(tmp_path, tokenizer__json=content))


@pytest.mark.parametrize(
    "name", ["model.bin", "pytorch_model.bin", "x.pt", "model.safetensors", "m.gguf"]
)
@pytest.mark.parametrize("content", [CTRANSLATE2, UNKNOWN], ids=["ctranslate2", "unknown"])
def test_other_formats_are_intact_and_can_be_stored(
    tmp_path: Path, name: str, content: bytes
) -> None:
    write(tmp_path, config__json="{}")
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(
            UnsupportedSource, match=f"store the file as it is with create --keep {name}$"
        ):
            Found(path)
        for keep in (name, "*"):
            assert name in Found(path, keep=(keep,)).files


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_program_of_torchscript_is_stored_under_its_exact_name(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "model.pt")
    with pytest.raises(UnsupportedSource, match=r"TorchScript.*, or store .* --keep model.pt$"):
        Found(tmp_path)
    assert Found(tmp_path, keep=("model.pt",)).files == ["model.pt"]


def test_files_of_other_formats_are_no_candidates(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "weights.bin")
    write(tmp_path, model__bin=CTRANSLATE2, vocab__bin=UNKNOWN)
    found = Found(tmp_path)
    assert found.tensors == {"a"}
    assert any("model.bin" in notice for notice in found.notices)


def test_a_pattern_keeps_what_is_not_read_and_a_name_whatever_it_is(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    write(tmp_path, other__bin=UNKNOWN)
    found = Found(tmp_path, keep=("*.bin",))
    assert (found.tensors, found.files) == ({"a"}, ["other.bin"])
    found = Found(tmp_path, keep=("pytorch_model.bin",))
    assert (found.tensors, found.files) == (set(), ["pytorch_model.bin"])


def test_formats_under_wrong_endings_are_named(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    with pytest.raises(
        UnsupportedSource, match="this is a PyTorch checkpoint; give it the ending .pt"
    ):
        Found(tmp_path)
    (tmp_path / "x.safetensors").rename(tmp_path / "x.pt")
    assert Found(tmp_path).tensors == {"a"}


def test_what_macos_writes_next_to_files_is_no_candidate(tmp_path: Path) -> None:
    model(tmp_path).joinpath("model.safetensors").rename(tmp_path / "x.safetensors")
    write(tmp_path, **{"._x__safetensors": b"\0\5\x16\7"})
    assert Found(tmp_path).notices == []


def test_endings_count_in_letters_of_any_case(tmp_path: Path) -> None:
    model(tmp_path / "safe").joinpath("model.safetensors").rename(
        tmp_path / "safe" / "M.SAFETENSORS"
    )
    (tmp_path / "torch").mkdir()
    torch.save({"a": torch.ones(3)}, tmp_path / "torch" / "X.PT")
    for source in ("safe", "safe/M.SAFETENSORS", "torch", "torch/X.PT"):
        assert Found(tmp_path / source).tensors == {"a"}


def test_a_folder_without_weights_says_what_it_has(tmp_path: Path) -> None:
    write(tmp_path, MODEL__WEIGHTS=b"\2\0\0\0\0\0\0\0{}")
    with pytest.raises(
        SourceError, match=r"safetensors file; give it the ending \.safetensors, or"
    ):
        Found(tmp_path)
    for name in ("manifests", "blobs"):
        (tmp_path / name).mkdir()
    with pytest.raises(SourceError, match=r"--all ollama://' imports those of \$OLLAMA_MODELS"):
        Found(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "trailing", "annex"])
def test_damage_comes_with_what_to_do(tmp_path: Path, damage: str) -> None:
    path = model(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    path.unlink()
    if damage == "annex":
        path.symlink_to(".git/annex/objects/a/b/SHA256E-s1--ab.safetensors")
    else:
        path.write_bytes(data[:-1] if damage == "cut" else data + b"\0")
    advice = "run git annex get" if damage == "annex" else "download the complete model"
    with pytest.raises(DamagedSource, match=f"; {advice}$"):
        Found(tmp_path)
