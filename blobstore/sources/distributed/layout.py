"""Recognises folders with pieces of tensors by the names of their files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from blobstore.core.escape import join_some, quote
from blobstore.core.files import read_regular
from blobstore.errors import DamagedSource, UnsupportedSource
from blobstore.sources.distributed.file_names import (
    FORMAT,
    METADATA_FILE,
    SHARD,
    ZERO_MODEL,
    ZERO_OPTIMIZER,
    ZERO_TOOLS,
)
from blobstore.sources.selection import DATA_FILE, is_model_folder

if TYPE_CHECKING:
    from pathlib import Path

    from blobstore.sources.base import SourceOptions, TensorSource

_MAX_NAME = 4096
_COMPLETE = re.compile(r".+\.(?:safetensors|gguf)|pytorch_model.*\.bin")
_MODEL_FOLDER = "pytorch_model_fsdp_0"
"""Where accelerate and the Trainer of transformers put the model, next to the optimizer's folder."""
_SHOWN = 8


def open_distributed(path: Path, options: SourceOptions) -> TensorSource | None:
    """Open a folder with pieces of tensors; return None for other sources.

    Raises:
        UnsupportedSource: it is a single file of such a folder, or has no model but such folders.
        SourceError, UsageError: as the kinds of folders.
        OSError: the folder cannot be read.
    """
    if not path.is_dir():
        if options.subtree is None and ZERO_OPTIMIZER.fullmatch(path.name):
            raise UnsupportedSource(
                f"{quote(path)} is the part of one process of DeepSpeed ZeRO; import the folder"
            )
        if path.name == METADATA_FILE or path.suffix == DATA_FILE:
            raise UnsupportedSource(
                f"{quote(path)} is one file of a folder of {FORMAT}; import the folder"
            )
        return None
    if options.weights is not None:
        return None
    # The readers are imported late: they take a while, and most models need none.
    if _has_shards(path):
        from blobstore.sources.distributed.huggingface_shards import HuggingFaceShards

        return HuggingFaceShards(path, options)
    if (inner := find_checkpoint(path)) is not None:
        from blobstore.sources.distributed.torch_folder import TorchFolder

        return TorchFolder(path, inner, options)
    if (inner := find_zero(path)) is not None:
        from blobstore.sources.distributed.zero_folder import ZeroFolder

        return ZeroFolder(path, inner, options)
    if not is_model_folder(path):
        _check_not_above(path)
    return None


def find_checkpoint(folder: Path) -> str | None:
    """Return where in a folder the files of ``torch.distributed.checkpoint`` are, or None.

    Raises:
        OSError: a folder cannot be read.
    """
    names = [path.name for path in folder.iterdir()]
    if any(name.endswith(".safetensors") for name in names):
        return None  # the complete model
    if any(name.endswith(DATA_FILE) for name in names):
        return ""
    return _MODEL_FOLDER if _MODEL_FOLDER in names and _has_data(folder / _MODEL_FOLDER) else None


def find_zero(folder: Path) -> str | None:
    """Return where in a folder the files of DeepSpeed are, or None.

    Raises:
        DamagedSource: the folder that ``latest`` names is missing.
        UnsupportedSource: there are several steps, and no ``latest``; or it is a universal checkpoint.
        OSError: a folder cannot be read.
    """
    names = [path.name for path in folder.iterdir()]
    if any(map(ZERO_OPTIMIZER.fullmatch, names)):
        return ""
    if any(map(_COMPLETE.fullmatch, names)):
        return None
    steps = sorted(name for name in names if _has_states(folder / name))
    latest = (
        read_regular(folder / "latest", _MAX_NAME).decode("utf-8", "replace").strip()
        if "latest" in names
        else None
    )
    _check_not_universal(folder, latest, steps)
    if latest is None:
        if steps:
            raise UnsupportedSource(
                f"{quote(folder)} has no file 'latest', which DeepSpeed writes last; import one of its "
                f"folders: {join_some([*map(quote, steps)], _SHOWN)}"
            )
        return None
    if latest in steps:
        return latest
    if ZERO_TOOLS[0] in names or steps:
        raise DamagedSource(
            f"{quote(folder / 'latest')} names {quote(latest)}, but there is no such folder with "
            "files of DeepSpeed: it was not saved or copied completely"
        )
    return None


def _check_not_universal(folder: Path, latest: str | None, steps: list[str]) -> None:
    """Refuse a folder that ``ds_to_universal`` wrote, unless it has or names another step."""
    universal = [name for name in steps if _is_universal(folder / name)]
    if _is_universal(folder):
        found = folder
    elif latest in universal or (latest is None and universal and universal == steps):
        found = folder / (latest or universal[0])
    else:
        return
    raise UnsupportedSource(
        f"{quote(found)} is a universal checkpoint of DeepSpeed, which is not read; import the step from "
        "which ds_to_universal made it, or load it with DeepSpeed and save complete weights"
    )


def _is_universal(folder: Path) -> bool:
    zero = folder / "zero"
    return zero.is_dir() and any((path / "fp32.pt").is_file() for path in zero.iterdir())


def _has_states(folder: Path) -> bool:
    return folder.is_dir() and any(
        ZERO_MODEL.fullmatch(path.name) or ZERO_OPTIMIZER.fullmatch(path.name)
        for path in folder.iterdir()
    )


def _check_not_above(folder: Path) -> None:
    """Check that a folder without a model does not have folders with pieces."""
    if found := sorted(quote(path.name) for path in folder.iterdir() if _has_data(path)):
        raise UnsupportedSource(
            f"{quote(folder)} has no weights, but folders of {FORMAT}; import one of them: "
            f"{join_some(found, _SHOWN)}"
        )


def _has_shards(folder: Path) -> bool:
    names = [path.name for path in folder.iterdir() if path.suffix == ".safetensors"]
    return bool(names) and all(SHARD.fullmatch(name) for name in names)


def _has_data(folder: Path) -> bool:
    return folder.is_dir() and any(path.suffix == DATA_FILE for path in folder.iterdir())
