from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from blobstore.archives.plan import (
    MAX_WITHOUT_BASE,
    PlannedMember,
    plan_members,
    read_models,
)
from blobstore.cold_blobs.blob_encoder import SizeEstimator
from blobstore.compression.base import BaseBlob
from blobstore.compression.spans import Span
from blobstore.core.digest import Digest
from blobstore.core.tensor import DType
from blobstore.errors import BlobDamaged, BlobMissing, InvalidManifest, ModelNotFound
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.maintenance.names import remove_models
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support.archives import put_family
from tests.support.cold import cold, noise
from tests.support.frozen import flip, layer, layers, put, weights
from tests.support.models import add_blobs, with_layers

CHILDREN = ("one", "two", "three")
EVERYONE = ("base", *CHILDREN)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    put_family(store, children=CHILDREN)
    return store


def planned(store: LocalStore, *names: str) -> list[PlannedMember]:
    models = read_models(store, [Reference.parse(name) for name in names])
    return plan_members(store, models, SizeEstimator(store, "fast"))


def edges(blobs: Sequence[PlannedMember]) -> dict[str, str]:
    """Return the base of each delta, by labels."""
    names = {blob.blob.digest: blob.label for blob in blobs}
    return {blob.label: names[blob.base.digest] for blob in blobs if blob.base is not None}


def test_reads_each_model_once_in_order(store: LocalStore) -> None:
    models = read_models(store, [Reference.parse(name) for name in ("two", "base", "two")])
    assert [model.reference.model for model in models] == ["base", "two"]
    for model in models:
        assert model.data == store.read_manifest(model.reference)


def test_rejects_missing_and_damaged_models(store: LocalStore) -> None:
    with pytest.raises(ModelNotFound):
        read_models(store, [Reference.parse("none")])
    store.manifest_path(Reference.parse("one")).write_bytes(b"{}")
    with pytest.raises(InvalidManifest, match="one"):
        read_models(store, [Reference.parse("one")])


def test_plans_each_blob_once_model_by_model(store: LocalStore) -> None:
    put(store, "other", {"x": 50, "y": 51})
    blobs = planned(store, "other", "base")
    assert [blob.label for blob in blobs] == [
        f"base:latest: '{media_types.CONFIG}'",
        "base:latest: layer 'l0'",
        "base:latest: layer 'l1'",
        "base:latest: layer 'l2'",
        "base:latest: layer 'shared'",
        "other:latest: layer 'x'",
        "other:latest: layer 'y'",
    ]
    assert edges(blobs) == {}
    assert {blob.cold for blob in blobs} == {None}


def test_fine_tunes_are_deltas_against_their_base_model(store: LocalStore) -> None:
    blobs = planned(store, *EVERYONE)
    assert edges(blobs) == {
        f"{child}:latest: layer '{key}'": f"base:latest: layer '{key}'"
        for child in CHILDREN
        for key in ("l0", "l1", "l2")
    }


def test_blobs_that_are_stored_uncompressed_get_no_base(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "small")
    count = (MAX_WITHOUT_BASE - len(layer("l0", b""))) // 2
    while len(layer("l0", weights(0, count))) > MAX_WITHOUT_BASE:
        count -= 1
    sizes = {}
    for more in (0, 4):  # the header is padded to 8 bytes
        put_family(store, count=count + more, children=("one",))
        sizes[len(layer("l0", weights(0, count + more)))] = len(
            edges(planned(store, "base", "one"))
        )
    assert sizes == {MAX_WITHOUT_BASE: 0, MAX_WITHOUT_BASE + 8: 3}


def test_a_base_comes_before_its_deltas(store: LocalStore) -> None:
    put_family(store, children=("a",))  # whose name comes first
    blobs = planned(store, "a", *EVERYONE)
    order = [blob.blob.digest for blob in blobs]
    assert edges(blobs)
    for blob in blobs:
        if blob.base is not None:
            assert order.index(blob.base.digest) < order.index(blob.blob.digest)


def test_no_base_has_a_base(store: LocalStore) -> None:
    freeze_models(["one"], store=store, base="two")
    for names in (EVERYONE, ("one", "two", "base"), ("one", "two")):
        blobs = planned(store, *names)
        coded = {blob.blob.digest for blob in blobs if blob.base is not None}
        assert coded
        assert coded.isdisjoint(blob.base.digest for blob in blobs if blob.base is not None)


def test_the_order_of_names_does_not_matter(store: LocalStore) -> None:
    freeze_models(["one"], store=store, base="two")
    assert planned(store, *EVERYONE) == planned(store, *EVERYONE[::-1])


def test_copies_cold_forms_with_their_bases(store: LocalStore) -> None:
    freeze_models(["base", *CHILDREN], store=store, base="base")
    blobs = planned(store, "base", "one")
    cold = {blob.label: blob.cold for blob in blobs}
    found = layers(store, "one")["l0"]
    data = cold["one:latest: layer 'l0'"]
    assert data is not None
    assert bytes(data) == Path(store.cold_path(found.digest)).read_bytes()
    assert edges(blobs)["one:latest: layer 'l0'"] == "base:latest: layer 'l0'"


@pytest.mark.slow
def test_adds_no_base_for_a_single_model(store: LocalStore) -> None:
    freeze_models(["base", *CHILDREN], store=store, base="base")
    blobs = planned(store, "one")
    assert edges(blobs) == {}
    assert [blob.label for blob in blobs if blob.cold is not None] == ["one:latest: layer 'shared'"]


