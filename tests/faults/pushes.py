"""Pushes to a real registry that are killed, disturbed and repeated.

A tag of the registry refers to a complete and right model, or is absent. A proxy between the two counts the
bytes that are sent: a push sends no blob that the registry has. (Docker's registry drops an upload that is cut
inside a part, so the blobs that were being sent are sent again from their first bytes.)
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Self

from blobstore.core.digest import Digest
from blobstore.store.local import LocalStore
from tests.faults import disks
from tests.faults.known import command
from tests.faults.outcomes import EVERY, Effort, Outcome
from tests.faults.processes import Ended, nursery, wait_for, workspace
from tests.support.frozen import weights
from tests.support.models import add_blobs, blob
from tests.support.registry import PROGRAM, Server, running_registry

_STREAMS = 4
_PART = 256 * 2**10
"""Bytes of a part of an upload in the children, so that small blobs are sent in parts."""
_REQUESTS = 2**17
"""Bytes of all requests of a push but those of blobs, at most."""
_REPOSITORY = "team/model"


class Proxy:
    """Passes connections on to a server; counts, slows down and cuts what it is sent."""

    def __init__(self, host: str) -> None:
        name, _, port = host.partition(":")
        self._server = (name, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self.received = 0
        self.pause = 0.0
        """Seconds before each 16 KiB."""
        self.cuts: list[int] = []
        """Counts of bytes at which the connection that receives them is lost, in order."""
        self.held = b""
        """How requests begin that are held, if not empty, until ``may_go_on`` is set."""
        self.is_holding, self.may_go_on = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # it is closed
                return
            thread = threading.Thread(target=self._connect, args=(client,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def join(self) -> None:
        """Wait until the server has what clients sent before they ended."""
        while self._threads:
            self._threads.pop().join()

    def _connect(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(self._server) as server:
            back = threading.Thread(target=self._answer, args=(server, client), daemon=True)
            back.start()
            self._forward(client, server)
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_WR)
            back.join()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(2**14):
                with self._lock:
                    self.received += len(data)
                    is_cut = bool(self.cuts) and self.received >= self.cuts[0]
                    if is_cut:
                        del self.cuts[0]
                if is_cut:
                    client.shutdown(socket.SHUT_RDWR)
                    return
                if self.held and data.startswith(self.held):
                    self.is_holding.set()
                    self.may_go_on.wait()
                time.sleep(self.pause)
                server.sendall(data)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(2**16):
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


class Case:
    """A store with one model, and a registry that it is pushed to."""

    def __init__(self, folder: Path, server: Server, proxy: Proxy, seed: int) -> None:
        self.chance = random.Random(seed)
        self.folder = folder
        self.server = server
        self.proxy = proxy
        self.store = LocalStore(folder / "store")
        self._number = 0
        self.renew()

    def renew(self) -> None:
        """Let the model have other weights, so that the registry has none of its blobs."""
        self._number += 1
        sizes = {"small": 10_000, "one": 300_000, "two": 800_000, "large": 1_500_000}
        layers = {
            name: blob((name, "U8", (size,), weights(self._number * 10 + number, size // 2)))
            for number, (name, size) in enumerate(sizes.items())
        }
        add_blobs(self.store, "model", layers)
        self.blobs = self.store.resolve("model").blobs
        self.size = sum(item.size for item in self.blobs)
        self.proxy.received = 0

    @property
    def tag(self) -> str:
        """The tag of this model, which no push before it had."""
        return f"v{self._number}"

    def arguments(self, *options: object) -> list[object]:
        """Return the command that pushes the model."""
        remote = f"{self.proxy.host}/{_REPOSITORY}:{self.tag}"
        where = ["--store", self.store.root]
        return ["blobstore", "push", "model", remote, "--streams", _STREAMS, *options, *where]

    def push(self, *options: object, **hooks: object) -> Ended:
        """Push the model in a child."""
        return nursery().run(*self.arguments(*options), hooks={"part": _PART} | hooks)

    def check(self, outcome: Outcome, how: str, *, is_there: bool | None = None) -> None:
        """Check in the files of the registry that the tag is complete or absent, or as ``is_there`` says."""
        root = self.server.root / "docker" / "registry" / "v2" / "repositories" / _REPOSITORY
        link = root / "_manifests" / "tags" / self.tag / "current" / "link"
        has_tag = link.exists() and bool(link.read_text())
        if is_there is not None and has_tag != is_there:
            outcome.violate(f"{how}: the tag is {'there' if has_tag else 'absent'}")
        if has_tag:
            problems = list(self._problems(link.read_text()))
            outcome.names_lost += bool(problems)
            for problem in problems:
                outcome.violate(f"{how}: {problem}")

    def _problems(self, digest: str) -> Iterator[str]:
        manifest = json.loads(self.server.blob(digest).read_bytes())
        for layer in (manifest["config"], *manifest["layers"]):
            path = self.server.blob(layer["digest"])
            if not path.exists() or str(Digest.of(path.read_bytes())) != layer["digest"]:
                yield f"the tag needs {layer['digest']}, which is missing or wrong"
        missing = {str(item.digest) for item in self.blobs} - {
            layer["digest"] for layer in manifest["layers"]
        }
        if missing:
            yield f"the manifest lacks {missing}"

    @property
    def missing(self) -> int:
        """The bytes of the model's blobs that the registry lacks."""
        return sum(
            item.size for item in self.blobs if not self.server.blob(str(item.digest)).exists()
        )

    def must_push(self, outcome: Outcome, how: str, *options: object, **hooks: object) -> None:
        """Check that a push succeeds now."""
        ended = self.push(*options, **hooks)
        if ended.code:
            outcome.violate(f"{how}: the next push exits with {ended.code}: {ended.stderr[-300:]}")
        self.check(outcome, how, is_there=True)


