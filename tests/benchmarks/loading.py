"""Loading a bf16 model of 1 GiB in 200 tensors into torch, compared with other loaders and the disk.

    python -m tests.benchmarks.loading [--folder DIR] [--scale X] [--rounds N] [TABLE ...]


"Ready" means that every tensor can be used, "touched" that every byte was read too. "Cold" means that
the files are not in the page cache; the limit is then direct reads, eight requests of 4 MiB at a time,
into memory of large pages. fastsafetensors and Run:ai's streamer are measured if they are installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import torch
from safetensors.numpy import load as load_bytes
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file

import blobstore
from blobstore.core.mmap import MappedRegion
from blobstore.core.tensor import DTYPES, TensorSpec
from tests.benchmarks import common
from tests.support import fuse_mount

_TENSORS = 200
_REQUEST = 4 << 20
_REQUESTS = 8


def make_model(folder: Path, nbytes: int, dtype: str = "BF16") -> Path:
    """Write a model folder."""
    rows = nbytes // (_TENSORS * 2 * 1024)
    specs = [
        TensorSpec(f"model.layers.{i // 10}.p{i % 10}.weight", DTYPES[dtype], (rows, 1024))
        for i in range(_TENSORS)
    ]
    return common.write_model(folder, specs, lambda _: [os.urandom(rows * 2048)])


def touch(tensors: Iterable[torch.Tensor]) -> None:
    """Read every byte."""
    for tensor in tensors:
        tensor.view(torch.int64).max()


def drop(paths: Iterable[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_directly(paths: list[Path]) -> object:
    """Read files past the page cache."""
    sizes = [-(-path.stat().st_size // mmap.PAGESIZE) * mmap.PAGESIZE for path in paths]
    region = MappedRegion(sizes, writable=True, filled=True)

    def read(request: tuple[int, int]) -> None:
        slot, begin = request
        descriptor = os.open(paths[slot], os.O_RDONLY | os.O_DIRECT)
        end = min(begin + _REQUEST, sizes[slot])
        os.preadv(descriptor, [region.slot_view(slot, begin, end)], begin)
        os.close(descriptor)

    requests = [
        (slot, begin) for slot, size in enumerate(sizes) for begin in range(0, size, _REQUEST)
    ]
    with ThreadPoolExecutor(_REQUESTS) as pool:
        list(pool.map(read, requests))
    touch([torch.frombuffer(region.memory, dtype=torch.int64)])
    return region


class Fastsafetensors(dict[str, torch.Tensor]):
    """A file loaded with fastsafetensors, whose memory has to be freed explicitly."""

    def __init__(self, file: Path) -> None:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        self._loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
        self._loader.add_filenames({0: [str(file)]})
        self._buffers = self._loader.copy_files_to_device()
        super().__init__({key: self._buffers.get_tensor(key) for key in self._loader.get_keys()})

    def __del__(self) -> None:
        self.clear()
        self._buffers.close()
        self._loader.close()


def streamed(file: Path) -> object:
    """Load a file with Run:ai's streamer, and read every byte."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(file))
        touch(tensor for _, tensor in streamer.get_tensors())
    return None


COPIES: dict[str, Callable[[Path, blobstore.LocalStore], object]] = {
    "safetensors, of the file's bytes": lambda file, _: load_bytes(file.read_bytes()),
    "safetensors, of the file": lambda file, _: load_arrays(file),
    "blobstore, read=pread": lambda _, store: blobstore.open(
        "half", store=store, read="pread"
    ).state_dict(),
}


