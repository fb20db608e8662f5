from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import blobstore
from blobstore.cold_blobs import equal_tensors
from blobstore.cold_blobs.blob_encoder import SizeEstimator
from blobstore.cold_blobs.tensor_index import Piece, probe_of
from blobstore.core.digest import Digest
from blobstore.operations.freeze.freeze import Frozen, freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.planning.grouping import ExpertForm
from blobstore.store.local import LocalStore
from tests.support.converted import write_converted
from tests.support.frozen import COUNT, forms_of, layer, layers, tuned, weights
from tests.support.models import Arrays, add_blobs, blob, write_folder

HEAD, EMBED = "lm_head", "embed_tokens"
LITTLE = 4096
SHAPE = (96, 128)
EXPERTS = 8


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store", lock_timeout=0.05)


def put(store: LocalStore, name: str, tensors: Mapping[str, bytes]) -> dict[Digest, bytes]:
    """Add a model; return its blobs."""
    data = {key: layer(key, item) for key, item in tensors.items()}
    add_blobs(store, name, data)
    return {item.digest: data[key] for key, item in layers(store, name).items()}


def bases_of(frozen: Frozen) -> dict[str, Digest | None]:
    """Return the base of each blob by name."""
    return {item.name: item.base for item in frozen.blobs}


def assert_whole(store: LocalStore, blobs: Mapping[Digest, bytes]) -> None:
    """Check that the store verifies and that frozen blobs read the same."""
    assert verify_models(store=store).faults == ()
    for digest, data in blobs.items():
        assert store.read_blob(digest, len(data)) == data


def test_tied_weights_are_stored_once(store: LocalStore) -> None:
    blobs = put(store, "m", {HEAD: weights(1), EMBED: weights(1), "x": weights(2)})
    found = layers(store, "m")
    frozen = freeze_models(["m"], store=store)
    assert {item.outcome for item in frozen.blobs} == {"frozen"}
    assert bases_of(frozen) == {HEAD: found[EMBED].digest, EMBED: None, "x": None}
    assert {item.name: item.stored < LITTLE for item in frozen.blobs} == {
        HEAD: True,
        EMBED: False,
        "x": False,
    }
    assert_whole(store, blobs)
    thaw_models(["m"], store=store)
    assert set(forms_of(store, "m").values()) == {"hot"}
    assert_whole(store, blobs)


def test_a_dry_run_estimates_the_size_of_duplicates(store: LocalStore) -> None:
    put(store, "m", {HEAD: weights(1), EMBED: weights(1)})
    estimated = freeze_models(["m"], store=store, dry_run=True)
    frozen = freeze_models(["m"], store=store)
    assert abs(estimated.stored - frozen.stored) < 0.01 * frozen.size


def test_no_duplicates_are_searched_without_bases(store: LocalStore) -> None:
    put(store, "m", {HEAD: weights(1), EMBED: weights(1)})
    frozen = freeze_models(["m"], store=store, find_base=False)
    assert set(bases_of(frozen).values()) == {None}


@pytest.mark.parametrize("form", ["hot", "cold", "together"])
def test_a_renamed_tensor_is_stored_once(store: LocalStore, form: str) -> None:
    other = put(store, "other", {"a": weights(1), "b": weights(2)})
    blobs = put(store, "m", {"long.name.x": weights(1), "long.name.y": weights(2)})
    if form == "cold":
        freeze_models(["other"], store=store, find_base=False)
    frozen = freeze_models(["m", "other"] if form == "together" else ["m"], store=store)
    coded = {item.digest: item for item in frozen.blobs if item.base is not None}
    assert len(coded) == 2
    assert all(item.stored < LITTLE for item in coded.values())
    if form != "together":
        assert {item.base for item in coded.values()} == set(other)
    assert_whole(store, blobs | other)


SEEDS = range(4)  # so that digests are in either order


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_prefers_a_base_that_is_not_being_frozen(store: LocalStore, seed: int) -> None:
    other = put(store, "other", {"a": weights(seed)})
    put(store, "m", {HEAD: weights(seed), EMBED: weights(seed)})
    frozen = freeze_models(["m"], store=store)
    assert set(bases_of(frozen).values()) == set(other)


def test_the_original_of_a_duplicate_outlives_its_model(store: LocalStore) -> None:
    other = put(store, "other", {"a": weights(1)})
    blobs = put(store, "m", {"x": weights(1)})
    freeze_models(["m"], store=store)
    removed = remove_models(["other"], store=store)
    assert (removed.blobs, removed.bases) == (0, 1)
    assert collect_garbage(store=store, older_than=0, force=True).blobs == ()
    assert_whole(store, blobs)
    thaw_models(["m"], store=store)
    assert len(collect_garbage(store=store, older_than=0, force=True).blobs) == 1
    assert_whole(store, blobs)
    assert not store.has(next(iter(other)))