def run(effort: Effort, only: Container[str] = EVERY) -> list[Outcome]:
    """Inject each kind ``effort.count`` times."""
    rows = []
    chosen = {fault: disturb for fault, disturb in CASES.items() if fault in only}
    for number, (fault, disturb) in enumerate(chosen.items()):
        outcome = Outcome(fault)
        rows.append(outcome)
        if shutil.which(PROGRAM) is None:
            outcome.skipped = f"{PROGRAM} is not installed"
            continue
        # Instants of a kill are the most different, so these take half of the time.
        parts = len(chosen) - number
        share = effort.share(min(parts, 2) if disturb is _killed else parts)
        with (
            workspace() as folder,
            _disk(folder, disturb, outcome) as place,
            running_registry(place) as server,
            Proxy(server.host) as proxy,
        ):
            if not outcome.skipped:
                disturb(Case(folder, server, proxy, effort.seed), share, outcome)
    return rows


@contextlib.contextmanager
def _disk(folder: Path, disturb: object, outcome: Outcome) -> Iterator[Path]:
    """Return where the registry has its files: on a small disk, if that is to be full."""
    if disturb is not _full:
        yield folder / "server"
    elif reason := disks.why_not():
        outcome.skipped = reason
        yield folder / "server"
    else:
        with disks.in_memory(folder / "disk", 2**26) as disk:
            yield disk / "server"


def _killed(case: Case, effort: Effort, outcome: Outcome) -> None:
    """Kill each push at a random instant until one ends; no push sends a blob that has arrived."""
    case.proxy.pause = 0.002
    for _ in range(effort.count * 10):
        if outcome.injected == effort.count or (outcome.injected and effort.is_spent):
            break
        missing, case.proxy.received = case.missing, 0
        child = nursery().start(*case.arguments(), hooks={"part": _PART})
        time.sleep(case.chance.uniform(0, 0.5))
        child.kill()
        ended = child.wait()
        case.proxy.join()
        outcome.injected += ended.is_killed
        if ended.code and not ended.is_killed:
            outcome.violate(f"exit code {ended.code}: {ended.stderr[-300:]}")
        if (sent := case.proxy.received) > missing + _REQUESTS:
            outcome.violate(f"{sent} bytes were sent, and the registry lacked {missing}")
        case.check(outcome, "killed", is_there=None if ended.is_killed else True)
        if not ended.is_killed:
            case.renew()
    case.must_push(outcome, "after the last kill")


def _cut(case: Case, effort: Effort, outcome: Outcome) -> None:
    """Lose connections at random bytes of a push, which continues and succeeds."""
    for _ in effort:
        case.renew()
        case.proxy.cuts = sorted(case.chance.sample(range(1, case.size), 3))
        outcome.injected += 3
        case.must_push(outcome, "connections were lost", impatience=0.01)
        case.proxy.cuts = []
        wasted = case.proxy.received - case.size
        outcome.notes.append(f"{wasted} of {case.size} bytes were sent twice")
        # A connection carries one blob at a time.
        if wasted > 3 * max(item.size for item in case.blobs) + _REQUESTS:
            outcome.violate(f"{wasted} bytes were sent twice")


