"""What the libraries read beside the weights: the small files, in a folder that soon goes again."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from blobstore.core.escape import escape, quote
from blobstore.errors import BlobDamaged, BlobstoreError
from blobstore.operations.export.folder import small_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from blobstore.core.progress import Progress
    from blobstore.models.files import ModelFiles
    from blobstore.models.memory import Prefetch, Read
    from blobstore.operations.open import Model, Verify

_LAYERS = re.compile(r"(?:num|n)_(?:[a-z]+_)*layers?|(?:encoder|decoder)_layers|depth")
"""Keys of configs that say how many layers there are, each of which has tensors."""
_SURELY_POSSIBLE = 1000
"""Layers that may share their tensors with each other."""
_MAX_DEPTH = 8
_MEMORY = "/dev/shm"  # noqa: S108 - the folder in it gets a name of its own and is the user's alone
_SPARE = 8
"""How many times their size must be free in memory, for others need it too."""
_MAX_REASON = 500
"""Characters of a library's own message that are shown."""


class Opening(TypedDict, total=False):
    """How a model is opened; see :func:`blobstore.open`."""

    verify: Verify
    read: Read
    prefetch: Prefetch | None
    progress: Progress | None


@contextlib.contextmanager
def folder_of_files(
    model: ModelFiles, patterns: Sequence[str] = ("*",), written: Mapping[str, bytes] | None = None
) -> Iterator[Path]:
    """Give a temporary folder of a model's small files, never of weights, and remove it.

    Args:
        model: the model.
        patterns: the names of the files that are wanted.
        written: files that shall say something else than the stored ones.

    Raises:
        BlobMissing, BlobDamaged, InvalidManifest: a file is not whole, or its name is none.
    """
    contents = {
        file: model.read_file(file)
        for file in small_files(model.manifest)
        if any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)
    }
    contents.update(written or {})
    place = _place_in_memory(sum(map(len, contents.values())))
    with tempfile.TemporaryDirectory(prefix="blobstore-", dir=place) as name:
        for file, content in contents.items():
            path = Path(name, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        yield Path(name)


def _place_in_memory(nbytes: int) -> str | None:
    """Return where files of some bytes cost a quarter of what they cost on a disk, if there is room.

    None is the usual place for temporary files, which the user may have chosen.
    """
    if os.environ.get("TMPDIR"):
        return None
    try:
        memory = os.statvfs(_MEMORY)
    except OSError:
        return None
    has_room = memory.f_bavail * memory.f_frsize > _SPARE * nbytes
    return _MEMORY if has_room and os.access(_MEMORY, os.W_OK | os.X_OK) else None


def decoded(model: ModelFiles, name: str) -> dict[str, Any]:
    """Return the JSON object that a file of a model holds.

    Raises:
        BlobstoreError: the model has no such file.
        BlobMissing, BlobDamaged: it is not whole, or no JSON object.
    """
    if name not in model.files:
        raise BlobstoreError(f"{model.reference} has no {name}, which tells how to build the model")
    try:
        value = json.loads(model.read_file(name))
    except (ValueError, RecursionError) as error:  # it is kept as the source had it
        raise BlobDamaged(f"{name} of {model.reference} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BlobDamaged(f"{name} of {model.reference} is not a JSON object")
    return value


def check_layers(model: Model, config: Mapping[str, Any]) -> None:
    """Check that a config asks for no more layers than the model can have tensors for.

    A library makes the layers before it looks at tensors, and of too many it takes all memory.

    Raises:
        BlobstoreError: it asks for more.
    """
    limit = max(len(model), _SURELY_POSSIBLE)
    for key, count in _layer_counts(config, _MAX_DEPTH):
        if count > limit:
            raise BlobstoreError(
                f"config.json of {model.reference} asks for more layers than its {len(model)} "
                f"tensors can be for: {key} is {count}"
            )


def _layer_counts(config: Mapping[str, Any], depth: int) -> Iterator[tuple[str, int | float]]:
    for key, value in config.items():
        if isinstance(value, dict) and depth:
            yield from _layer_counts(value, depth - 1)
        elif isinstance(value, int | float) and _LAYERS.fullmatch(key):
            yield key, value


@contextlib.contextmanager
def blaming(what: str) -> Iterator[None]:
    """Make one clear line of whatever a library raises, with what it failed to do before it.

    Raises:
        BlobstoreError: the library raised something.
    """
    try:
        yield
    except (BlobstoreError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise BlobstoreError(
            f"{what}: {type(error).__name__}: {escape(reason, _MAX_REASON)}"
        ) from error


def check_names(
    what: str,
    *,
    missing: Sequence[str] = (),
    unexpected: Sequence[str] = (),
    misshapen: Sequence[tuple[str, Sequence[int], Sequence[int]]] = (),
    mistyped: Sequence[tuple[str, str, str]] = (),
) -> None:
    """Check that a model got all the tensors that it needs, and no other.

    Args:
        what: the model and the library, for the message.
        missing: tensors that the library needs and the store has not.
        unexpected: tensors of the store that the library has no place for.
        misshapen: name, stored shape and expected shape of those that do not fit.
        mistyped: name, stored type and expected type of those that are no such numbers.

    Raises:
        BlobstoreError: it did not; all of them are listed.
    """
    faults = [
        *_listed("missing", missing),
        *_listed("unexpected", unexpected),
        *_listed("of another shape", [_shapes(*item) for item in misshapen], shown=str),
        *_listed("of another type", [_types(*item) for item in mistyped], shown=str),
    ]
    if faults:
        raise BlobstoreError(f"{what}: {'; '.join(faults)}")


def _shapes(name: str, stored: Sequence[int], expected: Sequence[int]) -> str:
    return f"{quote(name)} {list(stored)} where {list(expected)} is expected"


def _types(name: str, stored: str, expected: str) -> str:
    return f"{quote(name)} {stored} where {expected} is expected"


def _listed(kind: str, names: Sequence[str], shown: Any = quote) -> Iterator[str]:
    if names:
        noun = "tensor" if len(names) == 1 else "tensors"
        yield f"{len(names)} {noun} {kind}: {', '.join(map(shown, sorted(names)))}"