def test_a_base_frozen_later_does_not_become_a_delta(store: LocalStore) -> None:
    other = put(store, "other", {"a": weights(1)})
    blobs = put(store, "m", {"x": weights(1)})
    freeze_models(["m"], store=store)
    frozen = freeze_models(["other"], store=store)
    assert bases_of(frozen) == {"a": None}
    assert {item.outcome for item in frozen.blobs} == {"frozen"}
    assert_whole(store, blobs | other)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("keep_hot", [False, True])
def test_a_delta_never_becomes_a_base(store: LocalStore, seed: int, *, keep_hot: bool) -> None:
    first = put(store, "first", {"a": weights(seed)})
    second = put(store, "second", {"bb": weights(seed)})
    freeze_models(["second"], store=store, keep_hot=keep_hot)
    third = put(store, "third", {"ccc": weights(seed)})
    frozen = freeze_models(["third"], store=store)
    assert bases_of(frozen) == {"ccc": next(iter(first))}
    assert_whole(store, first | second | third)


def sampled_like(true: bytes, other: bytes) -> bytes:
    """Return the second bytes with those of the first at the position of the probe."""
    data = bytearray(other)

    def copy(out: memoryview, begin: int) -> None:
        data[begin : begin + len(out)] = out[:] = true[begin : begin + len(out)]

    probe_of(Piece(0, len(true), 16), copy)
    return bytes(data)


def test_equal_probes_alone_do_not_make_a_duplicate(store: LocalStore) -> None:
    crafted = sampled_like(weights(1), weights(2))
    assert crafted != weights(2)
    blobs = put(store, "m", {"x": weights(1), "y": crafted})
    frozen = freeze_models(["m"], store=store)
    assert set(bases_of(frozen).values()) == {None}
    assert_whole(store, blobs)


def test_a_false_duplicate_does_not_hide_a_real_one(store: LocalStore) -> None:
    """Even if its model is not being frozen, which would make it the preferred base."""
    put(store, "other", {"a": sampled_like(weights(1), weights(2))})
    blobs = put(store, "m", {HEAD: weights(1), EMBED: weights(1)})
    frozen = freeze_models(["m"], store=store)
    assert bases_of(frozen) == {HEAD: layers(store, "m")[EMBED].digest, EMBED: None}
    assert_whole(store, blobs)


