"""Models that ``serve`` fetches from an upstream while either, or a peer, is killed, the disk is full, or models are removed."""

from __future__ import annotations

import contextlib
import http.client
import random
import signal
import threading
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path

import numpy as np

from blobstore.operations.create.create import create
from blobstore.store.local import LocalStore
from tests.faults import disks
from tests.faults.known import command
from tests.faults.outcomes import EVERY, Effort, Outcome
from tests.faults.processes import workspace
from tests.support.hub_server import HubServer
from tests.support.models import write_folder
from tests.support.ports import free_port
from tests.support.serve_process import Serving, serving

_NAME = "org/model"
_FILES = tuple(f"model-{number}-of-00004.safetensors" for number in ("00001", "00003"))
_PAUSE = 0.002
"""Seconds before each part of a file that the upstream sends, so that a fetch can be disturbed."""
_IN_FLIGHT = 2**20
"""Bytes of a file that may have been sent in vain when a process is killed: buffers of both sides."""


class Case:
    """An upstream with one model, whose bytes come slowly, and a store that they are fetched into."""

    def __init__(self, folder: Path, hub: HubServer, seed: int) -> None:
        self.chance = random.Random(seed)
        self.folder, self.hub = folder, hub
        values = np.random.default_rng(seed)
        tensors = {
            f"layers.{number}": values.standard_normal((512, 512), dtype=np.float32)
            for number in range(8)
        }
        self.source = write_folder(folder / "source", tensors, shards=4)
        self._upstream = hub.add(_NAME, self.source)
        self.files = {path.name: path.read_bytes() for path in self.source.iterdir()}
        self.size = sum(map(len, self.files.values()))
        self.store = LocalStore(folder / "store")

    def forget(self) -> None:
        """Let the store have nothing, and the upstream be slow again."""
        self._upstream.pause = _PAUSE
        command("rm", "*", "--store", self.store.root)
        command("gc", "--force", "--older-than", "0s", "--store", self.store.root)
        self.hub.sent = 0

    @contextlib.contextmanager
    def server(self, url: str = "", *options: str) -> Iterator[Serving]:
        """Run a server in front of the upstream."""
        url = url or self.hub.url
        upstream = ("--upstream", url, *options)
        # What fails is asked for again at once, not after some seconds.
        limits = {"pull_through._REFUSED_SECONDS": 0.1}
        with serving(self.store, self.folder, *upstream, limits=limits) as running:
            yield running

    def check(self, outcome: Outcome, how: str) -> None:
        """Check that the model is complete or absent, and all else in the store right."""
        if self.store.root.exists():
            code, output, errors = command("verify", "--store", self.store.root)
            if code:
                outcome.names_lost += 1
                outcome.violate(f"{how}: verify: {output[-300:]}{errors[-300:]}")

    def must_get(self, server: Serving, outcome: Outcome, how: str) -> None:
        """Check that clients get all files now, and fast, and that the store has them then."""
        self._upstream.pause = 0.0
        deadline = time.monotonic() + 60
        for name, data in self.files.items():
            while (found := _get(server, name)) != data:
                if len(found) > len(data) or (len(found) == len(data) and found != data):
                    outcome.bytes_lost += len(data)
                    outcome.violate(f"{how}: a client got other bytes of {name}")
                    return
                if time.monotonic() > deadline:
                    outcome.violate(f"{how}: nobody gets {name}: {server.log()[-3:]}")
                    return
                time.sleep(0.05)
        while not self.store.has_model(_NAME) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not self.store.has_model(_NAME):
            outcome.violate(f"{how}: the store does not get the model: {server.log()[-3:]}")
        self.check(outcome, how)


def _get(server: Serving, name: str) -> bytes:
    """Return what a client gets of a file; nothing if the response is an error."""
    try:
        status, _, data = server.request(f"/{_NAME}/resolve/main/{name}")
    except http.client.IncompleteRead as error:
        return error.partial
    except OSError:
        return b""
    return data if status == 200 else b""


@contextlib.contextmanager
def _clients(server: Serving) -> Iterator[None]:
    """Let some clients ask for the model, and leave when the block ends."""
    threads = [threading.Thread(target=_get, args=(server, name)) for name in _FILES]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def run(effort: Effort, only: Container[str] = EVERY) -> list[Outcome]:
    """Inject each kind ``effort.count`` times."""
    rows = []
    chosen = {fault: disturb for fault, disturb in CASES.items() if fault in only}
    for number, (fault, disturb) in enumerate(chosen.items()):
        outcome = Outcome(fault)
        rows.append(outcome)
        with workspace() as folder, HubServer() as hub:
            case = Case(folder, hub, effort.seed)
            disturb(case, effort.share(len(chosen) - number), outcome)
    return rows


