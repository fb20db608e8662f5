"""Claims of blobs that processes read from a remote."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.core.digest import Digest
from blobstore.store import claims
from blobstore.store.claims import BlobClaims

ONE, TWO = Digest.of(b"one"), Digest.of(b"two")
HOLDER = """
import sys
import time
from pathlib import Path
from blobstore.core.digest import Digest
from blobstore.store.claims import BlobClaims
claims = BlobClaims(Path(sys.argv[1]))
print(claims.take(Digest.of(b"one")), flush=True)
for line in sys.stdin:
    if line == "progress\\n":
        claims.beat()
    else:
        claims.release([Digest.of(b"one")])
    print("done", flush=True)
"""


class Holder:
    """Another process, which has claimed a blob."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "True"

    def do(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        assert self._line() == "done"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "claims"


@pytest.fixture
def holder(path: Path) -> Iterator[Holder]:
    holder = Holder(path)
    yield holder
    holder.kill()


@pytest.fixture
def ours(path: Path) -> BlobClaims:
    return BlobClaims.of(path)


def test_a_blob_is_claimed_by_one_process_until_it_gives_the_claim_up(
    holder: Holder, ours: BlobClaims
) -> None:
    assert not ours.take(ONE)
    assert ours.take(TWO)
    holder.do("release")
    assert ours.take(ONE)


def test_a_process_that_dies_claims_nothing(holder: Holder, ours: BlobClaims) -> None:
    assert not ours.take(ONE)
    holder.kill()
    assert ours.take(ONE)


def test_a_forked_process_keeps_no_claim(path: Path, ours: BlobClaims) -> None:
    assert ours.take(TWO)
    done, wait = os.pipe()
    child = os.fork()
    if not child:
        os.read(done, 1)
        os._exit(0)
    ours.release([TWO])
    code = HOLDER.replace('b"one"', 'b"two"')
    output = subprocess.run(
        [sys.executable, "-c", code, path], check=False, input="", capture_output=True, text=True
    )
    os.write(wait, b"x")
    os.waitpid(child, 0)
    os.close(done)
    os.close(wait)
    assert output.stdout == "True\n"


def test_waiting_ends_with_the_claim(holder: Holder, ours: BlobClaims) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            holder.do("release")

    ours.wait(ONE, pause)
    assert len(pauses) == 3


def test_a_second_model_of_the_process_neither_shares_nor_ends_the_claims_of_the_first(
    path: Path, ours: BlobClaims
) -> None:
    assert ours.take(ONE)
    other = BlobClaims.of(path)
    assert other is ours
    assert not other.take(ONE)
    del other
    output = subprocess.run(
        [sys.executable, "-c", HOLDER, path], check=False, input="", capture_output=True, text=True
    )
    assert output.stdout == "False\n"


def test_waiting_ends_although_others_make_progress(
    holder: Holder, ours: BlobClaims, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def pause(_: float) -> None:
        now[0] += 50
        holder.do("progress")

    assert not ours.wait(ONE, pause)
    assert now[0] == 600


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path, path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        BlobClaims.of(path)
    assert not (tmp_path / "elsewhere").exists()


def test_waiting_ends_if_no_process_makes_progress(
    holder: Holder, ours: BlobClaims, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def pause(_: float) -> None:
        now[0] += 20
        if now[0] <= 100:
            holder.do("progress")

    ours.wait(ONE, pause)
    assert now[0] == 160  # 60 s after the progress that was shown last
    assert not ours.take(ONE)


def unexpected(_: float) -> None:
    pytest.fail("it waits")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_without_locks_everybody_reads(
    holder: Holder, ours: BlobClaims, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert ours.take(ONE)
    ours.wait(ONE, unexpected)
    ours.release([ONE])


def test_claims_are_few(holder: Holder, ours: BlobClaims, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_MAX_CLAIMS", 1)
    assert ours.take(TWO)
    assert ours.take(ONE)  # as if nobody had claimed it
    ours.release([ONE, TWO])
    assert not ours.take(ONE)
