"""Blobs with false metadata or quantization parameter tensors: a clear error everywhere, never a guess."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.errors import BlobDamaged
from blobstore.operations.export.export import export_model
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, blob
from tests.unit.cli.running import run

Entry = tuple[str, str, tuple[int, ...], bytes]
WEIGHT: Entry = ("w.weight", "U32", (2, 4), bytes(32))
SCALE: Entry = ("w.weight.scale", "BF16", (2, 1), bytes(4))
BIAS: Entry = ("w.weight.bias", "BF16", (2, 1), bytes(4))
NVFP4: Entry = ("w.weight.scale", "U8", (2, 2), bytes(4))
VALID: dict[str, Any] = {"quant_type": "int4", "group_size": "32"}

HOSTILE: dict[str, tuple[list[Entry], dict[str, Any]]] = {
    "group_size 0": ([WEIGHT, SCALE, BIAS], VALID | {"group_size": "0"}),
    "group_size -1": ([WEIGHT, SCALE, BIAS], VALID | {"group_size": "-1"}),
    "group_size 1e9": ([WEIGHT, SCALE, BIAS], VALID | {"group_size": "1e9"}),
    "group_size of 10,000 digits": ([WEIGHT, SCALE, BIAS], VALID | {"group_size": "9" * 10_000}),
    "another group_size": ([WEIGHT, SCALE, BIAS], VALID | {"group_size": "64"}),
    "an unknown type": ([WEIGHT, SCALE, BIAS], VALID | {"quant_type": "int9\x1b[2J"}),
    "another type": ([WEIGHT, SCALE, BIAS], VALID | {"quant_type": "int8"}),
    "a type of floats": ([WEIGHT, SCALE, BIAS], VALID | {"quant_type": "mxfp4"}),
    "no bias": ([WEIGHT, SCALE], VALID),
    "a bias of symmetric integers": (
        [WEIGHT, SCALE, BIAS],
        {"quant_type": "int4-sym", "group_size": "32"},
    ),
    "groups of less than a word": (
        [WEIGHT, ("w.weight.scale", "BF16", (2, 8), bytes(32))],
        {"quant_type": "int4-sym", "group_size": "4"},
    ),
    "one scale for all symmetric integers": (
        [WEIGHT, ("w.weight.scale", "BF16", (1,), bytes(2))],
        {"quant_type": "int4-sym", "group_size": "32"},
    ),
    "symmetric integers of another width": (
        [WEIGHT, SCALE],
        {"quant_type": "int8-sym", "group_size": "32"},
    ),
    "tiles of another number of rows": (
        [("w.weight", "U32", (2, 8), bytes(64)), ("w.weight.scale", "U8", (2, 4), bytes(8))],
        {"quant_type": "nvfp4-tiled", "group_size": "16"},
    ),
    "tiles of a stack": (
        [
            ("w.weight", "U32", (1, 2, 8), bytes(64)),
            ("w.weight.scale", "U8", (1, 128, 4), bytes(512)),
        ],
        {"quant_type": "nvfp4-tiled"},
    ),
    "groups of another size in tiles": (
        [("w.weight", "U32", (2, 8), bytes(64)), ("w.weight.scale", "U8", (128, 4), bytes(512))],
        {"quant_type": "nvfp4-tiled", "group_size": "32"},
    ),
    "tiled scales of floats": (
        [("w.weight", "U32", (2, 8), bytes(64)), ("w.weight.scale", "F16", (128, 4), bytes(1024))],
        {"quant_type": "mxfp8-tiled"},
    ),
    "a bias of floats": ([WEIGHT, NVFP4, BIAS], {"quant_type": "nvfp4"}),
    "more scales": ([WEIGHT, ("w.weight.scale", "BF16", (2, 2), bytes(8)), BIAS], VALID),
    "scales of another rank": ([WEIGHT, ("w.weight.scale", "BF16", (2,), bytes(4)), BIAS], VALID),
    "scales of integers": ([WEIGHT, ("w.weight.scale", "I16", (2, 1), bytes(4)), BIAS], VALID),
    "a bias of another type": ([WEIGHT, SCALE, ("w.weight.bias", "F16", (2, 1), bytes(4))], VALID),
    "two global scales": (
        [WEIGHT, NVFP4, ("w.weight.global_scale", "F32", (2,), bytes(8))],
        {"quant_type": "nvfp4"},
    ),
    "a weight without columns": (
        [
            ("w.weight", "U32", (2, 0), b""),
            ("w.weight.scale", "BF16", (2, 0), b""),
            ("w.weight.bias", "BF16", (2, 0), b""),
        ],
        VALID,
    ),
    "rows longer than any memory": (
        [
            ("w.weight", "U32", (0, 2**60), b""),
            ("w.weight.scale", "BF16", (0, 2**58), b""),
            ("w.weight.bias", "BF16", (0, 2**58), b""),
        ],
        VALID,
    ),
    "a scalar weight": (
        [("w.weight", "U32", (), bytes(4)), ("w.weight.scale", "BF16", (), bytes(2)), BIAS],
        VALID,
    ),
}


@pytest.fixture(params=HOSTILE)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    entries, metadata = HOSTILE[request.param]
    add_blobs(store, "m", {"w.weight": blob(*entries, **metadata)})
    return store


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_open_refuses_it(store: LocalStore, framework: Any) -> None:
    for dequantize in (False, True):
        with pytest.raises(BlobDamaged, match=r"m:latest: layer 'w\.weight': tensor 'w\.weight': "):
            blobstore.open("m", store=store, framework=framework, dequantize=dequantize)
    assert list(store.folder("headers").iterdir()) == []


def test_show_reports_damage(store: LocalStore) -> None:
    shown = run("show", "m", "--store", store.root, exit_code=4)
    assert "DAMAGED" in shown.stdout
    assert "tensor 'w.weight': " in shown.stderr
    assert "\x1b" not in shown.stdout + shown.stderr


def test_verify_finds_it(store: LocalStore) -> None:
    verified = run("verify", "--store", store.root, exit_code=4)
    assert "w.weight" in verified.stdout + verified.stderr


@pytest.mark.parametrize("dequantize", [True, False])
def test_export_refuses_it(store: LocalStore, tmp_path: Path, *, dequantize: bool) -> None:
    with pytest.raises(BlobDamaged, match=r"tensor 'w\.weight': "):
        export_model("m", tmp_path / "out", store=store, dequantize=dequantize)
    assert not (tmp_path / "out").exists()