def _killed(case: Case, effort: Effort, outcome: Outcome) -> None:
    """Kill the server at random instants; what was fetched is not fetched again."""
    for _ in effort:
        case.forget()
        with case.server() as server, _clients(server):
            time.sleep(case.chance.uniform(0, 0.6))
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
            outcome.injected += 1
        case.check(outcome, "the server was killed")
        with case.server() as server:
            case.must_get(server, outcome, "after the server was killed")
        wasted = case.hub.sent - case.size
        outcome.notes.append(f"{wasted} of {case.size} bytes were sent twice")
        if wasted > len(case.files) * _IN_FLIGHT:
            outcome.violate(f"{wasted} bytes were sent twice")


def _upstream_killed(case: Case, effort: Effort, outcome: Outcome) -> None:
    """Kill the upstream, another server, at random instants, and start it again."""
    origin = LocalStore(case.folder / "origin")
    create(case.source, _NAME, store=origin)
    place = case.folder / "upstream"
    place.mkdir()
    for _ in effort:
        case.forget()
        with contextlib.ExitStack() as stack:
            listen = f"--port={free_port()}"
            upstream = stack.enter_context(serving(origin, place, listen))
            server = stack.enter_context(case.server(upstream.url))
            stack.enter_context(_clients(server))
            time.sleep(case.chance.uniform(0, 0.3))
            upstream.process.send_signal(signal.SIGKILL)
            upstream.process.wait()
            outcome.injected += 1
            stack.enter_context(serving(origin, place, listen))
            case.must_get(server, outcome, "after the upstream was killed")


def _peer_killed(case: Case, effort: Effort, outcome: Outcome) -> None:
    """Kill a peer that has the model at random instants; the rest comes from the upstream."""
    own, place = case.store, case.folder / "peer"
    place.mkdir()
    case.store = LocalStore(place / "store")
    with case.server() as server:
        case.must_get(server, outcome, "before a peer was killed")
    there, case.store = case.store, own
    for _ in effort:
        case.forget()
        with serving(there, place) as peer, case.server("", f"--peers={peer.url}") as server:
            with _clients(server):
                time.sleep(case.chance.uniform(0, 1.5))
                peer.process.send_signal(signal.SIGKILL)
                peer.process.wait()
                outcome.injected += 1
            case.must_get(server, outcome, "after a peer was killed")
        outcome.notes.append(f"the upstream has sent {case.hub.sent} of {case.size} bytes")


def _full(case: Case, effort: Effort, outcome: Outcome) -> None:
    """Let the disk be full at a random byte; make space, and ask again."""
    if reason := disks.why_not():
        outcome.skipped = reason
        return
    size = 3 * case.size
    for number in effort:
        outcome.injected += 1
        with disks.in_memory(case.folder / "disk", size) as disk:
            case.store = LocalStore(disk / "store")
            filler = disk / "filler"
            free = 2 * case.size * (number + 1) // (effort.count + 1)
            with contextlib.suppress(OSError), filler.open("wb") as file:
                file.write(bytes(size - free))
            with case.server() as server:
                with _clients(server):
                    pass
                case.check(outcome, f"{free} bytes free")
                filler.unlink(missing_ok=True)
                case.must_get(server, outcome, f"after {free} bytes were free")


def _collected(case: Case, effort: Effort, outcome: Outcome) -> None:
    """Collect garbage, and remove the model, while it arrives and while it is sent."""
    for _ in effort:
        case.forget()
        outcome.injected += 1
        with case.server() as server:
            with _clients(server):
                for what in ("gc", "rm", "gc"):
                    options = ("--force", "--older-than", "0s") if what == "gc" else ("*",)
                    time.sleep(case.chance.uniform(0, 0.3))
                    command(what, *options, "--store", case.store.root)
            case.check(outcome, "gc and rm")
            case.must_get(server, outcome, "after gc and rm")


CASES: dict[str, Callable[[Case, Effort, Outcome], None]] = {
    "serve killed while it fetches a model": _killed,
    "upstream killed while a model is fetched": _upstream_killed,
    "peer killed while a model is fetched": _peer_killed,
    "disk full while a model is fetched": _full,
    "gc and rm while a model is fetched": _collected,
}
