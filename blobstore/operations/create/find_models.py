"""Finds the models of a cache, of a folder of model folders, of Ollama's folder, or of a Hub repository."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.arguments import local_path
from blobstore.core.escape import quote
from blobstore.core.globs import glob_matches
from blobstore.errors import SourceError, SourceNotFound, UsageError
from blobstore.gguf.roles import has_quantization
from blobstore.manifests.reference import natural_order
from blobstore.operations.create.ollama import SCHEME, ollama_models
from blobstore.operations.create.source_names import (
    STEP,
    cleaned,
    is_hub,
    name_in,
    name_of,
    path_name,
)
from blobstore.sources.distributed.layout import find_checkpoint
from blobstore.sources.file_tree import FileTree
from blobstore.sources.gguf import GGUF
from blobstore.sources.gguf_models import gguf_files
from blobstore.sources.hub import cached_repository, list_files, parse_hub_id
from blobstore.sources.hub_listing import cached_snapshot
from blobstore.sources.selection import is_model_folder
from blobstore.sources.sharded import WEIGHTS, has_ending

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.sources.gguf_models import GgufModel


_OWN_FILES = frozenset(
    ("config.json", "model_index.json", "modules.json", "adapter_config.json", "params.json")
)
"""Any of these makes a folder with weight files one model, whatever its folders have."""


_LLAMA_CPP = re.compile(r"manifest=([^=]+)=([^=]+)=([^=]+)\.json")
"""Matches what llama.cpp lists the files of a repository and a quantization in, in its cache."""


_LM_STUDIO = (".lmstudio", "lm-studio")
"""The folders of LM Studio, now in the home and formerly in ``~/.cache``."""


class FoundModel(NamedTuple):
    """A model that :func:`find_models` has found."""

    name: str
    """The name, valid or not."""
    source: Path | str
    """The path, or the address of a repository or of a model of Ollama's."""
    weights: str | None = None
    """What chooses the model if the source has several."""
    files: Sequence[str] = ()
    """Its files, if the source has several models."""

    def matches(self, weights: str | None) -> bool:
        """Return whether ``--weights`` allows the model."""
        if weights is None or self.weights is None:
            return True
        return weights.upper() == self.weights or any(
            glob_matches(name, weights) for name in self.files
        )


def find_models(source: str | os.PathLike[str], name: str | None = None) -> list[FoundModel]:
    """Return the models of a folder, of a cache of the Hub's client or of llama.cpp, of Ollama, or of a repository.

    Quantizations of a model in GGUF files are models of one name, with different tags.

    Raises:
        SourceNotFound: there is no such folder.
        SourceError: the folder cannot be read, has no models, or is a model.
        UsageError: as :func:`create_all`.
    """
    found, is_model = _find_models(source, name)
    if is_model and len(found) < 2:
        raise SourceError(
            f"{quote(source)} has weights itself; create it, or each of its files, without --all"
        )
    if not found:
        raise SourceError(
            f"{quote(source)} has no models; expected a cache of the Hub's client, a folder of "
            "model folders, or ollama:// for the folder of Ollama"
        )
    if name is not None and not any(one.name.startswith(f"{name}:") for one in found):
        raise UsageError(
            f"all models of {quote(source)} have names of their own", advice="leave NAME out"
        )
    return found


def _find_models(source: str | os.PathLike[str], name: str | None) -> tuple[list[FoundModel], bool]:
    """Return the models of a source, and whether it is a model itself, perhaps in several quantizations."""
    if source == SCHEME:
        return [FoundModel(*found) for found in ollama_models()], False
    if is_hub(source):
        text = os.fspath(source)
        return quantizations(name or name_of(parse_hub_id(text)[0]), text, list_files(text)), True
    folder = local_path(source, "source")
    if not folder.is_dir():
        raise SourceNotFound(f"no such folder: {quote(folder)}")
    try:
        return _in_folder(folder, name)
    except OSError as error:
        where = quote(error.filename or folder)
        raise SourceError(f"cannot read {where}: {error.strerror}") from error