def copied(case: str, file: Path, store: blobstore.LocalStore) -> float:
    """Return the seconds of a copy in a process of its own, which has no memory from one before.

    Memory is borrowed there: while the libraries are imported the system may give it away again.
    """
    code = (
        "import sys; from pathlib import Path; from tests.benchmarks.loading import *\n"
        "case, file, root, nbytes = sys.argv[1:]\n"
        "store = blobstore.LocalStore(root)\n"
        "common.borrow_memory(int(nbytes))\n"
        "print(common.timed(lambda: COPIES[case](Path(file), store)))"
    )
    at_hand = file.stat().st_size * 9 // 4
    command = [sys.executable, "-c", code, case, str(file), str(store.root), str(at_hand)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(result.stdout)


def on_a_slow_mount(store: blobstore.LocalStore, place: Path, rounds: int, nbytes: int) -> None:
    """Print how fast a model is read through FUSE, with 1 ms per request and 200 MB/s."""
    place.mkdir()

    def sequentially(root: Path) -> None:
        for path in sorted((root / "blobs").iterdir()):
            with path.open("rb", buffering=0) as file:
                while file.read(8 << 20):
                    pass

    def opened(root: Path, **how: Any) -> None:
        # Nothing is remembered there, because it is read-only.
        with blobstore.open(
            "m", store=blobstore.LocalStore(root), framework="torch", **how
        ) as model:
            touch(model.state_dict().values())

    def mounted(read: Callable[[Path], None]) -> float:
        with fuse_mount.mounted(store.root, place, delay=1e-3, rate=2e8) as mount:
            return common.timed(lambda: read(mount.path))

    first = "one sequential read of the files"
    cases: dict[str, Callable[[Path], None]] = {
        first: sequentially,
        "blobstore": opened,
        "blobstore, verify=digest": partial(opened, verify="digest"),
        "blobstore, read=mmap": partial(opened, read="mmap"),
    }
    print("On a mount with 1 ms per request and 200 MB/s, touched\n")
    common.table(
        common.rounds({name: partial(mounted, read) for name, read in cases.items()}, rounds),
        first,
        nbytes,
    )


def hashed(paths: Iterable[Path]) -> None:
    """Hash files on all processors, each by reads of 1 MiB."""

    def work(path: Path) -> None:
        digest, buffer = hashlib.sha256(), bytearray(1 << 20)
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(work, paths))


def by_processes(count: int, root: Path, bytes_read: list[int]) -> float:
    """Return the seconds in which processes load the model together, and note what they read from the disk."""
    code = (
        "import sys; from tests.benchmarks.loading import *\n"
        "torch.set_num_threads(1)  # more than there are processors would wait for each other\n"
        "store = blobstore.LocalStore(sys.argv[1])\n"
        "print(flush=True); sys.stdin.readline()\n"
        "model = blobstore.open('m', store=store, framework='torch')\n"
        "touch(model.state_dict().values())\n"
        "print(re.findall('read_bytes: (.*)', Path('/proc/self/io').read_text())[0], flush=True)"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-c", code, str(root)]
        processes = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(count)]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        before = sum(_bytes_read(process.pid) for process in processes)
        started = time.perf_counter()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        read = sum(int(process.stdout.readline()) for process in processes if process.stdout)
        taken = time.perf_counter() - started
    bytes_read.append(read - before)
    return taken


def _bytes_read(pid: int) -> int:
    return int(re.findall("read_bytes: (.*)", Path(f"/proc/{pid}/io").read_text())[0])


