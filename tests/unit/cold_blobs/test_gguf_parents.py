from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from blobstore.compression.quant_rule import QuantRule
from blobstore.core.digest import Digest
from blobstore.core.tensor import DType
from blobstore.gguf.dequantize import dequantize
from blobstore.gguf.quantize import quantize
from blobstore.operations.archive.pack import pack_models
from blobstore.operations.archive.unpack import unpack_archive
from blobstore.operations.freeze.freeze import Frozen, freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store.local import LocalStore
from tests.support.frozen import flip_in_place, forms_of, layers
from tests.support.ladders import (
    CODED,
    COLUMNS,
    LADDER,
    ROWS,
    Array,
    as_float32,
    block_blob,
    coded_blob,
    interleaved,
    kind_of,
    source,
    weight_blob,
    with_shape,
)
from tests.support.models import add_blobs, blob

LITTLE = 4096
NAME = "blk.0.ffn_up.weight"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store", lock_timeout=0.05)


def put(store: LocalStore, name: str, blobs: Mapping[str, bytes]) -> dict[str, Digest]:
    """Add a model; return the digests of its layers."""
    add_blobs(store, name, blobs)
    return {key: item.digest for key, item in layers(store, name).items()}


def bases_of(frozen: Frozen) -> dict[Digest, Digest | None]:
    return {item.digest: item.base for item in frozen.blobs}


def assert_whole(store: LocalStore, name: str, blobs: Mapping[str, bytes]) -> None:
    """Check that the store verifies and that the blobs of a model read the same."""
    assert verify_models(store=store).faults == ()
    for key, item in layers(store, name).items():
        assert store.read_blob(item.digest, item.size) == blobs[key]


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32], ids=lambda item: item.value)
def test_a_ladder_is_kept_as_rules_of_its_weights(store: LocalStore, dtype: DType) -> None:
    matrix = source(1, dtype)
    parent = put(store, "weights", {NAME: weight_blob(NAME, matrix)})[NAME]
    blobs = {name: {NAME: block_blob(NAME, name, matrix)} for name in LADDER}
    for name, model in blobs.items():
        put(store, name.lower(), model)
    ladder = [name.lower() for name in LADDER]
    frozen = freeze_models(["weights", *ladder], store=store)
    assert {item.outcome for item in frozen.blobs} == {"frozen"}
    assert bases_of(frozen).pop(parent) is None
    assert {item.base for item in frozen.blobs if item.digest != parent} == {parent}
    assert all(item.stored < LITTLE for item in frozen.blobs if item.digest != parent)
    for name, model in blobs.items():
        assert_whole(store, name.lower(), model)
    thaw_models(ladder, store=store)
    for name, model in blobs.items():
        assert set(forms_of(store, name.lower()).values()) == {"hot"}
        assert_whole(store, name.lower(), model)


def kept(type_name: str) -> int:
    """Return the bytes of scales of a matrix of the size of :func:`source`."""
    rule = QuantRule(type_name, DType.F32, keeps_scales=True)
    return ROWS * COLUMNS // rule.kind.weights * rule.kept


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32], ids=lambda item: item.value)
def test_of_quantizations_with_a_search_only_scales_are_kept(
    store: LocalStore, dtype: DType
) -> None:
    matrix = source(1, dtype)
    parent = put(store, "weights", {NAME: weight_blob(NAME, matrix)})[NAME]
    blobs = {name: {NAME: coded_blob(NAME, name, matrix)} for name in CODED}
    digests = {put(store, name.lower(), model)[NAME]: name for name, model in blobs.items()}
    ladder = [name.lower() for name in CODED]
    planned = freeze_models(["weights", *ladder], store=store, dry_run=True)
    frozen = freeze_models(["weights", *ladder], store=store)
    assert {item.base for item in frozen.blobs if item.digest != parent} == {parent}
    assert frozen.fallbacks == 0
    for item in frozen.blobs:
        if item.digest != parent:
            assert item.stored < kept(digests[item.digest]) + LITTLE
    # The table of each file is not estimated.
    assert 0 <= frozen.stored - planned.stored < 300 * len(frozen.blobs)
    for name, model in blobs.items():
        assert_whole(store, name.lower(), model)
    thaw_models(ladder, store=store)
    for name, model in blobs.items():
        assert_whole(store, name.lower(), model)


