"""Models as the Hub describes them, one or many.

Downloads and likes are not counted: both are 0, because clients need the fields. Filtering a list needs the
descriptions of all models; otherwise only those of a page are read.
"""

from __future__ import annotations

import sys
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from blobstore.core.escape import quote
from blobstore.serve.hub_files import PAGE, date_of, file_entry, model_of, name_asked, page_of
from blobstore.serve.messages import json_response
from blobstore.serve.names import any_tag, name_of, repository_of
from blobstore.serve.targets import InvalidTarget

if TYPE_CHECKING:
    from blobstore.manifests.reference import Reference
    from blobstore.serve.description import Description
    from blobstore.serve.hub_calls import Call
    from blobstore.serve.messages import Response
    from blobstore.serve.visible import Visible

_EQUAL_SORTS: Final = (
    "downloads",
    "likes",
    "trendingScore",
    "downloadsAllTime",
    "likes7d",
    "_id",
    "",
)
"""Orders in which all models here are equal, so that they are sorted by name."""
_DATE_SORTS: Final = ("lastModified", "last_modified", "createdAt", "created_at")
_MAX_SORTED: Final = 1000
"""The most models of a list in another order, which has no pages."""


def info(call: Call, library: Visible) -> Response:
    """Return the Hub's description of a model."""
    model = model_of(call, library)
    with_sizes = call.flag("blobs")
    if with_sizes:
        # By its commit, because the tag may have moved in between.
        model = model_of(call._replace(revision=model.commit), library, with_digests=True)
    siblings: list[dict[str, Any]] = []
    for path in model.files:
        sibling: dict[str, Any] = {"rfilename": path}
        if with_sizes:
            entry = file_entry(model, path)
            sibling |= {"size": entry["size"], "blobId": entry["oid"]}
            if lfs := entry.get("lfs"):
                sizes = {name: lfs[name] for name in ("size", "pointerSize")}
                sibling["lfs"] = {"sha256": lfs["oid"], **sizes}
        siblings.append(sibling)
    value = _described(name_asked(call, library), model.description, library) | {
        "_id": model.commit[:24],
        "sha": model.commit,
        "siblings": siblings,
        "usedStorage": sum(content.size for content in model.files.values()),
    }
    return json_response(value, headers={"X-Repo-Commit": model.commit})


def _described(name: Reference, description: Description, library: Visible) -> dict[str, Any]:
    spelled, date = name_of(name), date_of(name, library)
    return {
        "_id": spelled,
        "id": spelled,
        "modelId": spelled,
        "author": spelled.rpartition("/")[0] or None,
        "private": False,
        "gated": False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "lastModified": date,
        "createdAt": date,
        **description.fields(),
    }


def list_models(call: Call, library: Visible) -> Response:
    """Return the models of the store that match a query."""
    target = call.target
    author, search = target.first("author"), target.first("search").casefold()
    wanted = {*chain.from_iterable(text.split(",") for text in target.query.get("filter", ()))}
    wanted |= {*target.query.get("pipeline_tag", ())}
    wanted.discard("")
    sort = target.first("sort")

    def listed(reference: Reference) -> str:
        name = name_of(reference)
        if author not in ("", name.rpartition("/")[0]) or search not in name.casefold():
            return ""
        return name if repository_of(*name.split("/")) == any_tag(reference) else ""

    # A page needs no others, unless their tags or dates decide what is on it.
    is_page = not wanted and sort in _EQUAL_SORTS
    after, limit = (target.first("cursor"), call.limit(PAGE) + 1) if is_page else ("", sys.maxsize)
    names = {} if call.flag("gated") else library.page(listed, after, limit)  # no model here is
    found = list(names)
    if wanted:
        known = library.descriptions(names[name] for name in found)
        is_wanted = {name for name, one in known.items() if wanted <= {*one.tags}}
        found = [name for name in found if names[name] in is_wanted]
    headers: dict[str, str] = {}
    if sort in _DATE_SORTS:
        limit, is_up = call.limit(_MAX_SORTED), target.first("direction") == "1"
        dates = {name: date_of(names[name], library) for name in found}
        found = sorted(found, key=lambda name: dates[name], reverse=not is_up)[:limit]
    elif sort in _EQUAL_SORTS:
        found, headers = page_of(call, found)
    else:
        raise InvalidTarget(f"this server cannot sort by {quote(sort)}")
    known = library.descriptions(names[name] for name in found)
    # Those that were removed in the meantime have none.
    several = [(names[name], known.get(names[name])) for name in found]
    value = [_described(name, one, library) for name, one in several if one is not None]
    return json_response(value, headers=headers)