@pytest.mark.parametrize("is_base_cold", [False, True])
def test_adds_the_base_of_several_models(store: LocalStore, is_base_cold: bool) -> None:
    freeze_models(CHILDREN, store=store, base="base")
    if is_base_cold:
        freeze_models(["base"], store=store, find_base=False)
    blobs = planned(store, *CHILDREN)
    assert set(edges(blobs).values()) == {
        f"the base of one:latest: layer '{key}'" for key in ("l0", "l1", "l2")
    }
    assert len(edges(blobs)) == 9
    bases = [blob for blob in blobs if blob.label.startswith("the base")]
    assert {blob.cold is not None for blob in bases} == {is_base_cold}


def test_an_unreadable_cold_form_matters_only_if_the_blob_is_not_hot(store: LocalStore) -> None:
    freeze_models(["base"], store=store, find_base=False)
    thaw_models(["base"], store=store, keep_cold=True)
    found = layers(store, "base")["l0"]
    flip(store.cold_path(found.digest), -10)
    blobs = {blob.label: blob.cold for blob in planned(store, "base")}
    assert blobs["base:latest: layer 'l0'"] is None
    assert blobs["base:latest: layer 'l1'"] is not None
    Path(store.blob_path(found.digest)).unlink()
    with pytest.raises(BlobDamaged, match="base:latest: layer 'l0': cold blob"):
        planned(store, "base")


def test_names_the_model_and_layer_of_a_missing_blob(store: LocalStore) -> None:
    found = layers(store, "one")["l1"]
    Path(store.blob_path(found.digest)).unlink()
    with pytest.raises(BlobMissing, match="one:latest: layer 'l1': blob"):
        planned(store, "one")


def test_names_layers_without_names_by_their_types(store: LocalStore) -> None:
    data = b"MIT"
    with store.ingest() as ingest:
        added = ingest.add(len(data), lambda: [data])
        ingest.publish()
        manifest = store.resolve(Reference.parse("base"))
        license_ = Descriptor(media_types.LICENSE, added.digest, added.size)
        store.names.publish(
            replace_any("licensed"), Manifest(config=manifest.config, layers=(license_,))
        )
    assert planned(store, "licensed")[1].label == f"licensed:latest: '{media_types.LICENSE}'"


def test_plans_equal_tensors_of_other_names_as_a_delta(store: LocalStore) -> None:
    same = weights(60)
    blobs = {key: layer(key, same) for key in ("embedding", "head")}
    add_blobs(store, "tied", blobs | {"own": layer("own", weights(61))})
    assert edges(planned(store, "tied")) in (
        {"tied:latest: layer 'embedding'": "tied:latest: layer 'head'"},
        {"tied:latest: layer 'head'": "tied:latest: layer 'embedding'"},
    )


@pytest.mark.slow
def test_does_not_add_an_unreadable_base(store: LocalStore) -> None:
    freeze_models(CHILDREN, store=store, base="base")
    base = layers(store, "base")["l0"]
    flip(store.blob_path(base.digest))
    freeze_models(["base"], store=store, find_base=False)
    remove_models(["base"], store=store)
    for path in (store.blob_path(base.digest), store.base_path(base.digest)):
        Path(path).unlink()
    Path(store.cold_path(base.digest)).write_bytes(b"no cold blob")
    found = edges(planned(store, *CHILDREN))
    assert {key.rpartition(" ")[2] for key in found} == {"'l1'", "'l2'"}


@pytest.mark.slow
def test_does_not_copy_a_chain_of_deltas(store: LocalStore) -> None:
    freeze_models(["one"], store=store, base="base")
    base, other = layers(store, "base")["l0"], layers(store, "two")["l0"]
    data = Path(store.blob_path(base.digest)).read_bytes()
    by = BaseBlob.hot(Path(store.blob_path(other.digest)).read_bytes())
    chained = cold(data, spans=[Span(len(data), DType.BF16, base_begin=0)], base=by)
    Path(store.cold_path(base.digest)).write_bytes(chained)
    found = edges(planned(store, *EVERYONE))
    assert found["base:latest: layer 'l0'"] == "two:latest: layer 'l0'"
    assert "one:latest: layer 'l0'" not in found
    copied = [blob for blob in planned(store, *EVERYONE) if blob.cold is not None]
    assert {found[blob.label] for blob in copied}.isdisjoint(found)


def test_does_not_copy_a_cold_form_that_is_not_smaller(store: LocalStore) -> None:
    data = noise(50_000)
    add_blobs(store, "odd", {"x": data})
    store.folder("cold").mkdir(parents=True)
    Path(store.cold_path(Digest.of(data))).write_bytes(cold(data))
    assert {blob.cold for blob in planned(store, "odd")} == {None}


def test_rejects_a_manifest_that_contradicts_its_config(store: LocalStore) -> None:
    reference = Reference.parse("base")
    manifest = store.resolve(reference)
    store.names.publish(replace_any(reference), with_layers(store, manifest, manifest.layers))
    path = store.manifest_path(reference)
    path.write_bytes(path.read_bytes().replace(b'"l0"', b'"k0"'))
    with pytest.raises(InvalidManifest, match="base:latest: the manifest was changed"):
        read_models(store, [reference])