def test_each_quantization_is_reported_with_its_parent(store: LocalStore) -> None:
    matrix = source(1)
    put(store, "weights", {"up_proj": weight_blob("up_proj", matrix)})
    for name in ("Q4_K", "Q8_0"):
        make = coded_blob if name == "Q4_K" else block_blob
        put(store, name.lower(), {NAME: make(NAME, name, matrix)})
    for dry_run in (True, False):
        frozen = freeze_models(["weights", "q4_k", "q8_0"], store=store, dry_run=dry_run)
        found = {str(model.name): model for model in frozen.models}
        weights = found.pop("weights:latest")
        assert weights.base is None
        assert sum(model.stored for model in found.values()) + weights.stored == frozen.stored
        assert {str(model.base) for model in found.values()} == {"weights:latest"}
        assert found["q8_0:latest"].stored < LITTLE < found["q4_k:latest"].size / 5


def test_rows_of_heads_are_found_although_scales_were_searched_for(store: LocalStore) -> None:
    matrix = source(1)
    parent = put(store, "weights", {"q_proj": weight_blob("q_proj", matrix)})["q_proj"]
    blobs = {"attn_q": coded_blob("attn_q", "Q4_K", interleaved(matrix))}
    child = put(store, "q", blobs)["attn_q"]
    frozen = freeze_models(["q"], store=store)
    assert bases_of(frozen) == {child: parent}
    assert frozen.stored < kept("Q4_K") + LITTLE
    assert_whole(store, "q", blobs)