def _flipped(case: Case, effort: Effort, outcome: Outcome) -> None:
    """Flip a bit in the registry's storage: ``push --verify`` and ``verify --remote`` report it."""
    for _ in effort:
        case.renew()
        case.must_push(outcome, "before the flip")
        path = case.server.blob(str(case.chance.choice(case.blobs).digest))
        data = bytearray(path.read_bytes())
        data[case.chance.randrange(len(data))] ^= 1 << case.chance.randrange(8)
        path.write_bytes(data)
        outcome.injected += 1
        _must_notice(case, outcome)
        path.unlink()
        case.must_push(outcome, "the damaged blob was removed", "--verify")


def _must_notice(case: Case, outcome: Outcome) -> None:
    """Check that both commands that read a remote back say what to do."""
    remote = f"{case.proxy.host}/{_REPOSITORY}:{case.tag}"
    store = ("--store", case.store.root)
    ended = case.push("--verify")
    if not ended.code or ended.complaint or "push" not in ended.stderr:
        outcome.violate(f"push --verify: {ended.code}: {ended.stderr[-300:]}")
    code, output, errors = command("verify", "--remote", remote, *store)
    if not code:
        outcome.violate(f"verify --remote finds nothing: {output[-300:]}{errors[-300:]}")


def _collected(case: Case, effort: Effort, outcome: Outcome) -> None:
    """Let the registry collect its garbage during a push: verification notices, a second push heals.

    It removes blobs whose manifest is still to come, which its authors forbid: only a reader can tell. The
    first time all blobs are there, and the manifest is on its way.
    """
    proxy = case.proxy
    proxy.pause = 0.001
    config = case.server.root.parent / "config.yml"
    for number in effort:
        case.renew()
        proxy.held = b"" if number else f"PUT /v2/{_REPOSITORY}/manifests/".encode()
        child = nursery().start(
            *case.arguments("--verify"), hooks={"part": _PART, "impatience": 0.01}
        )
        enough = case.chance.randrange(case.size)
        if not number:
            wait_for(proxy.is_holding.is_set)
        wait_for(lambda: proxy.received >= enough)  # noqa: B023 - it is called here
        collected = subprocess.run(
            [PROGRAM, "garbage-collect", config], capture_output=True, text=True, check=False
        )
        outcome.injected += "eligible for deletion" in collected.stdout + collected.stderr
        proxy.may_go_on.set()
        ended = child.wait()
        if ended.complaint:
            outcome.violate(f"during garbage-collect: {ended.complaint}")
        if not ended.code:
            case.check(outcome, "push --verify succeeded during garbage-collect", is_there=True)
        case.must_push(outcome, "after garbage-collect", "--verify")


def _full(case: Case, effort: Effort, outcome: Outcome) -> None:
    """Fill the registry's disk while a push runs; give the space back, and push again."""
    filler = case.folder / "disk" / "filler"
    case.proxy.pause = 0.0005
    for _ in effort:
        case.renew()
        outcome.injected += 1
        free = case.chance.randrange(case.size)
        space = shutil.disk_usage(filler.parent).free
        filler.write_bytes(bytes(max(0, space - free)))
        ended = case.push(impatience=0.01)
        if ended.complaint:
            outcome.violate(f"{free} bytes free: {ended.complaint}")
        case.check(outcome, f"{free} bytes free", is_there=None if ended.code else True)
        filler.unlink()
        case.must_push(outcome, f"after {free} bytes free")
        shutil.rmtree(case.server.root / "docker" / "registry" / "v2" / "blobs")
        shutil.rmtree(case.server.root / "docker" / "registry" / "v2" / "repositories")


def _two(case: Case, effort: Effort, outcome: Outcome) -> None:
    """Push one model twice at once, and kill one of the two sometimes."""
    case.proxy.pause = 0.0005
    for _ in effort:
        case.renew()
        outcome.injected += 1
        children = [nursery().start(*case.arguments(), hooks={"part": _PART}) for _ in range(2)]
        if is_killed := case.chance.random() < 0.5:
            time.sleep(case.chance.uniform(0.1, 0.5))
            children[1].send(signal.SIGKILL)
        first, second = [child.wait() for child in children]
        if first.code or not (is_killed or second.code == 0):
            told = f"{first.stderr[-300:]} {second.stderr[-300:]}"
            outcome.violate(f"exit codes {first.code} and {second.code}: {told}")
        case.check(outcome, "two at once", is_there=True)


CASES: dict[str, Callable[[Case, Effort, Outcome], None]] = {
    "push killed and repeated": _killed,
    "connection lost during push": _cut,
    "bit flipped in the registry after push": _flipped,
    "registry collects garbage during push": _collected,
    "disk of the registry full during push": _full,
    "two pushes of one model at once": _two,
}