def _in_folder(folder: Path, name: str | None) -> tuple[list[FoundModel], bool]:
    if (folder / "hub").is_dir() and any(map(cached_repository, (folder / "hub").iterdir())):
        folder /= "hub"  # what HF_HOME names
    if folder.name in _LM_STUDIO and (folder / "models").is_dir():
        folder /= "models"
    name = name or name_of(path_name(folder))
    if cached_repository(folder) or (_is_model(folder) and not _has_loose_files(folder)):
        steps = [path for path in _models_below(folder) if STEP.fullmatch(path.name)]
        found = [FoundModel(name_in(folder, path, name), path) for path in steps]
        is_model = not any(_LLAMA_CPP.fullmatch(it.name) for it in folder.iterdir())
        return quantizations(name, folder, _tree(folder)) + found, is_model
    found = []
    for path in sorted(folder.iterdir()):
        if repository := cached_repository(path):
            found += quantizations(repository, path, _tree(path))
    for path in _models_below(folder):
        found += quantizations(name_in(folder, path, name), path, _tree(path))
    if gguf_files(FileTree(folder)).models:
        found += quantizations(name, folder, _tree(folder), by_stem=bool(found))
    return found, False


def _by_name(path: Path) -> tuple[str, str]:
    return natural_order(path.name)


def _models_below(folder: Path) -> Iterator[Path]:
    """Yield the folders of models in a folder, or in its folders, which may be those of organizations."""
    own = gguf_files(FileTree(folder)).folders
    # In the order of steps, because the newest one is that which was imported last.
    for path in sorted(folder.iterdir(), key=_by_name):
        if path.is_dir() and not path.name.startswith(".") and path.name not in own:
            inside = sorted(path.iterdir(), key=_by_name)
            if _is_model(path):  # perhaps the last one of a run
                inside = [path, *(it for it in inside if STEP.fullmatch(it.name))]
            yield from filter(_is_model, inside)


def _tree(folder: Path) -> FileTree:
    """Return the files of a model's folder, or of the snapshot of a repository in a cache."""
    if cached_repository(folder):
        snapshots = sorted((folder / "snapshots").glob("*"))
        folder = cached_snapshot(folder, None) or (snapshots[0] if len(snapshots) == 1 else folder)
    return FileTree(folder)


def quantizations(
    name: str, source: Path | str, tree: FileTree, *, by_stem: bool = False
) -> list[FoundModel]:
    """Return the models of one source: several if it has several of them in GGUF files, and no other weights.

    They have the name of the source, or those of their files if these are of different models, or ``by_stem``.
    llama.cpp puts the files of all repositories into one folder, and lists them in files named ``manifest=…``.
    """
    files = gguf_files(tree)
    others = (it for it in tree.entries() if has_ending(it) and it not in files.roles)
    listed = [*filter(None, map(_LLAMA_CPP.fullmatch, tree.entries()))]
    if not by_stem and not listed and (len(files.models) < 2 or any(others)):
        return [FoundModel(name, source)]
    is_one = len({model.stem for model in files.models}) == 1 and not by_stem
    named: dict[str, list[GgufModel]] = {}
    for model in files.models:
        own = name if is_one else name_of(name.rpartition("/")[0] + f"/{model.stem}").lstrip("/")
        for found in listed:
            if model.files[0].lower().startswith(f"{found[1]}_{found[2]}_".lower()):
                own = f"{found[1]}/{found[2]}"
                if has_quantization(model.files[0], found[3]):
                    own += f":{found[3]}"
                    break
        named.setdefault(own, []).append(model)
    return [
        FoundModel(
            f"{own}:{_tag(model, same)}" if len(same) > 1 else own,
            source,
            glob.escape(files.pattern_of(model)),
            model.files,
        )
        for own, same in named.items()
        for model in same
    ]


def _tag(model: GgufModel, same: Sequence[GgufModel]) -> str:
    """Return the tag of one of several quantizations: the name of its file if that of the type says too little."""
    alike = [it for it in same if it.quantization == model.quantization]
    is_clear = model.quantization and len(alike) == 1
    return cleaned(model.quantization if is_clear else PurePath(model.files[0]).stem)


def loose_files(folder: str | os.PathLike[str]) -> list[str]:
    """Return the weight files next to the folders of models, which :func:`create_all` does not import."""
    if folder == SCHEME or is_hub(folder):
        return []
    path = local_path(folder, "source")
    if not (path.is_dir() and _is_model(path) and _has_loose_files(path)):
        return []
    endings = tuple(ending for ending in WEIGHTS if ending != GGUF)
    return sorted(item.name for item in path.iterdir() if has_ending(item.name, endings))


def _has_loose_files(folder: Path) -> bool:
    """Return whether weight files lie next to folders of models, and are not parts of one."""
    try:
        inside = sorted(folder.iterdir())
        has_own = any(item.name in _OWN_FILES or ".index." in item.name for item in inside)
        return not has_own and any(_models_below(folder))
    except OSError:
        return False


def _is_model(folder: Path) -> bool:
    if is_model_folder(folder):
        return True
    return folder.is_dir() and (
        find_checkpoint(folder) is not None or bool(gguf_files(FileTree(folder)).models)
    )
