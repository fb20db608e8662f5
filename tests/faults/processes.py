"""Commands as real processes: started, stopped and killed by the faults, waited for with a limit."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from blobstore.core.system import available_memory
from blobstore.errors import Damaged

ROOT = Path(__file__).parents[2]
LIMIT = 120.0
"""Seconds after which a command that has not ended hangs, however busy the machine."""

_PAUSE = 0.002
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "COLUMNS": "200"}
_DAMAGED = Damaged.exit_code
_MIN_FREE = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended: its exit code, negative for a signal, None if it hung and was killed."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float
    peak: int = 0
    """Memory at its peak, in KiB."""

    @property
    def is_killed(self) -> bool:
        """Return whether the signal came before the command ended."""
        return self.code == -signal.SIGKILL

    @property
    def complaint(self) -> str:
        """What is wrong with how it ended: hanging, a signal, or anything but one line on an error."""
        if self.code is None:
            return f"it hung for {LIMIT:g} s"
        if self.code < 0:
            return f"it was ended by signal {-self.code}: {self.stderr[-300:]!r}"
        lines = self.stderr.splitlines()
        if self.code == _DAMAGED and self.stdout and all(map(_is_note, lines)):
            return ""  # what is damaged is what was asked for
        if self.code and (len(lines) != 1 or not lines[0].startswith("blobstore: error: ")):
            return f"exit code {self.code}, but not one clear line: {self.stderr[-700:]!r}"
        return ""


def _is_note(line: str) -> bool:
    return line.startswith("note: ")


@dataclass(slots=True, kw_only=True)
class Child:
    """A command that runs."""

    pid: int
    stdout: Path
    stderr: Path
    nursery: Nursery
    has_ended: bool = field(default=False, init=False)
    """Its number may be another's then."""

    def kill(self) -> None:
        """End it and all that it started, now."""
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Signal its group, if it has not been waited for."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def is_running(self) -> bool:
        """Return whether it has not ended by itself."""
        return not self.nursery.ask({"do": "look", "pid": self.pid})["has_ended"]

    def wait_among_others(self, seconds: float = LIMIT) -> Ended:
        """Do as :meth:`wait`, but let the nursery do what other threads ask in the meantime."""
        wait_for(lambda: not self.is_running(), seconds)
        return self.wait(0)

    def wait(self, seconds: float = LIMIT) -> Ended:
        """Return how it ended; kill it if it does not."""
        answer = self.nursery.ask({"do": "wait", "pid": self.pid, "seconds": seconds})
        if answer["code"] is None:
            self.kill()
            self.nursery.ask({"do": "wait", "pid": self.pid, "seconds": LIMIT})
        self.has_ended = True
        outputs = [path.read_text("utf-8", "replace") for path in (self.stdout, self.stderr)]
        for path in (self.stdout, self.stderr):
            path.unlink()
        return Ended(
            code=answer["code"],
            stdout=outputs[0],
            stderr=outputs[1],
            seconds=answer["seconds"],
            peak=answer["peak"],
        )


@dataclass(slots=True)
class Nursery:
    """The process that forks the children; see :mod:`tests.faults.nursery`."""

    modules: Sequence[str] = ()
    """What it imports at first; if nothing, what commands use."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that these modules read."""
    _process: subprocess.Popen[str] = field(init=False)
    _folder: tempfile.TemporaryDirectory[str] = field(init=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _asked: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="blobstore-faults-")
        Path(self._folder.name).chmod(0o777)  # some children give up their privileges
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.nursery", *self.modules],
            cwd=ROOT,
            env={**os.environ, **_ENVIRONMENT, **self.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us; its input ends when we do
        )
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()

    def start(
        self,
        *call: object,
        stopped: bool = False,
        unprivileged: bool = False,
        limits: Mapping[str, int] | None = None,
        hooks: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a command: ``blobstore`` or ``python`` with their arguments, or a function of the workloads.

        With ``stopped`` it stops itself when it could begin; signal it to go on.
        """
        number = next(self._numbers)
        stdout, stderr = (
            Path(self._folder.name, f"{number}.{name}") for name in ("stdout", "stderr")
        )
        for path in (stdout, stderr):
            path.touch()
            path.chmod(0o666)
        pid = self.fork(
            call,
            stdout,
            stderr,
            stopped=stopped,
            unprivileged=unprivileged,
            limits=limits,
            hooks=hooks,
            environment=environment,
        )
        return Child(pid=pid, stdout=stdout, stderr=stderr, nursery=self)

    def fork(
        self,
        call: Sequence[object],
        stdout: Path,
        stderr: Path,
        *,
        stopped: bool = False,
        unprivileged: bool = False,
        limits: Mapping[str, int] | None = None,
        hooks: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Start a command as :meth:`start` does, which appends to two files; return its process id.

        It has the folder that this process has now, and its environment unless another one is given.
        """
        answer = self.ask(
            {
                "do": "start",
                "call": [str(part) for part in call],
                "environment": {
                    **(os.environ if environment is None else environment),
                    **_ENVIRONMENT,
                },
                "folder": str(Path.cwd()),
                "stopped": stopped,
                "unprivileged": unprivileged,
                "limits": dict(limits or {}),
                "hooks": dict(hooks or {}),
                "stdout": str(stdout),
                "stderr": str(stderr),
            }
        )
        pid: int = answer["pid"]
        return pid

    def run(self, *call: object, **how: Any) -> Ended:
        """Run a command to its end."""
        return self.start(*call, **how).wait()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer."""
        assert self._process.stdin is not None
        with self._lock:
            self._asked += 1
            self._process.stdin.write(json.dumps(request | {"number": self._asked}) + "\n")
            self._process.stdin.flush()
            # A test that was ended while it waited has left an answer.
            while (answer := self._answer())["number"] != self._asked:
                pass
            return answer

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the nursery has ended with {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer


def wait_for(happens: Callable[[], bool], seconds: float = LIMIT) -> None:
    """Wait until something happens, or until a command that it depends on hangs or must have failed."""
    until = time.monotonic() + seconds
    while not happens() and time.monotonic() < until:
        time.sleep(_PAUSE)


def place_in_memory(min_free: int = _MIN_FREE) -> str | None:
    """Return a folder in memory, where no disk is waited for, if there is one with that many free bytes."""
    place = "/dev/shm"  # where Linux has one
    try:
        state = os.statvfs(place)
    except OSError:
        return None
    free = min(state.f_bavail * state.f_frsize, available_memory())
    runs_programs = not state.f_flag & os.ST_NOEXEC  # containers often forbid it
    return place if free > min_free and runs_programs and os.access(place, os.W_OK) else None


@functools.cache
def nursery() -> Nursery:
    """Return a nursery that stays for the life of this process."""
    return stays(Nursery())


def stays(nursery: Nursery) -> Nursery:
    """Start a nursery that ends with this process."""
    return _at_exit.enter_context(nursery)


_at_exit = contextlib.ExitStack()
atexit.register(_at_exit.close)


@contextlib.contextmanager
def workspace(*, in_memory: bool = True) -> Iterator[Path]:
    """Give a new folder that every user may enter, and remove it."""
    place = place_in_memory() if in_memory else None
    with tempfile.TemporaryDirectory(prefix="blobstore-faults-", dir=place) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
