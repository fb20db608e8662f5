"""What a client gets that is refused."""

from __future__ import annotations

import errno
import json

import pytest

from blobstore.errors import BlobstoreError, RemoteError, StoreBusy, StoreError
from blobstore.serve.messages import Request, Response
from blobstore.serve.refusal import Refusal, as_refusal, refusal_response
from blobstore.sources.hub_client import REFUSALS
from blobstore.store.local import LocalStore
from tests.support.serve import json_of

GET = Request("GET", "/")


def test_only_codes_of_the_hub_are_repeated() -> None:
    assert Refusal(403, "GatedRepo").code == "GatedRepo"
    assert Refusal(403, "\r\nEvil: x").code == ""


@pytest.mark.parametrize("is_registry", [False, True])
@pytest.mark.parametrize("reads_tokens", [False, True])
def test_all_refusals_of_a_repository_are_one(*, is_registry: bool, reads_tokens: bool) -> None:
    def answered(refusal: Refusal) -> Response:
        return refusal_response(refusal, is_registry=is_registry, reads_tokens=reads_tokens)

    expected = answered(Refusal(404, "RepoNotFound"))
    assert expected.status == (401 if reads_tokens else 404)
    assert ("WWW-Authenticate" in expected.headers) == reads_tokens
    for status in REFUSALS:
        for code in ("", "GatedRepo", "RepoNotFound", "DisabledRepo", "Evil"):
            assert answered(Refusal(status, code, "gated")) == expected


@pytest.mark.parametrize("reads_tokens", [False, True])
def test_what_is_missing_in_a_model_or_fails_is_named(*, reads_tokens: bool) -> None:
    for refusal in (
        Refusal(404, "RevisionNotFound"),
        Refusal(404, "EntryNotFound", commit="a" * 40),
        Refusal(502, message="nobody is there"),
        Refusal(507, message="it is too large"),
    ):
        hub = refusal_response(refusal, is_registry=False, reads_tokens=reads_tokens)
        assert (hub.status, hub.headers["X-Error-Message"]) == (refusal.status, refusal.message)
        assert hub.headers.get("X-Error-Code", "") == refusal.code
        assert hub.headers.get("X-Repo-Commit", "") == refusal.commit
        registry = refusal_response(refusal, is_registry=True, reads_tokens=reads_tokens)
        assert registry.status == refusal.status
        assert refusal.message in json.dumps(json_of(registry))


@pytest.mark.parametrize(
    ("number", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EROFS, 503)]
)
def test_only_a_full_store_is_called_full(store: LocalStore, number: int, status: int) -> None:
    with pytest.raises(StoreError) as caught, store.writing():
        raise OSError(number, "no")
    assert as_refusal(caught.value).status == status


@pytest.mark.parametrize(
    ("error", "status"),
    [(StoreError("needs 2 GB"), 507), (StoreBusy("a lock"), 503), (RemoteError("gone"), 502)],
)
def test_a_client_that_waits_hears_whether_the_upstream_or_the_store_fails(
    error: BlobstoreError, status: int
) -> None:
    found = as_refusal(error)
    assert found.status == status
    assert ("upstream" in found.message) == (status == 502)
