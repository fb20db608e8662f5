"""Checkpoints made by hand, opcode by opcode, and a reader of them that may hang, die or run code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tests.support.zip_files import Member, make_zip

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "data" / "hostile" / "checkpoints"
"""Hostile and borderline files; ``index.json`` has a verdict on each."""
MIB = 2**20
VALUES = struct.pack("<4f", 1, 2, 3, 4)
"""The bytes of the storage that most of the files have."""
MAGIC = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""LONG1 of the legacy stream's magic number."""


def text(value: str) -> bytes:
    """Return the opcode that pushes a text, lone surrogates included."""
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    """Return the opcode that pushes an integer."""
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(data) < 256:
        return b"\x8a" + bytes([len(data)]) + data
    return b"\x8b" + struct.pack("<i", len(data)) + data


def numbers(*values: int) -> bytes:
    """Return the opcodes that push a tuple of integers."""
    return several(*map(number, values))


def several(*parts: bytes) -> bytes:
    """Return the opcodes that push a tuple of what the ``parts`` push."""
    return b"(" + b"".join(parts) + b"t"


def listed(*parts: bytes) -> bytes:
    """Return the opcodes that push a list of what the ``parts`` push."""
    return b"](" + b"".join(parts) + b"e"


def named(module: str, name: str) -> bytes:
    """Return the opcode that pushes a global."""
    return f"c{module}\n{name}\n".encode()


def call(function: bytes, *arguments: bytes) -> bytes:
    """Return the opcodes that push what a call returns."""
    return function + several(*arguments) + b"R"


def mapping(**values: bytes) -> bytes:
    """Return the opcodes that push a dict."""
    return entries(*((text(key), value) for key, value in values.items()))


def entries(*pairs: tuple[bytes, bytes]) -> bytes:
    """Return the opcodes that push a dict whose keys are any values."""
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


def pickled(value: bytes, protocol: int = 2) -> bytes:
    """Return the pickle of what ``value`` pushes."""
    return b"\x80" + bytes([protocol]) + value + b"."


HOOKS = call(named("collections", "OrderedDict"))


def storage(
    key: str | bytes = "0",
    kind: str = "FloatStorage",
    count: int | bytes = 4,
    view: bytes | None = None,
) -> bytes:
    """Return the opcodes that push a storage; bytes stand for themselves."""
    return (
        several(
            text("storage"),
            named("torch", kind),
            key if isinstance(key, bytes) else text(key),
            text("cpu"),
            count if isinstance(count, bytes) else number(count),
            *([] if view is None else [view]),
        )
        + b"Q"
    )


def tensor(
    size: Sequence[int] | bytes = (2, 2),
    stride: Sequence[int] | bytes = (2, 1),
    *,
    of: bytes | None = None,
    offset: int | bytes = 0,
    more: Sequence[bytes] = (),
) -> bytes:
    """Return the opcodes that push a tensor; bytes stand for themselves."""
    return call(
        named("torch._utils", "_rebuild_tensor_v2"),
        storage() if of is None else of,
        offset if isinstance(offset, bytes) else number(offset),
        size if isinstance(size, bytes) else numbers(*size),
        stride if isinstance(stride, bytes) else numbers(*stride),
        b"\x89",
        HOOKS,
        *more,
    )


def members(
    pickle: bytes, storages: Mapping[str, bytes] | None = None, *, method: int = 0
) -> dict[str, Member]:
    """Return what a zip checkpoint holds, by the names within its folder."""
    if storages is None:
        storages = {"0": VALUES}
    contents = {
        "data.pkl": pickle,
        "byteorder": b"little",
        **{f"data/{key}": data for key, data in storages.items()},
        "version": b"3\n",
    }
    return {
        name: Member(f"archive/{name}".encode("utf-8", "surrogatepass"), content, method)
        for name, content in contents.items()
    }


def zip_file(
    pickle: bytes, storages: Mapping[str, bytes] | None = None, *, method: int = 0
) -> bytes:
    """Return a zip checkpoint; method 8 deflates it."""
    return make_zip(list(members(pickle, storages, method=method).values()))


def deflated_file(pickle: bytes, storages: Mapping[str, bytes] | None = None) -> bytes:
    """Return a zip checkpoint that is compressed."""
    return zip_file(pickle, storages, method=8)


