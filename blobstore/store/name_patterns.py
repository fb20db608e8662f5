"""The models that users name: by name, by glob, or by the start of an ID."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from blobstore.core.digest import Digest
from blobstore.core.escape import join_some, quote
from blobstore.errors import BlobstoreError, ModelNotFound, UsageError
from blobstore.manifests.reference import Reference, name_matches
from blobstore.store.manifests import ManifestReader

if TYPE_CHECKING:
    from blobstore.manifests.reference import Names
    from blobstore.store.protocols import ManifestResolver

_ID = re.compile(r"(?:sha256:)?(?P<start>[0-9a-f]{4,64})", re.ASCII)
_MAX_LISTED = 5


def is_pattern(text: str) -> bool:
    """Return whether a text is a glob: names of models contain none of its characters."""
    return not {"*", "?", "["}.isdisjoint(text)


def id_start(text: str) -> str | None:
    """Return the hexadecimal digits if a text may be the start of an ID, else None."""
    match = _ID.fullmatch(text)
    return match["start"] if match else None


def select_references(
    reader: ManifestResolver, texts: Iterable[str], *, needs_name: bool = False
) -> list[Reference]:
    """Return the models that texts spell: by name, by glob such as ``team/*``, or by start of the ID.

    The ID of a model is the digest of its manifest. A name wins over an ID of the same spelling. A name
    that does not exist is returned too: using it is the error.

    Args:
        reader: the store or archive with the models.
        texts: what the user wrote.
        needs_name: refuse an ID that has several names, instead of returning the first.

    Raises:
        InvalidReference: a text is not a glob, and breaks the grammar of names.
        ModelNotFound: a glob matches nothing.
        UsageError: a glob is too long, or an ID is the start of several IDs or has several names.
        StoreError: the names cannot be read.
    """
    found: dict[Reference, None] = {}
    for text in texts:
        if is_pattern(text):
            matches = _matching(reader, text)
        else:
            matches = [_named(reader, text, needs_name=needs_name)]
        found.update(dict.fromkeys(matches))
    return list(found)


def named_models(reader: ManifestResolver, names: Names) -> tuple[Reference, ...]:
    """Return the models of ``names``, which are one name or several, or globs such as ``team/*``, each once.

    Raises:
        InvalidReference, UsageError: as :meth:`Reference.of`.
        ModelNotFound: a glob matches nothing.
        StoreError: the names cannot be read.
    """
    listed: Iterable[Any] = [names]
    if isinstance(names, Iterable) and not isinstance(names, str | Mapping):
        listed = names
    found: dict[Reference, None] = {}
    for name in listed:
        is_glob = isinstance(name, str) and is_pattern(name)
        found.update(dict.fromkeys(_matching(reader, name) if is_glob else [Reference.of(name)]))
    return tuple(found)


def _matching(reader: ManifestResolver, glob: str) -> list[Reference]:
    """Return the models that a glob matches. Raises ModelNotFound if it matches nothing."""
    if matches := [name for name in reader.references() if name_matches(name, glob)]:
        return matches
    where = f" in the store {quote(reader.root)}" if isinstance(reader, ManifestReader) else ""
    raise ModelNotFound(f"no model matches {quote(glob)}{where}")


def _named(reader: ManifestResolver, text: str, *, needs_name: bool) -> Reference:
    """Return the model of a name or of the start of an ID."""
    reference, start = Reference.parse(text), id_start(text)
    if start is None:
        return reference
    try:
        reader.read_manifest(reference)
    except ModelNotFound:
        digests: dict[str, list[Reference]] = {}
        for name in reader.references():
            # A manifest that cannot be read has no ID; the other models may still match.
            with contextlib.suppress(BlobstoreError):
                digests.setdefault(Digest.of(reader.read_manifest(name)).hex, []).append(name)
        near = [names for digest, names in digests.items() if digest.startswith(start)]
        if len(near) > 1 or (near and needs_name and len(near[0]) > 1):
            what = "the start of several IDs" if len(near) > 1 else "the ID of several names"
            listed = [quote(name) for names in near for name in names]
            raise UsageError(f"{quote(text)} is {what}: {join_some(listed, _MAX_LISTED)}") from None
        return near[0][0] if near else reference
    except BlobstoreError:  # using the name reports it
        return reference
    return reference
