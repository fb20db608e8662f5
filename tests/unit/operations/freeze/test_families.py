"""Quantizations of one model that differ in their form, wherever they go: all stay what they were, in little space."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from blobstore.core.tensor import DType
from blobstore.gguf.dequantize import dequantize
from blobstore.gguf.quantize import quantize
from blobstore.gguf.types import TYPES
from blobstore.quantization import quantize_numpy as quantization
from blobstore.quantization.formats import FORMATS
from blobstore.store.local import LocalStore
from tests.support.gguf_files import TEXT, gguf_file, text
from tests.support.ladders import Array, coded_blocks, source
from tests.support.models import blob
from tests.support.scaled import block_scales, float8_codes, typed
from tests.support.serve_process import serving

MATRIX = source(1)
WEIGHT = "model.layers.0.mlp.up_proj.weight"
FILE = "model.safetensors"
BLOCK = (32, 128)
CONFIGS: dict[str, dict[str, Any]] = {
    "weights": {},
    "mlx": {"quantization": {"group_size": 64, "bits": 4}},
    "fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": BLOCK}},
}
NUMBERS = {kind.name.lower(): number for number, kind in TYPES.items()}
NAMES = ("mlx", "fp8", "q8_0", "q4_k", "q6_k")


def blocks() -> dict[str, Array]:
    """Return the tensors of GGUF files by type; that of Q6_K is made from that of Q8_0."""
    first = quantize("Q8_0", MATRIX)
    requantized = coded_blocks("Q6_K", dequantize("Q8_0", first))
    return {"q8_0": first, "q4_k": coded_blocks("Q4_K", MATRIX), "q6_k": requantized}


def tensors() -> dict[str, list[tuple[str, str, tuple[int, ...], bytes]]]:
    """Return the tensors of folders."""
    mlx = quantization.quantize(typed(MATRIX, DType.BF16), FORMATS["int4"], 64)
    assert mlx.bias is not None
    scales = block_scales(MATRIX, BLOCK)
    codes = float8_codes(MATRIX, scales, BLOCK)
    stem = WEIGHT.removesuffix("weight")
    return {
        "weights": [(WEIGHT, "BF16", MATRIX.shape, MATRIX.tobytes())],
        "mlx": [
            (stem + name, kind, item.shape, item.tobytes())
            for name, kind, item in (
                ("biases", "BF16", mlx.bias),
                ("scales", "BF16", mlx.scale),
                ("weight", "U32", mlx.weight),
            )
        ],
        "fp8": [
            (WEIGHT, "F8_E4M3", codes.shape, codes.tobytes()),
            (f"{WEIGHT}_scale_inv", "F32", scales.shape, scales.tobytes()),
        ],
    }


def write(folder: Path) -> dict[str, bytes]:
    """Write all models; return the bytes of their file with tensors."""
    folder.mkdir()
    for name, items in tensors().items():
        (folder / name).mkdir()
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **CONFIGS[name]}
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / FILE).write_bytes(blob(*items))
    for name, item in blocks().items():
        shape = MATRIX.shape[::-1]
        values = [("general.architecture", TEXT, text("llama"))]
        data = gguf_file(values, [("blk.0.ffn_up.weight", NUMBERS[name], shape, item.tobytes())])
        (folder / f"{name}.gguf").write_bytes(data)
    return {name: path_of(folder, name).read_bytes() for name in ("weights", *NAMES)}


def path_of(folder: Path, name: str) -> Path:
    return folder / name / FILE if (folder / name).exists() else folder / f"{name}.gguf"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    return write(tmp_path / "files")


@pytest.fixture
def frozen(tmp_path: Path, files: dict[str, bytes]) -> LocalStore:
    """A store with all models, of which the quantizations are frozen."""
    store = LocalStore(tmp_path / "store")
    for name in files:
        path = path_of(tmp_path / "files", name)
        blobstore.create(path.parent if path.name == FILE else path, name, store=store)
    done = blobstore.freeze(NAMES, store=store)
    assert (done.fallbacks, done.faults) == (0, ())
    for model in done.models:
        assert str(model.base) == "weights:latest"
        assert model.stored < 0.15 * model.size + 3000, model.name
    return store


def exported(store: LocalStore, folder: Path) -> dict[str, bytes]:
    """Return the file with tensors of each quantization."""
    found = {}
    for name in NAMES:
        blobstore.export(name, folder / name, store=store)
        (path,) = [*(folder / name).rglob("*.gguf"), *(folder / name).rglob("*.safetensors")]
        found[name] = path.read_bytes()
    return found


def test_they_are_read_and_exported_as_they_were(
    frozen: LocalStore, files: dict[str, bytes], tmp_path: Path
) -> None:
    hot = LocalStore(tmp_path / "hot")
    for name in NAMES:
        path = path_of(tmp_path / "files", name)
        blobstore.create(path.parent if path.name == FILE else path, name, store=hot)
        with blobstore.open(name, store=frozen) as model, blobstore.open(name, store=hot) as same:
            for key in same:
                assert np.asarray(model[key]).tobytes() == np.asarray(same[key]).tobytes()
    assert blobstore.verify(store=frozen).faults == ()
    assert exported(frozen, tmp_path / "out") == {name: files[name] for name in NAMES}


def test_they_are_packed_and_unpacked_next_to_their_weights(
    frozen: LocalStore, files: dict[str, bytes], tmp_path: Path
) -> None:
    path, target = tmp_path / "all.bsar", LocalStore(tmp_path / "target")
    packed = blobstore.pack(["weights", *NAMES], path, store=frozen)
    assert (packed.deltas, packed.fallbacks) == (len(NAMES), 0)
    blobstore.unpack(path, store=target)
    assert blobstore.verify(store=target).faults == ()
    assert exported(target, tmp_path / "out") == {name: files[name] for name in NAMES}


@pytest.mark.parametrize("is_frozen", [True, False], ids=["frozen", "hot"])
def test_who_has_the_weights_pulls_a_tenth_of_them(
    frozen: LocalStore, files: dict[str, bytes], tmp_path: Path, remote: str, *, is_frozen: bool
) -> None:
    if not is_frozen:
        blobstore.thaw(NAMES, store=frozen)
    target = LocalStore(tmp_path / "target")
    blobstore.create(tmp_path / "files" / "weights", "weights", store=target)
    for name in NAMES:
        tagged = f"{remote}:{name}"
        blobstore.push(name, tagged, store=frozen, cold=True, base="weights")
        pulled = blobstore.pull(tagged, name, store=target)
        assert pulled.bytes_fetched < 0.15 * len(files[name]) + 6000, name
    assert blobstore.verify(store=target).faults == ()
    assert exported(target, tmp_path / "out") == {name: files[name] for name in NAMES}


def test_they_are_served(frozen: LocalStore, files: dict[str, bytes], tmp_path: Path) -> None:
    for name in NAMES:
        blobstore.copy(name, f"org/{name}", store=frozen)
    with serving(frozen, tmp_path) as server:
        for name in NAMES:
            file = FILE if name in CONFIGS else f"{name}.gguf"
            target = f"/org/{name}/resolve/main/{file}"
            assert server.request(target)[2] == files[name], name
            part = server.request(target, range="bytes=9000-20000")[2]
            assert part == files[name][9000:20001]
