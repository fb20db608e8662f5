"""Requests of the Hub's clients as calls: the route of each, and its checked fields.

The route is found first, from the address alone. An address without a route is missing itself, whichever models there
are. The method and the fields of the query are checked next: fields that a route does not know are refused, because
the answer would be that to another request. Only then is a name looked up.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core.escape import quote
from blobstore.manifests.reference import DEFAULT_TAG
from blobstore.serve.messages import JSON, failure
from blobstore.serve.names import HEAD, MAIN
from blobstore.serve.refusal import Refused
from blobstore.serve.targets import InvalidTarget
from blobstore.serve.unprepared import BodyNeeded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from blobstore.serve.messages import Request, Response
    from blobstore.serve.targets import Target
    from blobstore.serve.visible import Visible

READS: Final = ("GET", "HEAD")
BODIES: Final = ("application/x-www-form-urlencoded", JSON)
"""The types of bodies that are understood."""
ANY: Final = "*"
"""Stands for all fields of a query."""
_API: Final = ("api", "models")
_REPOSITORY: Final = "REPOSITORY"
_COUNTS: Final = (2, 1, 3)
"""Parts of a name: with a namespace, without, and with a host."""
_HOST = re.compile(r".*[.:].*|.*_\d{1,5}|localhost", re.ASCII)
_BRANCH: Final = "refs/heads/"
_TAG: Final = "refs/tags/"
_NO_ROUTE: Final = "this server has models only, and does not offer what is at this address; see docs/guides/serve.md"
_TRUE: Final = ("true", "1")
_FALSE: Final = ("false", "0")


class Route(NamedTuple):
    """The answer to requests at an address."""

    answer: Callable[[Call, Visible], Response]
    reads: Sequence[str] = ()
    """The fields of the query that the answer depends on."""
    ignores: Sequence[str] = ()
    """Fields that it may ignore: they ask for fields of the answer, which always has all of them."""
    methods: Sequence[str] = READS
    is_list: bool = False
    """Whether the answer is slow, and so made on a thread, once for all clients that ask."""


class Call(NamedTuple):
    """A request at an address that has a route."""

    route: Route
    name: Sequence[str]
    """The parts of the repository's name."""
    revision: str
    path: str
    request: Request
    target: Target

    def flag(self, name: str) -> bool:
        """Return whether a field of the query is true. Raises InvalidTarget."""
        return is_true(name, self.target.first(name, _FALSE[0]))

    def limit(self, most: int) -> int:
        """Return how many entries a response may have, ``most`` if the client has no limit. Raises InvalidTarget."""
        text = self.target.first("limit", str(most))
        if not (text.isascii() and text.isdecimal() and text.strip("0")):
            raise InvalidTarget(f"limit={quote(text)}: expected a number from 1 on")
        return min(int(text.lstrip("0")[:19]), most)


class Routes:
    """A table of routes.

    An address is ``api/models``, or has a ``REPOSITORY`` of one to three parts, then a word, and then its
    arguments: a ``REVISION``, which is one segment, and a ``PATH`` of any length.
    """

    def __init__(self, table: Mapping[str, Route]) -> None:
        self._whole: dict[tuple[str, ...], Route] = {}
        self._words: dict[tuple[bool, str], tuple[Route, Sequence[str]]] = {}
        for address, route in table.items():
            before, _, after = address.partition(_REPOSITORY)
            word, *rest = after.strip("/").split("/")
            if word:
                self._words[bool(before), word] = route, rest
            else:
                self._whole[tuple(address.split("/"))] = route

    def find(self, segments: Sequence[str]) -> tuple[Route, Sequence[str], str, str] | None:
        """Return the route of an address, the name of the repository, the revision and the path; None without a route."""
        is_api = tuple(segments[:2]) == _API
        names = tuple(segments[2:] if is_api else segments)
        for count in _COUNTS:
            found = self._words.get((is_api, names[count])) if len(names) > count else None
            if found is not None and _is_name(names[:count]):
                route, takes = found
                rest = names[count + 1 :]
                if len(rest) == len(takes) or (
                    takes[-1:] == ["PATH"] and len(rest) >= len(takes) - 1
                ):
                    return route, names[:count], "".join(rest[:1]), "/".join(rest[1:])
        if not is_api:
            return None
        if names in ((), ("",)):
            return self._whole[_API], (), "", ""
        return (self._whole[*_API, _REPOSITORY], names, MAIN, "") if _is_name(names) else None

    def call(self, request: Request, target: Target) -> Call:
        """Return the call of a request. Raises Refused if it is not understood, or BodyNeeded."""
        found = self.find(target.segments)
        if found is None:
            status = 404 if request.method in READS else 405
            raise _refused(status, _NO_ROUTE, READS)
        call = Call(*found, request, target)
        if request.method not in call.route.methods:
            message = f"this address takes {' and '.join(call.route.methods)}"
            raise _refused(405, message, call.route.methods)
        if request.method not in READS and body_type(request) not in BODIES:
            raise _refused(415, f"expected a body of type {' or '.join(BODIES)}")
        known = {*call.route.reads, *call.route.ignores}
        for name in target.query if ANY not in known else ():
            if name not in known:
                message = (
                    f"this server does not understand {quote(name)} in a query to this address"
                )
                raise _refused(400, message)
        if request.method not in READS and request.body is None:
            raise BodyNeeded
        return call


def is_true(name: str, text: str) -> bool:
    """Return whether a field says yes. Raises InvalidTarget if it says neither yes nor no."""
    if text.lower() not in _TRUE + _FALSE:
        raise InvalidTarget(f"{name}={quote(text)}: expected true or false")
    return text.lower() in _TRUE


def body_type(request: Request) -> str:
    """Return the media type of a body, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _refused(status: int, message: str, methods: Sequence[str] = ()) -> Refused:
    """Return the refusal of a request that is not understood."""
    is_method = status == HTTPStatus.METHOD_NOT_ALLOWED
    return Refused(failure(message, status, {"Allow": ", ".join(methods)} if is_method else {}))


def _is_name(parts: Sequence[str]) -> bool:
    """Return whether there can be a repository with this name: three parts begin with a host."""
    has_host = len(parts) == 3 and _HOST.fullmatch(parts[0]) is not None
    return len(parts) < 3 or has_host


def tags_of(revision: str) -> Sequence[str]:
    """Return the tags in a store that a branch or tag of the Hub can be, the first that is there before the others.

    The branch ``main`` is the tag ``latest``, and only a tag ``main`` without one is that branch, too.
    """
    name = revision.removeprefix(_BRANCH).removeprefix(_TAG)
    is_main = name in (MAIN, HEAD) and not revision.startswith(_TAG)
    return (DEFAULT_TAG, name) if is_main else (name,)
