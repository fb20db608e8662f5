"""The part of the OCI distribution protocol that clients pull with: manifests, blobs, tags and referrers.

A repository is a model of the store, with or without a host. Names of repositories have small letters there, so
``org/model-7b`` is ``org/Model-7B`` too. A client gets a manifest of a type that it accepts: the artifact that
``push`` sends, or the manifest of Ollama's layout if it accepts no other. With the tag ``TAG.image`` it gets an
image, which runtimes mount. Bytes are exact, because they have digests.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from blobstore.core.digest import Digest
from blobstore.errors import InvalidDigest, InvalidReference
from blobstore.manifests.reference import DEFAULT_NAMESPACE, Reference
from blobstore.registry.manifest import OCI_INDEX
from blobstore.registry.reference import is_repository
from blobstore.serve.cold_files import is_current
from blobstore.serve.gguf_choice import gguf_choice, wants_gguf
from blobstore.serve.messages import (
    Response,
    Wait,
    bytes_response,
    content_response,
    has_tag,
    json_response,
)
from blobstore.serve.names import DERIVED, repository_of
from blobstore.serve.refusal import API_VERSION, Refusal, error_response, no_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.registry.manifest import RemoteManifest
    from blobstore.serve.library import Library
    from blobstore.serve.messages import Request
    from blobstore.serve.targets import Target
    from blobstore.serve.visible import Visible

_ACTIONS = ("manifests", "blobs", "tags", "referrers")
_PAGE: Final = 1000
_MAX_WAIT: Final = 60
"""Seconds that a client waits for a change at most."""
_WAIT: Final = re.compile(r"(?:.*[,;\s])?wait=(\d{1,9})(?:[,;\s].*)?", re.ASCII | re.IGNORECASE)


def registry_response(request: Request, target: Target, library: Visible) -> Response:
    """Return the response to a request of a registry's client.

    Raises:
        Refusal: there is no such model.
        NotPrepared: see there.
        BlobstoreError: the model is damaged.
    """
    segments = target.segments
    if segments[1:] in ((), ("",)):
        return json_response({}, headers=API_VERSION)
    if segments[1:] == ("_catalog",):
        return _repositories(target, library)
    if not _has_route(segments):
        message = "this server does not offer what is at this address"
        return error_response(404, "UNSUPPORTED", message)
    action, what = segments[-2:]
    asked = _repository_of(target, library)
    repository = None if asked is None else library.spelled(asked)
    if repository is None or not library.has(repository):
        raise no_model()
    if action == "tags":
        return _tags(target, repository, library)
    return _part(request, target, repository, (action, what), library)


def is_list(target: Target) -> bool:
    """Return whether the answer is a list; see :class:`blobstore.serve.hub_calls.Route`."""
    segments = target.segments
    is_of_tags = _has_route(segments) and segments[-2] == "tags"
    return is_of_tags or segments[1:] == ("_catalog",)


def _has_route(segments: Sequence[str]) -> bool:
    """Return whether an address has a name, then an action, and then what it is about."""
    is_action = len(segments) > 3 and segments[-2] in _ACTIONS  # with v2
    return is_action and (segments[-2] != "tags" or segments[-1] == "list")


def _part(
    request: Request,
    target: Target,
    repository: Reference,
    place: tuple[str, str],
    library: Visible,
) -> Response:
    """Return the response to a request for a manifest or a blob, or for the manifests that refer to one."""
    action, what = place
    if action == "manifests":
        if wants_gguf(request):
            return gguf_choice(repository, what, library)
        return _manifest(request, repository, what, library)
    try:
        digest = Digest.parse(what)
    except InvalidDigest:
        return error_response(404, "DIGEST_INVALID", "the digest is malformed")
    if action == "blobs":
        return _blob(request, repository, digest, library)
    return _referrers(target, repository, digest, library)


def asked_of_registry(target: Target, library: Library) -> tuple[Reference, str | None] | None:
    """Return the repository and the tag that a target is about; None for targets of another kind.

    The tag is None if the target is about all tags, or about a manifest or a blob by its digest. Raises NotPrepared.
    """
    if not _has_route(target.segments):
        return None
    action, what = target.segments[-2:]
    repository = _repository_of(target, library)
    if repository is None:
        return None
    if action != "manifests" or ":" in what or what.startswith(DERIVED):
        return repository, None
    return repository, what


def _repository_of(target: Target, library: Library | Visible) -> Reference | None:
    """Return the repository that a target with a route names; None if the name is malformed. Raises NotPrepared.

    containerd names the registry that it would ask without a mirror as ``ns``. Only models of that host are meant.
    The first of two parts is a host if the store has such a model, which no upstream can have. Otherwise it is a
    namespace, or a host and a namespace as clients of the Hub spell them.
    """
    name, host = target.segments[1:-2], target.first("ns")
    name = (host, *name) if host else name
    if len(name) == 2:
        found = repository_of(name[0], DEFAULT_NAMESPACE, name[1])
        if host:
            return found
        if found is not None and _name_of(found) == "/".join(name) and library.stores(found):
            return found
    return repository_of(*name)


def _manifest(request: Request, repository: Reference, what: str, library: Visible) -> Response:
    candidates = list(_named(repository, what, library))
    accepted = [
        part.partition(";")[0].strip() for part in request.headers.get("accept", "").split(",", 100)
    ]
    is_any = not any(accepted) or "*/*" in accepted
    for manifest in candidates:
        if is_any or manifest.media_type in accepted:
            headers = {
                **API_VERSION,
                "Docker-Content-Digest": str(manifest.digest),
                "ETag": f'"{manifest.digest}"',
            }
            if has_tag(request, headers["ETag"]):
                return _unchanged(request, repository, what, library, headers)
            return bytes_response(manifest.data, headers=headers, media_type=manifest.media_type)
    if candidates:
        types = " or ".join(manifest.media_type for manifest in candidates)
        message = f"the manifest is {types}, which the client does not accept"
    else:
        message = "the model has no such tag or manifest"
    return error_response(404, "MANIFEST_UNKNOWN", message)


def _unchanged(
    request: Request, repository: Reference, what: str, library: Visible, headers: dict[str, str]
) -> Response:
    """Return the response to a client that has the manifest, and may want to wait for another one (RFC 7240)."""
    wanted = _WAIT.fullmatch(request.headers.get("prefer", ""))
    is_changed = None
    if wanted:
        with contextlib.suppress(InvalidReference):
            is_changed = library.watch(Reference(*repository.parts[:3], what))
    if not wanted or is_changed is None:
        return Response(304, headers)
    seconds = min(int(wanted[1]), _MAX_WAIT)
    headers["Preference-Applied"] = f"wait={seconds}"
    return Response(304, headers, wait=Wait(seconds, is_changed))


def _named(repository: Reference, what: str, library: Visible) -> Sequence[RemoteManifest]:
    """Return the manifests that a tag or a digest names."""
    if ":" in what:
        with contextlib.suppress(InvalidDigest):
            digest = Digest.parse(what)
            # In all versions, the digest is that of a manifest, or in all that of a blob.
            for artifact in library.artifacts(repository, digest):
                made = artifact.manifests.get(digest)
                return [made] if made else []
        return []
    with contextlib.suppress(InvalidReference):
        found = library.artifact(Reference(*repository.parts[:3], what))
        if found is not None:
            return found.roots
    with contextlib.suppress(InvalidDigest):
        digest = _derived_from(what)
        for artifact in library.artifacts(repository, digest):
            if what in artifact.tags:
                return [artifact.manifests[artifact.tags[what]]]
            if digest not in artifact.manifests:
                break
    return []


def _derived_from(tag: str) -> Digest:
    """Return the digest of the manifest that clients derive a tag from, as ``sha256-….sig``. Raises InvalidDigest."""
    start, _, rest = tag.partition("-")
    return Digest.parse(f"{start}:{rest.partition('.')[0]}")


def _blob(request: Request, repository: Reference, digest: Digest, library: Visible) -> Response:
    for artifact in library.artifacts(repository, digest):
        content = artifact.content(digest)
        if content is not None and all(map(is_current, content.parts)):
            headers = {**API_VERSION, "Docker-Content-Digest": str(digest)}
            use = library.use(artifact)
            return content_response(request, content, str(digest), headers, use)
    return error_response(404, "BLOB_UNKNOWN", "the model has no such blob")


def _tags(target: Target, repository: Reference, library: Visible) -> Response:
    last, limit = _asked(target)
    found = [one.tag for one in library.tags(repository, last, limit + 1)]
    return _page(target, "tags", found, limit, name="/".join(target.segments[1:-2]))


def _repositories(target: Target, library: Visible) -> Response:
    """Return the names of the repositories, in small letters, because clients accept no others."""
    last, limit = _asked(target)

    def name_of(reference: Reference) -> str:
        name = _name_of(reference).lower()
        return name if name > last and is_repository(name) else ""

    return _page(target, "repositories", [*library.page(name_of, last, limit + 1)], limit)


def _name_of(repository: Reference) -> str:
    """Return the name that clients of registries know a repository by."""
    return str(repository).rpartition(":")[0].replace(":", "_")


def _asked(target: Target) -> tuple[str, int]:
    """Return after which name a page begins, and how many names it has at most. Raises Refusal."""
    text = target.first("n")
    if text and not (text.isascii() and text.isdecimal()):
        raise Refusal(400, message="n is not a number")
    return target.first("last"), min(int(text[:19]), _PAGE) if text else _PAGE


def _page(target: Target, kind: str, names: Sequence[str], limit: int, **others: str) -> Response:
    """Return a page of sorted names, with other fields. One more name than the limit means that a page follows."""
    headers, page = dict(API_VERSION), names[:limit]
    if page and len(names) > limit:
        path, after = "/".join(target.segments), quote(page[-1], safe="")
        host = f"&ns={quote(ns, safe='')}" if (ns := target.first("ns")) else ""
        headers["Link"] = f'</{path}?n={limit}&last={after}{host}>; rel="next"'
    return json_response({**others, kind: page}, headers=headers)


def _referrers(target: Target, repository: Reference, digest: Digest, library: Visible) -> Response:
    # Only what a tag names has all signatures that there are by now.
    tagged = library.tagged_artifacts(repository, digest)
    first = next(tagged, None) or next(library.artifacts(repository, digest), None)
    listed = library.referrers(first, digest) if first else []
    headers = dict(API_VERSION)
    if kind := target.first("artifactType"):
        listed = [one for one in listed if one["artifactType"] == kind]
        headers["OCI-Filters-Applied"] = "artifactType"
    return json_response(_index(listed), headers=headers, media_type=OCI_INDEX)


def _index(listed: list[Any]) -> dict[str, Any]:
    return {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": listed}


NO_REFERRERS: Final = json_response(_index([])).texts
"""The body of the response if nothing refers to a manifest, also if the store does not have it."""
