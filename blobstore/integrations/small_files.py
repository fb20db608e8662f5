"""Helpers of all integrations: small files in a temporary folder, and checks with clear errors."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from blobstore.core.escape import escape, quote
from blobstore.core.globs import any_glob_matches
from blobstore.errors import BlobstoreError
from blobstore.models.checks import check_level
from blobstore.models.contents import small_files
from blobstore.models.small_files import first_text
from blobstore.remotes.addresses import is_address
from blobstore.sources.small_files import MAX_SMALL_FILE
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from blobstore.core.progress import Progress
    from blobstore.manifests.reference import Reference
    from blobstore.models.read_strategy import Read
    from blobstore.models.small_files import ModelFiles
    from blobstore.operations.open import Model, Verify
    from blobstore.store.local import StoreLike

_LAYERS = re.compile(r"(?:num|n)_(?:[a-z]+_)*layers?|(?:encoder|decoder)_layers|depth")
"""Keys of configs that state a number of layers, each of which has tensors."""
_ALWAYS_ALLOWED = 1000
"""Numbers of layers that are not questioned: layers may share tensors."""
_MAX_DEPTH = 8
_LOGGER = logging.getLogger(__name__)
_VERIFY = "BLOBSTORE_VERIFY"
ADAPTER_CONFIG = "adapter_config.json"
_MEMORY = "/dev/shm"  # noqa: S108 - the folder in it has a random name and is private to the user
_SPARE = 8
"""Free space that is needed there, in sizes of the files, because others need memory too."""
_MAX_REASON = 500
"""Characters of a library's own message that are quoted."""


class OpenOptions(TypedDict, total=False):
    """Options of :func:`blobstore.open` that integrations pass on."""

    verify: Verify
    read: Read
    progress: Progress | None


def verify_level(given: Verify | None, name: str | Reference, store: StoreLike) -> Verify:
    """Return the level of ``verify`` for a server: what was given, or ``$BLOBSTORE_VERIFY``, or the default.

    That is ``digest`` for a model of the store, if the store can keep what was hashed: so a blob is hashed once
    after it has arrived. Otherwise each start would take the time, and it is ``size``.

    Raises:
        UsageError: there is no such level.
    """
    if level := given or os.environ.get(_VERIFY):
        check_level(level)
        return cast("Verify", level)
    is_stored = not is_address(name) and not str(name).endswith(".gguf")
    is_kept = is_stored and LocalStore.of(store).verified_blobs().is_kept
    return "digest" if is_kept else "size"


def log_verified(model: Model, verify: Verify, given: Verify | None) -> None:
    """Log what of a model was verified, and because of which option: ``given`` is what the caller chose."""
    by_default = f"from ${_VERIFY}" if os.environ.get(_VERIFY) else "by default"
    verdict, count = model.verdict, len(model.manifest.blobs)
    if verdict is None:
        trust = "there is no policy about signatures"
    elif verdict.is_trusted:
        by = f"signed by {quote(verdict.signer)}" if verdict.signer else "needs no signature"
        trust = f"trusted by the policy, {by}"
    else:
        trust = f"not trusted by the policy: {verdict.reason}"
    are_known = verify in ("digest", "rehash")
    _LOGGER.info(
        "model %s: verify=%s (%s), %d blobs hashed, %d known to be intact; %s",
        model.reference,
        verify,
        "as asked for" if given else by_default,
        model.hashed,
        count - model.hashed if are_known else 0,
        trust,
    )


