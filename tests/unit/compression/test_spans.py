from __future__ import annotations

import pytest

from blobstore.compression.spans import Span, mark_duplicates, spans_of, split_rows
from blobstore.core.tensor import DType
from tests.support.cold import noise, safetensors, weights

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
