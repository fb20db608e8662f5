"""The part of the Hub's HTTP interface that its clients load models with.

A repository is a model of the store, with or without a namespace or a host. Its tags are revisions, ``main`` and
``HEAD`` are ``latest``, and 40 hexadecimal digits are a commit. No response leads a client to another host, and
none offers the Xet protocol.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from blobstore.manifests.file_names import is_valid_name
from blobstore.manifests.reference import DEFAULT_TAG, Reference
from blobstore.serve.hub_calls import ANY, Call, Route, Routes
from blobstore.serve.hub_files import (
    commit_entry,
    model_of,
    paths_info,
    pointer,
    repository,
    tree,
)
from blobstore.serve.hub_models import info, list_models
from blobstore.serve.messages import Content, content_response, json_response
from blobstore.serve.names import MAIN, name_of, repository_of
from blobstore.serve.refusal import Refusal, no_model
from blobstore.sources.sharded import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.serve.library import ServedModel
    from blobstore.serve.messages import Request, Response
    from blobstore.serve.visible import Visible

_NO_OTHERS: Final = "this server has no file of that name; of a repository with over 2,000 files, or with two that exclude each other, it has only those that it imports"
_NO_SUCH_NAME: Final = "this server keeps no file of that name: it allows two folders, and letters, digits, '_', '.' and '-'"
_MAX_PLAIN: Final = 10 << 20
"""Bytes of a file that the Hub keeps in git as it is, unless it has weights."""


def hub_response(call: Call, library: Visible) -> Response:
    """Return the response to a request of a client of the Hub.

    Raises:
        Refusal: there is no such model, revision or file.
        InvalidTarget: a field of the query or of the body is malformed.
        NotPrepared: see there.
        BlobstoreError: the model is damaged.
    """
    asked = repository_of(*call.name) if call.name else None
    if asked is not None:
        call = call._replace(name=name_of(library.spelled(asked)).split("/"))
    return call.route.answer(call, library)


def asked_for(segments: Sequence[str]) -> tuple[Reference, str | None] | None:
    """Return the repository and the revision, if any, that a path is about; None for other paths."""
    found = ROUTES.find(segments)
    name = repository_of(*found[1]) if found is not None and found[1] else None
    return (name, found[2] or None) if found is not None and name is not None else None


def is_exact(segments: Sequence[str], repository: Reference) -> bool:
    """Return whether a path names a repository as the Hub does: there, ``library/foo`` is another one than ``foo``."""
    found = ROUTES.find(segments)
    return found is not None and "/".join(found[1]) == name_of(repository)


# Repositories


def _refs(call: Call, library: Visible) -> Response:
    branches, tags = [], []
    for reference, commit in library.commits(repository(call)).items():
        if reference.tag == DEFAULT_TAG:
            ref = {"name": MAIN, "ref": f"refs/heads/{MAIN}", "targetCommit": commit}
            branches.append(ref)
        else:
            ref = {"name": reference.tag, "ref": f"refs/tags/{reference.tag}"}
            tags.append(ref | {"targetCommit": commit})
    if not branches and not tags:
        raise no_model()
    return json_response({"branches": branches, "converts": [], "tags": tags})


def _commits(call: Call, library: Visible) -> Response:
    """Return the commit of a revision, alone: a store does not know the commit before it."""
    commit = commit_entry(call, model_of(call, library), library) | {"message": "", "authors": []}
    return json_response([commit] if call.target.first("p", "0") == "0" else [])


def _auth_check(call: Call, library: Visible) -> Response:
    if not library.has(repository(call)):
        raise no_model()
    return json_response({})


# Files


def _content(call: Call, library: Visible) -> tuple[ServedModel, Content]:
    model = model_of(call, library, with_digests=True)
    content = model.files.get(call.path)
    if content is None:
        message = ""
        if model.origin is not None and not is_valid_name(call.path):
            message = _NO_SUCH_NAME
        elif model.origin is not None and not model.origin.others:
            message = _NO_OTHERS
        raise Refusal(404, "EntryNotFound", message, model.commit)
    return model, content


def _resolve(call: Call, library: Visible) -> Response:
    model, content = _content(call, library)
    headers = {"X-Repo-Commit": model.commit, "X-Content-Type-Options": "nosniff"}
    etag = model.plain.get(call.path)
    if etag is None:
        etag = (model.digests or {})[call.path].hex
        headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(content.size)}
    # A HEAD request needs no bytes, so it fetches no file.
    if call.request.method != "HEAD":
        content = library.content(model, call.path)
    # A client that may have wrong bytes must not continue after them.
    request = _whole(call.request) if library.is_distrusted(model, etag) else call.request
    return content_response(request, content, etag, headers, library.use(model))


def _raw(call: Call, library: Visible) -> Response:
    """Return a file as git has it: one with weights or a large one as the LFS pointer with its digest."""
    model, content = _content(call, library)
    is_small = content.size <= _MAX_PLAIN and not call.path.endswith(WEIGHTS)
    if call.path in model.plain or (model.origin is None and is_small):
        return _resolve(call, library)
    made = Content((pointer(model, call.path),))
    headers = {"X-Repo-Commit": model.commit, "X-Content-Type-Options": "nosniff"}
    etag = f"pointer-{(model.digests or {})[call.path].hex}"
    return content_response(call.request, made, etag, headers)


def _whole(request: Request) -> Request:
    """Return a request for all of a file."""
    kept = {name: value for name, value in request.headers.items() if name != "range"}
    return replace(request, headers=kept)


_MORE: Final = ("expand", "expand[]", "full", "cardData", "config", "securityStatus")
"""Fields of a query that ask for more fields of a model."""
_INFO: Final = Route(info, reads=("blobs",), ignores=_MORE)
ROUTES: Final = Routes(
    {
        "api/models": Route(
            list_models,
            reads=(
                *("author", "search", "filter", "pipeline_tag", "gated"),
                *("sort", "direction", "limit", "cursor"),
            ),
            ignores=_MORE,
            is_list=True,
        ),
        "api/models/REPOSITORY": _INFO,
        "api/models/REPOSITORY/revision/REVISION": _INFO,
        "api/models/REPOSITORY/tree/REVISION/PATH": Route(
            tree, reads=("recursive", "expand", "limit", "cursor")
        ),
        "api/models/REPOSITORY/paths-info/REVISION": Route(paths_info, methods=("POST",)),
        "api/models/REPOSITORY/commits/REVISION": Route(
            _commits, reads=("p",), ignores=("limit", "expand[]", "expand")
        ),
        "api/models/REPOSITORY/refs": Route(_refs, ignores=("include_prs",), is_list=True),
        "api/models/REPOSITORY/auth-check": Route(_auth_check),
        # A query of a file says how a browser shows it, or keeps caches from answering.
        "REPOSITORY/resolve/REVISION/PATH": Route(_resolve, ignores=(ANY,)),
        "REPOSITORY/raw/REVISION/PATH": Route(_raw, ignores=(ANY,)),
    }
)
