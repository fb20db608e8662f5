"""Recognises folders with pieces of tensors by the names of their files."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

from blobstore.core.escape import join_some, quote
from blobstore.core.files import read_regular
from blobstore.errors import DamagedSource, SourceError, UnsupportedSource
from blobstore.sources.distributed.file_names import (
    FORMAT,
    SHARD,
    ZERO_MODEL,
    ZERO_OPTIMIZER,
    ZERO_TOOLS,
)
from blobstore.sources.file_tree import FileTree, joined
from blobstore.sources.parts import DATA_FILE
from blobstore.sources.selection import is_model_folder

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
        UnsupportedSource: it has no model but such folders.
        SourceError, UsageError: as the kinds of folders.
        OSError: the folder cannot be read.
    """
    if not path.is_dir():
        return None
    # The pattern chooses weight files by name, and these folders have none.
    if options.weights is not None:
        return None
    # The readers are imported late: they take a while, and most models need none.
    with contextlib.closing(FileTree(path)) as tree:
        has_shards = _has_shards(tree)
    # First, because the names of shards end like those of a complete model.
    if has_shards:
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
    with contextlib.closing(FileTree(folder)) as tree:
        names = tree.entries()
        if any(name.endswith(".safetensors") for name in names):
            return None  # the complete model
        if any(name.endswith(DATA_FILE) for name in names):
            return ""
        return _MODEL_FOLDER if _has_data(tree, _MODEL_FOLDER) else None


def find_zero(folder: Path) -> str | None:
    """Return where in a folder the files of DeepSpeed are, or None.

    Raises:
        DamagedSource: the folder that ``latest`` names is missing.
        UnsupportedSource: there are several steps, and no ``latest``; or it is a universal checkpoint.
        OSError: a folder cannot be read.
    """
    with contextlib.closing(FileTree(folder)) as tree:
        return _find_step(tree)


def zero_steps(folder: Path) -> list[str]:
    """Return the folders of DeepSpeed's steps in a folder."""
    with contextlib.closing(FileTree(folder)) as tree:
        return [name for name in tree.entries() if _has_states(tree, name)]


def _find_step(tree: FileTree) -> str | None:
    names = tree.entries()
    if any(map(ZERO_OPTIMIZER.fullmatch, names)):
        return ""
    if any(map(_COMPLETE.fullmatch, names)):
        return None
    steps = [name for name in names if _has_states(tree, name)]
    latest = (
        read_regular(tree.path("latest"), _MAX_NAME, tree.versions.open)
        .decode("utf-8", "replace")
        .strip()
        if "latest" in names
        else None
    )
    _check_not_universal(tree, latest, steps)
    if latest is None:
        if steps:
            raise UnsupportedSource(
                f"{tree.label()} has no file 'latest', which DeepSpeed writes last; import one of its "
                f"folders: {join_some([*map(quote, steps)], _SHOWN)}"
            )
        return None
    if latest in steps:
        return latest
    if ZERO_TOOLS[0] in names or steps:
        raise DamagedSource(
            f"{tree.label('latest')} names {quote(latest)}, but there is no such folder with "
            "files of DeepSpeed: it was not saved or copied completely"
        )
    return None


def _check_not_universal(tree: FileTree, latest: str | None, steps: list[str]) -> None:
    """Refuse a folder that ``ds_to_universal`` wrote, unless it has or names another step."""
    universal = [name for name in steps if _is_universal(tree, name)]
    if _is_universal(tree, ""):
        found = ""
    elif latest in universal or (latest is None and universal and universal == steps):
        found = latest or universal[0]
    else:
        return
    raise UnsupportedSource(
        f"{tree.label(found)} is a universal checkpoint of DeepSpeed, which is not read; import the step from "
        "which ds_to_universal made it, or load it with DeepSpeed and save complete weights"
    )


def _is_universal(tree: FileTree, step: str) -> bool:
    zero = joined(step, "zero")
    return any("fp32.pt" in _entries(tree, joined(zero, name)) for name in _entries(tree, zero))


def _has_states(tree: FileTree, name: str) -> bool:
    return any(
        ZERO_MODEL.fullmatch(entry) or ZERO_OPTIMIZER.fullmatch(entry)
        for entry in _entries(tree, name)
    )


def _entries(tree: FileTree, name: str) -> list[str]:
    """Return the names in a folder below the model's; none of one that a link leads out to."""
    try:
        return tree.entries(name)
    except SourceError:
        return []


def _check_not_above(folder: Path) -> None:
    """Check that a folder without a model does not have folders with pieces."""
    with contextlib.closing(FileTree(folder)) as tree:
        found = [quote(name) for name in tree.entries() if _has_data(tree, name)]
    if found:
        raise UnsupportedSource(
            f"{quote(folder)} has no weights, but folders of {FORMAT}; import one of them: "
            f"{join_some(found, _SHOWN)}"
        )


def _has_shards(tree: FileTree) -> bool:
    names = [name for name in tree.entries() if name.endswith(".safetensors")]
    return bool(names) and all(SHARD.fullmatch(name) for name in names)


def _has_data(tree: FileTree, name: str) -> bool:
    return any(entry.endswith(DATA_FILE) for entry in _entries(tree, name))
