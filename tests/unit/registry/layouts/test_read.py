"""Shapes of models in a registry: what is written, what is read back, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import (
    BlobDamaged,
    InvalidManifest,
    RemoteRefused,
    UnsupportedSource,
    UsageError,
)
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import Manifest
from blobstore.registry.layouts.oci import parameter_size, plan_oci
from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.registry.layouts.plan import (
    FILE_PATH,
    MODEL_CONFIG,
    ModelMetadata,
    RemotePlan,
)
from blobstore.registry.layouts.read import RemoteFiles, RemoteModel, read_model
from blobstore.registry.manifest import OCI_INDEX, OCI_MANIFEST, RemoteManifest

VECTORS = Path(__file__).parents[3] / "vectors" / "shapes.json"
FACTS = ModelMetadata(
    name="Tiny-1B",
    family="tiny",
    architecture="TinyForCausalLM",
    parameters=1_240_000_000,
    precision=("bfloat16", "float32"),
    licenses=("Apache-2.0",),
    source_url="https://huggingface.co/org/Tiny-1B",
    revision="ab" * 20,
)


def descriptor(media_type: str, content: bytes, name: str = "") -> Descriptor:
    return Descriptor(media_type, Digest.of(content), len(content), name)


def model(tensors: int = 3, *others: Descriptor) -> bytes:
    layers = [
        descriptor(media_types.TENSOR, f"tensor {number}".encode(), f"layers.{number}.weight")
        for number in range(tensors)
    ]
    layers.append(descriptor(media_types.JSON, b"{}", "config.json"))
    config = descriptor(media_types.CONFIG, b"config")
    return Manifest(config=config, layers=(*layers, *others)).to_bytes()


def read_back(plan: RemotePlan) -> RemoteModel:
    by_digest = {manifest.digest: manifest for manifest in plan.manifests}
    found = read_model(plan.root, by_digest.__getitem__, lambda digest, _: plan.made[digest])
    assert isinstance(found, RemoteModel)
    return found


def value_of(manifest: RemoteManifest) -> Any:
    return json.loads(manifest.data)


def changed(manifest: RemoteManifest, change: Callable[[Any], object]) -> RemoteManifest:
    value = value_of(manifest)
    change(value)
    data = json.dumps(value).encode()
    return RemoteManifest(value["mediaType"], data, Digest.of(data))


def refused(manifest: RemoteManifest, plan: RemotePlan, error: type[Exception]) -> str:
    by_digest = {part.digest: part for part in plan.manifests}
    with pytest.raises(error) as caught:
        read_model(manifest, by_digest.__getitem__, lambda digest, _: plan.made[digest])
    return str(caught.value)


def paths(plan: RemotePlan) -> list[str]:
    return [
        layer["annotations"][FILE_PATH]
        for manifest in plan.manifests
        for layer in value_of(manifest).get("layers", ())
    ]


def test_remote_manifests_have_the_documented_bytes() -> None:
    vectors = json.loads(VECTORS.read_text())
    data = model()
    plan = plan_oci(data, FACTS)
    assert plan.root.data.decode() == vectors["oci"]["manifest"]
    config = plan.made[Digest.parse(value_of(plan.root)["config"]["digest"])]
    assert config.decode() == vectors["oci"]["config"]
    parts = plan_oci(data, FACTS, max_layers=4)
    assert [part.data.decode() for part in parts.manifests] == vectors["index"]


def test_ollamas_shape_is_the_local_manifest_byte_for_byte() -> None:
    data = model().replace(b'"name"', b'"from":"x","name"')
    plan = plan_ollama(data)
    assert plan.root.data == data
    assert plan.root.media_type == media_types.MANIFEST
    assert plan.made == {}
    assert read_back(plan).manifest == data


@pytest.mark.parametrize("max_layers", [1, 2, 4, 6, 7, 400])
def test_a_model_comes_back_whatever_the_limit_of_layers(max_layers: int) -> None:
    data = model()
    plan = plan_oci(data, FACTS, max_layers=max_layers)
    found = read_back(plan)
    assert found.manifest == data
    assert found.blobs == Manifest.from_bytes(data).blobs
    assert all(len(value_of(part).get("layers", ())) <= max_layers for part in plan.manifests)
    is_index = plan.root.media_type == OCI_INDEX
    assert is_index == (max_layers < 6)


def test_every_layer_is_listed_in_the_config_in_order() -> None:
    plan = plan_oci(model(), FACTS, max_layers=2)
    (config,) = {value_of(part)["config"]["digest"] for part in plan.manifests[:-1]}
    listed = json.loads(plan.made[Digest.parse(config)])["modelfs"]["diffIds"]
    assert listed == [
        layer["digest"] for part in plan.manifests[:-1] for layer in value_of(part)["layers"]
    ]


def test_a_limit_of_no_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        plan_oci(model(), FACTS, max_layers=0)


@pytest.mark.slow
def test_a_manifest_over_the_limit_of_registries_is_refused_with_advice() -> None:
    data = model(30_000)
    with pytest.raises(RemoteRefused, match="packed, or push it with '--layout oci'"):
        plan_ollama(data)
    assert len(plan_oci(data, FACTS).manifests) > 70


def test_paths_are_safe_and_unique_even_where_case_is_ignored() -> None:
    names = ["a", "A", "../../etc/passwd", "é", "x" * 300, "model", "a/b"]
    others = [descriptor(media_types.TENSOR, name.encode(), name) for name in names] + [
        descriptor(media_types.JSON, b"1", "blobstore"),
        descriptor(media_types.JSON, b"2", "blobstore/manifest.json"),
        descriptor(media_types.JSON, b"3", "../escape"),
        descriptor(media_types.FILE, b"4", "Blobstore/Config.json"),
        descriptor(media_types.FILE, b"vae", "vae"),
        descriptor(media_types.JSON, b"in vae", "VAE/config.json"),
        descriptor(media_types.LICENSE, b"5"),
        descriptor(media_types.LICENSE, b"6"),
        descriptor("application/vnd.ollama.image.unknown", b"7", "/abs"),
    ]
    plan = plan_oci(model(1, *others), FACTS)
    found = paths(plan)
    folded = [path.casefold() for path in found]
    assert len(set(folded)) == len(folded)
    for path in found:
        assert not path.startswith("/")
        parts = path.split("/")
        assert not {"", ".", ".."} & set(parts)
        assert all(len(part.encode()) <= 255 for part in parts)
        for depth in range(1, len(parts)):
            assert "/".join(parts[:depth]).casefold() not in folded
    assert read_back(plan).manifest == model(1, *others)


def test_generated_files_become_layers_that_only_the_registry_has() -> None:
    index = b'{"weight_map": {}}'
    metadata = ModelMetadata(generated={"model.safetensors.index.json": index})
    plan = plan_oci(model(), metadata)
    assert paths(plan)[-1] == "model.safetensors.index.json"
    assert plan.made[Digest.of(index)] == index


def test_empty_facts_are_left_out_of_the_config() -> None:
    plan = plan_oci(model(), ModelMetadata())
    config = json.loads(plan.made[Digest.parse(value_of(plan.root)["config"]["digest"])])
    assert config["descriptor"] == {}
    assert config["config"] == {"format": "safetensors"}


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (0, ""),
        (15, "0.0K"),
        (999, "1K"),
        (1_000, "1K"),
        (7_240_000_000, "7.2B"),
        (999_960_000, "1B"),
        (70_553_706_496, "70.6B"),
        (1_000_000_000_000, "1T"),
    ],
)
def test_parameter_sizes_are_spelled_as_modelpack_does(parameters: int, expected: str) -> None:
    assert parameter_size(parameters) == expected


# What a hostile or broken registry returns


def test_rejects_a_manifest_without_one_of_the_models_blobs() -> None:
    plan = plan_oci(model(), FACTS)
    hostile = changed(plan.root, lambda value: value["layers"].pop(3))
    assert "is not a layer" in refused(hostile, plan, InvalidManifest)


def test_rejects_a_manifest_that_lists_a_blob_with_another_size() -> None:
    plan = plan_oci(model(), FACTS)
    hostile = changed(plan.root, lambda value: value["layers"][3].update(size=1))
    assert "is not a layer" in refused(hostile, plan, InvalidManifest)


def test_rejects_a_manifest_without_the_local_manifest() -> None:
    plan = plan_oci(model(), FACTS)
    hostile = changed(plan.root, lambda value: value["layers"].pop(0))
    assert "is not a layer" in refused(hostile, plan, InvalidManifest)


def test_rejects_a_local_manifest_that_is_too_large_before_it_is_read() -> None:
    plan = plan_oci(model(), FACTS)
    hostile = changed(plan.root, lambda value: value["layers"][0].update(size=2**40))
    assert "too large" in refused(hostile, plan, InvalidManifest)


def test_rejects_other_bytes_for_the_local_manifest() -> None:
    plan = plan_oci(model(), FACTS)
    with pytest.raises(BlobDamaged, match="returned bytes with digest"):
        read_model(plan.root, lambda _: plan.root, lambda *_: b"other")


def test_rejects_another_manifest_for_a_part() -> None:
    plan = plan_oci(model(), FACTS, max_layers=4)
    with pytest.raises(BlobDamaged, match="returned another manifest"):
        read_model(plan.root, lambda _: plan.root, lambda digest, _: plan.made[digest])


@pytest.mark.parametrize("text", ["", "sha256:../..", "md5:" + "0" * 32])
def test_rejects_an_annotation_without_a_digest(text: str) -> None:
    plan = plan_oci(model(), FACTS)
    hostile = changed(
        plan.root, lambda value: value["annotations"].update({media_types.LOCAL_MANIFEST: text})
    )
    assert "not a digest" in refused(hostile, plan, InvalidManifest)


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.update(layers=None),
        lambda value: value.update(layers={}),
        lambda value: value.update(config=7),
        lambda value: value.update(annotations=[1]),
        lambda value: value.update(annotations={"a": 1}),
        lambda value: value["layers"].append("text"),
        lambda value: value["layers"][1].update(size=-1),
        lambda value: value["layers"][1].update(digest="sha512:" + "0" * 128),
    ],
)
def test_rejects_malformed_manifests(change: Callable[[Any], object]) -> None:
    plan = plan_oci(model(), FACTS)
    refused(changed(plan.root, change), plan, InvalidManifest)


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.update(manifests=[]),
        lambda value: value.update(manifests=value["manifests"] * 2000),
        lambda value: value["manifests"][0].pop("digest"),
    ],
)
def test_rejects_malformed_indexes(change: Callable[[Any], object]) -> None:
    plan = plan_oci(model(), FACTS, max_layers=4)
    refused(changed(plan.root, change), plan, InvalidManifest)


def test_rejects_an_index_of_indexes() -> None:
    plan = plan_oci(model(), FACTS, max_layers=4)
    with pytest.raises(InvalidManifest, match="not an OCI image manifest"):
        read_model(
            changed(
                plan.root, lambda value: value["manifests"][0].update(digest=str(plan.root.digest))
            ),
            lambda _: plan.root,
            lambda digest, _: plan.made[digest],
        )


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"{" * 100_000, b'{"a":1,"a":2}'])
def test_rejects_bytes_of_another_form(data: bytes) -> None:
    for media_type in (OCI_MANIFEST, OCI_INDEX, media_types.MANIFEST):
        refused(
            RemoteManifest(media_type, data, Digest.of(data)), plan_ollama(model()), InvalidManifest
        )


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.update(mediaType=OCI_MANIFEST),
        lambda value: value["layers"][0].update(
            mediaType="application/vnd.docker.image.rootfs.diff.tar.gzip"
        ),
        lambda value: value.update(mediaType=OCI_INDEX, manifests=[]),
    ],
)
def test_refuses_other_artifacts(change: Callable[[Any], object]) -> None:
    plan = plan_ollama(model())
    refused(changed(plan.root, change), plan, UnsupportedSource)


@pytest.mark.parametrize(
    "config", [MODEL_CONFIG, "application/vnd.docker.ai.model.config.v0.1+json"]
)
def test_recognizes_files_that_other_tools_pushed(config: str) -> None:
    plan = plan_oci(model(), FACTS)

    def forget(value: Any) -> None:
        del value["annotations"]
        value["config"]["mediaType"] = config

    found = read_model(changed(plan.root, forget), lambda _: plan.root, lambda *_: b"")
    assert isinstance(found, RemoteFiles)
    assert len(found.layers) == 6
