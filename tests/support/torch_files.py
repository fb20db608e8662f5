"""Checkpoints written by torch itself, and what torch says is in them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from blobstore.sources.pytorch.checkpoint import Checkpoint, open_checkpoint
from tests.support.checkpoints import described

Tensors = dict[str, torch.Tensor]

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float4_e2m1fn_x2: "F4",
}
"""Torch's element types that the safetensors format has names for."""


def of_type(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of random bits."""
    size = dtype.itemsize
    wide = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape[:-1], shape[-1] * size))
    return wide.to(torch.uint8).view(dtype)


def every_type() -> Tensors:
    """Return a tensor of each type."""
    torch.manual_seed(1)
    return {str(dtype): of_type(dtype, 3, 4) for dtype in TYPES}


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes in C order, with the values that are meant."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = plain.as_subclass(torch.Tensor).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def described_by_torch(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[object]]:
    """Return type, shape and SHA-256 of tensors."""
    return {name: _described(tensor) for name, tensor in tensors.items()}


def _described(tensor: torch.Tensor) -> list[object]:
    shape = list(tensor.shape)
    if tensor.dtype == torch.float4_e2m1fn_x2:  # torch counts pairs
        shape[-1] *= 2
    return described(raw(tensor), shape, TYPES[tensor.dtype])


def described_by_views(checkpoint: Checkpoint) -> dict[str, list[object]]:
    """Return type, shape and SHA-256 of a checkpoint's tensors as it views them."""
    views = checkpoint.views()
    assert views.keys() == checkpoint.specs.keys()
    return {
        name: described(bytes(view.data), view.spec.shape, view.spec.dtype.value)
        for name, view in views.items()
    }


def described_by_reads(checkpoint: Checkpoint, size: int) -> dict[str, list[object]]:
    """Return type, shape and SHA-256 of a checkpoint's tensors as it reads them in pieces."""
    return {
        name: described(read(checkpoint, name, size), spec.shape, spec.dtype.value)
        for name, spec in checkpoint.specs.items()
    }


def read(checkpoint: Checkpoint, name: str, size: int = 4096) -> bytes:
    """Return a tensor's bytes, read by way of a buffer of ``size``."""
    buffer = memoryview(bytearray(size))
    return b"".join(bytes(piece) for piece in checkpoint.read(name, buffer))


def check(path: Path, tensors: Mapping[str, torch.Tensor], subtree: str | None = None) -> None:
    """Check that a file holds these tensors, in whatever way it is read."""
    expected = described_by_torch(tensors)
    with open_checkpoint(path, subtree=subtree) as checkpoint:
        assert not checkpoint.unreadable
        assert described_by_views(checkpoint) == expected
        for size in (1, 7, 4096):
            assert described_by_reads(checkpoint, size) == expected
        for name, tensor in tensors.items():
            check_ranges(checkpoint, name, raw(tensor))


def check_ranges(checkpoint: Checkpoint, name: str, data: bytes) -> None:
    """Check that parts of a tensor are read as they are in the whole."""
    size = len(data)
    for begin, end in {(0, min(size, 1)), (size // 3, size), (size // 2, size * 3 // 4), (0, 0)}:
        buffer = memoryview(bytearray(5))
        pieces = checkpoint.read_range(name, begin, end, buffer)
        assert b"".join(map(bytes, pieces)) == data[begin:end]


def save(folder: Path, value: Any, *, name: str = "model.pt", **options: Any) -> Path:
    """Write a value as ``torch.save`` does; ``legacy`` in the form of versions before 1.6."""
    path = folder / name
    is_zip = not options.pop("legacy", False)
    torch.save(value, path, _use_new_zipfile_serialization=is_zip, **options)
    return path


def rewritten(
    path: Path,
    change: Callable[[str, bytes], bytes | None] = lambda _, content: content,
    **options: Any,
) -> Path:
    """Rewrite a zip checkpoint with an ordinary archiver. None leaves an entry out."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in entries.items():
            changed = change(name.partition("/")[2], content)
            if changed is not None:
                archive.writestr(name, changed)
    return path


def entry_at(path: Path, name: str) -> int:
    """Return where the content of an entry begins."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        header = archive.getinfo(f"{path.stem}/{name}").header_offset
        file.seek(header)
        local = file.read(30)
    sizes = int.from_bytes(local[26:28], "little"), int.from_bytes(local[28:30], "little")
    return header + len(local) + sum(sizes)


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))
