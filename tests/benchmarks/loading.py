"""Loading a bf16 model of 1 GiB in 200 tensors into torch, compared with other loaders and the disk.

"Ready" means that every tensor can be used, "touched" that every byte was read too. "Cold" means that
the files are not in the page cache; the limit is then direct reads, eight requests of 4 MiB at a time,
into memory of large pages. fastsafetensors and Run:ai's streamer are measured if they are installed.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
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


def main() -> None:
    """Print the tables."""
    options = common.arguments(__doc__)
    with common.workspace(options.folder) as folder:
        nbytes = int(common.GIB * options.scale)
        source = make_model(folder / "model", nbytes)
        file = source / "model.safetensors"
        store = blobstore.LocalStore(folder / "store")
        blobstore.create(source, "m", store=store)
        blobs = [
            path
            for path in store.folder("blobs").iterdir()
            if path.stat().st_size > nbytes // _TENSORS // 2
        ]
        assert len(blobs) == _TENSORS

        def ours(**how: Any) -> object:
            model = blobstore.open("m", store=store, framework="torch", **how)
            return model, model.state_dict()

        def of_blobs() -> object:
            return {str(path): tensor for path in blobs for tensor in load_file(path).values()}

        loaders: dict[str, Callable[[], Any]] = {
            "safetensors, one file": lambda: load_file(file),
            "safetensors, 200 blobs": of_blobs,
            "blobstore": ours,
            "blobstore, read=mmap": lambda: ours(read="mmap"),
            "blobstore, read=populate": lambda: ours(read="populate"),
            "blobstore, read=pread": lambda: ours(read="pread"),
        }

        if find_spec("fastsafetensors"):
            loaders["fastsafetensors, one file"] = lambda: Fastsafetensors(file)

        def touched(load: Callable[[], Any]) -> object:
            found = load()
            touch((found[1] if isinstance(found, tuple) else found).values())
            return found

        def mlx() -> object:
            arrays = mx.load(str(file))
            mx.eval(arrays)
            return arrays

        print(f"{nbytes / common.GIB:.2f} GiB bf16, {_TENSORS} tensors\n\nWarm, ready\n")
        common.warm(folder)
        count = options.rounds * 2
        cases: dict[str, Callable[[], float]] = {
            name: partial(common.timed, load) for name, load in loaders.items()
        }
        common.table(common.rounds(cases, count), "safetensors, one file")
        print("Warm, touched\n")
        cases = {
            name: partial(common.timed, partial(touched, load)) for name, load in loaders.items()
        }
        cases["mx.load and eval"] = lambda: common.timed(mlx)
        if find_spec("runai_model_streamer"):
            cases["Run:ai's streamer, one file"] = lambda: common.timed(lambda: streamed(file))
        common.table(common.rounds(cases, count), "safetensors, one file", nbytes)
        warm_cases = cases
        print("Into memory of its own, float16 to numpy\n")
        half = make_model(folder / "half", nbytes, "F16") / "model.safetensors"
        blobstore.create(half.parent, "half", store=store)
        os.sync()
        cases = {name: partial(copied, name, half, store) for name in COPIES}
        at_hand = partial(common.borrow_memory, nbytes * 9 // 4)
        common.table(common.rounds(cases, count), "safetensors, of the file's bytes", nbytes)
        print("Cold, touched\n")
        limit = "8 requests of 4 MiB, past the page cache"
        cold = warm_cases | {limit: lambda: common.timed(lambda: read_directly(blobs))}

        def chill() -> None:
            drop([file, *blobs])
            at_hand()

        common.table(common.rounds(cold, options.rounds, chill), limit, nbytes)
        if not fuse_mount.why_not():
            on_a_slow_mount(store, folder / "mount", options.rounds, nbytes)


if __name__ == "__main__":
    main()
