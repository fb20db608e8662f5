from __future__ import annotations

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blobstore.core.digest import Digest, Digester, PieceDigester
from blobstore.errors import InvalidDigest, UsageError

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_hashes_an_empty_stream() -> None:
    digest = Digest.of(b"")
    assert str(digest) == f"sha256:{EMPTY}"
    assert digest.file_name == f"sha256-{EMPTY}"
    assert digest.short == "e3b0c44298fc"
    assert digest.hex == EMPTY


@pytest.mark.slow
@given(st.binary())
def test_parses_the_text_of_a_digest(data: bytes) -> None:
    digest = Digest.of(data)
    assert Digest.parse(str(digest)) == digest
    assert digest.hex == hashlib.sha256(data).hexdigest()


@pytest.mark.slow
@given(st.lists(st.binary()))
def test_the_digest_of_a_stream_is_that_of_its_bytes(parts: list[bytes]) -> None:
    digester = Digester()
    for part in parts:
        digester.update(memoryview(part))
    assert digester.digest() == Digest.of(b"".join(parts))
    assert digester.size == sum(map(len, parts))


def test_counts_bytes_instead_of_elements() -> None:
    digester = Digester()
    digester.update(memoryview(bytes(16)).cast("d"))
    assert digester.size == 16


@pytest.mark.parametrize(
    "text",
    [
        *("", EMPTY, f"sha256-{EMPTY}", f"SHA256:{EMPTY}", f"sha512:{EMPTY}", f"md5:{EMPTY[:32]}"),
        *(f"sha256:{EMPTY.upper()}", f"sha256:{EMPTY[:-1]}", f"sha256:{EMPTY}0"),
        *(f"sha256:{EMPTY}\n", f"\nsha256:{EMPTY}", f" sha256:{EMPTY}", f"sha256: {EMPTY[1:]}"),
        *(f"sha256:{EMPTY[:-1]}g", f"sha256:{EMPTY[:-1]}\u0663", f"sha256:{EMPTY[:-1]}\uff10"),
        *(f"sha256:../{EMPTY[3:]}", f"sha256:{EMPTY[:-3]}/..", f"sha256:{EMPTY[:-1]}/"),
        *(f"sha256:{EMPTY[:-1]}\0", f"sha256:/{EMPTY[1:]}", f"sha256:{'.' * 64}"),
        *(f"sha256:{EMPTY}:{EMPTY}", f"sha256::{EMPTY[1:]}", f"../sha256:{EMPTY}"),
    ],
)
def test_rejects_every_other_form(text: str) -> None:
    with pytest.raises(InvalidDigest, match="not a digest: .*; expected sha256: and 64 lower-case"):
        Digest.parse(text)


@pytest.mark.slow
@given(
    st.text()
    | st.text(alphabet="0123456789abcdefABCDEF./\\:-\0\n", min_size=60, max_size=66).map(
        "sha256:".__add__
    )
)
@example("sha256:" + "a" * 64)
def test_accepts_only_what_is_safe_as_a_file_name(text: str) -> None:
    try:
        digest = Digest.parse(text)
    except InvalidDigest as error:
        assert isinstance(error, UsageError)
        assert str(error).isprintable()
    else:
        assert re.fullmatch(r"sha256-[0-9a-f]{64}", digest.file_name)
        assert str(digest) == text


def test_digests_compare_by_value() -> None:
    assert {Digest.of(b"a"), Digest.of(b"a"), Digest.of(b"b")} == {Digest.of(b"b"), Digest.of(b"a")}


@given(st.lists(st.binary(min_size=1, max_size=9), max_size=9), st.randoms())
def test_pieces_are_hashed_in_their_order_however_they_arrive(
    parts: list[bytes], random: Any
) -> None:
    whole, digester = b"".join(parts), PieceDigester()
    begins = [sum(map(len, parts[:number])) for number in range(len(parts))]
    shuffled = list(zip(begins, parts, strict=True))
    random.shuffle(shuffled)
    for begin, part in shuffled:
        digester.add(begin, memoryview(part))
    assert (digester.size, digester.digest()) == (len(whole), Digest.of(whole))


def test_threads_hash_pieces_together() -> None:
    data = os.urandom(1 << 20)
    digester = PieceDigester()
    with ThreadPoolExecutor(8) as pool:
        for begin in range(0, len(data), 4096):
            pool.submit(digester.add, begin, memoryview(data)[begin : begin + 4096])
    assert digester.digest() == Digest.of(data)
