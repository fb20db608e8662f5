"""The part of the Hub's HTTP interface that its clients load models with.

A repository is a model of the store, with or without a namespace or a host. Its tags are revisions, ``main`` is
``latest``, and 40 hexadecimal digits are a commit. Every file is listed as a large one, with the sha256 of
its bytes, which is its ETag too: the clients compare both. Nothing here leads a client to another host, and
nothing says that the Xet protocol is spoken.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote as percent_encoded

from blobstore.errors import InvalidReference
from blobstore.manifests.reference import DEFAULT_TAG, Reference
from blobstore.serve.library import MAIN, name_of, repository_of
from blobstore.serve.messages import content_response, json_response
from blobstore.serve.refusal import Refusal, no_model
from blobstore.serve.targets import InvalidTarget, parse_form

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from blobstore.serve.library import ServedModel
    from blobstore.serve.messages import Request, Response
    from blobstore.serve.targets import Target
    from blobstore.serve.visible import Visible

PAGE: Final = 1000
"""Entries of a listing in one response."""
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_ACTIONS = ("revision", "tree", "paths-info", "refs", "resolve")
_BRANCH: Final = "refs/heads/"
_TAG: Final = "refs/tags/"


def hub_response(request: Request, target: Target, library: Visible) -> Response | None:
    """Return the response to a request of a client of the Hub; None for other targets.

    Raises:
        Refusal: there is no such model, revision or file.
        NotPrepared: see there.
        BlobstoreError: the model is damaged.
    """
    segments = target.segments
    try:
        if segments[:2] == ("api", "models"):
            return _api(request, target, segments[2:], library)
        found = _split(segments)
        if found is not None and found[1] == "resolve":
            return _resolve(request, *found, library)
    except InvalidTarget as error:
        return json_response(request, {"error": str(error)}, 400)
    return None


def asked_for(segments: Sequence[str]) -> tuple[Reference, str] | None:
    """Return the repository and the revision that a path is about; None for other paths."""
    is_api = segments[:2] == ("api", "models")
    try:
        found = _split(segments[2:] if is_api else segments)
    except Refusal:
        return None
    if found is not None and (is_api or found[1] == "resolve"):
        repository, action, rest = found
        return repository, rest[0] if rest and action != "refs" else MAIN
    whole = repository_of(*segments[2:]) if is_api and segments[2:] not in ((), ("",)) else None
    return (whole, MAIN) if whole is not None else None


def tag_of(revision: str) -> str:
    """Return the tag that a branch or a tag of the Hub is in a store."""
    name = revision.removeprefix(_BRANCH).removeprefix(_TAG)
    return DEFAULT_TAG if name == MAIN else name


def _split(segments: Sequence[str]) -> tuple[Reference, str, Sequence[str]] | None:
    """Return the repository, what is asked of it, and the rest of the path."""
    for count in (2, 1, 3):  # a repository with a namespace, without, and with a host
        if len(segments) > count and segments[count] in _ACTIONS:
            repository = repository_of(*segments[:count])
            if repository is None:
                raise no_model()
            return repository, segments[count], segments[count + 1 :]
    return None


def _api(
    request: Request, target: Target, segments: Sequence[str], library: Visible
) -> Response | None:
    if segments in ((), ("",)):
        return _models(request, target, library)
    found = _split(segments)
    if found is None:
        repository = repository_of(*segments)
        if repository is None:
            raise no_model()
        return _info(request, target, repository, MAIN, library)
    repository, action, rest = found
    if action == "refs" and not rest:
        return _refs(request, repository, library)
    if action == "revision" and len(rest) == 1:
        return _info(request, target, repository, rest[0], library)
    if action == "tree" and rest:
        return _tree(request, target, repository, rest, library)
    if action == "paths-info" and len(rest) == 1:
        return _paths_info(request, repository, rest[0], library)
    return None


def _model(
    repository: Reference, revision: str, library: Visible, *, with_digests: bool = False
) -> ServedModel:
    """Return the version of a repository that a revision names. Raises Refusal."""
    found = None
    if _COMMIT.fullmatch(revision):
        found = library.at_commit(repository, revision, with_digests=with_digests)
    else:
        try:
            tag = Reference(*repository.parts[:3], tag_of(revision))
        except InvalidReference:
            pass
        else:
            found = library.model(tag, with_digests=with_digests)
    if found is not None:
        return found
    if library.tags(repository):
        raise Refusal(404, "RevisionNotFound")
    raise no_model()


def _info(
    request: Request, target: Target, repository: Reference, revision: str, library: Visible
) -> Response:
    model = _model(repository, revision, library)
    with_sizes = target.first("blobs").lower() in ("true", "1")
    if with_sizes:
        model = _model(repository, model.commit, library, with_digests=True)
    siblings: list[dict[str, Any]] = []
    for path in model.files:
        sibling: dict[str, Any] = {"rfilename": path}
        if with_sizes:
            entry = _file_entry(model, path)
            sibling |= {"size": entry["size"], "blobId": entry["oid"]}
            if lfs := entry.get("lfs"):
                sizes = {name: lfs[name] for name in ("size", "pointerSize")}
                sibling["lfs"] = {"sha256": lfs["oid"], **sizes}
        siblings.append(sibling)
    name = name_of(repository)
    value = {
        "_id": model.commit[:24],
        "id": name,
        "modelId": name,
        "author": name.rpartition("/")[0] or repository.namespace,
        "sha": model.commit,
        "private": False,
        "gated": False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        "siblings": siblings,
    }
    if (modified := _modified(repository, library)) is not None:
        value["lastModified"] = value["createdAt"] = modified
    return json_response(request, value, headers={"X-Repo-Commit": model.commit})


def _modified(repository: Reference, library: Visible) -> str | None:
    modified = library.modified(repository)
    if modified is None:
        return None
    moment = datetime.fromtimestamp(modified // 10**9, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _models(request: Request, target: Target, library: Visible) -> Response:
    """Return the models of the store, of one author or with a text in their names."""
    author, search = target.first("author"), target.first("search").casefold()
    names: dict[str, Reference] = {}
    for reference in library.models():
        name = name_of(reference)
        if repository_of(*name.split("/")) == Reference(*reference.parts[:3], DEFAULT_TAG):
            names.setdefault(name, reference)
    value = [
        {"_id": name, "id": name, "modelId": name, "private": False, "tags": []}
        for name, reference in names.items()
        if author in ("", name.rpartition("/")[0] or reference.namespace)
        and search in name.casefold()
    ]
    return json_response(request, list(islice(value, _limit(target))))


def _refs(request: Request, repository: Reference, library: Visible) -> Response:
    branches, tags = [], []
    for reference in library.tags(repository):
        model = library.model(reference)
        if model is None:  # removed since it was listed
            continue
        if reference.tag == DEFAULT_TAG:
            branches.append({"name": MAIN, "ref": _BRANCH + MAIN, "targetCommit": model.commit})
        else:
            ref = _TAG + reference.tag
            tags.append({"name": reference.tag, "ref": ref, "targetCommit": model.commit})
    if not branches and not tags:
        raise no_model()
    return json_response(request, {"branches": branches, "converts": [], "tags": tags})


# Listings


def _file_entry(model: ServedModel, path: str) -> dict[str, Any]:
    size = model.files[path].size
    if oid := model.plain.get(path):
        return {"type": "file", "oid": oid, "size": size, "path": path}
    digest = (model.digests or {})[path].hex
    pointer = (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {size}\n".encode()
    )
    return {
        "type": "file",
        "oid": _git_blob(pointer),
        "size": size,
        "path": path,
        "lfs": {"oid": digest, "size": size, "pointerSize": len(pointer)},
    }


def _folder_entry(model: ServedModel, path: str) -> dict[str, Any]:
    # Git would name the tree of the folder; this name is as good as another that changes with it.
    oid = _git_blob(f"{model.commit} {path}".encode())
    return {"type": "directory", "oid": oid, "size": 0, "path": path}


def _git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _folders(paths: Mapping[str, Any]) -> list[str]:
    found = {
        "/".join(parts[:depth])
        for parts in (path.split("/") for path in paths)
        for depth in range(1, len(parts))
    }
    return sorted(found)


def _tree(
    request: Request, target: Target, repository: Reference, rest: Sequence[str], library: Visible
) -> Response:
    model = _model(repository, rest[0], library, with_digests=True)
    folder = "/".join(rest[1:]).strip("/")
    folders = _folders(model.files)
    if folder and folder not in folders:
        if folder not in model.files:
            raise Refusal(404, "EntryNotFound", "the model has no such folder", model.commit)
        paths = [folder]
    else:
        is_recursive = target.first("recursive").lower() in ("true", "1")
        paths = list(_listed(sorted([*folders, *model.files]), folder, is_recursive=is_recursive))
    limit, cursor = _limit(target), target.first("cursor")
    page = list(islice((path for path in paths if path > cursor), limit + 1))
    headers = {"X-Repo-Commit": model.commit}
    if len(page) > limit:
        del page[limit:]
        headers["Link"] = f'<{_next_page(request, target, page[-1])}>; rel="next"'
    known = set(folders)
    entries = [
        _folder_entry(model, path) if path in known else _file_entry(model, path) for path in page
    ]
    return json_response(request, entries, headers=headers)


def _listed(paths: Sequence[str], folder: str, *, is_recursive: bool) -> Iterator[str]:
    prefix = f"{folder}/" if folder else ""
    for path in paths:
        if path.startswith(prefix) and (is_recursive or "/" not in path[len(prefix) :]):
            yield path


def _limit(target: Target) -> int:
    text = target.first("limit")
    is_number = text.isdecimal() and len(text) <= len(str(PAGE))
    return min(max(int(text), 1), PAGE) if is_number else PAGE


def _next_page(request: Request, target: Target, last: str) -> str:
    """Return the address of the next page: absolute, because clients do not resolve it."""
    host = request.headers.get("host", "")
    path = "/".join(percent_encoded(part, safe="") for part in target.segments)
    fields = {name: values[0] for name, values in target.query.items()} | {"cursor": last}
    query = "&".join(
        f"{percent_encoded(name, safe='')}={percent_encoded(value, safe='')}"
        for name, value in fields.items()
    )
    scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else "http"
    return f"{scheme}://{percent_encoded(host, safe='.:[]')}/{path}?{query}"


def _paths_info(
    request: Request, repository: Reference, revision: str, library: Visible
) -> Response | None:
    if request.method != "POST":
        return json_response(request, {"error": "use POST"}, 405, {"Allow": "POST"})
    try:
        form = parse_form(request.body.decode("ascii"))
    except UnicodeDecodeError:
        raise InvalidTarget("the form is not ASCII") from None
    model = _model(repository, revision, library, with_digests=True)
    folders = set(_folders(model.files))
    entries = []
    for path in dict.fromkeys(path.strip("/") for path in form.get("paths", [])):
        if path in folders:
            entries.append(_folder_entry(model, path))
        elif path in model.files:
            entries.append(_file_entry(model, path))
    return json_response(request, entries, headers={"X-Repo-Commit": model.commit})


# Files


def _resolve(
    request: Request, repository: Reference, _: str, rest: Sequence[str], library: Visible
) -> Response:
    model = _model(repository, rest[0] if rest else "", library, with_digests=True)
    content = model.files.get("/".join(rest[1:]))
    if content is None:
        raise Refusal(404, "EntryNotFound", commit=model.commit)
    headers = {"X-Repo-Commit": model.commit, "X-Content-Type-Options": "nosniff"}
    etag = model.plain.get("/".join(rest[1:]))
    if etag is None:
        etag = (model.digests or {})["/".join(rest[1:])].hex
        headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(content.size)}
    if library.is_distrusted(etag):
        kept = {name: value for name, value in request.headers.items() if name != "range"}
        request = replace(request, headers=kept)
    return content_response(request, content, etag, headers, partial(library.keep, model))
