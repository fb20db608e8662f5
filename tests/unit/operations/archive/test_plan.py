from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from blobstore.compression.base import BaseBlob
from blobstore.compression.spans import Span
from blobstore.core.digest import Digest
from blobstore.core.tensor import DType
from blobstore.errors import BlobDamaged, BlobMissing, InvalidManifest, ModelNotFound
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.operations.archive.plan import plan_members, read_models
from blobstore.operations.freeze.blob_encoder import SizeEstimator
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.maintenance.names import remove_models
from blobstore.store.local import LocalStore
from tests.support.archives import put_family
from tests.support.cold import cold, noise
from tests.support.frozen import flip, layer, layers, put, weights
from tests.support.models import add_blobs, with_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.operations.archive.plan import PlannedMember

CHILDREN = ("one", "two", "three")
EVERYONE = ("base", *CHILDREN)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    put_family(store, children=CHILDREN)
    return store


def gathered(store: LocalStore, *names: str) -> list[PlannedMember]:
    models = read_models(store, [Reference.parse(name) for name in names])
    return plan_members(store, models, SizeEstimator(store, "fast"))


def edges(blobs: Sequence[PlannedMember]) -> dict[str, str]:
    """Return what is coded by what, as models and layers."""
    names = {blob.blob.digest: blob.label for blob in blobs}
    return {blob.label: names[blob.base.digest] for blob in blobs if blob.base is not None}


def test_models_are_sorted_and_each_once(store: LocalStore) -> None:
    models = read_models(store, [Reference.parse(name) for name in ("two", "base", "two")])
    assert [model.reference.model for model in models] == ["base", "two"]
    for model in models:
        assert model.data == store.read_manifest(model.reference)


def test_rejects_models_that_are_not_there_or_not_whole(store: LocalStore) -> None:
    with pytest.raises(ModelNotFound):
        read_models(store, [Reference.parse("none")])
    store.manifest_path(Reference.parse("one")).write_bytes(b"{}")
    with pytest.raises(InvalidManifest, match="one"):
        read_models(store, [Reference.parse("one")])


def test_all_blobs_are_there_once_model_by_model(store: LocalStore) -> None:
    put(store, "other", {"x": 50, "y": 51})
    blobs = gathered(store, "other", "base")
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


def test_a_family_is_coded_by_what_it_was_made_from(store: LocalStore) -> None:
    blobs = gathered(store, *EVERYONE)
    assert edges(blobs) == {
        f"{child}:latest: layer '{key}'": f"base:latest: layer '{key}'"
        for child in CHILDREN
        for key in ("l0", "l1", "l2")
    }


def test_a_base_comes_before_what_it_codes(store: LocalStore) -> None:
    put_family(store, children=("a",))  # whose name comes first
    blobs = gathered(store, "a", *EVERYONE)
    order = [blob.blob.digest for blob in blobs]
    assert edges(blobs)
    for blob in blobs:
        if blob.base is not None:
            assert order.index(blob.base.digest) < order.index(blob.blob.digest)


def test_no_base_has_a_base(store: LocalStore) -> None:
    freeze_models(["one"], store=store, base="two")
    for names in (EVERYONE, ("one", "two", "base"), ("one", "two")):
        blobs = gathered(store, *names)
        coded = {blob.blob.digest for blob in blobs if blob.base is not None}
        assert coded
        assert coded.isdisjoint(blob.base.digest for blob in blobs if blob.base is not None)


def test_the_order_of_names_does_not_matter(store: LocalStore) -> None:
    freeze_models(["one"], store=store, base="two")
    assert gathered(store, *EVERYONE) == gathered(store, *EVERYONE[::-1])


def test_what_is_cold_is_taken_with_its_base(store: LocalStore) -> None:
    freeze_models(["base", *CHILDREN], store=store, base="base")
    blobs = gathered(store, "base", "one")
    cold = {blob.label: blob.cold for blob in blobs}
    found = layers(store, "one")["l0"]
    data = cold["one:latest: layer 'l0'"]
    assert data is not None
    assert bytes(data) == Path(store.cold_path(found.digest)).read_bytes()
    assert edges(blobs)["one:latest: layer 'l0'"] == "base:latest: layer 'l0'"


def test_one_model_takes_no_base_of_another_along(store: LocalStore) -> None:
    freeze_models(["base", *CHILDREN], store=store, base="base")
    blobs = gathered(store, "one")
    assert edges(blobs) == {}
    assert [blob.label for blob in blobs if blob.cold is not None] == ["one:latest: layer 'shared'"]


