"""Loading models from an object store on this machine, compared with bare requests and Run:ai's streamer.

    python -m tests.benchmarks.objects [--folder DIR] [--scale X] [--rounds N] [--peers PYTHON]

The object store is SeaweedFS. Bare requests read the same objects with obstore on several threads, and hash
each. Every case runs in a process of its own, which imports its libraries before it is measured. The
limited rows read through a proxy that forwards 100 MB/s. ``--peers`` is an interpreter that has Run:ai's
streamer: ``pip install 'runai-model-streamer[s3]'``.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import obstore
from obstore.store import S3Store

import blobstore
from blobstore.core.rate_limit import RateLimiter
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.operations.transfer.push import push_model
from blobstore.store.local import LocalStore
from tests.benchmarks import common
from tests.support.objects import ObjectServer, running_object_store

_TENSORS = 200
_COLUMNS = 1024
_RATE = 100_000_000
_CHUNK = 1 << 18
_ROOT = Path(__file__).parents[2]

# Prints the seconds of load(), and the peak of private memory, both without what came before.
_MEASURE = """
import mmap, os, re, sys, threading, time
nbytes = int(sys.argv[1])
SCRIPT
memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)  # the system must have the memory ready, see common.borrow_memory
memory[::4096] = bytes(len(range(0, nbytes, 4096)))
memory.close()
def private():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
base = peak = private()
def sample():
    global peak
    while True:
        peak = max(peak, private())
        time.sleep(0.01)
threading.Thread(target=sample, daemon=True).start()
begin = time.perf_counter()
loaded = load()
seconds = time.perf_counter() - begin
print(seconds, max(peak, private()) - base, received, flush=True)
os._exit(0)
"""

_BARE = """
import hashlib
from concurrent.futures import ThreadPoolExecutor
import obstore
from obstore.store import S3Store
received = 0
threads, part, parts, endpoint, bucket, prefix = *map(int, sys.argv[2:5]), *sys.argv[5:]
def load():
    store = S3Store(bucket, prefix=prefix, endpoint=endpoint, client_options={"allow_http": True})
    objects = [(one["size"], one["path"]) for batch in obstore.list(store, "blobs") for one in batch]
    def read(item):
        size, path = item
        start, end = size * part // parts, size * (part + 1) // parts
        data = obstore.get_range(store, path, start=start, end=max(end, start + 1))
        assert parts > 1 or path.endswith(hashlib.sha256(data).hexdigest())
        return data
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(read, objects))
"""

_OURS = """
import blobstore, blobstore.operations.open, blobstore.remotes.remote_store
import blobstore.objects.source, numpy, obstore.store
from blobstore.objects.client import ObjectClient
received = 0
def counted(read):
    def run(*args):
        global received
        found = read(*args)
        received += len(found.data) if found else 0
        return found
    return run
ObjectClient.get, ObjectClient.read = counted(ObjectClient.get), counted(ObjectClient.read)
address, root, cache, cut, rank = sys.argv[2:]
def part(name):
    return _CUTS[cut](int(name.split(".")[1]))
