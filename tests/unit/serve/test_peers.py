"""What is known of a peer before it is asked."""

from __future__ import annotations

from blobstore.serve.peers import Peer


def test_a_token_that_was_given_comes_before_the_logins_of_the_user() -> None:
    assert Peer.parse("http://node:8080", "of-the-rack").token() == "of-the-rack"
    assert Peer.parse("http://node:8080").token() == ""
