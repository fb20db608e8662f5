"""The names that models get from their sources, for those who give none."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from blobstore.core.arguments import local_path
from blobstore.core.escape import cli_command, quote
from blobstore.core.schemes import BUCKETS, WEB, scheme_of
from blobstore.core.urls import last_part
from blobstore.errors import InvalidReference, UsageError
from blobstore.gguf.roles import is_quantization, named
from blobstore.manifests.reference import Reference
from blobstore.operations.create.ollama import SCHEME
from blobstore.sources.gguf import GGUF
from blobstore.sources.hub import (
    cached_repository,
    is_hub_id,
    is_hub_url,
    parse_hub_id,
    with_quantization,
)
from blobstore.sources.sharded import WEIGHTS, has_ending

if TYPE_CHECKING:
    from blobstore.sources.base import SourceOptions

_FOREIGN: Final = re.compile(r"[^A-Za-z0-9_.-]+", re.ASCII)
STEP: Final = re.compile(r"checkpoint-[0-9]+")
"""Matches the folder that the Trainer of transformers makes for a step of a run."""
STEPS: Final = "checkpoint-[0-9]*"
"""The glob of these folders."""


def is_hub(source: str | os.PathLike[str]) -> bool:
    """Return whether a source is a repository of the Hub, and not a path."""
    text = os.fspath(source)
    return is_hub_url(text) or (is_hub_id(text) and not Path(text).exists())


def is_elsewhere(source: str | os.PathLike[str]) -> bool:
    """Return whether a source is a folder in object storage, or a weight file on a web server."""
    scheme = scheme_of(source)
    return scheme in BUCKETS or (
        scheme in WEB
        and not is_hub_url(os.fspath(source))
        and has_ending(last_part(os.fspath(source)))
    )


def source_name(source: str | os.PathLike[str], options: SourceOptions) -> Reference:
    """Return the name that a source has: ``org/name:revision``, that of the folder or file, or Ollama's.

    Raises:
        UsageError: it has none.
    """
    text = os.fspath(source)
    if text.startswith(SCHEME):
        return Reference.parse(text.removeprefix(SCHEME))
    text, options = with_quantization(text, options)
    weights = options.weights or ""
    is_one = is_quantization(weights) or weights.lower().endswith(GGUF)
    tags = [named(weights).quantization] if is_one else []
    if is_elsewhere(text):
        name = _without_ending(last_part(text))
    elif is_hub(text):
        name, revision = parse_hub_id(text)
        tags = [revision or "", *tags]
    else:
        name = path_name(local_path(text, "source"))
    tag = "-".join(filter(None, map(cleaned, tags)))
    return derived_name(f"{name_of(name)}:{tag}".removesuffix(":"), text)


def derived_name(name: str, source: str | os.PathLike[str]) -> Reference:
    """Return the name that a source gives its model. Raises UsageError if it is not valid."""
    try:
        return Reference.parse(name)
    except InvalidReference as error:
        raise UsageError(
            f"{quote(source)} gives the model no name: {error.message}",
            advice=f"say one: {cli_command('create', source, 'NAME')}",
        ) from None


def path_name(path: Path) -> str:
    """Return the name of a folder or a weight file, of its repository if it is in a cache of the Hub."""
    path = path.absolute() if path.is_symlink() else path.resolve()
    for folder in (path, path.parent.parent):
        if repository := cached_repository(folder):
            return repository
    return path.name if path.is_dir() else _without_ending(path.name)


def name_in(folder: Path, path: Path, name: str) -> str:
    """Return the name of a model in a folder: steps of one run are tags of one name."""
    if STEP.fullmatch(path.name) is None:
        return name_of(path.relative_to(folder).as_posix())
    run = path.parent.relative_to(folder).as_posix()
    return f"{name if run == '.' else name_of(run)}:{path.name}"


def _without_ending(name: str) -> str:
    ending = next((it for it in WEIGHTS if name.lower().endswith(it)), "")
    return name[: len(name) - len(ending)]


def name_of(text: str) -> str:
    """Return a name without the characters that names of a store do not have; ``/`` stays."""
    *namespace, model = text.split("/")
    return "/".join([*(cleaned(part).replace(".", "-") for part in namespace), cleaned(model)])


def cleaned(text: str) -> str:
    """Return a part of a name without the characters that names of a store do not have."""
    return _FOREIGN.sub("-", text).strip("-.")
