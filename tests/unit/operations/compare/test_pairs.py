from __future__ import annotations

import numpy as np
import pytest

from blobstore.core import strict_json
from blobstore.errors import BlobDamaged, BlobstoreError, ModelNotFound, NotFound
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.reference import Reference
from blobstore.operations.compare.pairs import Pairing, pair_tensors
from blobstore.operations.create.create import create
from blobstore.planning.grouping import ExpertForm
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support.models import (
    Arrays,
    add_blob,
    add_blobs,
    blob,
    dense_tensors,
    moe_tensors,
    with_layers,
    write_folder,
)
from tests.support.options import grouped

LAYER = "model.layers.0.mlp"


def make(
    store: LocalStore, name: str, tensors: Arrays, experts: ExpertForm = "packed", **options: str
) -> None:
    folder = write_folder(store.root.parent / name, tensors)
    create(folder, name, store=store, experts=experts, **grouped(options))  # type: ignore[call-overload]


def paired(store: LocalStore, model: str, base: str, *patterns: str) -> Pairing:
    return pair_tensors(store, Reference.parse(model), Reference.parse(base), patterns)


def with_stacks(store: LocalStore, name: str, stacks: object) -> None:
    """Add a list of stacked tensors to a model."""
    content = strict_json.dumps(stacks).encode()
    layer = Descriptor(media_types.STACKS, *add_blob(store, content))
    manifest = store.resolve(Reference.parse(name))
    changed = with_layers(store, manifest, (*manifest.layers, layer))
    store.names.publish(replace_any(name), changed)


def test_pairs_tensors_by_name_in_the_order_of_the_model(store: LocalStore) -> None:
    make(store, "a", dense_tensors())
    make(store, "b", dict(reversed(dense_tensors().items())))
    found = paired(store, "a", "b")
    assert [pair.ours.name for pair in found.pairs] == sorted(dense_tensors())
    assert all(pair.ours.name == pair.base.name for pair in found.pairs)
    assert all(pair.is_shared for pair in found.pairs)
    assert (found.only_in_model, found.only_in_base) == ((), ())


@pytest.mark.parametrize("forms", [("packed", "stacked"), ("stacked", "packed"), ("stacked",) * 2])
def test_pairs_experts_of_either_form(
    forms: tuple[ExpertForm, ExpertForm], store: LocalStore
) -> None:
    for name, form in zip("ab", forms, strict=True):
        make(store, name, moe_tensors(), form)
    found = paired(store, "a", "b")
    assert {pair.ours.name for pair in found.pairs} == set(moe_tensors())
    for pair in found.pairs:
        shape = moe_tensors()[pair.ours.name].shape
        assert pair.ours.shape == pair.base.shape == shape
        assert pair.ours.nbytes == pair.base.nbytes == moe_tensors()[pair.ours.name].nbytes
    places = {pair.ours.name: pair.ours.place for pair in found.pairs}
    expected = 10 if forms[0] == "stacked" else None
    assert places[f"{LAYER}.experts.10.up_proj.weight"] == expected


def test_splits_a_stack_of_the_source_by_the_names_of_the_other_model(store: LocalStore) -> None:
    stacked = f"{LAYER}.experts.up_proj.weight"
    make(store, "a", {stacked: np.zeros((12, 6, 4), np.float32)})
    make(store, "b", moe_tensors(), "stacked")
    ups = [f"{LAYER}.experts.{number}.up_proj.weight" for number in range(12)]
    assert [pair.ours.name for pair in paired(store, "a", "b").pairs] == ups
    assert [pair.ours.name for pair in paired(store, "b", "a").pairs] == ups


def test_a_stack_of_unknown_members_is_one_tensor(store: LocalStore) -> None:
    stacked = f"{LAYER}.experts.up_proj.weight"
    for name in "ab":
        make(store, name, {stacked: np.zeros((12, 6, 4), np.float32)})
    (pair,) = paired(store, "a", "b").pairs
    assert (pair.ours.name, pair.ours.shape) == (stacked, (12, 6, 4))


def test_takes_the_group_size_from_the_quantized_side(store: LocalStore) -> None:
    tensors: Arrays = {"w.weight": np.zeros((64, 64), np.float32)}
    make(store, "plain", tensors)
    make(store, "other", {"w.weight": np.ones((64, 64), np.float32)})
    make(store, "packed", tensors, quantize="int4")
    sizes = [
        paired(store, *names).pairs[0].group_size
        for names in (("packed", "plain"), ("plain", "packed"), ("plain", "other"))
    ]
    assert sizes == [32, 32, 64]


