"""Pulls that are killed, disturbed and repeated: nothing is fetched twice, and no name is incomplete.

What a registry sends is counted. A pull that was killed may have to fetch again what was on its way: for
each stream no more than a few pieces.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import signal
import threading
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from blobstore.core.digest import Digest
from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.store.local import LocalStore
from blobstore.store.partial import RUN_AGAIN
from tests.faults import disks
from tests.faults.known import command
from tests.faults.outcomes import EVERY, Effort, Outcome
from tests.faults.processes import Child, Ended, nursery, wait_for, workspace
from tests.support.frozen import put, weights
from tests.support.models import add_blobs, blob
from tests.support.stub_registry import StubRegistry

_STREAMS = 4
_IN_FLIGHT = 2**20
"""Bytes that a stream may have fetched in vain when its process is killed: buffers of both sides."""
_PAGE = 4096
_HELD = 2**18
"""Bytes of each blob that a registry sends at first."""
_PULLED = ("model", "second", "third")
_COPIED = "copied"


class Case:
    """A registry with one model, and a store that it is pulled into."""

    def __init__(self, folder: Path, registry: StubRegistry, seed: int) -> None:
        self.chance = random.Random(seed)
        self.registry = registry
        self.origin = LocalStore(folder / "origin")
        layers = {
            name: blob((name, "U8", (size,), weights(number, size // 2)))
            for number, (name, size) in enumerate(
                {"small": 10_000, "one": 900_000, "two": 1_500_000, "large": 3_000_000}.items()
            )
        }
        add_blobs(self.origin, "model", layers)
        self.data = self.origin.read_manifest("model")
        self.blobs = self.origin.resolve("model").blobs
        self.size = sum(item.size for item in self.blobs)
        self.remote = registry.put(self.origin, plan_ollama(self.data), "team/model", "latest")
        self.store = LocalStore(folder / "store")

    def arguments(self, name: str = "model") -> list[object]:
        """Return the command that pulls the model."""
        where = ["--store", self.store.root]
        return ["blobstore", "pull", self.remote, name, "--streams", _STREAMS, *where]

    def pull(self, **hooks: object) -> Ended:
        """Pull the model in a child."""
        return nursery().run(*self.arguments(), hooks=hooks)

    def forget(self) -> None:
        """Let the store have no model, no blob and no unfinished download."""
        command("rm", "*", "--store", self.store.root)
        command("gc", "--force", "--older-than", "0s", "--store", self.store.root)
        self.registry.sent.clear()

    def check(
        self, outcome: Outcome, how: str, is_there: bool | None = None, name: str = "model"
    ) -> None:
        """Check that the model is complete or absent, or as ``is_there`` says."""
        has_name = self.store.has_model(name)
        if is_there is not None and has_name != is_there:
            outcome.violate(f"{how}: the name is {'there' if has_name else 'absent'}")
        if has_name:
            code, output, errors = command("verify", name, "--store", self.store.root)
            if code or self.store.read_manifest(name) != self.data:
                outcome.names_lost += 1
                outcome.violate(f"{how}: the model is not complete: {output[-300:]}{errors[-300:]}")

    def must_pull(self, outcome: Outcome, how: str, **hooks: object) -> None:
        """Check that a pull succeeds now."""
        ended = self.pull(**hooks)
        if ended.code:
            outcome.violate(f"{how}: the next pull exits with {ended.code}: {ended.stderr[-300:]}")
        self.check(outcome, how, is_there=True)


def run(effort: Effort, only: Container[str] = EVERY) -> list[Outcome]:
    """Inject each kind ``effort.count`` times."""
    rows = []
    chosen = {fault: disturb for fault, disturb in CASES.items() if fault in only}
    for number, (fault, disturb) in enumerate(chosen.items()):
        outcome = Outcome(fault)
        rows.append(outcome)
        # Instants of a kill are the most different, so these take half of the time.
        parts = len(chosen) - number
        share = effort.share(min(parts, 2) if disturb is _killed else parts)
        with workspace() as folder, StubRegistry() as registry:
            disturb(Case(folder, registry, effort.seed), share, outcome)
    return rows


def _killed(case: Case, effort: Effort, outcome: Outcome) -> None:
    """Kill each pull at a random instant until one ends; count what the registry has sent.

    The first is killed while the registry holds most of the blobs, so that one is sure to be struck.
    """
    case.registry.pause = 0.002
    may_go_on = threading.Event()

    def hold(_: str, begin: int, data: bytes) -> bytes:
        if begin >= _HELD:
            may_go_on.wait()
        return data

    case.registry.alter = hold
    kills = 0
    for number in effort:
        child = nursery().start(*case.arguments())
        if number:
            time.sleep(case.chance.uniform(0, 1.2))
        else:
            wait_for(lambda: case.registry.sent.total() >= _HELD)
        child.kill()
        may_go_on.set()
        ended = child.wait()
        kills += ended.is_killed
        outcome.injected += ended.is_killed
        case.check(outcome, "killed", is_there=None if ended.is_killed else True)
        if not ended.is_killed:
            _count(case, kills, outcome)
            case.forget()
            kills = 0
    case.must_pull(outcome, "after the last kill")
    _count(case, kills, outcome)


def _count(case: Case, kills: int, outcome: Outcome) -> None:
    wasted = case.registry.sent.total() - case.size
    outcome.notes.append(f"{kills} kills: {wasted} of {case.size} bytes were fetched twice")
    if wasted > kills * _STREAMS * _IN_FLIGHT:
        outcome.violate(f"{kills} kills: {wasted} bytes were fetched twice")


def _cut(case: Case, effort: Effort, outcome: Outcome) -> None:
    for _ in effort:
        case.forget()
        for item in case.blobs:
            case.registry.cut_after[str(item.digest)] = case.chance.randrange(item.size)
            outcome.injected += 1
        case.must_pull(outcome, "connections were cut", impatience=0.01)
        case.registry.cut_after.clear()
        if case.registry.sent.total() > case.size + len(case.blobs) * _IN_FLIGHT:
            outcome.violate(f"{case.registry.sent.total()} bytes were sent for {case.size}")


def _flipped(case: Case, effort: Effort, outcome: Outcome) -> None:
    """Flip a bit of a blob of the registry: the pull fails and names the layer."""
    for _ in effort:
        item = case.chance.choice(case.blobs)
        data = bytearray(case.registry.blobs[str(item.digest)])
        data[case.chance.randrange(len(data))] ^= 1 << case.chance.randrange(8)
        _refused(case, item.digest, bytes(data), outcome)


def _truncated(case: Case, effort: Effort, outcome: Outcome) -> None:
    for _ in effort:
        item = case.chance.choice(case.blobs)
        data = case.registry.blobs[str(item.digest)]
        _refused(case, item.digest, data[: case.chance.randrange(len(data))], outcome)


def _collected(case: Case, effort: Effort, outcome: Outcome) -> None:
    """Remove a blob of the registry, as a collection of garbage does at the wrong time."""
    for _ in effort:
        _refused(case, case.chance.choice(case.blobs).digest, None, outcome)


def _refused(case: Case, digest: Digest, instead: bytes | None, outcome: Outcome) -> None:
    """Check that a pull fails with one line while the registry has other bytes, and works afterwards."""
    case.forget()
    outcome.injected += 1
    blobs = case.registry.blobs
    data = blobs.pop(str(digest))
    if instead is not None:
        blobs[str(digest)] = instead
    ended = case.pull()
    blobs[str(digest)] = data
    if ended.code != 4 or ended.complaint:
        outcome.violate(f"exit code {ended.code}: {ended.stderr[-300:]}")
    case.check(outcome, "refused", is_there=False)
    case.registry.sent.clear()
    case.must_pull(outcome, "the registry is repaired")


def _full(case: Case, effort: Effort, outcome: Outcome) -> None:
    """Fill the disk while a pull runs; give the space back, and continue."""
    if reason := disks.why_not():
        outcome.skipped = reason
        return
    case.registry.pause = 0.001
    for number in effort:
        outcome.injected += 1
        with disks.in_memory(case.origin.root.parent / "disk", 12 * 2**20) as disk:
            case.store = LocalStore(disk / "store")
            case.registry.sent.clear()
            child = nursery().start(*case.arguments())
            free = case.size * (number + 1) // (effort.count + 1) // _PAGE * _PAGE
            filler = disk / "filler"
            wait_for(lambda: bool(case.registry.sent))
            with contextlib.suppress(OSError), filler.open("wb") as file:  # it may be full now
                file.write(bytes(12 * 2**20 - free - 64 * 2**10))
            ended = child.wait()
            if ended.code not in (0, 1) or ended.complaint:
                outcome.violate(f"{free} bytes free: {ended.code}: {ended.stderr[-300:]}")
            case.check(outcome, f"{free} bytes free", is_there=not ended.code)
            filler.unlink()
            case.must_pull(outcome, f"after {free} bytes free")
            wasted = case.registry.sent.total() - case.size
            if wasted > _STREAMS * _IN_FLIGHT:
                outcome.violate(f"{wasted} bytes were fetched twice")


def _two(case: Case, effort: Effort, outcome: Outcome) -> None:
    """Pull one model twice at once, and kill one of the two sometimes."""
    case.registry.pause = 0.0005
    for _ in effort:
        case.forget()
        outcome.injected += 1
        children = [nursery().start(*case.arguments(name)) for name in ("model", "other")]
        if is_killed := case.chance.random() < 0.5:
            time.sleep(case.chance.uniform(0.2, 0.8))
            children[1].send(signal.SIGKILL)
        first, second = [child.wait() for child in children]
        if first.code or not (is_killed or second.code == 0):
            outcome.violate(f"exit codes {first.code} and {second.code}: {first.stderr[-300:]}")
        case.check(outcome, "two at once", is_there=True)
        if case.registry.sent.total() > case.size + is_killed * _STREAMS * _IN_FLIGHT:
            outcome.violate(f"{case.registry.sent.total()} bytes were sent for {case.size}")


def _without_locks(case: Case, effort: Effort, outcome: Outcome) -> None:
    """Pull one model several times at once, and copy it, where all have every lock.

    Some are killed, and one stands still until the others have ended.
    """
    case.registry.pause = 0.002
    for _ in effort:
        if any(map(case.store.has_model, (*_PULLED, _COPIED))):
            case.forget()
        children = dict(_crowd(case))
        outcome.injected += 1
        late = case.chance.choice(_PULLED)
        _wait(case, 0.5)
        children[late].send(signal.SIGSTOP)
        for name in case.chance.sample(_PULLED, case.chance.randrange(len(_PULLED))):
            if name != late:
                _wait(case, 0.3)
                children[name].kill()
        for name, child in sorted(children.items(), key=lambda item: item[0] == late):
            if name == late:
                child.send(signal.SIGCONT)
                if case.chance.random() < 0.5:
                    _wait(case, 0.1)
                    child.kill()
            _check_pull(case, name, child.wait(), outcome)
    case.must_pull(outcome, "after the last kill")


def _wait(case: Case, most: float) -> None:
    time.sleep(case.chance.uniform(0, most))


def _check_pull(case: Case, name: str, ended: Ended, outcome: Outcome) -> None:
    """Check that a pull, or a copy, that was not killed has succeeded, and that all blobs are right."""
    if ended.code and not ended.is_killed and RUN_AGAIN not in ended.stderr:
        outcome.violate(f"{name}: exit code {ended.code}: {ended.stderr[-300:]}")
    case.check(outcome, f"others pull {name}", ended.code == 0 or None, name=name)
    for path in (case.store.root / "blobs").glob("sha256-*"):
        if f"sha256-{hashlib.sha256(path.read_bytes()).hexdigest()}" != path.name:
            outcome.violate(f"blob {path.name} has other bytes after {name}")


def _crowd(case: Case) -> Iterator[tuple[str, Child]]:
    """Start pulls, and sometimes a copy from another store, one soon after the other."""
    calls = {name: case.arguments(name) for name in _PULLED}
    if case.chance.random() < 0.3:
        where = ("--to", case.store.root, "--store", case.origin.root)
        calls[_COPIED] = ["blobstore", "cp", "model", _COPIED, *where]
    for name, arguments in calls.items():
        yield name, nursery().start(*arguments, hooks={"vain_locks": True})
        _wait(case, 0.3)


def _with_gc(case: Case, effort: Effort, outcome: Outcome) -> None:
    case.registry.pause = 0.0005
    put(case.store, "stays", {"x": 1})
    for _ in effort:
        case.forget()
        put(case.store, "stays", {"x": 1})
        outcome.injected += 1
        child = nursery().start(*case.arguments())
        while not child.has_ended and not case.store.has_model("model"):
            code, _, errors = command(
                "gc", "--force", "--older-than", "0s", "--store", case.store.root
            )
            if code:
                outcome.violate(f"gc exits with {code}: {errors[-300:]}")
            if case.registry.sent.total() >= case.size:
                break
        ended = child.wait()
        if ended.code:
            outcome.violate(f"during gc: exit code {ended.code}: {ended.stderr[-300:]}")
        case.check(outcome, "during gc", is_there=True)
        if case.registry.sent.total() > case.size:
            outcome.violate(f"{case.registry.sent.total()} bytes were sent for {case.size}")


CASES: dict[str, Callable[[Case, Effort, Outcome], None]] = {
    "pull killed and repeated": _killed,
    "connection lost during pull": _cut,
    "bit flipped in a blob of the registry": _flipped,
    "blob of the registry truncated": _truncated,
    "blob of the registry collected": _collected,
    "disk full during pull": _full,
    "two pulls of one model at once": _two,
    "pulls and copies of one model at once, where locks do nothing": _without_locks,
    "pull during gc": _with_gc,
}
