"""Reads model folders of Hugging Face's libraries.

A folder has components: the model itself, the parts of a diffusers pipeline listed in
``model_index.json``, and the modules of a sentence-transformers model listed in ``modules.json``. The
tensors and small files of a component get its folder's name as a prefix.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from blobstore.core.escape import join_some, quote
from blobstore.core.files import read_regular
from blobstore.errors import BlobstoreError, DamagedSource, SourceError, UnsupportedSource
from blobstore.manifests.file_names import MAX_DEPTH, is_valid_part
from blobstore.sources.base import DEFAULT_OPTIONS
from blobstore.sources.sharded import (
    CHECKPOINTS,
    SAFETENSORS,
    ShardSet,
    add_indexed,
    read_weight_map,
)
from blobstore.sources.small_files import files_of, unusable_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from blobstore.sources.base import SourceFile, SourceOptions

_T = TypeVar("_T")
_STEMS = {
    SAFETENSORS: ("model", "diffusion_pytorch_model"),
    ".bin": ("pytorch_model", "diffusion_pytorch_model"),
}
"""Names of weight files by ending, without ending and shard number."""
_MAX_FILE_SIZE = 64 * 2**20
_EXTRA_FOLDERS = ("additional_chat_templates",)
_TRAINING_STATE = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state)[^/]*\.(bin|pt|pth|ckpt)"
)
"""Checkpoints next to the weights that have no model."""
_OTHER_WEIGHTS = (*CHECKPOINTS, ".gguf", ".h5", ".msgpack", ".onnx")


class HuggingFaceFolder(ShardSet):
    """A :class:`TensorSource` over a folder, or over a single weight file."""

    def __init__(self, path: Path, options: SourceOptions = DEFAULT_OPTIONS) -> None:
        """Open all weight files of ``path`` and check that they are intact and consistent.

        Raises:
            DamagedSource: a file is missing, truncated or malformed, or files and index contradict
                each other.
            SourceError: there are no weights, or several sets and ``weights`` chooses none.
            UsageError: there is no such subtree.
        """
        super().__init__(options.subtree)
        self.reopen = functools.partial(HuggingFaceFolder, path.absolute(), options)
        self.config: Mapping[str, Any] = {}
        self.files: Sequence[SourceFile] = ()
        try:
            if path.is_dir():
                self._open_folder(path, options)
            else:
                self.add(path)
        except BaseException:
            self.close()
            raise

    def _open_folder(self, folder: Path, options: SourceOptions) -> None:
        self.config = _read_json(folder / "config.json", dict)
        components = _components(folder)
        found = self._add_weights(folder, "", options)
        for name in components:
            found |= self._add_weights(folder / name, f"{name}/", options)
        if not found:
            raise _no_weights(folder, options.weights)
        files = list(files_of(folder))
        folders = (*components, *_EXTRA_FOLDERS)
        for name in folders:
            if (folder / name).is_dir():
                files.extend(_files_below(folder / name, name))
        self.files = sorted(files, key=lambda file: file.name)
        weights = set(_weight_files(folder, options.weights))
        for path in sorted(folder.iterdir()):
            is_known = path.name in folders or path.name.startswith(".")
            if path.is_dir() and not is_known:
                self.notices.append(f"left out: folder {quote(path)}")
            elif path.suffix in _OTHER_WEIGHTS and path.name not in weights:
                self.notices.append(f"left out: {quote(path)}, not part of the model's weights")
            elif notice := unusable_name(path):
                self.notices.append(notice)

    def _add_weights(self, folder: Path, prefix: str, options: SourceOptions) -> bool:
        """Add the weights of one component; return whether it has any."""
        names = _weight_files(folder, options.weights)
        index, chosen = _choose(folder, names, options.weights)
        if index is not None:
            weight_map = read_weight_map(index)
            ignore = options.ignore_unindexed
            # Adding shards adds notices too.
            self.notices += [*add_indexed(self, index, weight_map, prefix=prefix, ignore=ignore)]
            chosen = sorted(set(weight_map.values()))
        else:
            for name in chosen:
                self.add(folder / name, prefix=prefix)
        self.notices.extend(
            f"left out: {quote(folder / name)}; choose other weights with --weights"
            for name in names
            if name not in chosen
        )
        return bool(chosen)


def _weight_files(folder: Path, weights: str | None) -> list[str]:
    """Return the names of the safetensors files, or else of checkpoints; for a pattern, of both."""
    every = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    names = [name for name in every if name.endswith(SAFETENSORS)]
    if names and weights is None:
        return names
    return names + [
        name
        for name in every
        if name.endswith(CHECKPOINTS)
        and (weights is not None or not _TRAINING_STATE.fullmatch(name))
    ]


def _choose(
    folder: Path, names: Sequence[str], weights: str | None
) -> tuple[Path | None, Sequence[str]]:
    """Return the index to follow, or the files to read, of one component."""
    indexes = {
        ending: sorted(folder.glob(f"*{ending}.index*.json")) for ending in (SAFETENSORS, ".bin")
    }
    if weights is not None:
        return _choose_by(weights, [*indexes[SAFETENSORS], *indexes[".bin"]], names)
    is_safetensors = indexes[SAFETENSORS] or any(name.endswith(SAFETENSORS) for name in names)
    ending = SAFETENSORS if is_safetensors else ".bin"
    if _read_json(folder / "model_index.json", dict):
        # The folder of a pipeline often has all components once more in a single file.
        names = [name for name in names if name.startswith(("model", "pytorch_model"))]
    for stem in _STEMS[ending]:
        single = f"{stem}{ending}"
        index = folder / f"{single}.index.json"
        if index in indexes[ending] and (mapped := set(read_weight_map(index).values())):
            if single in names and single not in mapped:
                raise SourceError(
                    f"{quote(folder)} has both {single} and the shards of {index.name}; "
                    f"choose with --weights '{single}' or --weights '{stem}-*{ending}'"
                )
            return index, ()
        if single in names:
            return None, [single]
        shards = [name for name in names if re.fullmatch(rf"{stem}-\d+-of-\d+\{ending}", name)]
        if shards:
            _check_numbers(folder, shards)
            return None, shards
    if len(names) > 1:
        raise SourceError(
            f"{quote(folder)} has several weight files ({join_some([*map(quote, names)], 5)}) and "
            f"none is named {_STEMS[ending][0]}{ending}; choose with --weights PATTERN"
        )
    return None, names


def _choose_by(
    weights: str, indexes: Sequence[Path], names: Sequence[str]
) -> tuple[Path | None, Sequence[str]]:
    """Return the index or the files that ``--weights`` chooses."""
    # A pattern such as '*.bin' means the model. Training state has to be named exactly.
    chosen = {
        name
        for name in fnmatch.filter(names, weights)
        if name == weights or not _TRAINING_STATE.fullmatch(name)
    }
    for index in indexes:
        mapped = set(read_weight_map(index).values())
        if not mapped & chosen:
            continue
        if chosen <= mapped:
            return index, ()
        raise SourceError(
            f"pattern {quote(weights)} chooses files of {quote(index)} and others; "
            "give a narrower --weights"
        )
    return None, sorted(chosen)


def _check_numbers(folder: Path, shards: Sequence[str]) -> None:
    """Check that shards without an index are complete, by the numbers in their names."""
    totals = {name.rpartition("-")[2] for name in shards}
    numbers = {int(re.findall(r"-(\d+)-of-", name)[-1]) for name in shards}
    total = int(totals.pop().partition(".")[0]) if len(totals) == 1 else 0
    if len(numbers) != total or numbers != set(range(1, total + 1)):
        raise DamagedSource(
            f"the weight files of {quote(folder)} are not a complete set of shards, and there is no "
            f"index: {len(shards)} found, such as {quote(shards[0])}; download the complete model"
        )


def _components(folder: Path) -> list[str]:
    """Return the names of the component folders, checked and sorted."""
    # A component is [library, class], or [null, null] if the pipeline does not have it.
    parts = [
        name
        for name, value in _read_json(folder / "model_index.json", dict).items()
        if isinstance(value, list) and len(value) == 2 and value[1] is not None  # noqa: PLR2004
    ]
    modules = [
        path
        for module in _read_json(folder / "modules.json", list)
        if isinstance(module, dict) and isinstance(path := module.get("path"), str) and path
    ]
    for name in (*parts, *modules):
        if not is_valid_part(name):
            raise DamagedSource(
                f"{quote(folder)} lists a component {quote(name)}, which is not a folder name"
            )
        if name in parts and not (folder / name).is_dir():
            raise DamagedSource(
                f"model_index.json of {quote(folder)} lists component {quote(name)}, but "
                "there is no such folder; download the complete model"
            )
    return sorted(name for name in {*parts, *modules} if (folder / name).is_dir())


def _files_below(folder: Path, name: str) -> Iterator[SourceFile]:
    depth = len(PurePosixPath(name).parts) + 1
    if depth <= MAX_DEPTH:
        yield from files_of(folder, f"{name}/")
    if depth < MAX_DEPTH:
        for path in folder.iterdir():
            if path.is_dir() and is_valid_part(path.name):
                yield from _files_below(path, f"{name}/{path.name}")


def _no_weights(folder: Path, weights: str | None) -> SourceError:
    if weights is not None:
        return SourceError(f"no file in {quote(folder)} matches --weights {quote(weights)}")
    names = sorted(path.name for path in folder.iterdir())
    other = [name for name in names if name.endswith(_OTHER_WEIGHTS)]
    if other:
        return UnsupportedSource(
            f"{quote(folder)} has weights only in files like {quote(other[0])}, which have no model or "
            "cannot be read; use a version of the model in safetensors files"
        )
    what = "has no weight files" if names else "is empty"
    return SourceError(f"{quote(folder)} {what}; expected a Hugging Face model folder")


def _read_json(path: Path, kind: type[_T]) -> _T:
    """Return the decoded file; an empty ``kind`` if it is missing, malformed or of another kind."""
    try:
        value = json.loads(read_regular(path, _MAX_FILE_SIZE))
    except (OSError, ValueError, RecursionError, BlobstoreError):
        return kind()
    return value if isinstance(value, kind) else kind()