@pytest.mark.parametrize("is_base_cold", [False, True])
def test_many_models_take_their_base_along(store: LocalStore, is_base_cold: bool) -> None:
    freeze_models(CHILDREN, store=store, base="base")
    if is_base_cold:
        freeze_models(["base"], store=store, find_base=False)
    blobs = gathered(store, *CHILDREN)
    assert set(edges(blobs).values()) == {
        f"the base of one:latest: layer '{key}'" for key in ("l0", "l1", "l2")
    }
    assert len(edges(blobs)) == 9
    bases = [blob for blob in blobs if blob.label.startswith("the base")]
    assert {blob.cold is not None for blob in bases} == {is_base_cold}


def test_a_cold_form_that_cannot_be_read_matters_only_without_another(store: LocalStore) -> None:
    freeze_models(["base"], store=store, find_base=False)
    thaw_models(["base"], store=store, keep_cold=True)
    found = layers(store, "base")["l0"]
    flip(store.cold_path(found.digest), -10)
    blobs = {blob.label: blob.cold for blob in gathered(store, "base")}
    assert blobs["base:latest: layer 'l0'"] is None
    assert blobs["base:latest: layer 'l1'"] is not None
    Path(store.blob_path(found.digest)).unlink()
    with pytest.raises(BlobDamaged, match="base:latest: layer 'l0': cold blob"):
        gathered(store, "base")


def test_a_missing_blob_is_told_by_model_and_layer(store: LocalStore) -> None:
    found = layers(store, "one")["l1"]
    Path(store.blob_path(found.digest)).unlink()
    with pytest.raises(BlobMissing, match="one:latest: layer 'l1': blob"):
        gathered(store, "one")


def test_layers_without_names_are_told_by_their_types(store: LocalStore) -> None:
    data = b"MIT"
    with store.ingest() as ingest:
        added = ingest.add(len(data), lambda: [data])
        ingest.publish()
        manifest = store.resolve(Reference.parse("base"))
        license_ = Descriptor(media_types.LICENSE, added.digest, added.size)
        store.publish(
            Reference.parse("licensed"), Manifest(config=manifest.config, layers=(license_,))
        )
    assert gathered(store, "licensed")[1].label == f"licensed:latest: '{media_types.LICENSE}'"


def test_equal_tensors_of_other_names_are_coded_by_one(store: LocalStore) -> None:
    same = weights(60)
    blobs = {key: layer(key, same) for key in ("embedding", "head")}
    add_blobs(store, "tied", blobs | {"own": layer("own", weights(61))})
    assert edges(gathered(store, "tied")) in (
        {"tied:latest: layer 'embedding'": "tied:latest: layer 'head'"},
        {"tied:latest: layer 'head'": "tied:latest: layer 'embedding'"},
    )


def test_a_base_that_cannot_be_read_is_not_taken_along(store: LocalStore) -> None:
    freeze_models(CHILDREN, store=store, base="base")
    base = layers(store, "base")["l0"]
    flip(store.blob_path(base.digest))
    freeze_models(["base"], store=store, find_base=False)
    remove_models(["base"], store=store)
    for path in (store.blob_path(base.digest), store.base_path(base.digest)):
        Path(path).unlink()
    Path(store.cold_path(base.digest)).write_bytes(b"no cold blob")
    found = edges(gathered(store, *CHILDREN))
    assert {key.rpartition(" ")[2] for key in found} == {"'l1'", "'l2'"}


def test_a_chain_in_a_damaged_store_is_not_taken_along(store: LocalStore) -> None:
    freeze_models(["one"], store=store, base="base")
    base, other = layers(store, "base")["l0"], layers(store, "two")["l0"]
    data = Path(store.blob_path(base.digest)).read_bytes()
    by = BaseBlob.hot(Path(store.blob_path(other.digest)).read_bytes())
    chained = cold(data, runs=[Span(len(data), DType.BF16, base_begin=0)], base=by)
    Path(store.cold_path(base.digest)).write_bytes(chained)
    found = edges(gathered(store, *EVERYONE))
    assert found["base:latest: layer 'l0'"] == "two:latest: layer 'l0'"
    assert "one:latest: layer 'l0'" not in found
    assert not set(found) & set(found.values())


def test_a_cold_form_that_is_no_smaller_is_not_taken(store: LocalStore) -> None:
    data = noise(50_000)
    add_blobs(store, "odd", {"x": data})
    store.folder("cold").mkdir(parents=True)
    Path(store.cold_path(Digest.of(data))).write_bytes(cold(data))
    assert {blob.cold for blob in gathered(store, "odd")} == {None}


def test_a_manifest_that_its_config_does_not_know_is_refused(store: LocalStore) -> None:
    reference = Reference.parse("base")
    manifest = store.resolve(reference)
    store.publish(reference, with_layers(store, manifest, manifest.layers))
    path = store.manifest_path(reference)
    path.write_bytes(path.read_bytes().replace(b'"l0"', b'"k0"'))
    with pytest.raises(InvalidManifest, match="base:latest: the manifest was changed"):
        read_models(store, [reference])
