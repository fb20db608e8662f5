"""What must hold on a GPU. Each check raises an error if it does not."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch

import blobstore
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import BlobDamaged
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.planning.plan import QuantizeOptions
from blobstore.quantization import dequantize_torch as engine
from blobstore.quantization import quantize_numpy as reference
from blobstore.quantization.formats import FORMATS, Float8Layout
from blobstore.quantization.fp8 import TYPES, decode_stack
from blobstore.safetensors import safe_open
from blobstore.safetensors.torch import _SIZE as SIZES
from blobstore.safetensors.torch import load_file, save_file
from blobstore.store.local import LocalStore
from tests.gpu.lane import Lane
from tests.support.damage import blob_path
from tests.support.dtypes import NAMES
from tests.support.models import add_blobs, blob, write_folder
from tests.unit.cli.running import run_json

ROOT = Path(__file__).parents[2]
Need = Literal["a GPU", "two GPUs", "vLLM", "compute-sanitizer", "transformers", "accelerate"]
Check = Callable[[Lane], None]


class Registered(NamedTuple):
    title: str
    check: Check
    needs: tuple[Need, ...]


CHECKS: dict[str, Registered] = {}
"""By name, in the order in which they run."""


def register(title: str, *needs: Need) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        CHECKS[check.__name__] = Registered(title, check, needs)
        return check

    return add


def run(*command: str, seconds: int = 240, **environment: str) -> str:
    """Run a program of this checkout; return what it prints, or raise an error with the end of it."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-3000:]}"
    return done.stdout


# Inputs


