"""Models in object storage, while clients and the server are killed, against a real server.

A name refers to a complete model, or is absent. What the local store keeps is right. A repeated push sends no
blob that has arrived; a proxy between the two counts the bytes.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Container
from pathlib import Path
from unittest.mock import patch

from blobstore.core.digest import Digest
from blobstore.errors import RemoteError
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.objects.address import StoreAddress
from blobstore.objects.store import ObjectStore
from blobstore.store.local import LocalStore
from tests.faults.known import command
from tests.faults.outcomes import EVERY, Effort, Outcome
from tests.faults.processes import LIMIT, Child, Ended, nursery, wait_for, workspace
from tests.faults.pushes import Proxy
from tests.support.frozen import weights
from tests.support.models import add_blobs, blob
from tests.support.objects import ObjectServer, running_object_store

_REQUESTS = 2**17
"""Bytes of all requests of a push but those of blobs, at most."""
_PAUSE = 0.002
"""Seconds before each 16 KiB of a push that is disturbed."""


class Case:
    """A store with one model, and a server that it is pushed to."""

    def __init__(self, folder: Path, server: ObjectServer, proxy: Proxy, seed: int) -> None:
        self.chance = random.Random(seed)
        self.folder = folder
        self.server = server
        self.proxy = proxy
        self.local = LocalStore(folder / "local")
        self.address = StoreAddress("s3", server.bucket, "faults")
        with patch.dict(os.environ, {"AWS_ENDPOINT_URL": server.endpoint}):
            self.objects = ObjectStore(self.address)  # not through the proxy
        self._number = 0
        self.renew()

    def renew(self) -> None:
        """Let the model have other weights and another name, which the server has not."""
        self._number += 1
        sizes = {"small": 10_000, "one": 300_000, "two": 900_000, "large": 9_000_000}
        layers = {
            name: blob((name, "U8", (size,), weights(self._number * 10 + number, size // 2)))
            for number, (name, size) in enumerate(sizes.items())
        }
        self.name = f"model{self._number}"
        add_blobs(self.local, self.name, layers)
        self.blobs = self.local.resolve(self.name).blobs
        self.other = LocalStore(self.folder / f"other{self._number}")

    @property
    def model(self) -> str:
        """The address of the model."""
        return f"{self.address}/{self.name}"

    def push(self) -> Child:
        """Push the model in a child."""
        self.proxy.pause = 0.0
        return self._push()

    def push_slowly(self) -> Child:
        """Push the model in a child, which takes more than a second, so that it can be disturbed."""
        self.proxy.pause = _PAUSE
        return self._push()

    def _push(self) -> Child:
        return self._start("blobstore", "push", self.name, self.address, "--store", self.local.root)

    def pull(self) -> Child:
        """Pull the model in a child."""
        return self._start("blobstore", "pull", self.model, "--store", self.other.root)

    def open(self) -> Child:
        """Load the model in a child, which keeps its blobs."""
        return self._start("open_elsewhere", self.model, self.other.root)

    def collect(self) -> Ended:
        """Collect garbage of any age, in a child."""
        gc = ("blobstore", "gc", "--remote", self.address, "--older-than", "0s", "--force")
        return self._start(*gc).wait()

    def _start(self, *call: object) -> Child:
        return nursery().start(*call)

    @property
    def has_name(self) -> bool:
        """Whether the server has a model of that name."""
        return self.objects.has_model(Reference.parse(self.name))

    @property
    def missing(self) -> int:
        """The bytes of the model's blobs that the server lacks."""
        return sum(item.size for item in self.blobs if not self.objects.exists(*item.id))

    def must(self, start: Callable[[], Child], outcome: Outcome, how: str) -> None:
        """Check that a command succeeds now."""
        ended = start().wait()
        if ended.code:
            outcome.violate(f"{how}: the next one exits with {ended.code}: {ended.stderr[-300:]}")

    def must_push(self, outcome: Outcome, how: str) -> None:
        """Check that a push succeeds now, and sends only what is not there."""
        self.proxy.join()
        missing, before = self.missing, self.proxy.received
        self.must(self.push, outcome, how)
        sent = self.proxy.received - before
        if sent > missing + missing // 50 + _REQUESTS:
            outcome.violate(f"{how}: {sent} bytes were sent for {missing}")
        self.check(outcome, how)
        if not self.has_name:
            outcome.violate(f"{how}: the name is absent")

    def wait_for_server(self) -> None:
        """Wait until the server reads its own files again; it answers with status 500 before."""
        until = time.monotonic() + LIMIT
        while True:
            try:
                self.check(Outcome("ready"), "")
            except RemoteError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
            else:
                return

    def check(self, outcome: Outcome, how: str) -> None:
        """Check that the name is absent, or that all its blobs have their digests."""
        for reference in self.objects.references():
            for item in Manifest.from_bytes(self.objects.read_manifest(reference)).blobs:
                found = Digest.of(b"".join(self.objects.read_pieces(*item.id)))
                if found != item.digest:
                    outcome.names_lost += 1
                    outcome.violate(f"{how}: {reference} needs {item.digest}, which is wrong")

    def check_local(self, outcome: Outcome, how: str) -> None:
        """Check that blobs of the store that fetches have their digests, and its names all of theirs."""
        for path in sorted(Path(self.other.root, "blobs").glob("sha256-*")):
            if Digest.of(path.read_bytes()).file_name != path.name:
                outcome.violate(f"{how}: {path.name} has other bytes")
        if self.other.has_model(self.name):
            code, output, errors = command("verify", self.name, "--store", self.other.root)
            if code:
                outcome.names_lost += 1
                outcome.violate(f"{how}: {output[-300:]}{errors[-300:]}")


