"""Which server is asked for a model, and when."""

from __future__ import annotations

import threading

import pytest

from blobstore.serve.find_upstream import Upstreams
from blobstore.serve.peers import PATIENCE, Peer, Peers
from blobstore.serve.pulled import PulledModels
from blobstore.serve.refusal import Refusal
from blobstore.serve.rights import Rights
from blobstore.serve.upstream import Revision, UpstreamClient
from blobstore.store.local import LocalStore

SECONDS = 60.0


def test_all_peers_are_asked_at_once_and_the_first_of_the_list_that_has_a_model_is_taken(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = [f"http://peer{number}" for number in range(4)]
    all_asked = threading.Barrier(len(urls))

    def revision(client: UpstreamClient, repository: str, _: str) -> Revision:
        all_asked.wait(SECONDS)
        number = urls.index(client._url)
        if number < 2:
            raise Refusal(404)
        return Revision(str(number) * 40, [], repository)

    monkeypatch.setattr(UpstreamClient, "revision", revision)
    peers = Peers(store, [Peer.parse(url) for url in urls])
    upstreams = Upstreams(None, "", peers, Rights(PulledModels(store)))
    found = upstreams.find("org/model", "main", "", PATIENCE)
    assert (found.giver, found.commit) == (urls[2], "2" * 40)
    assert len(peers.alive()) == len(urls), "a peer without the model has answered"
