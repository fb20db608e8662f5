"""Stores differences of which few are not zero: their places as gaps, and then these differences.

Forms that have one code for each difference spend a quarter of a bit or more on each zero. Gaps cost
about what the places are worth, and what is not listed takes no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.compression.delta import gaps, planes
from blobstore.compression.delta.planes import Form, Segment, coded_plane, escaped_plane
from blobstore.compression.entropy import Coder, Method, Plane, decode_plane, encode_plane
from blobstore.compression.scratch import scratch
from blobstore.errors import ColdDamaged

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

    Array = np.ndarray[Any, Any]

BLOCK: Final = 64
"""Elements per block; those that differ are listed only if they are few in each block with any."""
_WORD: Final = 8
"""Bytes that are compared at once."""
_FEW_WORDS: Final = 1 / 4
"""If more words differ, their elements are as fast to find among all."""
_FEW_ESCAPES: Final = [
    (int(form), planes.largest(form), share)
    for form, share in ((Form.CRUMBS, 1 / 64), (Form.NIBBLES, 1 / 8), (Form.ESCAPED, 1 / 8))
]
"""Forms, their largest differences, and the share of escapes that each may have where there is no time for an estimate."""


def differing_words(chunk: Array, predicted: Array) -> Array:
    """Return a mask of the words of 8 bytes that differ, apart from a shorter last one.

    It is valid until this thread's next call.
    """
    many = chunk.nbytes // _WORD
    whole = many * _WORD // chunk.itemsize
    mask = scratch("delta words", many).view(np.bool)
    np.not_equal(chunk[:whole].view(np.uint64), predicted[:whole].view(np.uint64), out=mask)
    return mask


def find(chunk: Array, predicted: Array, words: Array, share: float) -> tuple[Array, Array] | None:
    """Return the indexes of the elements that differ and their differences, if they are few and scattered.

    Args:
        chunk: elements.
        predicted: as many elements.
        words: the mask from :func:`differing_words`.
        share: how much of the blocks with any element that differs may differ; None is returned if it is
            more.
    """
    many = int(np.count_nonzero(words))
    if many > share * len(chunk):
        return None
    if many > _FEW_WORDS * len(words):
        differs = scratch("delta differs", len(chunk)).view(np.bool)
        np.not_equal(chunk, predicted, out=differs)
        if np.count_nonzero(differs) > share * len(chunk):
            return None
        places = gaps.nonzero(differs)
        blocks = _blocks(places, BLOCK)
        differences = chunk.take(places) - predicted.take(places)
    else:
        numbers = gaps.nonzero(words)
        whole = len(words) * _WORD // chunk.itemsize
        blocks = _blocks(
            numbers, chunk.itemsize * BLOCK // _WORD
        )  # these are those of the elements
        # Each word has at least one element that differs, and the rest is in at most one more block.
        if many > share * BLOCK * (blocks + 1):
            return None
        places, differences = _in_words(chunk[:whole], predicted[:whole], numbers)
        if whole < len(chunk):
            rest = chunk[whole:] - predicted[whole:]
            last = np.flatnonzero(rest)
            places = np.concatenate([places, last + whole])
            differences = np.concatenate([differences, rest[last]])
            blocks = _blocks(places, BLOCK)
    most = share * min(blocks * BLOCK, len(chunk))
    return (places, differences) if 0 < len(places) <= most else None


def _in_words(chunk: Array, predicted: Array, numbers: Array) -> tuple[Array, Array]:
    """Return the places and the differences of the elements that differ in the words with these numbers."""
    per_word = _WORD // chunk.itemsize
    differences = chunk.view(np.uint64).take(numbers).view(chunk.dtype)
    differences -= predicted.view(np.uint64).take(numbers).view(chunk.dtype)
    within = (differences != 0).nonzero()[0]
    differences = differences.take(within)
    places = numbers.take(within >> per_word.bit_length() - 1)  # numpy divides slowly
    places *= per_word
    within &= per_word - 1
    places += within
    return places, differences


def _blocks(places: Array, size: int) -> int:
    """Return how many blocks of ``size``, a power of two, have any of some ascending places."""
    numbers = places >> size.bit_length() - 1
    return int(np.count_nonzero(numbers[1:] != numbers[:-1])) + min(len(places), 1)


def encode_segment(
    differences: Array, sizes: Sequence[int], form: int, coders: Sequence[Coder]
) -> Segment:
    """Encode the differences of some classes; the result does not reference ``differences``.

    Args:
        differences: all differences of these classes.
        sizes: the number of differences in each class.
        form: a form behind `GAPS`.
        coders: as :func:`encode` takes them.
    """
    ranks = gaps.nonzero(differences != 0)
    return encode(differences[ranks], ranks, sizes, form - Form.GAPS, coders)


def encode(
    differences: Array,
    ranks: Array,
    sizes: Sequence[int],
    form: int | None,
    coders: Sequence[Coder],
) -> Segment:
    """Encode differences that are not zero, with their places.

    Args:
        differences: the nonzero differences of some classes.
        ranks: their places among all differences of these classes, ascending.
        sizes: the number of differences in each class, zeros included.
        form: the form of the nonzero differences; None to choose one by their sizes alone.
        coders: the coders to try on the planes; the second only if the first saves much.
    """
    counts = gaps.counts_of(ranks, sizes)
    stored = gaps.encode(ranks, counts, sizes, coders[:1])
    places = Plane(Method.RAW, stored, len(stored))
    magnitudes = planes.magnitudes(differences)
    if form is None:
        form = _form_by_size(magnitudes)
    if form >= Form.BYTES:
        inner = planes.encode(differences, counts, form, coders)
        return Segment(inner.form + Form.GAPS, [places, *inner.planes])
    escapes = (magnitudes > planes.largest(form)).nonzero()[0]
    if form == Form.CRUMBS and not len(escapes):
        signs = encode_plane(differences.astype(np.int8).view(np.uint8).data, (Coder.BITS,))
        if signs.method == Method.BITS:
            return Segment(Form.ESCAPED + Form.GAPS, [places, signs])
    plane = escaped_plane(differences, escapes, counts, form, coders)
    if not len(escapes):
        return Segment(form + Form.GAPS, [places, plane])
    split = differences[escapes].view(np.uint8).reshape(len(escapes), -1).T.ravel()
    rest = coded_plane(split, range(len(escapes), len(split), len(escapes)), coders)
    return Segment(form + Form.GAPS, [places, plane, rest], len(escapes))


def _form_by_size(magnitudes: Array) -> int:
    """Return a form that suits nonzero differences of these magnitudes, in little time."""
    for form, largest, share in _FEW_ESCAPES:
        if np.count_nonzero(magnitudes > largest) <= share * len(magnitudes):
            return form
    return Form.BYTES + magnitudes.itemsize - 1


def decode(
    form: int,
    stored: Sequence[tuple[int, memoryview]],
    escapes: int,
    sizes: Sequence[int],
    dtype: np.dtype[Any],
) -> tuple[Array, Array]:
    """Return the places of the differences that are not zero, ascending, and these differences.

    Args:
        form: a form behind `GAPS`.
        stored: its planes.
        escapes: the number of escape codes.
        sizes: the number of differences in each class.
        dtype: the type of differences.

    Raises:
        ColdDamaged: a plane is damaged, or places or escape codes are impossible.
    """
    (method, places), *inner = stored
    if method != Method.RAW:
        raise ColdDamaged(f"the places of differences have the method {method}")
    ranks, _ = gaps.decode(places, sizes)
    escaped = np.zeros(0, dtype)
    if escapes:
        if escapes > len(ranks):
            raise ColdDamaged(f"{escapes} escaped differences of {len(ranks)}")
        split = np.empty((dtype.itemsize, escapes), np.uint8)
        decode_plane(*inner.pop(), split.data)
        escaped = split.T.copy().view(dtype).ravel()
    differences = np.empty(len(ranks), dtype)
    planes.decode(form - Form.GAPS, iter(inner), escaped, differences)
    return ranks, differences