@pytest.mark.parametrize("name", ["Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("cast", [DType.F16, DType.BF16])
def test_weights_that_were_rounded_before_are_found(
    store: LocalStore, cast: DType, name: str
) -> None:
    matrix = source(1, DType.F32)
    rounded = matrix.astype("<f2")
    if cast is DType.BF16:
        rounded = matrix.astype(ml_dtypes.bfloat16).view("<u2")
    parent = put(store, "weights", {NAME: weight_blob(NAME, matrix)})[NAME]
    blobs = {NAME: coded_blob(NAME, name, rounded)}
    child = put(store, "q", blobs)[NAME]
    frozen = freeze_models(["q"], store=store)
    assert bases_of(frozen) == {child: parent}
    assert frozen.stored < kept(name) + LITTLE
    assert_whole(store, "q", blobs)


def test_the_weights_of_a_fine_tune_come_before_those_of_its_base(store: LocalStore) -> None:
    matrix = source(1)
    tuned = (as_float32(matrix) * 1.01).astype(ml_dtypes.bfloat16).view("<u2")
    base = put(store, "base", {NAME: weight_blob(NAME, matrix)})[NAME]
    parent = put(store, "tuned", {"other": weight_blob("other", tuned)})["other"]
    blobs = {NAME: coded_blob(NAME, "Q5_K", tuned)}
    child = put(store, "q", blobs)[NAME]
    frozen = freeze_models(["q"], store=store)
    assert bases_of(frozen) == {child: parent}
    thaw_models(["q"], store=store)
    remove_models(["tuned"], store=store)
    # Some codes follow from the base otherwise, and are listed.
    other = freeze_models(["q"], store=store)
    assert bases_of(other) == {child: base}
    assert 1.5 * frozen.stored < other.stored < len(blobs[NAME]) / 2
    assert_whole(store, "q", blobs)


def test_searched_scales_of_other_weights_are_compressed_alone(store: LocalStore) -> None:
    put(store, "weights", {NAME: weight_blob(NAME, source(1))})
    blobs = {NAME: coded_blob(NAME, "Q4_K", source(2))}
    child = put(store, "q", blobs)[NAME]
    assert bases_of(freeze_models(["q"], store=store)) == {child: None}
    assert_whole(store, "q", blobs)


def test_parents_may_have_other_names_and_other_shapes(store: LocalStore) -> None:
    matrix = source(1)
    other = blob(("up_proj", "BF16", (2, 48, 512), matrix.tobytes()))
    parents = put(store, "weights", {"x": weight_blob("x", source(2)), "up_proj": other})
    child = put(store, "q", {NAME: block_blob(NAME, "Q4_0", matrix)})[NAME]
    assert bases_of(freeze_models(["q"], store=store)) == {child: parents["up_proj"]}


def test_rows_of_attention_heads_are_found_in_the_order_of_llama_cpp(store: LocalStore) -> None:
    matrix = source(1)
    parent = put(store, "weights", {"q_proj": weight_blob("q_proj", matrix)})["q_proj"]
    blobs = {"attn_q": block_blob("attn_q", "Q8_0", interleaved(matrix))}
    child = put(store, "q", blobs)["attn_q"]
    frozen = freeze_models(["q"], store=store)
    assert bases_of(frozen) == {child: parent}
    assert frozen.stored < LITTLE
    assert_whole(store, "q", blobs)


def test_one_of_several_tensors_of_a_blob_can_be_the_parent(store: LocalStore) -> None:
    matrices = [source(seed) for seed in (1, 2, 3)]
    experts = blob(
        *((f"w{at}", "BF16", item.shape, item.tobytes()) for at, item in enumerate(matrices))
    )
    parent = put(store, "weights", {"experts": experts})["experts"]
    blobs = {"up": block_blob("up", "Q4_1", matrices[1])}
    child = put(store, "q", blobs)["up"]
    frozen = freeze_models(["q"], store=store)
    assert bases_of(frozen) == {child: parent}
    assert store.read_blob(child, len(blobs["up"])) == blobs["up"]


@pytest.mark.parametrize("type_name", ["Q4_K", "Q8_0"])
def test_a_stack_of_experts_follows_from_their_weights(store: LocalStore, type_name: str) -> None:
    """The file has one tensor for a projection of all experts, the parent a blob of all projections."""
    experts = [[source(10 * at + number) for number in range(2)] for at in range(12)]
    tensors = {
        f"mlp.experts.{at}.{name}.weight": matrix
        for at, matrices in enumerate(experts)
        for name, matrix in zip(("down_proj", "up_proj"), matrices, strict=True)
    }
    items = [(name, "BF16", item.shape, item.tobytes()) for name, item in tensors.items()]
    parent = put(store, "weights", {"mlp.experts": blob(*sorted(items))})["mlp.experts"]
    up = np.stack([matrices[1] for matrices in experts])
    up[5] = source(99)  # which the store does not have
    make = block_blob if type_name == "Q8_0" else coded_blob
    flat = make("ffn_up_exps", type_name, up.reshape(-1, COLUMNS))
    blobs = {"ffn_up_exps": with_shape(flat, len(up))}
    child = put(store, "q", blobs)["ffn_up_exps"]
    frozen = freeze_models(["q"], store=store)
    assert bases_of(frozen) == {child: parent}
    alone = ROWS * COLUMNS * kind_of(type_name).size // kind_of(type_name).weights
    known = 0 if type_name == "Q8_0" else 11 * kept(type_name)
    assert frozen.stored < alone + known + LITTLE
    assert_whole(store, "q", blobs)


def test_shapes_of_one_size_have_samples_of_their_own(store: LocalStore) -> None:
    matrix = source(1)
    narrow, wide = matrix.reshape(-1, 32), matrix
    parents = put(store, "weights", {"x": weight_blob("x", narrow)})
    children = {
        name: put(store, name, {"x": block_blob("x", "Q4_0", item)})["x"]
        for name, item in (("narrow", narrow), ("wide", wide))
    }
    found = bases_of(freeze_models(["narrow", "wide"], store=store))
    assert found == dict.fromkeys(children.values(), parents["x"])


def test_weights_of_a_fine_tune_are_found_and_not_those_of_its_base(store: LocalStore) -> None:
    matrix = source(1)
    tuned = matrix.copy()
    tuned[1:] ^= 1
    put(store, "base", {NAME: weight_blob(NAME, matrix)})
    parent = put(store, "tuned", {NAME: weight_blob(NAME, tuned)})[NAME]
    child = put(store, "q", {NAME: block_blob(NAME, "Q8_0", tuned)})[NAME]
    assert bases_of(freeze_models(["q"], store=store)) == {child: parent}


def test_blocks_of_other_weights_are_compressed_alone(store: LocalStore) -> None:
    put(store, "weights", {NAME: weight_blob(NAME, source(1))})
    blobs = {NAME: block_blob(NAME, "Q4_0", source(2))}
    child = put(store, "q", blobs)[NAME]
    assert bases_of(freeze_models(["q"], store=store)) == {child: None}
    assert_whole(store, "q", blobs)


def test_a_few_blocks_that_were_quantized_otherwise_are_kept_as_differences(
    store: LocalStore,
) -> None:
    matrix = source(1)
    parent = put(store, "weights", {NAME: weight_blob(NAME, matrix)})[NAME]
    data = bytearray(block_blob(NAME, "Q4_0", matrix))
    data[len(data) // 3] ^= 1
    child = put(store, "q", {NAME: bytes(data)})[NAME]
    frozen = freeze_models(["q"], store=store)
    assert bases_of(frozen) == {child: parent}
    assert frozen.stored < LITTLE
    assert_whole(store, "q", {NAME: bytes(data)})


def test_no_parents_are_searched_without_bases(store: LocalStore) -> None:
    matrix = source(1)
    put(store, "weights", {NAME: weight_blob(NAME, matrix)})
    child = put(store, "q", {NAME: block_blob(NAME, "Q4_0", matrix)})[NAME]
    assert bases_of(freeze_models(["q"], store=store, find_base=False)) == {child: None}


def test_a_dry_run_finds_the_parents(store: LocalStore) -> None:
    matrix = source(1)
    parent = put(store, "weights", {NAME: weight_blob(NAME, matrix)})[NAME]
    child = put(store, "q", {NAME: block_blob(NAME, "Q4_0", matrix)})[NAME]
    planned = freeze_models(["q"], store=store, dry_run=True)
    assert planned.stored < LITTLE
    assert bases_of(planned) == {child: parent}
    assert [str(model.base) for model in planned.models] == ["weights:latest"]


def test_weights_with_a_ladder_are_no_delta_themselves(store: LocalStore) -> None:
    """They could be one against the base that the user names, but that would save less."""
    matrix = source(1)
    tuned = matrix ^ np.random.default_rng(0).integers(0, 2, matrix.shape, np.uint16)
    base = put(store, "base", {NAME: weight_blob(NAME, matrix)})[NAME]
    parent = put(store, "tuned", {NAME: weight_blob(NAME, tuned)})[NAME]
    children = [
        put(store, name.lower(), {NAME: block_blob(NAME, name, tuned)})[NAME] for name in LADDER
    ]
    names = ["base", "tuned", *(name.lower() for name in LADDER)]
    found = bases_of(freeze_models(names, store=store, base="base"))
    assert found == {base: None, parent: None, **dict.fromkeys(children, parent)}


def test_weights_that_nearly_equal_a_base_are_deltas_and_their_quantization_is_not(
    store: LocalStore,
) -> None:
    matrix = source(1, rows=512)
    tuned = matrix.copy()
    tuned[:, ::100] ^= 1
    base = put(store, "base", {NAME: weight_blob(NAME, matrix)})[NAME]
    parent = put(store, "tuned", {NAME: weight_blob(NAME, tuned)})[NAME]
    child = put(store, "q", {NAME: block_blob(NAME, "TQ1_0", tuned)})[NAME]
    found = bases_of(freeze_models(["base", "tuned", "q"], store=store, base="base"))
    assert found == {base: None, parent: base, child: None}


def test_blocks_that_are_the_base_of_many_have_no_parent(store: LocalStore) -> None:
    """The fine-tunes would lose more than one quantization takes."""
    matrix = source(1)
    put(store, "weights", {NAME: weight_blob(NAME, matrix)})
    base = put(store, "q", {NAME: block_blob(NAME, "Q8_0", matrix)})[NAME]
    tuned = {}
    for seed in (1, 2, 3):
        changed = matrix.copy()
        changed[seed::7, ::40] += 1
        tuned[f"q{seed}"] = put(store, f"q{seed}", {NAME: block_blob(NAME, "Q8_0", changed)})[NAME]
    found = bases_of(freeze_models(["q", *tuned], store=store, base="q"))
    assert found == {base: None, **dict.fromkeys(tuned.values(), base)}


@pytest.mark.parametrize("make", [block_blob, coded_blob])
def test_the_weights_stay_as_long_as_blocks_need_them(
    store: LocalStore, make: Callable[[str, str, Array], bytes]
) -> None:
    matrix = source(1)
    parent = put(store, "weights", {NAME: weight_blob(NAME, matrix)})[NAME]
    blobs = {NAME: make(NAME, "Q5_0", matrix)}
    put(store, "q", blobs)
    freeze_models(["q"], store=store)
    remove_models(["weights"], store=store)
    collect_garbage(store=store, older_than=0)
    assert_whole(store, "q", blobs)
    remove_models(["q"], store=store)
    collect_garbage(store=store, older_than=0, force=True)
    assert not store.has_hot(parent)
    assert not store.cold_files()


def test_damaged_weights_are_reported_and_blocks_come_back_with_them(store: LocalStore) -> None:
    matrix = source(1)
    parent = put(store, "weights", {NAME: weight_blob(NAME, matrix)})[NAME]
    blobs = {NAME: block_blob(NAME, "Q5_0", matrix)}
    put(store, "q", blobs)
    freeze_models(["q"], store=store)
    flip_in_place(store.blob_path(parent), -99)
    faults = verify_models(store=store).faults
    assert {str(fault.reference) for fault in faults} == {"weights:latest", "q:latest"}
    assert all(parent.hex in str(fault) for fault in faults)
    flip_in_place(store.blob_path(parent), -99)
    assert_whole(store, "q", blobs)


def test_an_archive_has_a_ladder_as_rules(store: LocalStore, tmp_path: Path) -> None:
    matrix = source(1)
    models = {"weights": {NAME: weight_blob(NAME, matrix)}}
    models |= {name.lower(): {NAME: block_blob(NAME, name, matrix)} for name in LADDER}
    for name, blobs in models.items():
        put(store, name, blobs)
    packed = pack_models(list(models), tmp_path / "all.tar", store=store)
    alone = pack_models(["weights"], tmp_path / "one.tar", store=store)
    assert packed.deltas == len(LADDER)
    assert packed.stored < alone.stored + len(LADDER) * LITTLE
    other = LocalStore(tmp_path / "other")
    unpack_archive(tmp_path / "all.tar", store=other)
    for name, blobs in models.items():
        assert_whole(other, name, blobs)


def test_an_archive_has_steps_in_a_chain_next_to_a_ladder(
    store: LocalStore, tmp_path: Path
) -> None:
    matrix = source(1, DType.BF16)
    bits = matrix.view(np.uint16).copy()
    blobs = {}
    for number in range(4):
        blobs[f"run:{number}"] = {NAME: weight_blob(NAME, bits.view(matrix.dtype).copy())}
        bits.reshape(-1)[number :: 100 + number] += 1
    blobs["ladder:q4_0"] = {NAME: block_blob(NAME, "Q4_0", matrix)}
    for name, model in blobs.items():
        put(store, name, model)
    path, target = tmp_path / "run.bsar", LocalStore(tmp_path / "target")
    packed = pack_models(list(blobs), path, store=store)
    assert (packed.deltas, packed.fallbacks) == (4, 0)
    unpack_archive(path, store=target)
    for name, model in blobs.items():
        assert_whole(target, name, model)


def q8_0(matrix: Array) -> Array:
    """Return the weights that blocks of Q8_0 of others stand for, as float32."""
    return dequantize("Q8_0", quantize("Q8_0", matrix))


@pytest.mark.parametrize("type_name", ["Q4_0", "Q6_K", "IQ4_XS"])
def test_blocks_of_q8_0_are_a_parent(store: LocalStore, type_name: str) -> None:
    matrix = source(1)
    parent = put(store, "q8", {NAME: block_blob(NAME, "Q8_0", matrix)})[NAME]
    blobs = {NAME: coded_blob(NAME, type_name, q8_0(matrix))}
    child = put(store, "q", blobs)[NAME]
    frozen = freeze_models(["q8", "q"], store=store)
    assert bases_of(frozen) == {parent: None, child: parent}
    assert frozen.blobs[-1].stored < kept(type_name) + LITTLE
    assert_whole(store, "q", blobs)
    put(store, "other", {NAME: block_blob(NAME, "Q8_0", source(2))})
    assert bases_of(freeze_models(["other"], store=store)).popitem()[1] is None


def test_quantizations_of_blocks_of_q8_0_follow_from_their_weights(store: LocalStore) -> None:
    matrix = source(1)
    parent = put(store, "weights", {NAME: weight_blob(NAME, matrix)})[NAME]
    blobs = {NAME: coded_blob(NAME, "Q4_K", q8_0(matrix))}
    models = {"q8": {NAME: block_blob(NAME, "Q8_0", matrix)}, "q": blobs}
    children = [put(store, name, model)[NAME] for name, model in models.items()]
    frozen = freeze_models(list(models), store=store)
    assert bases_of(frozen) == dict.fromkeys(children, parent)
    assert all(item.stored < kept("Q4_K") + LITTLE for item in frozen.blobs)
    assert_whole(store, "q", blobs)


def test_quantizations_of_the_same_weights_share_most_codes_with_q8_0(store: LocalStore) -> None:
    """Without their parent: each stands for the same weights, about."""
    matrix = source(1)
    parent = put(store, "q8", {NAME: block_blob(NAME, "Q8_0", matrix)})[NAME]
    blobs = {NAME: coded_blob(NAME, "Q4_K", matrix)}
    child = put(store, "q", blobs)[NAME]
    frozen = freeze_models(["q8", "q"], store=store)
    assert bases_of(frozen) == {parent: None, child: parent}
    assert frozen.blobs[-1].stored < len(blobs[NAME]) / 3
    assert_whole(store, "q", blobs)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K"])
def test_experts_follow_from_matrices_that_are_fused(store: LocalStore, type_name: str) -> None:
    """The parent has the gate and the other projection of each expert one after the other."""
    fused = np.stack([source(number, rows=2 * ROWS) for number in range(5)])
    name = "mlp.experts.gate_up_proj"
    stack = blob((name, "BF16", fused.shape, fused.tobytes()))
    parent = put(store, "weights", {name: stack})[name]
    make = block_blob if type_name == "Q8_0" else coded_blob
    for part, rows in (("gate", fused[:, :ROWS]), ("up", fused[:, ROWS:])):
        ours = f"blk.0.ffn_{part}_exps.weight"
        flat = make(ours, type_name, np.ascontiguousarray(rows).reshape(-1, COLUMNS))
        blobs = {ours: with_shape(flat, len(fused))}
        child = put(store, part, blobs)[ours]
        frozen = freeze_models([part], store=store)
        assert bases_of(frozen) == {child: parent}
        assert frozen.stored < len(fused) * (kept(type_name) if make is coded_blob else 0) + LITTLE
        assert_whole(store, part, blobs)


def test_fused_experts_follow_from_single_matrices(store: LocalStore) -> None:
    matrices = {
        f"mlp.experts.{at}.{name}.weight": source(2 * at + number)
        for at in range(3)
        for number, name in enumerate(("gate_proj", "up_proj"))
    }
    items = [(name, "BF16", item.shape, item.tobytes()) for name, item in matrices.items()]
    parent = put(store, "weights", {"mlp.experts": blob(*sorted(items))})["mlp.experts"]
    name = "mlp.experts.gate_up_proj"
    blobs = {name: with_shape(coded_blob(name, "Q4_K", np.concatenate([*matrices.values()])), 3)}
    child = put(store, "q", blobs)[name]
    frozen = freeze_models(["q"], store=store)
    assert bases_of(frozen) == {child: parent}
    assert frozen.stored < len(matrices) * kept("Q4_K") + LITTLE
    assert_whole(store, "q", blobs)


def test_queries_keys_and_values_follow_from_weights_that_are_fused(store: LocalStore) -> None:
    queries, keys, values = source(1), source(2, rows=ROWS // 3), source(3, rows=ROWS // 3)
    name = "self_attn.qkv_proj.weight"
    fused = weight_blob(name, np.concatenate([queries, keys, values]))
    parent = put(store, "weights", {name: fused})[name]
    blobs = {
        "attn_q": coded_blob("attn_q", "Q4_K", interleaved(queries)),
        "attn_k": coded_blob("attn_k", "Q4_K", interleaved(keys)),
        "attn_v": coded_blob("attn_v", "Q6_K", values),
    }
    put(store, "q", blobs)
    frozen = freeze_models(["q"], store=store)
    assert {item.base for item in frozen.blobs} == {parent}
    assert frozen.stored < kept("Q4_K") * 4 // 3 + kept("Q6_K") // 3 + LITTLE
    assert_whole(store, "q", blobs)


@pytest.mark.parametrize("count", [2, 3])
def test_a_part_of_what_is_fused_follows_from_one_of_several_blobs(
    store: LocalStore, count: int
) -> None:
    matrices = {str(seed): source(seed) for seed in range(count)}
    weights = {name: weight_blob(name, matrix) for name, matrix in matrices.items()}
    parents = put(store, "weights", weights)
    name = "self_attn.qkv_proj.weight"
    blobs = {name: coded_blob(name, "Q4_K", np.concatenate([*matrices.values()]))}
    child = put(store, "q", blobs)[name]
    frozen = freeze_models(["q"], store=store)
    assert bases_of(frozen) == {child: parents["0"]}
    assert frozen.stored < (1.15 - 1 / count) * len(blobs[name])
    assert_whole(store, "q", blobs)


@pytest.mark.parametrize("rows", [ROWS - 7, ROWS + 7])
def test_vocabularies_may_have_other_rows_at_their_end(store: LocalStore, rows: int) -> None:
    name = "model.embed_tokens.weight"
    parent = put(store, "weights", {name: weight_blob(name, source(1))})[name]
    matrix = source(3, rows=rows)
    common = min(rows, ROWS)
    matrix = np.concatenate([source(1)[:common], matrix[common:]])
    blobs = {"token_embd.weight": coded_blob("token_embd.weight", "Q6_K", matrix)}
    child = put(store, "q", blobs)["token_embd.weight"]
    frozen = freeze_models(["q"], store=store)
    assert bases_of(frozen) == {child: parent}
    added = max(rows - ROWS, 0) * COLUMNS * 210 // 256
    assert frozen.stored < kept("Q6_K") + added + LITTLE
    assert_whole(store, "q", blobs)


def test_a_parent_may_be_frozen_before_its_quantizations_come(store: LocalStore) -> None:
    matrix = source(1)
    parent = put(store, "weights", {NAME: weight_blob(NAME, matrix)})[NAME]
    freeze_models(["weights"], store=store)
    blobs = {NAME: coded_blob(NAME, "Q4_K", matrix)}
    child = put(store, "q", blobs)[NAME]
    assert bases_of(freeze_models(["q"], store=store)) == {child: parent}
    assert_whole(store, "q", blobs)


def test_next_to_a_parent_that_is_a_delta_its_base_serves(store: LocalStore) -> None:
    matrix = source(1, rows=512)
    tuned = matrix.copy()
    tuned[:, ::100] ^= 1
    base = put(store, "base", {NAME: weight_blob(NAME, matrix)})[NAME]
    parent = put(store, "tuned", {NAME: weight_blob(NAME, tuned)})[NAME]
    child = put(store, "q", {NAME: coded_blob(NAME, "Q6_K", tuned)})[NAME]
    for names in (["tuned", "q"], ["tuned"], ["q"]):
        found = bases_of(freeze_models(names, store=store, base="base"))
        assert set(found.values()) == {base}
        if len(names) > 1:
            assert set(found) == {parent, child}
            thaw_models(names, store=store)
    assert verify_models(store=store).faults == ()


def test_a_parent_that_is_a_delta_serves_once_it_is_thawed(store: LocalStore) -> None:
    matrix = source(1)
    tuned = matrix ^ np.random.default_rng(0).integers(0, 64, matrix.shape, np.uint16)
    put(store, "base", {NAME: weight_blob(NAME, matrix)})
    parent = put(store, "tuned", {NAME: weight_blob(NAME, tuned)})[NAME]
    freeze_models(["tuned"], store=store, base="base")
    children = [
        put(store, name.lower(), {NAME: coded_blob(NAME, name, tuned)})[NAME] for name in CODED
    ]
    names = [name.lower() for name in CODED]
    assert parent not in bases_of(freeze_models(names, store=store)).values()
    thaw_models(["tuned", *names], store=store)
    found = bases_of(freeze_models(["tuned", *names], store=store))
    assert found == {parent: None, **dict.fromkeys(children, parent)}
    assert verify_models(store=store).faults == ()
