from __future__ import annotations

import pytest

from blobstore.core.workers import WorkerPool
from blobstore.errors import BlobstoreError
from blobstore.operations.bench.measurements import (
    Measurement,
    Place,
    Run,
    advice_of,
    fits,
    measure_all,
)


def bare(place: Place, rate: int, device: str | None = None) -> Measurement:
    return Measurement(
        place=place, reader="bare", how="8 threads", size=rate, seconds=1, device=device
    )


def opened(place: Place, how: str, rate: int, device: str | None = None) -> Measurement:
    return Measurement(place=place, reader="open", how=how, size=rate, seconds=1, device=device)


def test_advice_compares_open_with_bare_reads_and_its_options() -> None:
    done = [bare("disk", 50), bare("disk", 100), opened("disk", "a", 40), opened("disk", "b", 90)]
    assert advice_of(done) == (
        "disk: b reaches 90% of bare reads",
        "disk: b is 2.2 times as fast as a",
    )


def test_what_is_faster_than_bare_reads_is_as_fast() -> None:
    done = [bare("page cache", 100), opened("page cache", "a", 290)]
    assert advice_of(done) == ("page cache: a is as fast as bare reads",)


@pytest.mark.parametrize(
    ("disk", "copies", "text"),
    [
        (100, 400, "disk to cuda:0: a reaches 50% of bare reads"),
        (400, 200, "disk to cuda:0: a reaches 25% of bare copies"),
    ],
)
def test_a_load_from_the_disk_is_compared_with_what_limits_it(
    disk: int, copies: int, text: str
) -> None:
    done = [
        *(bare("disk", disk), bare("page cache", 10), bare("host memory", copies, "cuda:0")),
        opened("disk", "a", 50, "cuda:0"),
        opened("page cache", "a", 50, "cuda:0"),
    ]
    assert advice_of(done) == (
        text,
        f"page cache to cuda:0: a reaches {50 / copies:.0%} of bare copies",
    )


def test_a_load_is_compared_with_bare_reads_if_all_bare_copies_failed() -> None:
    done = [bare("disk", 100), opened("disk", "a", 50, "cuda:0")]
    assert advice_of(done) == ("disk to cuda:0: a reaches 50% of bare reads",)


def test_the_fastest_of_several_passes_counts_and_progress_ends_at_its_total() -> None:
    rates = iter([1, 3, 2, 5])
    prepared: list[None] = []
    reports: list[tuple[int, int]] = []

    def measure(pool: WorkerPool) -> Measurement:
        pool.report(10, "a")
        return bare("disk", next(rates))

    runs = [
        Run(measure=measure, before=lambda: prepared.append(None), size=10, passes=3),
        Run(measure=measure, size=10),
    ]
    done = measure_all(runs, lambda _, done, total: reports.append((done, total)), [])

    assert [one.rate for one in done] == [3, 5]
    assert len(prepared) == 3
    assert reports == [(10, 40), (20, 40), (30, 40), (40, 40)]


def test_an_error_of_optional_ways_is_one_notice() -> None:
    def fail(_: WorkerPool) -> Measurement:
        raise BlobstoreError("the device is out of memory")

    notices: list[str] = []
    runs = [
        *[Run(measure=fail, size=1, is_optional=True)] * 2,
        Run(measure=lambda _: bare("disk", 1), size=1),
    ]
    assert len(measure_all(runs, None, notices)) == 1
    assert notices == ["not all was measured: the device is out of memory"]
    with pytest.raises(BlobstoreError, match="out of memory"):
        measure_all([Run(measure=fail, size=1)], None, notices)


def test_a_load_leaves_some_memory() -> None:
    assert fits(80, 100)
    assert not fits(81, 100)
