"""The names of repositories and tags, as clients of the Hub and of registries know them."""

from __future__ import annotations

import re
from typing import TypeGuard

from blobstore.errors import InvalidReference
from blobstore.manifests.reference import DEFAULT_HOST, DEFAULT_NAMESPACE, DEFAULT_TAG, Reference

IMAGE = ".image"
"""The end of tags of images, which have the name of a model before it."""
DERIVED = "sha256-"
"""The start of tags that clients derive from the digest of a manifest, for its signatures."""
MAIN = "main"
"""The branch of the Hub that the tag ``latest`` is."""
HEAD = "HEAD"
"""Another name of that branch."""
MAX_NAME = 80
"""Characters of a model's name in a store, as Ollama has it. The Hub allows 96."""
_NONE = "_"
"""The namespace, after a host, of a model that has none: a name of the Hub cannot end with the host's dot."""
_PORT = re.compile(r"_(\d{1,5})$", re.ASCII)


def repository_of(*parts: str) -> Reference | None:
    """Return the repository that the parts of a path name, with any tag; None if it names none.

    Clients of the Hub know names of two parts: ``ghcr.io.team/llama`` is ``ghcr.io/team/llama`` for them. No
    namespace has a dot, so no other model has that name. ``ghcr.io._/llama`` is ``ghcr.io/llama``. No name has a colon:
    ``localhost_5000`` is ``localhost:5000``.
    """
    if not 1 <= len(parts) <= 3:  # a host, a namespace and a model
        return None
    *first, model = parts
    host, separator, namespace = "/".join(first or [DEFAULT_NAMESPACE]).rpartition(
        "/" if len(first) > 1 else "."
    )
    host = _PORT.sub(r":\1", host) if separator else DEFAULT_HOST
    namespace = DEFAULT_NAMESPACE if separator and namespace == _NONE else namespace
    try:
        return Reference(host, namespace, model, DEFAULT_TAG)
    except InvalidReference:
        return None


def name_of(repository: Reference) -> str:
    """Return the name that clients of the Hub know a repository by; see :func:`repository_of`."""
    has_none = repository.namespace == DEFAULT_NAMESPACE
    if repository.host != DEFAULT_HOST:
        host = repository.host.replace(":", "_")
        return f"{host}.{_NONE if has_none else repository.namespace}/{repository.model}"
    return repository.model if has_none else f"{repository.namespace}/{repository.model}"


def any_tag(reference: Reference) -> Reference:
    """Return the repository of a name."""
    return Reference(*reference.parts[:3], DEFAULT_TAG)


def is_name(value: object) -> TypeGuard[str]:
    """Return whether clients of the Hub can know a repository without a host by this name."""
    found = repository_of(*value.split("/")) if isinstance(value, str) else None
    return found is not None and found.host == DEFAULT_HOST and name_of(found) == value
