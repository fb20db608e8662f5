from __future__ import annotations

import itertools
import json
import multiprocessing
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import blobstore
from blobstore.errors import (
    BlobstoreError,
    DamagedSource,
    NameConflict,
    UnsupportedSource,
    UsageError,
)
from blobstore.operations.create.create import create
from blobstore.operations.create.save import _KEPT, _SAVES, save
from blobstore.safetensors import numpy as arrays
from blobstore.store.local import LocalStore
from blobstore.store.names import Names

TENSORS = {
    "embed.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "norm.weight": np.ones(4, ml_dtypes.bfloat16),
    "step": np.array(7, np.int64),
    "empty": np.zeros((0, 3), np.float16),
}
CONFIG = {"model_type": "toy", "author": "Zoë"}
# The code of an error that a save may raise.
EXPECTED = "blobstore.BlobstoreError('the disk\\nis full')"


def converted(framework: str, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return arrays as tensors of a framework."""
    if framework == "torch":
        from blobstore.safetensors import torch

        return dict(torch.load(arrays.save(tensors)))
    if framework == "mlx":
        from blobstore.safetensors import mlx

        return dict(mlx.load(arrays.save(tensors)))
    return tensors


def test_gives_back_the_tensors(store: LocalStore, framework: str) -> None:
    saved = save(converted(framework, TENSORS), "m", files={"config.json": CONFIG}, store=store)
    opened = blobstore.open("m", store=store)
    assert saved.tensors == len(TENSORS) == len(opened)
    for name, array in TENSORS.items():
        found = np.asarray(opened[name])
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()
    assert opened.config == CONFIG


def test_has_the_blobs_of_an_import_of_the_same_tensors_and_is_exported_as_that_file(
    store: LocalStore, tmp_path: Path
) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    arrays.save_file(TENSORS, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2, ensure_ascii=False) + "\n")
    create(folder, "created", store=store)
    saved = save(TENSORS, "saved", files={"config.json": CONFIG}, store=store)
    assert saved.bytes_written < 1500  # the record and the config of the manifest
    blobstore.export("saved", tmp_path / "exported", store=store)
    for path in folder.iterdir():
        assert (tmp_path / "exported" / path.name).read_bytes() == path.read_bytes()
    assert not blobstore.verify("saved", store=store).faults


@pytest.mark.parametrize(("framework", "metadata"), [("torch", "pt"), ("mlx", "mlx")])
def test_the_exported_file_names_the_framework(
    store: LocalStore, tmp_path: Path, framework: str, metadata: str
) -> None:
    if framework == "mlx":
        pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
    save(converted(framework, TENSORS), "m", store=store)
    blobstore.export("m", tmp_path / "exported", store=store)
    with blobstore.safetensors.safe_open(tmp_path / "exported/model.safetensors", "np") as file:
        assert file.metadata() == {"format": metadata}


def test_a_frozen_base_is_stored_once(store: LocalStore) -> None:
    base = {f"layers.{number}.weight": np.full((64, 64), number, np.float32) for number in range(8)}
    for step in range(10):
        saved = save(base | {"adapter": np.full(8, step)}, f"run:step-{step}", store=store)
        assert saved.bytes_present > 8 * 64 * 64 * 4 or not step
    blobs = list(store.folder("blobs").iterdir())
    assert sum(path.stat().st_size > 64 * 64 * 4 for path in blobs) == 8


@pytest.mark.parametrize("framework", ["numpy", "torch"])  # arrays of MLX do not change
def test_a_background_save_keeps_what_the_tensors_were(store: LocalStore, framework: str) -> None:
    tensors = converted(framework, {"x": np.zeros(1000, np.float32)})
    future = save(tensors, "m", store=store, background=True)
    tensors["x"][:] = 1
    assert future.result().tensors == 1
    assert not np.asarray(blobstore.open("m", store=store)["x"]).any()


def test_a_background_save_reports_its_error_in_the_future(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BlobstoreError("no")

    monkeypatch.setattr(Names, "publish", fail)
    future = save(TENSORS, "m", store=store, background=True)
    with pytest.raises(BlobstoreError, match="no"):
        future.result()
    assert not list(store.references())


def test_a_background_save_that_failed_fails_the_next_one(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Names, "publish", lambda *_, **__: 1 / 0)
    save(TENSORS, "m", store=store, background=True)
    with pytest.raises(ZeroDivisionError):
        save(TENSORS, "m", store=store, background=True)
    monkeypatch.undo()
    save(TENSORS, "m", store=store, background=True).result()


def test_background_saves_copy_to_the_same_memory(store: LocalStore) -> None:
    def saved(size: int) -> object:
        array = np.full(size, size, np.uint8)
        save({"x": array}, "m", store=store, background=True).result()
        assert blobstore.open("m", store=store)["x"].tolist() == array.tolist()
        (memory,) = _KEPT
        return memory.obj

    _KEPT.clear()  # what other tests have left
    first = saved(100)
    assert saved(100) is saved(50) is first
    assert saved(101) is not first
    save(TENSORS, "m", store=store)
    assert not _KEPT


def test_saves_of_several_threads_do_not_share_memory(store: LocalStore) -> None:
    def saved(number: int) -> None:
        save({"x": np.full(1 << 20, number)}, f"m:{number}", store=store, background=True).result()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(saved, range(8)))
    for number in range(8):
        assert (blobstore.open(f"m:{number}", store=store)["x"] == number).all()


@pytest.mark.parametrize("is_whole", [False, True])
def test_an_adapter_is_exported_to_the_file_that_peft_reads(
    store: LocalStore, tmp_path: Path, is_whole: bool
) -> None:
    files: dict[str, Any] = {"adapter_config.json": {}} | (
        {"config.json": CONFIG} if is_whole else {}
    )
    save(TENSORS, "m", files=files, store=store)
    blobstore.export("m", tmp_path / "out", store=store)
    (weights,) = (tmp_path / "out").glob("*.safetensors")
    assert weights.name == ("model.safetensors" if is_whole else "adapter_model.safetensors")


def test_files_are_bytes_paths_or_json(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(b"[1]")
    files: dict[str, Any] = {
        "a.txt": b"a",
        "tokenizer.json": tmp_path / "t.json",
        "config.json": CONFIG,
    }
    save(TENSORS, "m", files=files, store=store)
    read = [blobstore.read_file("m", name, store=store) for name in files]
    assert read[:2] == [b"a", b"[1]"]
    assert read[2].decode() == json.dumps(CONFIG, indent=2, ensure_ascii=False) + "\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"../x": b""}, "a store cannot hold a file '../x'"),
        ({"config.json": b"[]"}, "config.json is not a JSON object"),
        ({"config.json": b"{"}, "config.json: "),
        ({"notes.txt": "text"}, "file 'notes.txt' is 'str'; give its content in bytes, its Path"),
        ({"config.json": {"x": object()}}, "file 'config.json': .*not JSON serializable"),
        ({"x": Path("/nothing")}, "file 'x': .*No such file"),
        ({"x": Path("/dev/null")}, "file 'x': .*is not a regular file"),
        ({"x": 7}, "file 'x' is 'int'; give"),
    ],
)
def test_refuses_files_that_cannot_be_kept(
    store: LocalStore, files: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        save(TENSORS, "m", files=files, store=store)
    assert not list(store.references())


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({}, UsageError, "there are no tensors"),
        ({"x": [1.0]}, UsageError, "there are no tensors"),
        ({7: np.zeros(1)}, UsageError, "which is not a text"),
        ({"x": np.array(["text"])}, UnsupportedSource, "'x' is of type <U4"),
        ({"__metadata__": np.zeros(1)}, UnsupportedSource, "it is reserved"),
        ({"\udc80": np.zeros(1)}, UnsupportedSource, "no safetensors file can hold the tensors"),
    ],
)
def test_refuses_values_that_are_not_tensors(
    store: LocalStore, tensors: dict[Any, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        save(tensors, "m", store=store)
    assert not list(store.references())


def test_tensors_of_torch_may_be_strided_shared_and_need_gradients(store: LocalStore) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    tensors = {
        "tied": weight,
        "weight": weight,
        "t": weight.T,
        "conjugate": torch.tensor([1j]).conj(),
    }
    save(tensors, "m", store=store)
    opened = blobstore.open("m", store=store, framework="torch")
    for name, tensor in tensors.items():
        assert torch.equal(opened[name], tensor.resolve_conj())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda torch: torch.eye(2).to_sparse(), "is sparse or nested; make it dense"),
        (lambda torch: torch.nn.parameter.UninitializedParameter(), "has no data"),
        (lambda torch: torch.empty(2, device="meta"), "has no data"),
        (lambda torch: torch.zeros(2, dtype=torch.complex128), "is of type torch.complex128"),
        (
            lambda torch: __import__(
                "torch.testing._internal.two_tensor", fromlist=["TwoTensor"]
            ).TwoTensor(torch.ones(2), torch.ones(2)),
            "is a 'TwoTensor', which holds its values in other tensors",
        ),
    ],
)
def test_refuses_tensors_of_torch_without_bytes_of_their_own(
    store: LocalStore, make: Any, message: str
) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UnsupportedSource, match=message):
        save({"x": make(torch)}, "m", store=store)


def test_the_interpreter_waits_for_a_background_save(store: LocalStore) -> None:
    program = (
        "import sys, numpy, blobstore; "
        "blobstore.save({'x': numpy.ones(1 << 20)}, 'm', store=sys.argv[1], background=True)"
    )
    subprocess.run([sys.executable, "-c", program, str(store.root)], check=True)
    assert np.asarray(blobstore.open("m", store=store)["x"]).all()


def test_a_tensor_that_changes_while_it_is_saved_does_not_make_a_wrong_blob(
    store: LocalStore,
) -> None:
    tensor = np.zeros(1 << 22, np.uint8)
    numbers = itertools.count(1)

    def change(*_: object) -> None:
        tensor[:] = next(numbers) % 251

    save({"x": tensor}, "m", store=store, progress=change)
    assert not blobstore.verify("m", store=store).faults


def test_wrong_arguments_of_a_background_save_are_refused_at_once(store: LocalStore) -> None:
    save(TENSORS, "org/m", store=store)
    with pytest.raises(NameConflict):
        save(TENSORS, "Org/m", store=store, background=True)
    with pytest.raises(UsageError, match="jobs"):
        save(TENSORS, "n", store=store, jobs=0, background=True)


def test_a_save_counts_its_own_time(store: LocalStore) -> None:
    started = time.monotonic()
    saved = save(TENSORS, "m", store=store)
    assert 0 < saved.seconds <= time.monotonic() - started


def test_background_saves_of_one_name_keep_their_order(store: LocalStore) -> None:
    futures = [
        save({"x": np.full(1 << 20, step)}, "m", store=store, background=True) for step in range(4)
    ]
    assert all(future.done() for future in futures[:-1])
    futures[-1].result()
    assert np.asarray(blobstore.open("m", store=store)["x"])[0] == 3


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model.safetensors": b""}, "two files would both be 'model.safetensors'"),
        ({"a": b"", "a/b": b""}, "'a' would be both a file and a folder"),
        ({"model.safetensors.index.json": b"{}"}, "is an index of weight files"),
        ({7: b""}, "which is not a text"),
    ],
)
def test_refuses_files_that_an_export_could_not_write(
    store: LocalStore, files: dict[Any, bytes], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        save(TENSORS, "m", files=files, store=store)


def test_refuses_arrays_with_a_mask(store: LocalStore) -> None:
    with pytest.raises(UnsupportedSource, match="has a mask, which would be lost"):
        save({"x": np.ma.masked_array([1.0], [True])}, "m", store=store)


def test_a_process_that_is_forked_during_a_background_save_can_end(store: LocalStore) -> None:
    future = save({"x": np.zeros(1 << 24, np.uint8)}, "m", store=store, background=True)
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    future.result()  # before the store is removed


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2),
    reason="this Python has no saves to wait for at its end",
)
@pytest.mark.parametrize(
    ("end", "error", "is_reported"),
    [
        ("", EXPECTED, True),  # the interpreter waits for it
        ("", "ZeroDivisionError", True),
        ("wait([future])", EXPECTED, True),
        ("sys.exit(0)", "ZeroDivisionError", True),
        ("future.exception()", "ZeroDivisionError", False),
        (
            "future.add_done_callback(lambda it: (time.sleep(0.2), it.exception()))",
            EXPECTED,
            False,
        ),
        ("asyncio.run(asked(future))", EXPECTED, False),
    ],
)
def test_an_error_of_a_background_save_that_nobody_asks_for_fails_the_process(
    tmp_path: Path, end: str, error: str, *, is_reported: bool
) -> None:
    program = f"""
import asyncio, atexit, sys, time, numpy, blobstore
from concurrent.futures import wait
from blobstore.store.names import Names

async def asked(future):
    await asyncio.wait([asyncio.wrap_future(future)])

def fail(*_, **__):
    raise {error}

atexit.register(print, "what others do at exit")
store = blobstore.LocalStore(sys.argv[1])
Names.publish = fail
future = blobstore.save({{"x": numpy.ones(1 << 20)}}, "m", store=store, background=True)
{end}
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, check=False, text=True
    )
    assert done.stdout == "what others do at exit\n"
    *traceback, line = done.stderr.splitlines() if is_reported else ("",)
    if is_reported:
        assert line.startswith("blobstore: error: saving m:latest in the background failed: ")
        assert bool(traceback) == (error == "ZeroDivisionError")
    else:
        assert done.stderr == ""
    assert done.returncode == (120 if is_reported else 0)