def legacy_file(
    pickle: bytes,
    storages: Mapping[str, bytes] | None = None,
    *,
    itemsize: int = 4,
    keys: bytes | None = None,
    counts: Mapping[str, int] | None = None,
    facts: bytes | None = None,
) -> bytes:
    """Return a legacy stream; ``keys``, ``counts`` and ``facts`` replace what is right."""
    storages = {"0": VALUES} if storages is None else storages
    if facts is None:
        facts = mapping(protocol_version=number(1001), little_endian=b"\x88")
    if keys is None:
        keys = listed(*map(text, storages))
    counts = {key: len(data) // itemsize for key, data in storages.items()} | dict(counts or {})
    return b"".join(
        [
            pickled(MAGIC),
            pickled(number(1001)),
            pickled(facts),
            pickle,
            pickled(keys),
            *(struct.pack("<q", counts[key]) + data for key, data in storages.items()),
        ]
    )


def described(data: bytes, shape: Sequence[int], dtype: str = "F32") -> list[object]:
    """Return what a :class:`Reader` says of a tensor of these bytes."""
    return [dtype, list(shape), hashlib.sha256(data).hexdigest()]


GOOD = described(VALUES, [2, 2])
"""What a :class:`Reader` says of :func:`tensor`."""


@dataclass
class Outcome:
    """What came of reading a file."""

    refusal: str = ""
    """Why it was refused; empty if it was not."""
    error: str = ""
    """The exception that came instead of a refusal, or how the reader ended; empty as it should be."""
    tensors: dict[str, list[object]] = field(default_factory=dict)
    """Type, shape and SHA-256 of every tensor."""
    unreadable: list[str] = field(default_factory=list)
    globals: list[str] = field(default_factory=list)
    """What it asks for, if it was inspected."""


class Reader:
    """Reads checkpoints in a process of its own, which is started again whenever it ends.

    ``PTH_CANARY`` names a file for it that hostile checkpoints write to once they run.
    """

    memory = 512 * MIB
    """Bytes that the process may allocate for a file."""
    timeout = 120.0
    """Seconds after which the process counts as hanging."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.canary = folder / "canary"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def take(self, data: bytes, subtree: str | None = ".", *, memory: int | None = None) -> Outcome:
        """Read a checkpoint of these bytes."""
        return self.read(self.write(data), subtree, memory=memory)

    def write(self, data: bytes) -> Path:
        """Return a file of these bytes, until the next."""
        path = self.folder / "taken.pt"
        path.write_bytes(data)
        return path

    def read(
        self,
        path: Path,
        subtree: str | None = ".",
        *,
        memory: int | None = None,
        inspect: bool = False,
    ) -> Outcome:
        """Read a checkpoint with all its tensors, or inspect it, and check that it ran nothing."""
        request = {
            "path": str(path),
            "subtree": subtree,
            "memory": memory or self.memory,
            "inspect": inspect,
        }
        answer = self._answer(json.dumps(request))
        assert not self.canary.exists(), f"{path} has run code"
        return Outcome(**json.loads(answer)) if answer[:1] == "{" else Outcome(error=answer)

    def _answer(self, request: str) -> str:
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin
        assert process.stdout
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{request}\n")
            process.stdin.flush()
        if not select.select([process.stdout], [], [], self.timeout)[0]:
            self._end()
            return f"it hung for {self.timeout} seconds"
        answer = process.stdout.readline()
        if not answer:
            self._end()
            return f"it ended with status {process.returncode}"
        return answer

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.readers.checkpoints"],
            cwd=ROOT,
            env={**os.environ, "PTH_CANARY": str(self.canary), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def refusal(reader: Reader, data: bytes, subtree: str | None = ".") -> str:
    """Return why these bytes are refused, in one clean line and for no other reason."""
    outcome = reader.take(data, subtree)
    assert not outcome.error
    assert outcome.refusal.isprintable()
    assert 0 < len(outcome.refusal) < 2000
    path = f"'{reader.folder / 'taken.pt'}'"
    assert outcome.refusal.startswith((f"{path}: ", f"{path}, tensor "))
    return outcome.refusal.removeprefix(path)


def tensors(reader: Reader, data: bytes, subtree: str | None = ".") -> dict[str, list[object]]:
    """Return the tensors of a file that is not an attack, or of one that fails."""
    outcome = reader.take(data, subtree)
    assert not outcome.error
    assert not outcome.refusal
    return outcome.tensors
