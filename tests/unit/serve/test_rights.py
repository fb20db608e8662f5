"""The ledger of rights: what a right opens, when it ends, and what takes it back."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from blobstore.serve import rights
from blobstore.serve.pulled import Origin, PulledModels
from blobstore.serve.rights import EVERYONE, UPSTREAM, Right, Rights, client_of
from blobstore.store.local import LocalStore

NAME, COMMIT, OTHER = "org/model", "a" * 40, "b" * 40
READER, PEER = client_of("hf_reader"), "http://peer"


@pytest.fixture
def pulled(store: LocalStore) -> PulledModels:
    return PulledModels(store)


@pytest.fixture
def ledger(pulled: PulledModels) -> Rights:
    return Rights(pulled)


def right(client: str = EVERYONE, giver: str = UPSTREAM, commit: str = "") -> Right:
    """Return a right of which the question was asked now."""
    now = time.monotonic()
    return Right(giver, client, NAME, commit, now, now + 1000)


def test_the_upstream_gives_a_repository_to_a_client_or_to_everyone(ledger: Rights) -> None:
    ledger.give(right(READER), [COMMIT])
    found = ledger.of(READER, NAME, COMMIT)
    assert found is not None
    assert found.opens == {(NAME, COMMIT)}
    assert ledger.of(EVERYONE, NAME, COMMIT) is None
    assert ledger.of(client_of("hf_other"), NAME) is None
    assert ledger.of(READER, "org/other") is None
    ledger.give(right())
    assert ledger.of(EVERYONE, NAME) == ledger.of(client_of("hf_other"), NAME) is not None


def test_a_peer_opens_the_commit_that_it_gives_and_nothing_else(ledger: Rights) -> None:
    ledger.give(right(giver=PEER, commit=COMMIT))
    found = ledger.of(READER, NAME, COMMIT)
    assert found is not None
    assert found.opens == frozenset()
    assert ledger.of(READER, NAME) is ledger.of(READER, NAME, OTHER) is None
    ledger.give(right(giver=PEER))
    assert ledger.of(READER, NAME) is None, "no peer gives a repository"


def test_the_upstream_opens_a_commit_that_shows_nothing_of_its_repository(
    ledger: Rights, pulled: PulledModels
) -> None:
    ledger.give(right(commit=COMMIT))
    ledger.note_public(NAME, Origin(NAME, COMMIT), is_judged=False)
    assert not pulled.is_public(NAME)
    found = ledger.of(READER, NAME, COMMIT)
    assert found is not None
    assert found.opens == {(NAME, COMMIT)}
    assert ledger.of(READER, NAME) is ledger.of(READER, NAME, OTHER) is None


def test_a_peer_opens_nothing_of_a_repository_that_the_upstream_restricts(
    ledger: Rights, pulled: PulledModels
) -> None:
    ledger.give(right(giver=PEER, commit=COMMIT))
    pulled.keep(Origin(NAME, OTHER), is_public=False)
    assert ledger.of(EVERYONE, NAME, COMMIT) is None


def test_a_right_ends(ledger: Rights) -> None:
    ledger.give(replace(right(), until=time.monotonic()))
    assert ledger.of(EVERYONE, NAME) is None


def test_a_right_proves_the_commits_that_the_upstream_has_given_with_it(
    ledger: Rights, pulled: PulledModels
) -> None:
    pulled.keep(Origin(NAME, COMMIT), is_public=False)
    assert ledger.unproven(NAME, READER) == [COMMIT]
    ledger.give(right(READER), [COMMIT])
    assert ledger.unproven(NAME, READER) == []
    pulled.keep(Origin(NAME, OTHER), is_public=False)  # which another client has fetched
    assert ledger.unproven(NAME, READER) == [OTHER]
    ledger.give(right(READER), [OTHER])
    assert ledger.unproven(NAME, READER) == []
    ledger.take_back(NAME, READER)
    assert set(ledger.unproven(NAME, READER)) == {COMMIT, OTHER}
    ledger.give(right(READER), [OTHER])
    assert ledger.unproven(NAME, READER) == [COMMIT]


def test_a_refusal_takes_back_what_it_contradicts(ledger: Rights) -> None:
    def give() -> None:
        for one in (right(), right(READER), right(giver=PEER, commit=COMMIT)):
            ledger.give(one)

    def readers() -> list[bool]:
        several = ((EVERYONE, ""), (READER, ""), (EVERYONE, COMMIT))
        return [ledger.of(client, NAME, commit) is not None for client, commit in several]

    give()
    ledger.take_back(NAME, client_of("hf_wrong"))
    assert readers() == [True, True, True], "the token may be wrong"
    ledger.take_back(NAME, EVERYONE)
    assert readers() == [False, True, False]
    ledger.take_back(NAME, READER)
    assert readers() == [False, False, False]
    give()
    assert readers() == [True, True, True]


def test_peers_are_asked_unless_the_upstream_has_refused_everyone_last(ledger: Rights) -> None:
    assert ledger.lets_peers(NAME)
    ledger.take_back(NAME, READER)
    assert ledger.lets_peers(NAME), "the token may be wrong"
    ledger.take_back(NAME, EVERYONE)
    assert not ledger.lets_peers(NAME)
    ledger.give(right(READER))
    ledger.give(right(giver=PEER, commit=COMMIT))
    assert not ledger.lets_peers(NAME)
    ledger.give(right())
    assert ledger.lets_peers(NAME)


def test_an_answer_that_is_older_than_a_refusal_gives_nothing(ledger: Rights) -> None:
    slow = right()
    ledger.take_back(NAME, EVERYONE)
    ledger.give(slow)
    assert ledger.of(EVERYONE, NAME) is None


def test_what_is_forgotten_opens_nothing(ledger: Rights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rights, "MAX_KNOWN", 3)
    ledger.give(right())
    for number in range(9):
        ledger.take_back(NAME if number == 0 else f"org/{number}", EVERYONE)
        assert ledger.of(EVERYONE, NAME) is None
        assert len(ledger._refused) <= 3


def test_what_is_durable_is_what_the_ledger_says(ledger: Rights, pulled: PulledModels) -> None:
    origin = Origin(NAME, COMMIT)
    ledger.give(right(READER))
    ledger.note_public(NAME, origin)
    assert not pulled.is_public(NAME)
    ledger.give(right())
    ledger.note_public(NAME)
    assert pulled.is_public(NAME)
    ledger.take_back(NAME, EVERYONE)
    ledger.note_public(NAME)
    assert not pulled.is_public(NAME)


def test_what_only_the_servers_own_token_opens_is_not_public(pulled: PulledModels) -> None:
    ledger = Rights(pulled, has_token=True)
    ledger.give(right())
    ledger.note_public(NAME, Origin(NAME, COMMIT))
    assert ledger.of(READER, NAME) is not None
    assert not pulled.is_public(NAME)
    ledger.give(right(ledger.public))
    ledger.note_public(NAME)
    assert pulled.is_public(NAME)
    ledger.take_back(NAME, ledger.public)
    ledger.note_public(NAME)
    assert not pulled.is_public(NAME)
    assert ledger.of(READER, NAME) is not None
    ledger.give(right(ledger.public))
    ledger.take_back(NAME, EVERYONE)
    assert not ledger.is_public(NAME)


def test_a_commit_of_a_peer_says_nothing_about_its_repository(
    ledger: Rights, pulled: PulledModels
) -> None:
    ledger.note_public(NAME, Origin(NAME, COMMIT, peer=PEER), is_judged=False)
    assert pulled.is_public(NAME)
    ledger.note_public(NAME, Origin(NAME, OTHER))
    assert not pulled.is_public(NAME)
    ledger.give(right())
    ledger.note_public(NAME, Origin(NAME, COMMIT, peer=PEER), is_judged=False)
    assert not pulled.is_public(NAME), "nobody was asked as everyone since"


def test_a_token_is_not_kept() -> None:
    assert client_of("") == EVERYONE
    assert "hf_reader" not in READER
    assert client_of("hf_readeR") != READER
