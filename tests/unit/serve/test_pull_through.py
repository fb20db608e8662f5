"""What a server that asks an upstream keeps in memory."""

from __future__ import annotations

import gc
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.serve import pull_through
from blobstore.serve.access import Access
from blobstore.serve.answer import answer
from blobstore.serve.library import Library, NotPrepared
from blobstore.serve.messages import Request
from blobstore.serve.pull_through import PullThrough
from blobstore.serve.upstream import Upstream
from blobstore.store.local import LocalStore
from tests.support.hub_server import HubServer
from tests.support.models import dense_tensors, write_folder


@pytest.fixture
def through(store: LocalStore, tmp_path: Path) -> Iterator[PullThrough]:
    with HubServer() as hub:
        hub.add("org/model", write_folder(tmp_path / "model", dense_tensors()))
        made = PullThrough(Library(store), Upstream.parse(hub.url), fresh=300)
        yield made
        made.close()


def ask(through: PullThrough, target: str) -> int:
    for _ in range(10):
        try:
            request = Request("GET", target)
            return answer(request, through._library, Access(), pull_through=through).status
        except NotPrepared as first:
            first.prepare()
    raise AssertionError(f"{target} is never prepared")


def test_questions_for_absent_models_share_what_connections_trust(through: PullThrough) -> None:
    """A context has a MiB of certificates, and is in a circle that the collector finds late."""
    ask(through, "/org/none/resolve/main/f")
    gc.collect()
    gc.disable()
    try:
        before = contexts()
        for number in range(20):
            assert ask(through, f"/org/m{number}/resolve/main/f") == 401
        assert contexts() <= before
    finally:
        gc.enable()


def contexts() -> int:
    # Objects of some libraries warn if they are asked for their class.
    return sum(issubclass(type(one), ssl.SSLContext) for one in gc.get_objects())


def test_only_some_refusals_are_kept(through: PullThrough, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_through, "_MAX_REFUSALS", 5)
    for number in range(12):
        assert ask(through, f"/org/m{number}/resolve/main/f") == 401
        assert len(through._refusals) <= 5


@pytest.mark.parametrize("what", ["blobs", "manifests", "referrers"])
def test_a_question_about_no_version_fetches_none(through: PullThrough, what: str) -> None:
    assert ask(through, f"/v2/org/model/{what}/sha256:{'0' * 64}") == 401
    assert not through._arrivals
    assert not list(through._store.references())