def test_lists_tensors_that_only_one_model_has(store: LocalStore) -> None:
    tensors = dense_tensors()
    make(store, "a", {name: tensors[name] for name in ("mask", "scalar")})
    make(store, "b", {name: tensors[name] for name in ("scalar", "empty")})
    found = paired(store, "a", "b")
    assert [pair.ours.name for pair in found.pairs] == ["scalar"]
    assert found.only_in_model == ("mask",)
    assert found.only_in_base == ("empty",)


def test_filters_both_models_by_pattern(store: LocalStore) -> None:
    tensors = dense_tensors()
    make(store, "a", {name: tensors[name] for name in ("mask", "scalar", "empty")})
    make(store, "b", {name: tensors[name] for name in ("scalar", "empty", "position_ids")})
    found = paired(store, "a", "b", "s*", "m*")
    assert [pair.ours.name for pair in found.pairs] == ["scalar"]
    assert (found.only_in_model, found.only_in_base) == (("mask",), ())
    with pytest.raises(NotFound, match=r"no tensor of a:latest or b:latest matches 'x\*'"):
        paired(store, "a", "b", "s*", "x*")


def test_rejects_models_without_a_common_tensor(store: LocalStore) -> None:
    make(store, "a", {"x": np.zeros(3)})
    make(store, "b", {"y": np.zeros(3)})
    with pytest.raises(BlobstoreError, match="have no tensor of the same name"):
        paired(store, "a", "b")


def test_rejects_another_shape(store: LocalStore) -> None:
    make(store, "a", {"x": np.zeros((2, 3))})
    make(store, "b", {"x": np.zeros((3, 2))})
    message = r"tensor 'x' has shape \[2, 3\] in a:latest and \[3, 2\] in b:latest"
    with pytest.raises(BlobstoreError, match=message):
        paired(store, "a", "b")


def test_rejects_quantized_weights_of_unknown_format(store: LocalStore) -> None:
    weight = ("x", "U32", (1, 4), bytes(16))
    scale = ("x.scale", "F32", (1, 1), bytes(4))
    add_blobs(store, "a", {"x": blob(weight, scale)})
    make(store, "b", {"x": np.zeros((1, 32), np.float32)})
    for names in (("a", "b"), ("b", "a")):
        with pytest.raises(BlobstoreError, match="'x' of a:latest is quantized, but its blob does"):
            paired(store, *names)
    (pair,) = paired(store, "a", "a").pairs  # shared, so not read
    assert pair.is_shared


def test_rejects_models_without_tensors(store: LocalStore) -> None:
    make(store, "a", {"x": np.zeros(3)})
    manifest = store.resolve(Reference.parse("a"))
    store.names.publish(replace_any("b"), with_layers(store, manifest, ()))
    with pytest.raises(BlobstoreError, match="b:latest has no tensor layers"):
        paired(store, "a", "b")
    with pytest.raises(ModelNotFound):
        paired(store, "a", "none")


def test_rejects_a_list_of_stacks_that_does_not_fit(store: LocalStore) -> None:
    for name in "ab":
        make(store, name, {"x": np.zeros((2, 3)), "y.0": np.zeros(3)})
    with_stacks(store, "a", {"x": ["y.0", "y.1"]})
    with pytest.raises(BlobDamaged, match=r"model a:latest: two tensors .* be called 'y\.0'"):
        paired(store, "a", "b")
    with_stacks(store, "b", {"x": ["z"]})
    with pytest.raises(BlobDamaged, match=r"model b:latest: tensor 'x' .* a stack of length 1"):
        paired(store, "b", "b")


def test_only_the_same_bytes_of_the_same_blob_are_shared(store: LocalStore) -> None:
    one, two = (f"{LAYER}.shared_experts.{name}.weight" for name in "xy")
    for name, (first, second) in (("a", "pq"), ("b", "qp")):
        make(store, name, {"z": np.ones((2, 3)), one: np.ones((1, 3)), two: np.ones((1, 3))})
        stacks = {"z": [f"z{first}", f"z{second}"], one: [first], two: [second]}
        with_stacks(store, name, stacks)
    assert [pair.is_shared for pair in paired(store, "a", "b").pairs] == [False] * 4
    assert [pair.is_shared for pair in paired(store, "a", "a").pairs] == [True] * 4
