"""The files of a model as the Hub lists them: trees, paths, and the place of each in git.

Every file of the store's own models is listed as a large one, with the sha256 of its bytes, which is its ETag too: the
clients compare both. Files that an upstream lists as small ones keep their names in git.
"""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, datetime
from http import HTTPStatus
from itertools import islice
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote as percent_encoded

from blobstore.core import strict_json
from blobstore.core.digest import git_digester
from blobstore.errors import InvalidReference
from blobstore.manifests.reference import Reference
from blobstore.serve.hub_calls import body_type, is_true, tags_of
from blobstore.serve.messages import JSON, json_response
from blobstore.serve.names import MAX_NAME, any_tag, repository_of
from blobstore.serve.refusal import Refusal, no_model
from blobstore.serve.targets import InvalidTarget, parse_form

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from blobstore.serve.hub_calls import Call
    from blobstore.serve.library import ServedModel
    from blobstore.serve.messages import Request, Response
    from blobstore.serve.targets import Target
    from blobstore.serve.visible import Visible

PAGE: Final = 1000
"""Entries of a listing in one response."""
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_PATHS: Final = {"paths", "expand"}
"""The fields of a request about paths."""
_MAX_PATHS: Final = 10_000
"""Paths of a request."""
_MAX_MEMORY: Final = 32 << 20
"""Estimated bytes that a body may take when it is decoded."""
_LONG_NAME: Final = f"this server keeps no model whose name has more than {MAX_NAME} characters"
_EPOCH: Final = "1970-01-01T00:00:00.000Z"


def repository(call: Call) -> Reference:
    """Return the repository that a request is about. Raises Refusal if no model can have its name."""
    found = repository_of(*call.name)
    if found is None and len(call.name[-1]) > MAX_NAME:
        raise Refusal(HTTPStatus.BAD_REQUEST, message=_LONG_NAME)
    if found is None:
        raise no_model()
    return found


def model_of(call: Call, library: Visible, *, with_digests: bool = False) -> ServedModel:
    """Return the version of a repository that a request is about. Raises Refusal and NotPrepared."""
    name, revision = repository(call), library.resolved(call.revision)
    found = None
    if _COMMIT.fullmatch(revision):
        found = library.at_commit(name, revision, with_digests=with_digests)
    else:
        for tag in _names(name, revision):
            found = found or library.model(tag, with_digests=with_digests)
    if found is not None:
        return found
    if library.has(name):
        raise Refusal(404, "RevisionNotFound")
    raise no_model()


def name_asked(call: Call, library: Visible) -> Reference:
    """Return the name of the version that a request is about; that of its repository if the version has none now."""
    name, revision = repository(call), library.resolved(call.revision)
    if _COMMIT.fullmatch(revision):
        return library.name_at(name, revision) or name
    several = list(_names(name, revision))
    return next((one for one in several if library.modified(one) is not None), several[0])


def _names(repository: Reference, revision: str) -> Iterator[Reference]:
    """Yield the names that a revision can be, in their order; none if no tag is spelled so."""
    with contextlib.suppress(InvalidReference):
        for tag in tags_of(revision):
            yield Reference(*repository.parts[:3], tag)