def run(effort: Effort, only: Container[str] = EVERY) -> list[Outcome]:
    """Inject each kind ``effort.count`` times."""
    rows = []
    chosen = {fault: disturb for fault, disturb in CASES.items() if fault in only}
    with workspace(in_memory=False) as folder, running_object_store(folder / "weed") as server:
        for number, (fault, disturb) in enumerate(chosen.items()):
            outcome = Outcome(fault)
            rows.append(outcome)
            with Proxy(server.endpoint.removeprefix("http://")) as proxy:
                endpoint = {"AWS_ENDPOINT_URL": f"http://{proxy.host}"}
                with patch.dict(os.environ, server.environment | endpoint):
                    place = folder / str(number)
                    case = Case(place, server, proxy, effort.seed)
                    disturb(case, effort.share(len(chosen) - number), outcome)
    return rows


def _is_killed(case: Case, start: Callable[[Case], Child], most: float, held: bytes) -> bool:
    """Kill a command at a random instant, or at its first request that begins so; return whether it had not ended."""
    case.proxy.held = held
    child = start(case)
    if held:
        wait_for(case.proxy.is_holding.is_set)
    else:
        time.sleep(case.chance.uniform(0, most))
    child.kill()
    case.proxy.held = b""
    case.proxy.may_go_on.set()
    return child.wait().is_killed


def _push_killed(case: Case, effort: Effort, outcome: Outcome) -> None:
    for number in effort:
        case.renew()
        outcome.injected += _is_killed(case, Case.push_slowly, 1.5, b"" if number else b"PUT ")
        case.check(outcome, "killed")
        case.must_push(outcome, "after a kill")


def _fetch_killed(
    start: Callable[[Case], Child],
) -> Callable[[Case, Effort, Outcome], None]:
    def disturb(case: Case, effort: Effort, outcome: Outcome) -> None:
        for number in effort:
            case.renew()
            case.must(case.push, outcome, "before")
            outcome.injected += _is_killed(case, start, 0.15, b"" if number else b"GET ")
            case.check_local(outcome, "killed")
            case.must(lambda: start(case), outcome, "after a kill")
            case.check_local(outcome, "after a kill")

    return disturb


def _collected(case: Case, effort: Effort, outcome: Outcome) -> None:
    for _ in effort:
        case.renew()
        first = case.push_slowly()
        time.sleep(case.chance.uniform(0, 1))
        first.kill()  # what it has sent is garbage, and what the next one relies on
        outcome.injected += 1
        first.wait()
        second = case.push_slowly()
        until = time.monotonic() + LIMIT
        while time.monotonic() < until and not case.has_name:
            ended = case.collect()
            if ended.code:
                outcome.violate(f"gc exits with {ended.code}: {ended.stderr[-300:]}")
        ended = second.wait()
        if ended.code:
            outcome.violate(f"during gc: exit code {ended.code}: {ended.stderr[-300:]}")
        case.check(outcome, "during gc")


def _server_killed(
    start: Callable[[Case], Child],
) -> Callable[[Case, Effort, Outcome], None]:
    def disturb(case: Case, effort: Effort, outcome: Outcome) -> None:
        for _ in effort:
            case.renew()
            if start is not Case.push_slowly:
                case.must(case.push, outcome, "before")
            child = start(case)
            time.sleep(case.chance.uniform(0.1, 1))
            case.server.kill()
            outcome.injected += 1
            case.server.start()
            ended = child.wait()
            if ended.complaint:
                outcome.violate(ended.complaint)
            case.wait_for_server()
            case.check(outcome, "the server was killed")
            case.check_local(outcome, "the server was killed")
            case.must(lambda: start(case), outcome, "after the server was killed")
            case.check(outcome, "after the server was killed")

    return disturb


CASES: dict[str, Callable[[Case, Effort, Outcome], None]] = {
    "push to object storage killed and repeated": _push_killed,
    "pull from object storage killed and repeated": _fetch_killed(Case.pull),
    "model opened in object storage, killed and repeated": _fetch_killed(Case.open),
    "object storage collected during push": _collected,
    "object storage killed during push": _server_killed(Case.push_slowly),
    "object storage killed during pull": _server_killed(Case.pull),
}