def quarter(count):
    return slice(count * int(rank) // 4, count * (int(rank) + 1) // 4)
_CUTS = {
    "rows": lambda _: (quarter(rows),),
    "Llama": lambda number: (quarter(rows),) if number % 10 < 7 else (slice(None), quarter(columns)),
}
def load():
    global rows, columns
    model = blobstore.open(address, store=root, cache=cache)
    if not cut:
        return model, model.state_dict()
    rows, columns = next(iter(model.specs.values())).shape
    return model, dict(model.iter_tensors(parts=part))
"""

_STREAMER = """
from runai_model_streamer import SafetensorsStreamer
received = 0
def load():
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(sys.argv[2])
        return streamer, dict(streamer.get_tensors())
"""


class Sample(NamedTuple):
    """What one process has measured."""

    seconds: float
    private: int
    """Bytes of private memory at the peak."""
    received: int
    """Bytes of responses."""


class Case(NamedTuple):
    """A script that defines ``load()``, and its arguments."""

    name: str
    script: str
    arguments: tuple[object, ...]
    python: str | Path


class Bench:
    """Cases in processes of their own."""

    def __init__(self, server: ObjectServer, nbytes: int, folder: Path) -> None:
        self.server = server
        self.nbytes = nbytes
        self.folder = folder

    def case(
        self, name: str, script: str, *arguments: object, python: str | Path | None = None
    ) -> Case:
        """Return a case."""
        return Case(name, script, arguments, python or sys.executable)

    def ours(
        self,
        name: str,
        address: str,
        *,
        cache: str = "none",
        cut: str = "",
        rank: int = 0,
        root: Path | None = None,
    ) -> Case:
        """Return a case that opens a model, with an empty local store unless ``root`` is one."""
        return self.case(name, _OURS, address, root or self.folder / "empty", cache, cut, rank)

    def bare(self, name: str, prefix: str, threads: int, part: int = 0, parts: int = 1) -> Case:
        """Return a case that reads all blobs below a prefix, or one of equal parts of each."""
        place = (self.server.endpoint, self.server.bucket, prefix)
        return self.case(f"{name}, {threads} threads", _BARE, threads, part, parts, *place)

    def compare(self, cases: list[Case], rounds: int, limits: int = 1) -> None:
        """Run cases in rounds; print medians, and ratios to the fastest of the first ``limits`` cases."""
        found: dict[str, list[Sample]] = {case.name: [] for case in cases}

        def run(case: Case) -> float:
            sample = self._measure(case)
            found[case.name].append(sample)
            shutil.rmtree(self.folder / "empty", ignore_errors=True)
            return sample.seconds

        common.rounds({case.name: partial(run, case) for case in cases}, rounds)
        base = min(
            statistics.median(one.seconds for one in found[case.name][1:])
            for case in cases[:limits]
        )
        print(f"| {self.nbytes / 1e9:.2f} GB | median s | min | GB/s | time | read | private |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for name, (_, *samples) in found.items():
            seconds = [one.seconds for one in samples]
            middle, received = statistics.median(seconds), samples[-1].received
            private = statistics.median(one.private for one in samples)
            print(
                f"| {name} | {middle:.2f} | {min(seconds):.2f} | {self.nbytes / middle / 1e9:.2f} "
                f"| {middle / base:.2f} | {f'{received / self.nbytes:.3f}' if received else ''} "
                f"| {private / self.nbytes:.2f} |"
            )
        print(flush=True)

    def _measure(self, case: Case) -> Sample:
        code = _MEASURE.replace("SCRIPT", case.script)
        command = [case.python, "-c", code, self.nbytes * 5 // 4, *case.arguments]
        variables = {"PYTHONPATH": str(_ROOT), "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
        result = subprocess.run(
            list(map(str, command)),
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | self.server.environment | variables,
            cwd=_ROOT,
        )
        seconds, private, received = result.stdout.split()
        return Sample(float(seconds), int(private), int(received))


def make_models(folder: Path, nbytes: int) -> LocalStore:
    """Return a store with a model of bf16 weights and one that shares every other tensor with it."""
    rows = nbytes // (2 * _TENSORS * _COLUMNS)
    specs = [
        TensorSpec(f"unit.{number}.weight", DTYPES["BF16"], (rows, _COLUMNS))
        for number in range(_TENSORS)
    ]
    random = np.random.default_rng(0)
    values = random.standard_normal(rows * _COLUMNS, np.float32) * np.float32(0.02)
    weights = (values.view(np.uint32) >> 16).astype(np.uint16)
    store = LocalStore(folder / "store")
    for model, step in (("base", 1), ("tune", 2)):

        def read(name: str, step: int = step) -> Iterator[bytes]:
            number = int(name.split(".")[1])
            yield np.roll(weights, number * 17 if number % step == 0 else -number * 17).tobytes()

        source = common.write_model(folder / model, specs, read)
        blobstore.create(source, model, store=store)
        if model == "base":
            (source / "model.safetensors").rename(folder / "model.safetensors")
        shutil.rmtree(source)
    return store


@contextmanager
def limited(server: ObjectServer, rate: int) -> Iterator[ObjectServer]:
    """Forward connections to a server, and let the responses of all together have ``rate`` bytes per second."""
    host, port = server.endpoint.removeprefix("http://").split(":")
    limiter = RateLimiter(rate)

    def forward(source: socket.socket, target: socket.socket, wait: RateLimiter | None) -> None:
        # The bytes go through a pipe inside the kernel, which takes next to no time of a processor.
        reading, writing = os.pipe()
        with suppress(OSError):
            while count := os.splice(source.fileno(), writing, _CHUNK):
                if wait is not None:
                    wait.spend(count, time.sleep)
                while count:
                    count -= os.splice(reading, target.fileno(), count)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)
        os.close(reading)
        os.close(writing)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                upstream = socket.create_connection((host, int(port)))
                for source, target, wait in (
                    (client, upstream, None),
                    (upstream, client, limiter),
                ):
                    threading.Thread(
                        target=forward, args=(source, target, wait), daemon=True
                    ).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield replace(server, endpoint=f"http://127.0.0.1:{listener.getsockname()[1]}")
        listener.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """Print the tables."""
    options = common.arguments(__doc__, lambda parser: parser.add_argument("--peers", type=Path))
    unit = 8 * _TENSORS * _COLUMNS  # a quarter of the rows must be a whole number
    nbytes = int(2 * common.GIB * options.scale) // unit * unit
    with (
        common.workspace(options.folder) as folder,
        running_object_store(folder / "server") as server,
        patch.dict(os.environ, server.environment),
    ):
        store = make_models(folder, nbytes)
        push_model("base", f"s3://{server.bucket}/all", store=store)
        file = f"s3://{server.bucket}/model.safetensors"
        objects = S3Store(server.bucket, client_options={"allow_http": True})
        obstore.put(objects, "model.safetensors", folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        bench = Bench(server, nbytes, folder)
        compare_all(bench, options.rounds, f"s3://{server.bucket}/all/base", file, options.peers)
        compare_parts(bench, options.rounds, f"s3://{server.bucket}/all/base")
        push_model("tune", f"s3://{server.bucket}/all", store=store)
        compare_fine_tune(bench, options.rounds, f"s3://{server.bucket}/all/tune", store)
    with (
        common.workspace(options.folder) as folder,
        running_object_store(folder / "server") as server,
        patch.dict(os.environ, server.environment),
    ):
        quarter = nbytes // 4 // unit * unit
        store = make_models(folder, quarter)
        for prefix in ("raw", "cold"):
            cold = prefix == "cold"
            push_model("base", f"s3://{server.bucket}/{prefix}", store=store, cold=cold)
        with limited(server, _RATE) as slow:
            compare_cold(Bench(slow, quarter, folder), options.rounds)


def compare_all(bench: Bench, rounds: int, address: str, file: str, peers: Path | None) -> None:
    """Print the table of loading all tensors."""
    bare = [bench.bare("bare requests", "all", threads) for threads in (4, 8, 16)]
    streamer = bench.case("Run:ai's streamer, one file", _STREAMER, file, python=peers)
    bench.compare(
        [
            *bare,
            bench.ours("blobstore, cache=none", address),
            bench.ours("blobstore, cache=keep", address, cache="keep"),
            *([streamer] if peers else []),
        ],
        rounds,
        len(bare),
    )


def compare_parts(bench: Bench, rounds: int, address: str) -> None:
    """Print the table of the ranks of four."""
    cases = [
        bench.ours("all tensors", address),
        *(
            bench.ours(f"rank {rank}: its rows", address, cut="rows", rank=rank)
            for rank in range(4)
        ),
        *(
            bench.bare(f"bare requests, rows of rank {rank}", "all", 16, rank, 4)
            for rank in range(4)
        ),
        bench.ours("rank 1: three of ten by columns, as in Llama", address, cut="Llama", rank=1),
    ]
    bench.compare(cases, rounds)


def compare_fine_tune(bench: Bench, rounds: int, address: str, store: LocalStore) -> None:
    """Print the table of a fine-tune, with a store that has its base and with one that has not."""
    store.names.remove("tune")
    blobstore.gc(store=store, older_than=0, force=True)
    cases = [
        bench.ours("a fine-tune", address),
        bench.ours("a fine-tune whose base is present", address, root=store.root),
    ]
    bench.compare(cases, rounds)


def compare_cold(bench: Bench, rounds: int) -> None:
    """Print the table of a model with and without compressed forms."""
    cases = [
        bench.ours(f"{kind}, {_RATE // 10**6} MB/s", f"s3://{bench.server.bucket}/{prefix}/base")
        for kind, prefix in (("raw", "raw"), ("compressed", "cold"))
    ]
    bench.compare(cases, rounds)


if __name__ == "__main__":
    main()