def date_of(name: Reference, library: Visible) -> str:
    """Return when a name got its model, or ``latest`` of its repository did; 1970 if neither is in the store."""
    for reference in (name, any_tag(name)):
        if (modified := library.modified(reference)) is not None:
            moment = datetime.fromtimestamp(modified // 10**9, UTC)
            return moment.strftime("%Y-%m-%dT%H:%M:%S.000Z")
    return _EPOCH


def commit_entry(call: Call, model: ServedModel, library: Visible) -> dict[str, Any]:
    """Return a commit in the form in which listings name the last commit of a file."""
    name = name_asked(call, library)
    return {"id": model.commit, "title": f"Store {name}", "date": date_of(name, library)}


# Entries


def file_entry(model: ServedModel, path: str) -> dict[str, Any]:
    """Return a file of a model whose digests are known."""
    size = model.files[path].size
    if oid := model.plain.get(path):
        return {"type": "file", "oid": oid, "size": size, "path": path}
    text = pointer(model, path)
    digest = (model.digests or {})[path].hex
    return {
        "type": "file",
        "oid": _git_blob(text),
        "size": size,
        "path": path,
        "lfs": {"oid": digest, "size": size, "pointerSize": len(text)},
    }


def pointer(model: ServedModel, path: str) -> bytes:
    """Return the LFS pointer that git has for a large file."""
    digest, size = (model.digests or {})[path].hex, model.files[path].size
    return (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {size}\n".encode()
    )


def _folder_entry(model: ServedModel, path: str) -> dict[str, Any]:
    # Git names the tree of the folder. Here, any name will do that changes with its content.
    oid = _git_blob(f"{model.commit} {path}".encode())
    return {"type": "directory", "oid": oid, "size": 0, "path": path}


def _git_blob(data: bytes) -> str:
    digester = git_digester(len(data))
    digester.update(data)
    return digester.hexdigest()


def _folders(paths: Mapping[str, Any]) -> set[str]:
    return {
        "/".join(parts[:depth])
        for parts in (path.split("/") for path in paths)
        for depth in range(1, len(parts))
    }


def _entries(model: ServedModel, paths: Iterable[str], last: dict[str, Any]) -> list[Any]:
    """Return files and folders, each with the fields ``last``."""
    folders = _folders(model.files)
    return [
        (_folder_entry if path in folders else file_entry)(model, path) | last for path in paths
    ]


# Answers


def tree(call: Call, library: Visible) -> Response:
    """Return the files in a folder of a model, or in all folders."""
    model = model_of(call, library, with_digests=True)
    folder, folders = call.path.strip("/"), _folders(model.files)
    if folder and folder not in folders:
        if folder not in model.files:
            raise Refusal(404, "EntryNotFound", "the model has no such folder", model.commit)
        paths = [folder]
    else:
        every = sorted([*folders, *model.files])
        paths = list(_inside(every, folder, is_recursive=call.flag("recursive")))
    page, link = page_of(call, paths)
    last = {"lastCommit": commit_entry(call, model, library)} if call.flag("expand") else {}
    headers = {"X-Repo-Commit": model.commit, **link}
    return json_response(_entries(model, page, last), headers=headers)


def _inside(paths: Sequence[str], folder: str, *, is_recursive: bool) -> Iterator[str]:
    prefix = f"{folder}/" if folder else ""
    for path in paths:
        if path.startswith(prefix) and (is_recursive or "/" not in path[len(prefix) :]):
            yield path


def paths_info(call: Call, library: Visible) -> Response:
    """Return the entries of the requested paths that the model has."""
    read = _asked_as_json if body_type(call.request) == JSON else _asked_as_form
    wanted, is_expanded = read(call.request.body or b"")
    model = model_of(call, library, with_digests=True)
    there = model.files.keys() | _folders(model.files)
    found = [path for path in dict.fromkeys(one.strip("/") for one in wanted) if path in there]
    last = {"lastCommit": commit_entry(call, model, library)} if is_expanded else {}
    headers = {"X-Repo-Commit": model.commit}
    return json_response(_entries(model, found, last), headers=headers)


def _asked_as_json(body: bytes) -> tuple[list[str], bool]:
    try:
        value = strict_json.loads(body, _MAX_MEMORY)
    except ValueError:
        raise InvalidTarget("the body is not JSON") from None
    paths = value.get("paths") if isinstance(value, dict) and value.keys() <= _PATHS else None
    is_sound = isinstance(paths, list) and all(isinstance(path, str) for path in paths)
    if not is_sound or not isinstance(value.get("expand", False), bool):
        raise InvalidTarget('the body is not {"paths": [TEXT, ...], "expand": BOOL}')
    if len(value["paths"]) > _MAX_PATHS:
        raise InvalidTarget(f"there are more than {_MAX_PATHS} paths; ask for some at a time")
    return value["paths"], value.get("expand", False)


def _asked_as_form(body: bytes) -> tuple[list[str], bool]:
    try:
        form = parse_form(body.decode("ascii"))
    except UnicodeDecodeError:
        raise InvalidTarget("the form is not ASCII") from None
    if not form.keys() <= _PATHS:
        raise InvalidTarget("the form has other fields than paths and expand")
    return form.get("paths", []), is_true("expand", form.get("expand", ["false"])[-1])


# Pages


def page_of(call: Call, names: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return the page of sorted names that a request is for, and a header that leads to the next one.

    Those after the first one that is not on the page may be left out.
    """
    limit, cursor = call.limit(PAGE), call.target.first("cursor")
    page = list(islice((name for name in names if name > cursor), limit + 1))
    if len(page) <= limit:
        return page, {}
    del page[limit:]
    return page, {"Link": f'<{_next_page(call.request, call.target, page[-1])}>; rel="next"'}


def _next_page(request: Request, target: Target, last: str) -> str:
    """Return the address of the next page: absolute, because clients do not resolve it."""
    host = request.headers.get("host", "")
    path = "/".join(percent_encoded(part, safe="") for part in target.segments)
    fields = [(name, value) for name, values in target.query.items() for value in values]
    fields = [one for one in fields if one[0] != "cursor"] + [("cursor", last)]
    query = "&".join(
        f"{percent_encoded(name, safe='')}={percent_encoded(value, safe='')}"
        for name, value in fields
    )
    scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else "http"
    return f"{scheme}://{percent_encoded(host, safe='.:[]')}/{path}?{query}"
