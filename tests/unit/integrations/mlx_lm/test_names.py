"""What mlx-lm calls tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.errors import BlobstoreError
from blobstore.integrations.mlx_lm.names import Naming, mlx_naming
from blobstore.models.source_layers import read_stacks
from blobstore.planning.grouping import ExpertForm
from blobstore.planning.plan import QuantizeOptions
from blobstore.quantization.formats import FORMATS
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, blob, quantizable_tensors, write_folder
from tests.support.options import grouped

EXPERTS = "model.layers.0.mlp.experts"
SWITCH = "model.layers.0.mlp.switch_mlp"
Q = "model.layers.0.self_attn.q_proj"


def naming_of(store: LocalStore, name: str = "m") -> Naming:
    with blobstore.open(name, store=store) as model:
        return mlx_naming(model.specs, model.quantized, read_stacks(store, model.manifest))


def created(tmp_path: Path, experts: ExpertForm, quantize: str | None = "int4") -> LocalStore:
    store = LocalStore(tmp_path / "store")
    source = write_folder(tmp_path / "source", quantizable_tensors())
    options: dict[str, Any] = {}
    if quantize is not None:
        options = {"quantize": quantize, "group_size": 64, "policy": "uniform"}
    blobstore.create(source, "m", store=store, experts=experts, **grouped(options))
    return store


def test_qparams_have_mlx_names(tmp_path: Path) -> None:
    naming = naming_of(created(tmp_path, "packed"))
    assert naming.single[f"{Q}.weight"] == f"{Q}.weight"
    assert naming.single[f"{Q}.weight_scale"] == f"{Q}.scales"
    assert naming.single[f"{Q}.weight_qbias"] == f"{Q}.biases"
    assert naming.single[f"{Q}.bias"] == f"{Q}.bias"
    assert naming.types[f"{Q}.weight"] == (FORMATS["int4"], 64)


def test_packed_experts_are_stacked_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    naming = naming_of(created(tmp_path, "packed"))
    for kind, end in (("weight", ""), ("scales", "_scale"), ("biases", "_qbias")):
        assert naming.joined[f"{SWITCH}.up_proj.{kind}"] == [
            f"{EXPERTS}.{number}.up_proj.weight{end}" for number in range(12)
        ]
    assert len(naming.joined) == 6
    assert not any(EXPERTS in name for name in naming.single)
    assert naming.types[f"{SWITCH}.up_proj.weight"] == (FORMATS["int4"], 64)
    assert not any(EXPERTS in name for name in naming.types)
    assert naming.split == {}


def test_stacked_experts_stay_unchanged(tmp_path: Path) -> None:
    naming = naming_of(created(tmp_path, "stacked"))
    assert naming.single[f"{EXPERTS}.up_proj.weight"] == f"{SWITCH}.up_proj.weight"
    assert naming.single[f"{EXPERTS}.up_proj.weight_scale"] == f"{SWITCH}.up_proj.scales"
    assert naming.single[f"{EXPERTS}.up_proj.weight_qbias"] == f"{SWITCH}.up_proj.biases"
    assert naming.types[f"{SWITCH}.up_proj.weight"] == (FORMATS["int4"], 64)
    assert (naming.split, naming.joined) == ({}, {})


def test_plain_experts_are_left_to_mlx_lm(tmp_path: Path) -> None:
    packed = naming_of(created(tmp_path / "packed", "packed", quantize=None))
    stacked = naming_of(created(tmp_path / "stacked", "stacked", quantize=None))
    assert packed.single == {name: name for name in quantizable_tensors()}
    assert (packed.split, packed.joined, packed.types) == ({}, {}, {})
    assert stacked.split[f"{EXPERTS}.up_proj.weight"] == [
        f"{EXPERTS}.{number}.up_proj.weight" for number in range(12)
    ]
    assert not any(".experts." in name for name in stacked.single)


def test_experts_of_mixed_types_are_not_joined(store: LocalStore, tmp_path: Path) -> None:
    blobstore.create(
        write_folder(tmp_path / "source", quantizable_tensors()),
        "m",
        store=store,
        quantize=QuantizeOptions(
            "int8", policy="uniform", overrides=("*experts.3.up_proj.weight=none",)
        ),
    )
    naming = naming_of(store)
    assert naming.single[f"{EXPERTS}.2.up_proj.weight_scale"] == f"{EXPERTS}.2.up_proj.scales"
    assert not any("up_proj" in name for name in naming.joined)
    assert f"{SWITCH}.down_proj.weight" in naming.joined


def test_rejects_a_global_scale(store: LocalStore) -> None:
    data = blob(
        ("w", "U32", (2, 4), bytes(32)),
        ("w.scale", "U8", (2, 2), bytes(4)),
        ("w.global_scale", "F32", (), bytes(4)),
        quant_type="nvfp4",
        group_size="16",
    )
    add_blobs(store, "m", {"w": data})
    with pytest.raises(BlobstoreError, match="'w' has a global scale"):
        naming_of(store)
