from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from typing import Any

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import InvalidManifest, UnsupportedSource
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import Manifest
from blobstore.registry.layouts.image import MAX_TARS, ImageLayers, image_layers, plan_image
from blobstore.registry.layouts.plan import ModelMetadata, RemotePlan
from blobstore.registry.layouts.read import RemoteModel, read_model
from blobstore.registry.manifest import RemoteManifest

FACTS = ModelMetadata(
    name="Tiny", licenses=("MIT",), generated={"model.safetensors.index.json": b"{}"}
)


def blobs_of(names: list[str]) -> dict[str, bytes]:
    return {name: f"bytes of {name}".encode() * 40 for name in names}


def model(blobs: dict[str, bytes]) -> tuple[bytes, dict[Digest, bytes]]:
    contents = {"config.json": b"{}", **blobs}
    layers = tuple(
        Descriptor(
            media_types.TENSOR if name in blobs else media_types.JSON,
            Digest.of(data),
            len(data),
            name,
        )
        for name, data in contents.items()
    )
    config = Descriptor(media_types.CONFIG, Digest.of(b"config"), 6)
    found = {Digest.of(data): data for data in (b"config", *contents.values())}
    return Manifest(config=config, layers=layers).to_bytes(), found


def tar_bytes(layers: ImageLayers, blobs: dict[Digest, bytes]) -> list[bytes]:
    return [b"".join(tar.pieces(lambda digest, _: [blobs[digest]])) for tar in layers.tars]


def planned(names: list[str]) -> tuple[bytes, RemotePlan, dict[Digest, bytes]]:
    """Return a local manifest, its image, and all blobs of the registry."""
    data, blobs = model(blobs_of(names))
    layers = image_layers(data, FACTS)
    tars = tar_bytes(layers, blobs)
    plan = plan_image(data, layers, [Digest.of(tar) for tar in tars], FACTS)
    return data, plan, {Digest.of(tar): tar for tar in tars} | dict(plan.made)


NAMES = [
    "model.embed_tokens.weight",
    *(f"model.layers.{block}.{name}" for block in range(3) for name in ("up", "down")),
    "lm_head.weight",
]


def read(plan: RemotePlan, remote: dict[Digest, bytes], root: RemoteManifest) -> RemoteModel:
    manifests = {manifest.digest: manifest for manifest in plan.manifests}
    found = read_model(root, manifests.__getitem__, lambda digest, _: remote[digest])
    assert isinstance(found, RemoteModel)
    return found


def test_the_model_and_the_place_of_every_blob_come_back() -> None:
    data, plan, remote = planned(NAMES)
    for root in plan.manifests:  # the index, and the manifest of each processor
        found = read(plan, remote, root)
        assert found.layout == "image"
        assert found.manifest == data
        for blob in found.blobs:
            place = found.places[blob.digest]
            tar = remote[place.digest]
            assert len(tar) == place.size
            assert Digest.of(tar[place.offset : place.offset + blob.size]) == blob.digest


def test_layers_are_deterministic_tars_of_one_folder() -> None:
    _, plan, remote = planned(NAMES)
    first = json.loads(plan.manifests[0].data)["layers"]
    paths = []
    for layer in first:
        data = remote[Digest.parse(layer["digest"])]
        assert layer["size"] == len(data)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for member in tar:
                assert (member.mtime, member.uid, member.gid, member.uname) == (0, 0, 0, "")
                assert member.mode == (0o755 if member.isdir() else 0o644)
                paths.append(member.name)
    assert paths[:2] == ["models", "models/blobstore"]
    assert "models/model.safetensors.index.json" in paths
    assert "models/config.json" in paths
    assert len(set(paths)) == len(paths)
    assert planned(NAMES)[1].root.digest == plan.root.digest


def test_equal_blocks_have_equal_layers_in_a_fine_tune() -> None:
    data, blobs = model(blobs_of(NAMES))
    changed = blobs_of(NAMES) | {"model.layers.1.up": b"tuned"}
    tuned, others = model(changed)
    first = {Digest.of(tar) for tar in tar_bytes(image_layers(data, FACTS), blobs)}
    second = {Digest.of(tar) for tar in tar_bytes(image_layers(tuned, FACTS), others)}
    assert len(first) == 6  # files, embeddings, three blocks, head
    assert len(first - second) == 1


def test_an_image_has_at_most_100_layers_whatever_the_model() -> None:
    names = [f"model.layers.{block}.weight" for block in range(1000)]
    data, _ = model(blobs_of(names))
    layers = image_layers(data, FACTS)
    assert len(layers.tars) + 1 <= MAX_TARS
    assert sum(len(tar.files) for tar in layers.tars) == 1002


