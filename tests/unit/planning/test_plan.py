from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.errors import UnsupportedSource, UsageError
from blobstore.operations.create.create import create
from blobstore.planning import plan
from blobstore.planning.grouping import ExpertForm
from blobstore.planning.plan import ModelPlan, PlannedTensor, QuantizeOptions, plan_source
from blobstore.sources.open import open_source
from blobstore.store.local import LocalStore
from tests.support.models import quantizable_tensors, write_folder
from tests.support.pack_quantized import packed_weight, write_packed

DATA = Path(__file__).parents[2] / "data" / "ollama" / "hf"
LAYER = "model.layers.0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", quantizable_tensors())


def planned(source: Path, *, experts: ExpertForm = "packed", **options: Any) -> ModelPlan:
    opened = open_source(source)
    try:
        return plan_source(opened, experts=experts, quantize=QuantizeOptions(**options))
    finally:
        opened.close()


def decisions(found: ModelPlan) -> dict[str, PlannedTensor]:
    return {row.name: row for row in found.decisions()}


def test_copies_everything_without_a_type(folder: Path) -> None:
    found = planned(folder)
    assert found.quant_type == ""
    assert {row.reason for row in found.decisions()} == {"copied"}
    assert all(row.bytes_before == row.bytes_after for row in found.decisions())
    assert {row.name for row in found.decisions()} == set(quantizable_tensors())


def test_decides_every_tensor_and_gives_the_reason(folder: Path) -> None:
    found = planned(folder, quant_type="int4")
    rows = decisions(found)
    assert found.quant_type == "int4"
    assert rows[f"{LAYER}.self_attn.q_proj.weight"] == PlannedTensor(
        name=f"{LAYER}.self_attn.q_proj.weight",
        shape=(128, 128),
        dtype="BF16",
        type="int4",
        group_size=32,
        bytes_before=32768,
        bytes_after=128 * 128 // 2 + 2 * 2 * 128 * 4,
        reason="requested type",
    )
    kept = rows["model.embed_tokens.weight"]
    assert (kept.type, kept.group_size, kept.reason) == ("BF16", 0, "embedding")
    promoted = rows[f"{LAYER}.self_attn.v_proj.weight"]
    assert (promoted.type, promoted.group_size) == ("int8", 64)


def test_a_model_of_more_blobs_than_a_manifest_lists_is_refused_before_it_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path / "store")
    create(folder, "m", store=store)
    size = len(store.read_manifest("m"))
    monkeypatch.setattr(plan, "MAX_MANIFEST_SIZE", size)
    found = planned(folder)
    monkeypatch.setattr(plan, "MAX_MANIFEST_SIZE", size - 1000)  # less than the layers take
    with pytest.raises(UnsupportedSource, match=rf"the model has {len(found.blobs)} blobs"):
        planned(folder)


def test_keeps_weights_that_are_stored_transposed_with_a_notice(tmp_path: Path) -> None:
    tensors = {
        "h.0.mlp.c_fc.weight": np.zeros((64, 256), np.float32),
        "h.0.mlp.c_proj.weight": np.zeros((256, 64), np.float32),
    }
    source = write_folder(tmp_path, tensors, files={"config.json": b'{"n_embd": 64}'})
    found = planned(source, quant_type="int4")
    assert {(row.type, row.reason) for row in found.decisions()} == {("F32", "stored transposed")}
    assert found.quant_type == ""
    assert [notice for notice in found.notices if "'h.0.mlp.c_fc.weight' and 1 more" in notice]
    assert planned(source).notices == ()


def test_decides_stacked_experts_as_one_tensor(folder: Path) -> None:
    rows = decisions(planned(folder, experts="stacked", quant_type="nvfp4"))
    row = rows[f"{LAYER}.mlp.experts.up_proj.weight"]
    assert (row.shape, row.type, row.elements) == ((12, 64, 128), "nvfp4", 12 * 64 * 128)


@pytest.mark.parametrize(
    ("model", "name", "kind", "group_size"),
    [
        ("mlx-mode", f"{LAYER}.self_attn.q_proj.weight", "int4", 64),
        ("ct-nvfp4", f"{LAYER}.mlp.up_proj.weight", "nvfp4", 16),
    ],
)
def test_reports_quantization_in_the_source(
    model: str, name: str, kind: str, group_size: int
) -> None:
    found = planned(DATA / model)
    row = decisions(found)[name]
    assert found.quant_type == kind
    assert (row.dtype, row.type, row.group_size) == (kind, kind, group_size)
    assert row.reason == "quantized in the source"
    assert row.bytes_after * 8 / row.elements < 6


def test_rejects_quantizing_a_quantized_source() -> None:
    with pytest.raises(UnsupportedSource, match=r"is already quantized to int4; create from"):
        planned(DATA / "mlx-mode", quant_type="int8")


def test_symmetric_integers_are_neither_quantized_nor_decoded_again(tmp_path: Path) -> None:
    source = write_packed(tmp_path / "m", packed_weight("w").tensors)
    row = decisions(planned(source))["w.weight"]
    assert (row.type, row.group_size, row.shape) == ("int4-sym", 32, (6, 64))
    assert row.bytes_after == 6 * 64 // 2 + 6 * 2 * 2
    with pytest.raises(UnsupportedSource, match=r"is already quantized to int4-sym; create from"):
        planned(source, quant_type="int4")


@pytest.mark.parametrize(
    "options",
    [{"group_size": 32}, {"policy": "uniform"}, {"overrides": ("*=int4",)}],
)
def test_rejects_options_without_a_type(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="requires a type to quantize to"):
        planned(folder, **options)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"quant_type": "fp8"}, "cannot quantize to 'fp8': in Ollama it means int8"),
        ({"quant_type": "int4", "group_size": 16}, "int4 cannot have groups of 16"),
        ({"quant_type": "nvfp4", "group_size": 32}, "nvfp4 cannot have groups of 32"),
        ({"quant_type": "int4", "overrides": ("x=",)}, "x="),
        ({"quant_type": "int4", "overrides": ("*.nothing=none",)}, r"matches the override '\*\.no"),
        ({"quant_type": "int4", "policy": "best"}, "best"),
    ],
)
def test_rejects_invalid_options(folder: Path, options: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        planned(folder, **options)


def test_the_last_matching_override_decides(folder: Path) -> None:
    overrides = ("*.q_proj.weight=none", "*lm_head*=none", "lm_head.weight=int8")
    rows = decisions(planned(folder, quant_type="mxfp4", overrides=overrides))
    assert rows[f"{LAYER}.self_attn.q_proj.weight"].type == "BF16"
    assert rows["lm_head.weight"].type == "int8"


def test_a_model_without_quantized_tensors_has_no_type(folder: Path) -> None:
    found = planned(folder, quant_type="int4", overrides=("*=none",))
    assert found.quant_type == ""
    assert found.notices[-1].startswith("nothing was quantized: no tensor can be int4; --dry-run")


def test_decoding_nothing_has_a_notice(folder: Path) -> None:
    source = open_source(folder)
    assert plan_source(source).notices == ()
    notices = plan_source(source, decode=True).notices
    assert notices == ("nothing was decoded: the source has no 8-bit floats with scales",)
    source.close()
