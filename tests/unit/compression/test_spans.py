from __future__ import annotations

import pytest

from blobstore.compression.spans import Span, mark_duplicates, merge_small, split_rows
from blobstore.core.tensor import DType
from tests.support.cold import noise, safetensors, spans_of, weights

A, B = weights(DType.BF16, 100), weights(DType.F32, 50)
FILE = safetensors({"a": (DType.BF16, A), "empty": (DType.F16, b""), "b": (DType.F32, B)})


def test_a_file_has_a_span_for_the_header_and_each_tensor() -> None:
    header = len(FILE) - len(A) - len(B)
    assert spans_of(FILE, len(FILE)) == [
        Span(header),
        Span(len(A), DType.BF16, shape=(100,)),
        Span(len(B), DType.F32, shape=(50,)),
    ]


def test_splits_a_stack_into_its_slices() -> None:
    span = Span(120, DType.F32, base_begin=7, shape=(3, 2, 5))
    slices = split_rows(span)
    assert [(one.size, one.base_begin, one.shape) for one in slices] == [
        (40, begin, (2, 5)) for begin in (7, 47, 87)
    ]
    assert [one.base_begin for one in split_rows(span._replace(base_begin=None))] == [None] * 3


def test_needs_only_the_bytes_of_the_header() -> None:
    header = len(FILE) - len(A) - len(B)
    assert spans_of(FILE[:header], len(FILE)) == spans_of(FILE, len(FILE))


@pytest.mark.parametrize("blob", [b"x", noise(3000), FILE[:-1], FILE + b"\0", b"{}" * 50])
def test_other_blobs_are_one_span(blob: bytes) -> None:
    assert spans_of(blob, len(blob)) == [Span(len(blob))]


def test_an_empty_blob_has_no_spans() -> None:
    assert spans_of(b"", 0) == []


def test_a_blob_with_a_truncated_header_is_one_span() -> None:
    assert spans_of(FILE[:20], len(FILE)) == [Span(len(FILE))]


def test_marks_spans_of_the_same_bytes_and_type() -> None:
    other = noise(len(A))
    blob = A + other + A + A + other + A
    spans = [*(Span(len(A), DType.BF16),) * 4, Span(len(A), DType.BF16), Span(len(A), DType.I16)]
    assert [span.same_as for span in mark_duplicates(spans, blob)] == [None, None, 0, 0, 1, None]


def test_spans_with_colliding_checksums_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blobstore.compression.spans.crc32", lambda _: 7)
    marked = mark_duplicates([Span(4)] * 3, b"abcdefghabcd")
    assert [span.same_as for span in marked] == [None, None, 0]


def small(*sizes: int, dtype: DType | None = DType.BF16, begin: int = 0) -> list[Span]:
    """Return spans that are neighbours in the base."""
    spans = []
    for size in sizes:
        spans.append(Span(size, dtype, base_begin=begin))
        begin += size
    return spans


def test_small_neighbours_are_merged() -> None:
    assert merge_small(small(100, 200, 300)) == small(600)
    assert merge_small(small(100, 1 << 16, 300)) == small(100, 1 << 16, 300)
    many = merge_small(small(*[1000] * 100))
    assert [span.size for span in many] == [65_000, 35_000]


def test_sparse_neighbours_of_any_size_are_merged() -> None:
    sparse = [span._replace(is_sparse=True) for span in small(72, 1 << 22, 300, 1 << 17)]
    header = sparse[1]._replace(dtype=None)
    assert merge_small([header, sparse[2]]) == [header, sparse[2]]
    whole = Span(sum(span.size for span in sparse), DType.BF16, base_begin=0, is_sparse=True)
    assert merge_small(sparse) == [whole]
    dense = sparse[1]._replace(is_sparse=False)
    assert merge_small([sparse[0], dense, *sparse[2:]]) == [
        sparse[0],
        dense,
        Span((1 << 17) + 300, DType.BF16, base_begin=sparse[2].base_begin, is_sparse=True),
    ]


def test_a_header_is_merged_with_the_tensor_behind_it() -> None:
    header, tensor = small(72, dtype=None)[0], small(400, begin=72)[0]
    assert merge_small([header, tensor]) == small(472)


@pytest.mark.parametrize(
    "spans",
    [
        [Span(100, DType.BF16), *small(100, begin=100)],
        [*small(100), *small(100, begin=104)],
        [*small(100), *small(100, begin=100, dtype=DType.F32)],
        [*small(70, dtype=None), *small(100, begin=70, dtype=DType.F32)],
        [*small(100), small(100, begin=100)[0]._replace(factors=b"f")],
        [*small(100, 50), Span(100, DType.BF16, same_as=0)],
    ],
    ids=["no base", "gap in the base", "other type", "odd place", "factors", "repeated"],
)
def test_other_spans_stay_apart(spans: list[Span]) -> None:
    assert merge_small(spans) == spans


def test_copies_refer_to_the_same_span_after_a_merge() -> None:
    spans = [*small(10, 20), Span(7), Span(9), Span(7, same_as=2)]
    assert merge_small(spans) == [*small(30), Span(7), Span(9), Span(7, same_as=1)]


def test_an_original_stays_apart_after_a_merge() -> None:
    begins = (0, 100, 300, 350)
    spans = [
        Span(size, DType.BF16, base_begin=begin)
        for size, begin in zip((100, 200, 50, 60), begins, strict=True)
    ]
    copy = Span(50, DType.BF16, same_as=2)
    assert merge_small([*spans, copy]) == [
        Span(300, DType.BF16, base_begin=0),
        *spans[2:],
        copy._replace(same_as=1),
    ]