def test_a_background_save_that_succeeds_or_was_asked_for_is_not_kept(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(TENSORS, "m", store=store, background=True).result()
    monkeypatch.setattr(Names, "publish", lambda *_, **__: 1 / 0)
    future = save(TENSORS, "m", store=store, background=True)
    with pytest.raises(ZeroDivisionError):
        future.result()
    assert not _SAVES
    assert not future.cancel()


def test_a_background_save_that_runs_was_not_asked_for(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_fail = threading.Event()

    def fail(*_: object, **__: object) -> None:
        may_fail.wait()
        raise BlobstoreError("no")

    monkeypatch.setattr(Names, "publish", fail)
    future = save(TENSORS, "m", store=store, background=True)
    with pytest.raises(TimeoutError):
        future.result(timeout=0)
    assert future in _SAVES
    may_fail.set()
    assert isinstance(future.exception(), BlobstoreError)
    assert future not in _SAVES


@pytest.mark.parametrize("background", [False, True])
def test_a_tensor_that_is_replaced_while_it_is_saved_is_named(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, *, background: bool
) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(1000)

    def swap(*_: object) -> None:  # as another thread does
        tensor.data = torch.zeros(10)

    monkeypatch.setattr("blobstore.safetensors.torch.wait_for_devices", swap)
    with pytest.raises(
        DamagedSource, match="tensor 'x' has 40 bytes, and had 4000: it was replaced"
    ):
        save({"x": tensor}, "m", store=store, background=background)  # type: ignore[call-overload]
    assert not list(store.references())


def test_what_a_framework_raises_is_an_error_of_the_save(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blobstore.safetensors.numpy.file_bytes", lambda _: 1 / 0)
    for background in (False, True):
        with pytest.raises(DamagedSource, match="tensor 'x' cannot be read: division by zero"):
            save({"x": np.ones(3)}, "m", store=store, background=background)  # type: ignore[call-overload]


def test_no_memory_for_the_copy_is_an_error_of_the_save(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> memoryview:
        raise MemoryError

    monkeypatch.setattr("blobstore.operations.create.save.new_buffer", fail)
    with pytest.raises(BlobstoreError, match=r"no memory .* 24 bytes; leave out background"):
        save({"x": np.ones(3)}, "m", store=store, background=True)


def test_arguments_of_other_kinds_are_named(store: LocalStore) -> None:
    torch = pytest.importorskip("torch")
    wrong: list[tuple[Any, Any, str]] = [
        (torch.nn.Linear(2, 2), "m", r"got 'Linear'; pass its state_dict\(\)"),
        ("m", TENSORS, "tensors is a state dict, got 'str'"),
        (TENSORS, TENSORS, "a name is a text, got 'dict'"),
    ]
    for tensors, name, message in wrong:
        with pytest.raises(UsageError, match=message):
            save(tensors, name, store=store)
    with pytest.raises(UsageError, match="files is a dict of small files, got 'list'"):
        save(TENSORS, "m", files=[], store=store)  # type: ignore[call-overload]