def store_of_all_types(lane: Lane) -> LocalStore:
    """Return a store with a model of all types that torch has, in sizes from 1 byte to 300 MB."""
    store = LocalStore(lane.folder / "store")
    if store.root.exists():
        return store
    random = np.random.default_rng(0)
    largest = int(300e6 * lane.scale)
    blobs: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for dtype in (*(it for it, name in NAMES.items() if hasattr(torch, name)), DType.F4):
        for count in (2, 30, 4098):
            blobs[f"{dtype.value}.{count}"] = (dtype, (count // 2, 2))
    blobs |= {
        "scalar": (DType.F32, ()),
        "empty": (DType.BF16, (0, 3)),
        "byte": (DType.U8, (1,)),
        "large": (DType.BF16, (largest // 4, 2)),
        "odd": (DType.U8, (largest // 3 + 1,)),
    }
    made = {}
    for name, (dtype, shape) in blobs.items():
        nbytes = TensorSpec(name, dtype, shape).nbytes
        data = random.integers(0, 2 if dtype is DType.BOOL else 256, nbytes, np.uint8)
        made[name] = blob((name, dtype.value, shape, data.tobytes()))
    add_blobs(store, "m", made)
    return store


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().reshape(-1).view(torch.uint8)


def expected_of(store: LocalStore, name: str = "m", **options: Any) -> dict[str, torch.Tensor]:
    with blobstore.open(name, store=store, framework="torch", **options) as model:
        return model.state_dict()


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        if not torch.equal(bits(found[name]), bits(tensor)):
            raise AssertionError(f"tensor {name} differs")


def opened(lane: Lane, store: LocalStore, name: str = "m", **options: Any) -> blobstore.Model:
    return blobstore.open(name, store=store, framework="torch", device=lane.device, **options)


@contextlib.contextmanager
def busy(lane: Lane) -> Iterator[None]:
    """Keep the current stream of a GPU busy with work that was requested before."""
    if lane.is_gpu:
        matrix = torch.randn(4096, 4096, device=lane.device)
        for _ in range(50):
            matrix = torch.tanh(matrix @ matrix)
    yield


# Copies


@register("the unit tests of everything that touches a device")
def unit_tests(lane: Lane) -> None:
    names = [
        *("safetensors/test_cuda.py", "models/test_device.py", "models/test_frameworks.py"),
        *("safetensors/test_copies.py", "models/test_prefetch.py"),
        *("quantization/test_dequantize_torch.py", "integrations/vllm/test_loader.py"),
    ]
    files = [f"tests/unit/{name}" for name in names]
    base = f"--basetemp={lane.folder / 'pytest'}"
    run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", base, *files)


@register("every type and size arrives bit for bit")
def types(lane: Lane) -> None:
    store = store_of_all_types(lane)
    expected = expected_of(store)
    for read in ("mmap", "pread"):
        with opened(lane, store, read=read) as model:
            check_equal(model.state_dict(), expected)
            check_equal({name: model[name] for name in model}, expected)


@register("repeated loads are equal while the stream has other work")
def busy_stream(lane: Lane) -> None:
    store = store_of_all_types(lane)
    expected = expected_of(store)
    for _ in range(20 if lane.is_gpu else 3):
        with opened(lane, store) as model, busy(lane):
            check_equal(model.state_dict(), expected)


@register("loads are equal on a stream of the caller's own", "a GPU")
def own_stream(lane: Lane) -> None:
    store = store_of_all_types(lane)
    expected = expected_of(store)
    stream: Any = torch.cuda.Stream()
    for _ in range(5):
        with torch.cuda.stream(stream), busy(lane), opened(lane, store) as model:
            found = {name: tensor.clone() for name, tensor in model.iter_tensors()}
        stream.synchronize()
        check_equal(found, expected)


@register("prefetched tensors are equal on the caller's stream and on another", "a GPU")
def prefetched(lane: Lane) -> None:
    store = store_of_all_types(lane)
    expected = expected_of(store)
    path = lane.folder / "a.safetensors"
    loadable = {name: one for name, one in expected.items() if one.dtype in SIZES}
    save_file(loadable, path)
    other: Any = torch.cuda.Stream
    for stream in (torch.cuda.current_stream(), other()):
        with torch.cuda.stream(stream), busy(lane), opened(lane, store) as model:
            check_equal(dict(model.prefetch()), expected)
            loader = model.prefetch()
            with torch.cuda.stream(other()):
                check_equal({name: one.clone() for name, one in loader}, expected)
            for backend in ("mmap", "pread"):
                with safe_open(path, "pt", lane.device, backend=backend) as file:
                    check_equal(dict(file.prefetch()), loadable)
                check_equal(load_file(path, lane.device, backend=backend), loadable)


@register("loads are equal without torch's cache of device memory", "a GPU")
def without_cache(lane: Lane) -> None:
    run("-m", "tests.gpu", "--only", "types", "dropped", PYTORCH_NO_CUDA_MEMORY_CACHING="1")


@register("tensors that the consumer drops at once do no harm")
def dropped(lane: Lane) -> None:
    store = store_of_all_types(lane)
    expected = expected_of(store)
    for kept in (0, 1):
        with opened(lane, store) as model, busy(lane):
            found, names = {}, []
            for number, (name, tensor) in enumerate(model.iter_tensors()):
                if number % 2 == kept:
                    found[name] = tensor
                    names.append(name)
                elif tensor.numel() and tensor.dtype == torch.float32:
                    torch.zeros_like(tensor)  # wants memory of the same size
                del tensor
        check_equal(found, {name: expected[name] for name in names})


@register("an error of the consumer leaves no memory behind")
def consumer_error(lane: Lane) -> None:
    store = store_of_all_types(lane)
    before = lane.allocated()

    def consume() -> None:
        with opened(lane, store) as model:
            for _ in itertools.islice(model.iter_tensors(), 3):
                pass
            raise ArithmeticError

    for _ in range(3):
        with pytest.raises(ArithmeticError):
            consume()
        assert lane.allocated() == before
    types(lane)


@register("a second device is used without touching the first", "two GPUs")
def second_device(lane: Lane) -> None:
    store = store_of_all_types(lane)
    code = (
        "import sys, torch, blobstore\n"
        "with blobstore.open('m', store=sys.argv[1], framework='torch', device='cuda:1') as model:\n"
        "    found = model.state_dict()\n"
        "    found |= dict(model.prefetch())\n"
        "torch.cuda.synchronize(1)\n"
        "import subprocess, os\n"
        "assert torch.cuda.current_device() == 0\n"
        "print(torch.cuda.memory_reserved(0))\n"
        "query = ['nvidia-smi', '--query-compute-apps=pid,gpu_bus_id', '--format=csv,noheader']\n"
        "rows = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()\n"
        "mine = {row.split(',')[1] for row in rows if row.split(',')[0] == str(os.getpid())}\n"
        "assert len(mine) <= 1, mine\n"
    )
    assert run("-c", code, str(store.root)).split()[-1] == "0"
    check_equal(
        blobstore.open("m", store=store, framework="torch", device="cuda:1").state_dict(),
        expected_of(store),
    )


@register("loads in inference mode are equal")
def inference_mode(lane: Lane) -> None:
    store = store_of_all_types(lane)
    expected = expected_of(store)
    with torch.inference_mode(), opened(lane, store) as model:
        check_equal(model.state_dict(), expected)


@register("a frozen model arrives bit for bit")
def frozen(lane: Lane) -> None:
    store = store_of_all_types(lane)
    expected = expected_of(store)
    freeze_models(["m"], store=store)
    for read in ("mmap", "pread"):
        with opened(lane, store, read=read) as model:
            check_equal(model.state_dict(), expected)


@register("a blob that is cut short while it is read is an error")
def cut_short(lane: Lane) -> None:
    store = store_of_all_types(lane)
    before = lane.allocated()
    path = blob_path(store, "large")
    path.chmod(0o644)
    with opened(lane, store, read="pread") as model:
        found = model.iter_tensors()
        if lane.is_gpu:  # smaller inputs are all on their way by then
            next(found)
        os.truncate(path, 4096)
        with pytest.raises(BlobDamaged, match="large"):
            for _ in found:
                pass
        del found
    assert lane.allocated() == before


# Quantized weights


@register("weights of every type are dequantized as on the processor, bit for bit")
def dequantization(lane: Lane) -> None:
    random = np.random.default_rng(1)
    for item in FORMATS.values():
        if not item.group_sizes:
            continue  # see float8()
        group_size = item.group_sizes[0]
        rows, groups = max(int(4096 * lane.scale), 8), 128
        words = random.integers(0, 2**32, (rows, item.words(groups * group_size)), np.uint32)
        shape = (rows, groups)
        scale: Any = random.integers(1, 254 if item.mode != "nvfp4" else 126, shape, np.uint8)
        bias = None
        if item.has_bias:
            scale = random.standard_normal(shape).astype(np.float16)
            bias = random.standard_normal(shape).astype(np.float16)
        arrays = [
            None if array is None else torch.from_numpy(array) for array in (words, scale, bias)
        ]
        moved = [None if array is None else array.to(lane.device) for array in arrays]
        global_scale = 0.37 if item.mode == "nvfp4" else None
        options = (item, group_size, "bfloat16", global_scale)
        weight, factors, offsets = moved
        assert weight is not None
        assert factors is not None
        expected = reference.dequantize(words, scale, bias, *options)  # type: ignore[arg-type]
        found = engine.dequantize(weight, factors, offsets, *options)
        numbers = found.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        # The reference gives NaNs of another bit pattern.
        same = (numbers.view(np.uint16) == expected.view(np.uint16)) | (
            np.isnan(numbers) & np.isnan(expected)
        )
        assert same.all(), f"{item.name}: {(~same).sum()} values differ"


@register("8-bit floats are decoded as on the processor, bit for bit")
def float8(lane: Lane) -> None:
    random = np.random.default_rng(3)
    shape = (3, max(int(4096 * lane.scale), 40) // 2 * 2, 1100)
    blocks = {"tensor": shape[1:], "channel": (1, shape[2]), "block": (128, 128)}
    for (title, block), code in itertools.product(blocks.items(), (DType.F8_E4M3, DType.F8_E5M2)):
        sharing: Any = block if title == "block" else title
        layout = Float8Layout(sharing, block, code, DType.F32)
        data = random.integers(0, 256, shape, np.uint8)
        scale = random.standard_normal(layout.blocks(shape)[1]).astype(np.float32)
        expected = decode_stack(data.view(TYPES[code]), scale, layout, "bfloat16")
        weight = torch.from_numpy(data).view(getattr(torch, NAMES[code])).to(lane.device)
        factors = torch.from_numpy(scale).to(lane.device)
        found = engine.decode(weight, factors, layout, torch.bfloat16).cpu().view(torch.int16)
        same = found.numpy().view(np.uint16) == expected.view(np.uint16)
        assert same.all(), f"{title} {code.value}: {(~same).sum()} values differ"


def quantizable_folder(folder: Path, scale: float) -> Path:
    random = np.random.default_rng(2)
    width = max(int(4096 * scale) // 128 * 128, 256)
    return write_folder(
        folder,
        {
            f"model.layers.{layer}.mlp.{name}.weight": random.standard_normal(
                (width, width), np.float32
            ).astype(ml_dtypes.bfloat16)
            for layer in range(4)
            for name in ("gate_proj", "up_proj", "down_proj")
        },
    )


@register("quantized models and their slices equal those on the processor")
def quantized_models(lane: Lane) -> None:
    store = LocalStore(lane.folder / "store")
    source = quantizable_folder(lane.folder / "source", lane.scale)
    for kind in ("int4", "int8", "nvfp4", "mxfp4", "mxfp8"):
        blobstore.create(
            source, kind, store=store, quantize=QuantizeOptions(kind, policy="uniform")
        )
        expected = expected_of(store, kind, dequantize=True)
        with opened(lane, store, kind, dequantize=True) as model:
            check_equal(model.state_dict(), expected)
            for name in itertools.islice(model, 2):
                part = model.get_slice(name)[3:70, 32:96]
                assert torch.equal(
                    bits(part.contiguous()), bits(expected[name][3:70, 32:96].clone())
                )


# Speed, for the table in docs/internals/performance.md


@register("the benchmark of loading runs", "a GPU")
def loading_speed(lane: Lane) -> None:
    sys.stdout.write(run("-m", "tests.benchmarks.device", "--scale", "0.25", "--rounds", "3"))


@register("the benchmark of dequantization runs", "a GPU")
def dequantization_speed(lane: Lane) -> None:
    sys.stdout.write(run("-m", "tests.benchmarks.quantize", "--scale", "0.05", "--rounds", "3"))


def bench_on(lane: Lane, device: str, *, exit_code: int = 0) -> Any:
    """Run ``bench`` in this process; return its JSON."""
    store = store_of_all_types(lane).root
    return run_json("bench", "m", f"--device={device}", "--store", store, exit_code=exit_code)


@register("bench compares loads with bare copies")
def bench(lane: Lane) -> None:
    device = "cuda:0" if lane.is_gpu else lane.device
    before = lane.allocated()
    found = bench_on(lane, device)
    rows = [one for one in found["measurements"] if one["device"]]
    copies = ["pageable, one by one", "pinned, one by one", "in the buffers of open"]
    if not lane.is_gpu:
        del copies[1]
    loads = [f'open(device="{device}"{way})' for way in ("", ', read="populate"', ', read="pread"')]
    assert [(one["place"], one["how"]) for one in rows] == [
        *(("host memory", how) for how in copies),
        *(("disk", how) for how in loads),
        *(("page cache", how) for how in loads),
    ]
    assert {one["device"] for one in rows} == {device}
    nbytes = sum(tensor.nbytes for tensor in expected_of(store_of_all_types(lane)).values())
    assert {one["bytes"] for one in rows} == {nbytes}
    # Nothing is faster than memory: a copy that was not waited for would be.
    assert all(0 < one["bytes_per_second"] < 5e12 for one in rows), rows
    assert any(line.startswith(f"page cache to {device}: open(") for line in found["advice"])
    assert len(found["notices"]) == (0 if lane.is_gpu else 1)
    assert lane.allocated() == before


@register("bench finds a GPU by itself, and loads nothing for which it has no memory", "a GPU")
def bench_memory(lane: Lane) -> None:
    found = bench_on(lane, "auto")
    assert {one["device"] for one in found["measurements"]} == {None, "cuda:0"}
    size = found["measurements"][-1]["bytes"]
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(0)
    ballast = torch.empty(free - size // 4, dtype=torch.uint8, device="cuda:0")
    error = bench_on(lane, "cuda:0", exit_code=1)["error"]["message"]
    assert "of free memory, too little for a tensor" in error, error
    found = bench_on(lane, "auto")
    assert {one["device"] for one in found["measurements"]} == {None}
    assert any("cuda:0 was not measured" in line for line in found["notices"])
    del ballast
    torch.cuda.empty_cache()