@pytest.mark.slow
def test_a_nearly_equal_tensor_is_no_duplicate(store: LocalStore) -> None:
    count = 4_000_000
    data = bytearray(weights(1, count))
    data[3 * count // 4] ^= 1
    blobs = put(store, "m", {"x": weights(1, count), "y": bytes(data)})
    frozen = freeze_models(["m"], store=store)
    assert [item.base for item in frozen.blobs] == [None, None]
    assert_whole(store, blobs)


def lightly(seed: int, of: int) -> bytes:
    """Return weights after a training that changed few of them."""
    return tuned(seed, of)[:2000] + weights(of)[2000:]


@pytest.mark.parametrize("names", [["tuned"], ["base", "tuned"], ["tuned", "base"]])
def test_tied_weights_that_differ_little_from_a_base_are_deltas(
    store: LocalStore, names: list[str]
) -> None:
    blobs = put(store, "base", {HEAD: weights(1), EMBED: weights(1), "x": weights(2)})
    blobs |= put(store, "tuned", {HEAD: lightly(3, 1), EMBED: lightly(3, 1), "x": lightly(4, 2)})
    frozen = freeze_models(names, store=store, base="base")
    found = layers(store, "tuned")
    coded = {item.digest: item for item in frozen.blobs}
    mine = [coded[item.digest] for item in found.values()]
    assert all(item.base is not None for item in mine)
    assert {item.base for item in mine} <= {item.digest for item in layers(store, "base").values()}
    assert all(item.stored < 0.2 * item.size for item in mine)
    alone = [item for item in frozen.blobs if item.base is None]
    assert len(alone) == (0 if names == ["tuned"] else 2)  # one of the tied ones, and x
    assert_whole(store, blobs)


def retrained(seed: int, of: int) -> bytes:
    """Return weights after a training that changed most of them."""
    return weights(of)[:COUNT] + weights(seed)[COUNT:]


def test_tied_weights_that_differ_much_from_a_base_are_stored_once(store: LocalStore) -> None:
    blobs = put(store, "base", {HEAD: weights(1), EMBED: weights(1)})
    blobs |= put(store, "tuned", {HEAD: retrained(3, 1), EMBED: retrained(3, 1)})
    frozen = freeze_models(["tuned"], store=store, base="base")
    sizes = sorted(item.stored for item in frozen.blobs)
    assert sizes[0] < LITTLE
    alone = freeze_models(["tuned"], store=store, find_base=False, dry_run=True)
    assert sizes[1] <= max(item.stored for item in alone.blobs)
    assert_whole(store, blobs)


def test_a_tied_pair_of_a_model_with_a_base_that_differs_is_stored_once(store: LocalStore) -> None:
    """A blob of equal size in another model is not a base of it."""
    blobs = put(store, "base", {"x": weights(2), EMBED: weights(5)})
    blobs |= put(store, "tuned", {"x": lightly(3, 2), EMBED: weights(6), HEAD: weights(6)})
    frozen = freeze_models(["tuned"], store=store, base="base")
    found = layers(store, "tuned")
    assert bases_of(frozen) == {
        "x": layers(store, "base")["x"].digest,
        EMBED: None,
        HEAD: found[EMBED].digest,
    }
    assert_whole(store, blobs)


def experts_of(seed: int) -> Arrays:
    """Return a layer of experts."""
    random = np.random.default_rng(seed)
    return {
        f"model.layers.0.mlp.experts.{number}.{name}.weight": (
            random.standard_normal(SHAPE, dtype=np.float32) * np.float32(0.02)
        ).astype(ml_dtypes.bfloat16)
        for number in range(EXPERTS)
        for name in ("gate_proj", "up_proj", "down_proj")
    }


@pytest.mark.slow
@pytest.mark.parametrize("first", ["packed", "stacked"])
@pytest.mark.parametrize("is_together", [False, True])
def test_packed_and_stacked_experts_are_stored_once(
    store: LocalStore, tmp_path: Path, first: ExpertForm, *, is_together: bool
) -> None:
    folder = write_folder(tmp_path / "model", experts_of(1))
    second: ExpertForm = "stacked" if first == "packed" else "packed"
    blobs = {}
    for form in (first, second):
        blobstore.create(folder, form, store=store, experts=form)
        for item in layers(store, form).values():
            blobs[item.digest] = store.read_blob(item.digest, item.size)
    if not is_together:
        freeze_models([first], store=store, find_base=False)
    frozen = freeze_models([first, second] if is_together else [second], store=store)
    tensors = [item for item in frozen.blobs if item.size > LITTLE]
    assert sum(item.base is not None for item in tensors) == 1
    coded = next(item for item in tensors if item.base is not None)
    assert coded.stored < LITTLE + 0.02 * coded.size
    assert_whole(store, blobs)


def pair(prefix: str, *seeds: int) -> bytes:
    """Return a blob of some tensors."""
    return blob(*((f"{prefix}.{seed}", "BF16", (COUNT,), weights(seed)) for seed in seeds))


def test_half_of_a_blob_may_be_a_duplicate(store: LocalStore) -> None:
    add_blobs(store, "other", {"experts": pair("experts", 1, 3)})
    mine = pair("my.experts", 1, 2)
    add_blobs(store, "m", {"my.experts": mine})
    frozen = freeze_models(["m"], store=store)
    assert bases_of(frozen) == {"my.experts": layers(store, "other")["experts"].digest}
    assert frozen.stored < 0.4 * len(mine)
    assert_whole(store, {layers(store, "m")["my.experts"].digest: mine})


def test_a_group_with_deltas_does_not_become_a_duplicate(store: LocalStore) -> None:
    """The deltas find their tensors in it by name, which another group lacks."""
    group = "model.experts"
    tuned_pair = blob(*((f"{group}.{n}", "BF16", (COUNT,), tuned(5, n)) for n in (1, 2)))
    add_blobs(store, "base", {group: pair(group, 1, 2)})
    add_blobs(store, "tuned", {group: tuned_pair})
    longer = "model.language_model.experts"  # so that the tensors are a smaller share of the blob
    add_blobs(store, "renamed", {longer: pair(longer, 1, 2)})
    frozen = freeze_models(["tuned", "renamed", "base"], store=store, base="base")
    base = layers(store, "base")[group].digest
    assert {item.digest: item.base for item in frozen.blobs} == {
        base: None,
        layers(store, "tuned")[group].digest: base,
        layers(store, "renamed")[longer].digest: base,
    }
    assert all(item.stored < 0.3 * item.size for item in frozen.blobs if item.base)
    assert_whole(store, {layers(store, "tuned")[group].digest: tuned_pair})


@pytest.mark.slow
def test_reads_only_blobs_of_the_same_sizes_and_other_names(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        put(store, f"alike-{number}", {"x": weights(10 + number), "y": weights(20 + number)})
    for number in range(12):
        put(store, f"renamed-{number:02}", {"xx": weights(30 + number), "yy": weights(50 + number)})
    put(store, "small", {"z": weights(70, 1000)})
    put(store, "m", {"x": weights(41), "y": weights(51)})
    opened: list[Digest] = []
    base = LocalStore.base

    def noted(self: LocalStore, digest: Digest, size: int) -> object:
        opened.append(digest)
        return base(self, digest, size)

    monkeypatch.setattr(LocalStore, "base", noted)
    mine = {item.digest: item for item in layers(store, "m").values()}
    others = [layers(store, item.model) for item in store.references() if item.model != "m"]
    equal_tensors.DuplicateFinder(store, SizeEstimator(store, "fast"), mine, {}).read(others)
    assert len(opened) == len(set(opened)) == 2 + 24
    assert not {item.digest for item in layers(store, "alike-0").values()} & {*opened}
    monkeypatch.undo()
    frozen = freeze_models(["m"], store=store)
    assert bases_of(frozen)["x"] == layers(store, "renamed-11")["xx"].digest


def test_unreadable_blobs_are_not_bases(store: LocalStore) -> None:
    put(store, "other", {"a": weights(1), "b": weights(2)})
    digests = [item.digest for item in layers(store, "other").values()]
    Path(store.blob_path(digests[0])).unlink()
    blobs = put(store, "m", {"x": weights(1), "y": weights(2)})
    frozen = freeze_models(["m"], store=store)
    assert bases_of(frozen) == {"x": None, "y": digests[1]}
    for digest, data in blobs.items():
        assert store.read_blob(digest, len(data)) == data


def test_a_base_with_deltas_does_not_become_a_delta(store: LocalStore) -> None:
    blobs = put(store, "base", {"x": weights(1)})
    blobs |= put(store, "tuned", {"x": lightly(3, 1)})
    freeze_models(["tuned"], store=store, base="base")
    blobs |= put(store, "renamed", {"long.name": weights(1)})
    frozen = freeze_models(["base", "renamed"], store=store)
    assert bases_of(frozen) == {"x": None, "long.name": layers(store, "base")["x"].digest}
    assert_whole(store, blobs)


# GGUF files


def converted_layer(dtype: type, *, has_experts: bool) -> Arrays:
    """Return matrices that llama.cpp renames and keeps, one that it changes, and experts that it merges."""
    random = np.random.default_rng(0)

    def matrix() -> Any:
        return random.standard_normal((96, 128)).astype(dtype)

    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
    if has_experts:
        names += [
            f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"
            for expert in range(4)
            for part in ("gate", "up", "down")
        ]
    return {name: matrix() for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kind"), [(np.float32, "F32"), (np.float16, "F16"), (ml_dtypes.bfloat16, "BF16")]
)
@pytest.mark.parametrize("frozen", [["gguf"], ["hf"], ["hf", "gguf"]], ids=" ".join)
def test_equal_tensors_of_a_gguf_file_are_stored_once(
    store: LocalStore, tmp_path: Path, dtype: type, kind: str, frozen: list[str]
) -> None:
    arrays = converted_layer(dtype, has_experts=False)
    path = write_converted(tmp_path / "m.gguf", arrays, "llama", heads=3, heads_kv=3, dtype=kind)
    blobstore.create(path, "gguf", store=store)
    add_blobs(
        store,
        "hf",
        {name: blob((name, kind, array.shape, array.tobytes())) for name, array in arrays.items()},
    )
    found = [item for item in freeze_models(frozen, store=store).blobs if item.base is not None]
    # The rows of queries and keys have another order.
    assert {item.name for item in found} in (
        {"blk.0.attn_v.weight", "blk.0.attn_output.weight"},
        {f"model.layers.0.self_attn.{part}_proj.weight" for part in "vo"},
    )
    assert all(item.stored < LITTLE for item in found)
    assert verify_models(store=store).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["packed", "stacked"])
@pytest.mark.parametrize("frozen", [["gguf"], ["hf"], ["hf", "gguf"]], ids=" ".join)
def test_experts_of_a_gguf_file_are_stored_once(
    store: LocalStore, tmp_path: Path, form: ExpertForm, frozen: list[str]
) -> None:
    arrays = converted_layer(np.float32, has_experts=True)
    path = write_converted(tmp_path / "m.gguf", arrays, "qwen3moe")
    blobstore.create(path, "gguf", store=store)
    blobstore.create(write_folder(tmp_path / "hf", arrays), "hf", store=store, experts=form)
    found = freeze_models(frozen, store=store).blobs
    expected = sum(array.nbytes for name, array in arrays.items() if "experts" in name)
    saved = sum(item.size - item.stored for item in found if item.base and "exp" in item.name)
    # A blob has one base, and a projection is one in GGUF files.
    assert saved > 0.98 * expected / (3 if frozen == ["hf"] else 1)
    assert verify_models(store=store).faults == ()