@contextlib.contextmanager
def temporary_folder(
    model: ModelFiles,
    patterns: Sequence[str] = ("*",),
    written: Mapping[str, bytes] | None = None,
    *,
    omitted: Collection[str] = (),
) -> Iterator[Path]:
    """Give a temporary folder with a model's small files and no weights; remove it at the end.

    Large files that the model keeps, such as other weights, are left out.

    Args:
        model: the model.
        patterns: which files to write.
        written: files by name, written instead of the stored ones.
        omitted: names of files that are not written.

    Raises:
        BlobMissing, BlobDamaged, InvalidManifest: a file is missing or damaged, or has an invalid
            name.
    """
    contents = {
        file: model.read_file(file)
        for file, layer in small_files(model.manifest).items()
        if layer.size <= MAX_SMALL_FILE and file not in omitted and any_glob_matches(file, patterns)
    }
    contents.update(written or {})
    place = _folder_in_memory(sum(map(len, contents.values())))
    with tempfile.TemporaryDirectory(prefix="blobstore-", dir=place) as name:
        for file, content in contents.items():
            path = Path(name, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        yield Path(name)


def _folder_in_memory(nbytes: int) -> str | None:
    """Return a folder in memory, where writing takes a quarter of the time; None for the default."""
    if os.environ.get("TMPDIR"):
        return None
    try:
        memory = os.statvfs(_MEMORY)
    except OSError:
        return None
    is_ample = memory.f_bavail * memory.f_frsize > _SPARE * nbytes
    return _MEMORY if is_ample and os.access(_MEMORY, os.W_OK | os.X_OK) else None


def read_json(model: ModelFiles, name: str) -> dict[str, Any]:
    """Return the JSON object in a file that a library cannot do without.

    Raises:
        BlobstoreError: the model has no such file.
        BlobMissing, BlobDamaged: the file is missing, damaged, or not a JSON object.
    """
    if name not in model.files:
        advice = ""
        if ADAPTER_CONFIG in model.files:
            base = first_text(model.read_json(ADAPTER_CONFIG), "base_model_name_or_path")
            advice = (
                f"it is an adapter of {quote(base or 'another model')}, which "
                "blobstore.integrations.transformers.from_store loads with it"
            )
        raise BlobstoreError(
            f"{model.reference} has no {name}, which describes the model", advice=advice
        )
    return model.read_json(name)


def check_layers(model: Model, config: Mapping[str, Any]) -> None:
    """Check that a config states no more layers than the model can have tensors for.

    Libraries build all layers before they read tensors, and too many layers exhaust the memory.

    Raises:
        BlobstoreError: it states more.
    """
    limit = max(len(model), _ALWAYS_ALLOWED)
    for key, count in _layer_counts(config, _MAX_DEPTH):
        if count > limit:
            raise BlobstoreError(
                f"config.json of {model.reference} states more layers than its {len(model)} "
                f"tensors can belong to: {key} is {count}"
            )


def _layer_counts(config: Mapping[str, Any], depth: int) -> Iterator[tuple[str, int | float]]:
    for key, value in config.items():
        if isinstance(value, dict) and depth:
            yield from _layer_counts(value, depth - 1)
        elif isinstance(value, int | float) and _LAYERS.fullmatch(key):
            yield key, value


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn any error of a library into one line that begins with ``what`` failed.

    Raises:
        BlobstoreError: the library raised an error.
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
    """Check that a model got all the tensors that it needs, and no others.

    Args:
        what: the model and the library, for the message.
        missing: tensors that the library needs and the store lacks.
        unexpected: tensors of the store that the library has no parameter for.
        misshapen: name, stored shape and expected shape of tensors of a wrong shape.
        mistyped: name, stored type and expected type of tensors of a wrong type.

    Raises:
        BlobstoreError: any list is not empty. The message lists all tensors.
    """
    faults = [
        *_listed("missing", missing),
        *_listed("unexpected", unexpected),
        *_listed(
            "of another shape",
            [
                f"{quote(name)} {list(stored)} where {list(expected)} is expected"
                for name, stored, expected in misshapen
            ],
            shown=str,
        ),
        *_listed(
            "of another type",
            [
                f"{quote(name)} {stored} where {expected} is expected"
                for name, stored, expected in mistyped
            ],
            shown=str,
        ),
    ]
    if faults:
        raise BlobstoreError(f"{what}: {'; '.join(faults)}")


def _listed(kind: str, names: Sequence[str], shown: Any = quote) -> Iterator[str]:
    if names:
        noun = "tensor" if len(names) == 1 else "tensors"
        yield f"{len(names)} {noun} {kind}: {', '.join(map(shown, sorted(names)))}"