def test_every_processor_gets_the_same_layers() -> None:
    _, plan, _ = planned(NAMES)
    index = json.loads(plan.root.data)
    assert [entry["platform"]["architecture"] for entry in index["manifests"]] == ["amd64", "arm64"]
    layers = [json.loads(manifest.data)["layers"] for manifest in plan.manifests[:-1]]
    assert layers[0] == layers[1]
    config = json.loads(
        plan.made[Digest.parse(json.loads(plan.manifests[0].data)["config"]["digest"])]
    )
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in layers[0]]


def test_a_file_over_8_gib_has_its_size_in_the_tar() -> None:
    data = Manifest(
        config=Descriptor(media_types.CONFIG, Digest.of(b"c"), 1),
        layers=(Descriptor(media_types.TENSOR, Digest.of(b"t"), 2**40, "t" * 150),),
    ).to_bytes()
    tar = image_layers(data, FACTS).tars[-1]
    header = next(iter(tar.pieces(lambda *_: [])))
    assert len(header) == tar.offsets[0]
    with tarfile.open(fileobj=io.BytesIO(bytes(header) + bytes(1024))) as found:
        assert found.next().size == 2**40  # type: ignore[union-attr]


# What a hostile registry returns


def with_catalog(plan: RemotePlan, change: Any, remote: dict[Digest, bytes]) -> RemoteManifest:
    """Return the first manifest with another first layer, which ``remote`` gets too."""
    value = json.loads(plan.manifests[0].data)
    catalog = change(remote[Digest.parse(value["layers"][0]["digest"])])
    value["layers"][0] |= {"digest": str(Digest.of(catalog)), "size": len(catalog)}
    remote[Digest.of(catalog)] = catalog
    data = json.dumps(value).encode()
    return replace(plan.manifests[0], data=data, digest=Digest.of(data))


def places(change: Any) -> Any:
    """Return a change of a catalog: the places of its blobs."""

    def changed(catalog: bytes) -> bytes:
        target = io.BytesIO()
        with (
            tarfile.open(fileobj=io.BytesIO(catalog)) as source,
            tarfile.open(fileobj=target, mode="w") as tar,
        ):
            for member in source:
                content = source.extractfile(member)
                data = content.read() if content else b""
                if member.name.endswith("places.json"):
                    data = json.dumps(change(json.loads(data))).encode()
                    member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        return target.getvalue()

    return changed


def every(found: dict[str, Any], place: list[int]) -> dict[str, Any]:
    """Return the same place for every blob."""
    return {blob: place for blob in found}  # noqa: C420 - the value is a list


@pytest.mark.parametrize(
    "change",
    [
        lambda _: b"",
        lambda _: b"no tar" * 200,
        lambda catalog: catalog[:700],
        places(lambda _: {}),
        places(lambda _: []),
        places(lambda found: every(found, [0])),
        places(lambda found: every(found, [1, -1])),
        places(lambda found: every(found, [-1, 0])),
        places(lambda found: every(found, [99, 0])),
        places(lambda found: every(found, [1, 2**62])),
        places(lambda found: every(found, [True, 0])),
    ],
)
def test_rejects_places_outside_of_the_layers(change: Any) -> None:
    _, plan, remote = planned(NAMES)
    root = with_catalog(plan, change, remote)
    with pytest.raises(InvalidManifest):
        read(plan, remote, root)


def test_rejects_a_first_layer_that_is_too_large_before_it_is_read() -> None:
    _, plan, remote = planned(NAMES)
    value = json.loads(plan.manifests[0].data)
    value["layers"][0]["size"] = 2**40
    data = json.dumps(value).encode()
    with pytest.raises(InvalidManifest, match="too large"):
        read(plan, remote, replace(plan.manifests[0], data=data, digest=Digest.of(data)))


def test_refuses_an_image_without_layers() -> None:
    _, plan, remote = planned(NAMES)
    value = json.loads(plan.manifests[0].data) | {"layers": []}
    data = json.dumps(value).encode()
    with pytest.raises(UnsupportedSource):
        read(plan, remote, replace(plan.manifests[0], data=data, digest=Digest.of(data)))


def test_refuses_layers_that_a_copy_has_compressed() -> None:
    _, plan, remote = planned(NAMES)
    value = json.loads(plan.manifests[0].data)
    value["layers"][1]["mediaType"] += "+gzip"
    data = json.dumps(value).encode()
    with pytest.raises(UnsupportedSource, match="compressed.*--preserve-digests"):
        read(plan, remote, replace(plan.manifests[0], data=data, digest=Digest.of(data)))