class Tables:
    """The models, and a method per table."""

    def __init__(self, folder: Path, nbytes: int, rounds: int) -> None:
        self._folder, self._nbytes, self._rounds = folder, nbytes, rounds
        source = make_model(folder / "model", nbytes)
        self._file = source / "model.safetensors"
        self._store = blobstore.LocalStore(folder / "store")
        blobstore.create(source, "m", store=self._store)
        self._blobs = [
            path
            for path in self._store.folder("blobs").iterdir()
            if path.stat().st_size > nbytes // _TENSORS // 2
        ]
        assert len(self._blobs) == _TENSORS
        print(f"{nbytes / common.GIB:.2f} GiB bf16, {_TENSORS} tensors\n")
        common.warm(folder)
        self._loaders: dict[str, Callable[[], Any]] = {
            "safetensors, one file": lambda: load_file(self._file),
            "safetensors, 200 blobs": self._of_blobs,
            "blobstore": self._ours,
            "blobstore, read=mmap": lambda: self._ours(read="mmap"),
            "blobstore, read=populate": lambda: self._ours(read="populate"),
            "blobstore, read=pread": lambda: self._ours(read="pread"),
        }
        if find_spec("fastsafetensors"):
            self._loaders["fastsafetensors, one file"] = lambda: Fastsafetensors(self._file)

    def _ours(self, **how: Any) -> object:
        model = blobstore.open("m", store=self._store, framework="torch", **how)
        return model, model.state_dict()

    def _of_blobs(self) -> object:
        return {str(path): tensor for path in self._blobs for tensor in load_file(path).values()}

    def _touched(self, load: Callable[[], Any]) -> float:
        def work() -> object:
            found = load()
            touch((found[1] if isinstance(found, tuple) else found).values())
            return found

        return common.timed(work)

    def _all_touched(self) -> dict[str, Callable[[], float]]:
        def mlx() -> object:
            arrays = mx.load(str(self._file))
            mx.eval(arrays)
            return arrays

        cases = {name: partial(self._touched, load) for name, load in self._loaders.items()}
        found: dict[str, Callable[[], float]] = {
            **cases,
            "mx.load and eval": lambda: common.timed(mlx),
        }
        if find_spec("runai_model_streamer"):
            found["Run:ai's streamer, one file"] = lambda: common.timed(
                lambda: streamed(self._file)
            )
        return found

    def _at_hand(self) -> None:
        common.borrow_memory(self._nbytes * 9 // 4)

    def _chill(self) -> None:
        drop([self._file, *self._blobs])
        self._at_hand()

    def warm(self) -> None:
        """Load what is in the page cache, and read every byte of it."""
        count = self._rounds * 2
        cases: dict[str, Callable[[], float]] = {
            name: partial(common.timed, load) for name, load in self._loaders.items()
        }
        print("Warm, ready\n")
        common.table(common.rounds(cases, count), "safetensors, one file")
        print("Warm, touched\n")
        seconds = common.rounds(self._all_touched(), count)
        common.table(seconds, "safetensors, one file", self._nbytes)

    def copies(self) -> None:
        """Load into private memory."""
        print("Into memory of its own, float16 to numpy\n")
        half = make_model(self._folder / "half", self._nbytes, "F16") / "model.safetensors"
        blobstore.create(half.parent, "half", store=self._store)
        os.sync()
        cases = {name: partial(copied, name, half, self._store) for name in COPIES}
        seconds = common.rounds(cases, self._rounds * 2)
        common.table(seconds, "safetensors, of the file's bytes", self._nbytes)

    def cold(self) -> None:
        """Load what is not in the page cache."""
        print("Cold, touched\n")
        limit = "8 requests of 4 MiB, past the page cache"
        cases = self._all_touched() | {
            limit: lambda: common.timed(lambda: read_directly(self._blobs))
        }
        common.table(common.rounds(cases, self._rounds, self._chill), limit, self._nbytes)

    def verified(self) -> None:
        """Load with each blob hashed, cold and warm."""
        plain = "blobstore"
        loads: dict[str, Callable[[], object]] = {
            plain: self._ours,
            "blobstore, verify=digest": partial(self._ours, verify="digest"),
            "blobstore, verify=rehash": partial(self._ours, verify="rehash"),
        }
        print("Verified, cold, touched\n")
        touched = {name: partial(self._touched, load) for name, load in loads.items()}
        common.table(common.rounds(touched, self._rounds, self._chill), plain, self._nbytes)
        limit = "sha256 of the blobs by all processors"
        loads[limit] = lambda: hashed(self._blobs)
        common.warm(self._folder)
        print("Verified, warm, ready\n")
        ready = {name: partial(common.timed, load) for name, load in loads.items()}
        common.table(common.rounds(ready, self._rounds * 2), limit, self._nbytes)

    def processes(self) -> None:
        """Load in several processes at once, cold."""
        one, read = "1 process", {1: list[int](), 4: list[int]()}
        cases = {
            f"{count} process{'es' if count > 1 else ''}": partial(
                by_processes, count, self._store.root, read[count]
            )
            for count in read
        }
        print("Processes that load at once, cold, touched\n")
        common.table(common.rounds(cases, self._rounds, self._chill), one, self._nbytes)
        shares = {count: statistics.median(found) / self._nbytes for count, found in read.items()}
        print(
            *(f"{count}: {share:.3f} of its bytes read." for count, share in shares.items()), "\n"
        )

    def slow(self) -> None:
        """Load from a slow mount."""
        if not fuse_mount.why_not():
            on_a_slow_mount(self._store, self._folder / "mount", self._rounds, self._nbytes)


_TABLES = ("warm", "copies", "cold", "verified", "processes", "slow")


def main() -> None:
    """Print the tables."""
    options = common.arguments(
        __doc__,
        lambda parser: parser.add_argument(
            "tables", nargs="*", metavar="TABLE", help=f"of {', '.join(_TABLES)}; by default all"
        ),
    )
    with common.workspace(options.folder) as folder:
        tables = Tables(folder, int(common.GIB * options.scale), options.rounds)
        for name in options.tables or _TABLES:
            getattr(tables, name)()


if __name__ == "__main__":
    main()
