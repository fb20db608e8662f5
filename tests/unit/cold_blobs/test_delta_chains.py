from __future__ import annotations

from itertools import pairwise

import pytest

from blobstore.cold_blobs.delta_chains import Chains, Fit, choose_chains
from blobstore.compression.delta import MAX_WRITTEN_CHAIN
from blobstore.core.digest import Digest
from blobstore.manifests.reference import Reference

RUN = [Reference.parse(f"run:step-{number:02}") for number in range(30)]
FIRST, SECOND, THIRD, *REST = (Digest.of(bytes([number])) for number in range(20))


def fits(many: int, near: int = 30, share: float = 0.01) -> dict[Reference, dict[Reference, Fit]]:
    """Return how well steps serve for the steps that are ``near``; each changes a share of a model."""
    steps = range(many)
    return {
        RUN[one]: {
            RUN[two]: Fit(1e9 * (1 - share * abs(one - two)), 1e9 * share * abs(one - two))
            for two in steps
            if 0 < abs(one - two) <= near
        }
        for one in steps
    }


def lengths(bases: dict[Reference, Reference]) -> list[int]:
    found = []
    for step in bases:
        length, one = 0, step
        while one in bases:
            one, length = bases[one], length + 1
        found.append(length)
    return found


def test_each_step_has_a_neighbour_as_its_base() -> None:
    bases = choose_chains(fits(10))
    (first,) = set(RUN[:10]) - bases.keys()
    assert first in {RUN[4], RUN[5]}
    for step, base in bases.items():
        assert abs(RUN.index(step) - RUN.index(base)) == 1


def test_chains_of_long_runs_are_cut_but_each_step_is_a_delta() -> None:
    bases = choose_chains(fits(30, near=4))
    assert max(lengths(bases)) <= MAX_WRITTEN_CHAIN
    assert len(bases) == 27
    near = choose_chains(fits(30))
    assert len(near) == 29
    assert max(lengths(near)) <= MAX_WRITTEN_CHAIN


def test_fine_tunes_of_one_model_need_no_chain() -> None:
    base, *tunes = RUN[:5]
    bases = choose_chains(
        {
            base: dict.fromkeys(tunes, Fit(4e8, 6e8)),
            **{
                one: {base: Fit(5e8, 5e8)} | {two: Fit(5.2e8, 4.8e8) for two in tunes if two != one}
                for one in tunes
            },
        }
    )
    assert bases == dict.fromkeys(tunes, base)


@pytest.mark.parametrize(("left", "base"), [(9, RUN[1]), (10, RUN[0])])
def test_a_base_that_is_a_delta_must_save_an_eighth(left: float, base: Reference) -> None:
    fits = {RUN[1]: {RUN[0]: Fit(9, 1)}, RUN[2]: {RUN[0]: Fit(8, 11), RUN[1]: Fit(8, left)}}
    assert choose_chains(fits) == {RUN[1]: RUN[0], RUN[2]: base}


def test_models_that_need_no_base_come_first() -> None:
    bases = choose_chains({RUN[1]: {RUN[0]: Fit(1, 2)}, RUN[2]: {RUN[1]: Fit(2, 1)}, RUN[3]: {}})
    assert bases == {RUN[1]: RUN[0], RUN[2]: RUN[1]}


def test_blobs_make_no_cycles() -> None:
    chains = Chains({FIRST: SECOND})
    assert chains.add(SECOND, THIRD)
    assert not chains.add(THIRD, FIRST)
    assert not chains.add(THIRD, THIRD)
    assert chains.add(THIRD, REST[0])


@pytest.mark.parametrize("is_upwards", [False, True])
def test_chains_of_blobs_have_a_length(is_upwards: bool) -> None:
    links = list(pairwise(REST))[: MAX_WRITTEN_CHAIN + 1]
    chains = Chains({})
    added = [chains.add(*link) for link in (links if is_upwards else reversed(links))]
    assert added == [True] * MAX_WRITTEN_CHAIN + [False]
    assert chains.add(FIRST, SECOND)
    longer = Chains({FIRST: SECOND})
    added = [longer.add(*link) for link in list(pairwise([SECOND, *REST]))[:MAX_WRITTEN_CHAIN]]
    assert added == [True] * (MAX_WRITTEN_CHAIN - 1) + [False]
