"""The response to a request, without a socket: which rules apply to it, and which protocol it speaks."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from functools import partial, reduce
from http import HTTPStatus
from typing import TYPE_CHECKING

from blobstore.errors import BlobstoreError
from blobstore.serve.hub import ROUTES, hub_response
from blobstore.serve.hub_calls import READS
from blobstore.serve.messages import bytes_response, failure
from blobstore.serve.metrics import METRICS_TYPE
from blobstore.serve.refusal import Refusal, Refused, error_response, refusal_response
from blobstore.serve.registry import NO_REFERRERS, is_list, registry_response
from blobstore.serve.targets import InvalidTarget, parse_target, split_host
from blobstore.serve.token_owners import owner_response
from blobstore.serve.unprepared import List, ListOfAll
from blobstore.serve.visible import Visible

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from blobstore.serve.access import Access, Client
    from blobstore.serve.hub_calls import Call
    from blobstore.serve.library import Library
    from blobstore.serve.messages import Request, Response
    from blobstore.serve.pull_through import PullThrough
    from blobstore.serve.targets import Target

_ALLOWED = {"Allow": ", ".join(READS)}
_WELCOME = b"blobstore serves models here, as the Hub and as a container registry do; see docs/guides/serve.md\n"
_OF_CLIENTS = ("user-agent", "authorization")
"""Headers on which no list depends, besides what the client may see."""


def answer(
    request: Request,
    library: Library,
    access: Access,
    metrics: Callable[[], str] = lambda: "",
    pull_through: PullThrough | None = None,
    shared: Library | None = None,
) -> Response:
    """Return the response to a request; ``metrics`` returns the text of ``/metrics``.

    With ``pull_through``, models that the library lacks are fetched. With ``shared``, that of the shared store, they
    are answered from it.

    No blob is read for it. A manifest's file is looked at, so the response is about the store as it is now.

    Raises:
        BodyNeeded: the head allows an answer; read the body, and ask again.
        NotPrepared: the model was not asked for before; call its ``prepare`` and ask again.
        BlobstoreError: the model is damaged, or the store cannot be read.
    """
    request = _in_origin_form(request)

    def respond(make: Callable[[], Response]) -> Response:
        """Return a response, or that of a refusal in the words of the client's protocol."""
        try:
            return make()
        except InvalidTarget as error:
            return failure(str(error), 400)
        except Refused as refused:
            return refused.response
        except Refusal as refusal:
            return refusal_response(
                refusal,
                is_registry=parse_target(request.target).is_of_registry,
                reads_tokens=pull_through is not None and pull_through.reads_tokens(request),
            )

    def found() -> Response:
        target = parse_target(request.target)
        # Before the token is checked, because probes have none.
        if (status := _probe(target, library, shared)) is not None:
            return status
        # Before all else: a client without access must not learn which addresses there are.
        client = access.client(request, target)
        if (page := _page(request, target, metrics)) is not None:
            return page
        if target.segments == ("api", "whoami-v2") and request.method in READS:
            return _owner(request, access, client, pull_through)
        # Before a name is looked up: a request that is not understood fails alike for all models.
        call = _understood(request, target)
        library.store.check_root()
        if pull_through is None:
            both = [one.only(client.models) for one in (library, shared) if one is not None]
            visible = tuple(map(Visible.of, both))
        else:
            through = pull_through.only(client.models)
            visible = (through.visible(request, target, client.upstream_token),)
        return _about_models(request, target, call, visible, respond)

    return respond(found)


def _about_models(
    request: Request,
    target: Target,
    call: Call | None,
    visible: Sequence[Visible],
    respond: Callable[[Callable[[], Response]], Response],
) -> Response:
    """Return the response to a request that the rules of this server allow; a list is made by ``respond`` later.

    It is that of the first store which has what is asked for, each with what is ``visible`` in it. Lists are of both.
    Each store has its own records of who may read its models.
    """

    def of(store: Visible) -> Response:
        if call is None:
            return registry_response(request, target, store)
        return hub_response(call, store)

    def found() -> Response:
        response = respond(partial(of, visible[0]))
        for store in visible[1:] if _lacks_name(response) else ():
            other = respond(partial(of, store))
            if _lacks_repository(response) or not _lacks_name(other):
                response = other
        return response

    if not (is_list(target) if call is None else call.route.is_list):
        return found()
    is_of_all = target.segments[-1] == "_catalog" if call is None else not call.name
    asked = {name: value for name, value in request.headers.items() if name not in _OF_CLIENTS}
    key = (visible, request.method, request.target, tuple(sorted(asked.items())))
    raise (ListOfAll if is_of_all else List)(
        lambda: respond(lambda: of(reduce(Visible.joined, visible))), *key
    )


def _lacks_name(response: Response) -> bool:
    """Return whether a store has no model of the name, or nothing of the digest, that is asked for."""
    if response.status != HTTPStatus.NOT_FOUND:
        return response.texts == NO_REFERRERS
    return response.headers.get("X-Error-Code") != "EntryNotFound"


def _lacks_repository(response: Response) -> bool:
    """Return whether a store has no model with any tag of the name."""
    is_unknown = any(b'"NAME_UNKNOWN"' in text for text in response.texts or ())
    return is_unknown or response.headers.get("X-Error-Code") == "RepoNotFound"


def _owner(
    request: Request, access: Access, client: Client, pull_through: PullThrough | None
) -> Response:
    """Return the response to a client that asks for the owner of its token. Raises NotPrepared."""
    asks = pull_through is not None and pull_through.reads_tokens(request)
    owners = pull_through.owners if pull_through and asks and access.tokens is None else None
    return owner_response(client.upstream_token, owners, has_token=client.has_token)


def _in_origin_form(request: Request) -> Request:
    """Return a request whose header has the host that its target may have named."""
    host, target = split_host(request.target)
    if host is None:
        return request
    return replace(request, target=target, headers={**request.headers, "host": host})


def _probe(target: Target, library: Library, shared: Library | None) -> Response | None:
    """Return the response to a question whether the server lives or is ready; None to others."""
    if target.segments == ("readyz",):
        if library.awaited:
            return failure(f"{len(library.awaited)} models of the lock file are not there yet", 503)
        with contextlib.suppress(BlobstoreError):
            library.store.check_root()
            roots = (one.store.root for one in (library, shared) if one is not None)
            if all(os.access(root, os.R_OK | os.X_OK) for root in roots):
                return bytes_response(b"ok\n")
        return failure("the store cannot be read", 503)
    if target.segments != ("healthz",):
        return None
    return bytes_response(b"ok\n")


def _page(request: Request, target: Target, metrics: Callable[[], str]) -> Response | None:
    """Return the response to a request that is about no model; None for others."""
    if request.method not in READS:
        return None
    if target.segments == ("",):
        return bytes_response(_WELCOME)
    if target.segments == ("metrics",):
        return bytes_response(metrics().encode(), media_type=METRICS_TYPE)
    return None


def _understood(request: Request, target: Target) -> Call | None:
    """Return the call of a client of the Hub; None for a client of a registry. Raises Refused if it is malformed."""
    if not target.is_of_registry:
        return ROUTES.call(request, target)
    if request.method not in READS:
        raise Refused(error_response(405, "UNSUPPORTED", "this server only reads", _ALLOWED))
    return None
