"""Models in object storage, opened without fetching them first, against a real server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    InvalidManifest,
    StoreError,
    UsageError,
)
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.objects.source import ObjectSource
from blobstore.objects.store import HEADERS, ObjectStore, blob_key
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.transfer.push import push_model
from blobstore.planning.plan import QuantizeOptions
from blobstore.remotes.addresses import Cache
from blobstore.remotes.cache_limit import evict_models
from blobstore.remotes.cold_layers import format_cold_layers, parse_cold_layers
from blobstore.remotes.model_reader import pack_headers, unpack_headers
from blobstore.remotes.remote_store import RemoteStore
from blobstore.store.ingest import Ingest
from blobstore.store.local import LocalStore
from blobstore.store.protocols import BlobAccess
from tests.support import frozen
from tests.support.models import add_blobs, blob, moe_tensors, quantizable_tensors, write_folder
from tests.support.objects import no_lease
from tests.support.store_suite import BlobAccessSuite


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    frozen.put(store, "one", {"shared": 1, "own": 2})
    frozen.put(store, "two", {"shared": 1, "other": 3})
    return store


class Read(list[tuple[str, int, int]]):
    """Which bytes of which blobs were read from object storage."""

    @property
    def size(self) -> int:
        return sum(end - begin for _, begin, end in self)

    def blobs(self) -> set[str]:
        return {digest for digest, *_ in self}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    found = Read()
    really_read = ObjectSource.read

    def count(self: ObjectSource, digest: Digest, size: int, begin: int, end: int) -> object:
        found.append((str(digest), begin, end))
        return really_read(self, digest, size, begin, end)

    monkeypatch.setattr(ObjectSource, "read", count)
    return found


def kept(store: LocalStore, of: LocalStore, name: str) -> int:
    return sum(store.has(item.digest) for item in of.resolve(name).blobs)


@pytest.mark.parametrize("cache", ["keep", "none"])
def test_tensors_are_those_of_the_model(
    local: LocalStore, objects: ObjectStore, other: LocalStore, framework: Any, cache: Cache
) -> None:
    push_model("one", objects.address, store=local)
    with (
        blobstore.open("one", store=local, framework="numpy") as expected,
        blobstore.open(
            f"{objects.address}/one", store=other, cache=cache, framework=framework
        ) as model,
    ):
        assert list(model) == list(expected)
        for name in expected:
            assert bytes(model.view(name).data) == bytes(expected.view(name).data)
            assert model[name].shape == expected[name].shape
    assert kept(other, local, "one") == (len(local.resolve("one").blobs) if cache == "keep" else 0)
    assert not list(other.references())


def test_every_way_to_read_tensors_returns_the_same(
    tmp_path: Path, objects: ObjectStore, other: LocalStore
) -> None:
    local = LocalStore(tmp_path / "store")
    tensors = moe_tensors(3)
    blobstore.create(write_folder(tmp_path / "model", tensors), "moe", store=local)
    push_model("moe", objects.address, store=local)
    with blobstore.open("moe", store=local) as model:
        expected = {name: bytes(model.view(name).data) for name in model}

    def bytes_of(items: Any) -> dict[str, bytes]:
        return {name: np.ascontiguousarray(array).tobytes() for name, array in items}

    def opened() -> blobstore.Model[Any]:
        return blobstore.open(f"{objects.address}/moe", store=other, cache="none")

    with opened() as model:
        assert bytes_of(model.items()) == expected
    with opened() as model:
        assert bytes_of(model.tensors().items()) == expected
    with opened() as model:
        assert bytes_of(model.iter_tensors()) == expected
    with opened() as model:
        shards = [model.iter_tensors(shard=(rank, 3)) for rank in range(3)]
        assert {name: data for shard in shards for name, data in bytes_of(shard).items()} == (
            expected
        )


def test_the_second_model_reads_what_the_first_has_not_read(
    local: LocalStore, objects: ObjectStore, other: LocalStore, read: Read
) -> None:
    for name in ("one", "two"):
        push_model(name, objects.address, store=local)
    with blobstore.open(f"{objects.address}/one", store=other) as model:
        model.tensors()
    read.clear()
    with blobstore.open(f"{objects.address}/two", store=other) as model:
        model.tensors()
    shared = {str(item.digest) for item in local.resolve("one").blobs}
    assert read
    assert not read.blobs() & shared


def test_a_compressed_form_is_read_instead_of_its_blob(
    local: LocalStore, objects: ObjectStore, other: LocalStore, read: Read
) -> None:
    pushed = push_model("one", objects.address, store=local, cold=True)
    assert pushed.cold_blobs == 2
    plan = blobstore.open(f"{objects.address}/one", store=other, plan=True)
    assert plan.bytes_to_read < 0.8 * plan.size
    with (
        blobstore.open("one", store=local) as expected,
        blobstore.open(f"{objects.address}/one", store=other) as model,
    ):
        read.clear()
        assert {name: array.tobytes() for name, array in model.tensors().items()} == {
            name: expected[name].tobytes() for name in expected
        }
    assert 0 < read.size < 0.8 * plan.size
    assert not read.blobs() & {str(item.digest) for item in frozen.layers(local, "one").values()}


@pytest.mark.parametrize("has_base", [True, False])
def test_a_delta_is_read_only_if_its_base_is_here(
    tmp_path: Path, objects: ObjectStore, other: LocalStore, read: Read, has_base: bool
) -> None:
    local = LocalStore(tmp_path / "store")
    frozen.put(local, "base", {"w": 1})
    add_blobs(local, "tuned", {"w": frozen.layer("w", frozen.tuned(5, of=1))})
    for name in ("base", "tuned"):
        push_model(
            name,
            objects.address,
            store=local,
            cold=name == "tuned",
            base="base" if name == "tuned" else None,
        )
    if has_base:
        with blobstore.open(f"{objects.address}/base", store=other) as model:
            model.tensors()
    with (
        blobstore.open("tuned", store=local) as expected,
        blobstore.open(f"{objects.address}/tuned", store=other) as model,
    ):
        read.clear()  # of the header
        assert model["w"].tobytes() == expected["w"].tobytes()
    layer = frozen.layers(local, "tuned")["w"]
    assert (str(layer.digest) in read.blobs()) is not has_base


def test_a_delta_is_read_onto_a_base_that_was_frozen_here(
    tmp_path: Path, objects: ObjectStore, other: LocalStore, read: Read
) -> None:
    """The chunks of that base, which is a sparse delta, lie elsewhere than those of the delta."""
    local = LocalStore(tmp_path / "store")
    for name, data in zip(("base", "one", "two"), frozen.mixed_steps(), strict=True):
        add_blobs(local, name, {"x": data})
        if name != "two":
            add_blobs(other, name, {"x": data})
    blobstore.freeze("one", store=other, base="base")
    push_model("two", objects.address, store=local, cold=True, base="one")
    plan = blobstore.open(f"{objects.address}/two", store=other, plan=True)
    with (
        blobstore.open("two", store=local) as expected,
        blobstore.open(f"{objects.address}/two", store=other) as model,
    ):
        read.clear()  # of the header
        for name in expected:
            assert model[name].tobytes() == expected[name].tobytes()
    assert read.size == plan.bytes_to_read < 0.03 * plan.size


@pytest.mark.parametrize("cache", ["keep", "none"])
def test_a_delta_is_read_after_its_base_if_both_are_read(
    tmp_path: Path, objects: ObjectStore, other: LocalStore, read: Read, cache: Cache
) -> None:
    local = LocalStore(tmp_path / "store")
    twins = {name: frozen.layer(name, frozen.weights(1)) for name in "abc"}
    add_blobs(local, "twins", twins)
    push_model("twins", objects.address, store=local, cold=True)
    plan = blobstore.open(f"{objects.address}/twins", store=other, plan=True)
    with (
        blobstore.open("twins", store=local) as expected,
        blobstore.open(f"{objects.address}/twins", store=other, cache=cache) as model,
    ):
        read.clear()
        assert {name: array.tobytes() for name, array in model.tensors().items()} == {
            name: expected[name].tobytes() for name in expected
        }
    config = local.resolve("twins").config  # was read before
    assert read.size == plan.bytes_to_read - config.size < 0.25 * plan.size


def test_a_delta_is_not_read_without_its_base(
    tmp_path: Path, objects: ObjectStore, other: LocalStore, read: Read
) -> None:
    """A part of one blob is less than the base and the delta."""
    local = LocalStore(tmp_path / "store")
    twins = {name: frozen.layer(name, frozen.weights(1, 1 << 20)) for name in "ab"}
    add_blobs(local, "twins", twins)
    push_model("twins", objects.address, store=local, cold=True)
    for name in "ab":
        with (
            blobstore.open("twins", store=local) as expected,
            blobstore.open(f"{objects.address}/twins", store=other, cache="none") as model,
        ):
            read.clear()
            part = model.get_slice(name)[:1000]
            assert part.tobytes() == expected.get_slice(name)[:1000].tobytes()
        assert read.size == 2000


@pytest.mark.parametrize("names", ["ab", "abcdefghijklmnopqrst"])
@pytest.mark.parametrize("is_cycle", [True, False])
def test_forged_bases_are_replaced_by_the_blobs(
    tmp_path: Path,
    objects: ObjectStore,
    other: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
    names: str,
    is_cycle: bool,
) -> None:
    """Cycles, and chains that no store makes."""
    local = LocalStore(tmp_path / "store")
    frozen.put(local, "one", {name: number for number, name in enumerate(names)})
    push_model("one", objects.address, store=local, cold=True)
    layers = frozen.layers(local, "one")
    really_read = ObjectSource.cold_index

    def forged(self: ObjectSource) -> bytes:
        known = parse_cold_layers(really_read(self) or b"")
        found = []
        for name, before in zip(names, names[-1] + names, strict=False):
            layer = known[layers[name].digest]
            is_first = name == names[0] and not is_cycle
            found.append(layer._replace(base=None if is_first else layers[before].id))
        return format_cold_layers(found)

    monkeypatch.setattr(ObjectSource, "cold_index", forged)
    with (
        blobstore.open("one", store=local) as expected,
        blobstore.open(f"{objects.address}/one", store=other) as model,
    ):
        assert {name: array.tobytes() for name, array in model.tensors().items()} == {
            name: expected[name].tobytes() for name in expected
        }


def test_a_damaged_compressed_form_is_replaced_by_the_blob(
    local: LocalStore, objects: ObjectStore, other: LocalStore
) -> None:
    push_model("one", objects.address, store=local)
    before = {item.key for item in objects.client.list("blobs")}
    push_model("one", objects.address, store=local, cold=True)
    for item in list(objects.client.list("blobs")):
        if item.key not in before:
            objects.client.put(item.key, bytes(item.size))
    with (
        blobstore.open("one", store=local) as expected,
        blobstore.open(f"{objects.address}/one", store=other) as model,
    ):
        for name in expected:
            assert model[name].tobytes() == expected[name].tobytes()


def test_damaged_bytes_are_not_used(
    local: LocalStore, objects: ObjectStore, other: LocalStore
) -> None:
    push_model("one", objects.address, store=local)
    layer = frozen.layers(local, "one")["own"]
    data = bytearray(local.read_blob(*layer.id))
    data[-1] ^= 1
    objects.client.put(blob_key(layer.digest), bytes(data))
    with (
        blobstore.open(f"{objects.address}/one", store=other) as model,
        pytest.raises(BlobDamaged, match=r"layer 'own'.*the remote sent bytes with digest"),
    ):
        model.tensors()
    assert not other.has(layer.digest)


@pytest.mark.parametrize("options", [{"verify": "digest"}, {"read": "populate"}])
def test_all_blobs_can_be_read_before_the_model_is_used(
    local: LocalStore, objects: ObjectStore, other: LocalStore, read: Read, options: dict[str, Any]
) -> None:
    push_model("one", objects.address, store=local)
    with blobstore.open(f"{objects.address}/one", store=other, **options) as model:
        assert model.is_resident
        read.clear()
        model.tensors()
        assert not read
    layer = frozen.layers(local, "one")["own"]
    with open(other.blob_path(layer.digest), "r+b") as file:  # noqa: PTH123 - a string
        os.chmod(other.blob_path(layer.digest), 0o600)  # noqa: PTH101
        file.seek(-1, 2)
        file.write(b"?")
    if "verify" in options:
        with pytest.raises(BlobDamaged):
            blobstore.open(f"{objects.address}/one", store=other, **options)


def test_thawing_a_remote_model_is_refused(
    local: LocalStore, objects: ObjectStore, other: LocalStore
) -> None:
    push_model("one", objects.address, store=local)
    with pytest.raises(UsageError, match="thaw is for models of the store"):
        blobstore.open(f"{objects.address}/one", store=other, thaw=True)


def test_a_manifest_that_was_changed_elsewhere_is_refused(
    tmp_path: Path, objects: ObjectStore, other: LocalStore
) -> None:
    local = LocalStore(tmp_path / "store")
    blobstore.create(write_folder(tmp_path / "model", moe_tensors(3)), "moe", store=local)
    push_model("moe", objects.address, store=local)
    name = Reference.parse("moe")
    data, tag = objects.read_version(name)
    objects.place(name, data.replace(b"layers.0", b"layers.1"), tag, no_lease)
    with pytest.raises(InvalidManifest, match="moe"):
        blobstore.open(f"{objects.address}/moe", store=other, cache="none")


def test_a_remote_file_can_be_read_and_has_no_path(
    tmp_path: Path, objects: ObjectStore, other: LocalStore
) -> None:
    local = LocalStore(tmp_path / "store")
    blobstore.create(write_folder(tmp_path / "model", moe_tensors(3)), "moe", store=local)
    push_model("moe", objects.address, store=local)
    with blobstore.open(f"{objects.address}/moe", store=other, cache="none") as model:
        assert model.read_file("config.json")
        with pytest.raises(BlobMissing, match=r"'config\.json' of model .* has no local path"):
            model.file_path("config.json")
    blobstore.pull(f"{objects.address}/moe", store=other)
    with blobstore.open(f"{objects.address}/moe", store=other) as model:
        assert model.file_path("config.json").read_bytes() == model.read_file("config.json")


def test_blobs_are_read_ahead_if_tensors_are_read_in_order_and_local_ones_end_nothing(
    tmp_path: Path, objects: ObjectStore, other: LocalStore, read: Read
) -> None:
    local = LocalStore(tmp_path / "store")
    frozen.put(local, "m", {name: seed for seed, name in enumerate("abcdef")})
    push_model("m", objects.address, store=local)
    layers = frozen.layers(local, "m")
    digests = {name: str(layer.digest) for name, layer in layers.items()}
    add_blobs(other, "has", {"b": local.read_blob(*layers["b"].id)})
    with blobstore.open(f"{objects.address}/m", store=other, cache="none") as model:
        read.clear()
        model["a"]
        assert read.blobs() == {digests["a"]}
        model["b"]
        assert read.blobs() == {digests["a"]}
        model["c"]
        assert read.blobs() == {digests[name] for name in "acdef"}


def test_a_blob_that_is_compressed_here_is_read_in_parts(
    local: LocalStore, objects: ObjectStore, other: LocalStore, read: Read
) -> None:
    push_model("one", objects.address, store=local)
    blobstore.pull(f"{objects.address}/one", store=other)
    freeze_models(["one"], store=other)
    assert other.is_cold(frozen.layers(other, "one")["own"].digest)
    with (
        blobstore.open("one", store=local) as expected,
        blobstore.open(f"{objects.address}/one", store=other, read="pread", verify="none") as model,
    ):
        read.clear()
        assert np.array_equal(model.get_slice("own")[800:1600], expected["own"][800:1600])
        assert not read


# Parts


ROWS = 64


@pytest.fixture
def wide(tmp_path: Path, objects: ObjectStore) -> LocalStore:
    """Return a store of a model with tensors of 4 MiB, which is in object storage too."""
    local = LocalStore(tmp_path / "store")
    random = np.random.default_rng(1)
    blobs = {
        name: blob((name, "U8", (ROWS, 1 << 16), random.bytes(ROWS << 16)))
        for name in ("a", "b", "c")
    }
    add_blobs(local, "wide", blobs)
    push_model("wide", objects.address, store=local)
    return local


def test_a_slice_reads_its_bytes_only(
    wide: LocalStore, objects: ObjectStore, other: LocalStore, read: Read
) -> None:
    with (
        blobstore.open("wide", store=wide) as expected,
        blobstore.open(f"{objects.address}/wide", store=other) as model,
    ):
        read.clear()
        part = model.get_slice("b")[8:16]
        assert np.array_equal(part, expected["b"][8:16])
        assert read.size == 8 << 16
        read.clear()
        assert np.array_equal(model.get_slice("b")[:, 5:9], expected["b"][:, 5:9])
    assert kept(other, wide, "wide") == len(wide.resolve("wide").blobs) - 2  # "b" became complete


def test_a_rank_reads_its_part_of_each_tensor(
    wide: LocalStore, objects: ObjectStore, other: LocalStore, read: Read
) -> None:
    quarter = ROWS // 4
    parts = {name: slice(quarter, 2 * quarter) for name in "abc"}
    with (
        blobstore.open("wide", store=wide) as expected,
        blobstore.open(f"{objects.address}/wide", store=other) as model,
    ):
        read.clear()
        found = dict(model.iter_tensors(parts=parts))
        assert all(np.array_equal(found[name], expected[name][parts[name]]) for name in "abc")
    assert read.size == 3 * quarter << 16


def test_a_shard_reads_no_blob_of_another_rank(
    wide: LocalStore, objects: ObjectStore, other: LocalStore, read: Read
) -> None:
    with blobstore.open(f"{objects.address}/wide", store=other) as model:
        read.clear()
        names = [name for name, _ in model.iter_tensors(shard=(1, 3))]
    layers = frozen.layers(wide, "wide")
    assert read.blobs() == {str(layers[name].digest) for name in names}
    assert len(names) == 1


@pytest.mark.parametrize("dequantize", [False, True])
def test_parts_of_quantized_weights_are_those_of_the_local_store(
    tmp_path: Path, objects: ObjectStore, other: LocalStore, dequantize: bool
) -> None:
    local = LocalStore(tmp_path / "store")
    folder = write_folder(tmp_path / "model", quantizable_tensors())
    blobstore.create(folder, "q", store=local, quantize=QuantizeOptions("int4"))
    push_model("q", objects.address, store=local)

    def half(name: str) -> Any:
        return slice(0, 64) if name.endswith("q_proj.weight") else None

    def parts(model: blobstore.Model[Any]) -> Iterator[tuple[str, bytes]]:
        for name, array in model.iter_tensors(parts=half):
            yield name, np.ascontiguousarray(array).tobytes()

    with (
        blobstore.open("q", store=local, dequantize=dequantize) as expected,
        blobstore.open(
            f"{objects.address}/q", store=other, dequantize=dequantize, cache="none"
        ) as model,
    ):
        assert dict(parts(model)) == dict(parts(expected))


def test_a_remote_model_uses_the_store_that_it_is_opened_with_and_its_settings(
    local: LocalStore, objects: ObjectStore, other: LocalStore
) -> None:
    push_model("one", objects.address, store=local)
    with blobstore.open(f"{objects.address}/one", store=other) as model:
        assert isinstance(model.store, RemoteStore)
        assert model.store.local is other


class TestOpenModelsElsewhere(BlobAccessSuite):
    """Models of which the local store has nothing, one blob, or all blobs, compressed or not."""

    @pytest.fixture(params=["nothing", "one blob", "all blobs", "all blobs, compressed"])
    def access(
        self, request: pytest.FixtureRequest, origin: LocalStore, tmp_path: Path
    ) -> BlobAccess:
        address = f"file://{tmp_path}/bucket"
        push_model("model", address, store=origin)
        here = LocalStore(tmp_path / "here")
        if request.param == "one blob":
            blob = origin.resolve("model").layers_of(media_types.TENSOR)[0]
            with here.ingest() as ingest:
                ingest.add(blob.size, lambda: [origin.read_blob(*blob.id)])
                ingest.publish()
        elif request.param != "nothing":
            blobstore.pull(f"{address}/model", store=here)
        if request.param == "all blobs, compressed":
            freeze_models(["model"], store=here)
            assert len(here.frozen()) == 2
        return RemoteStore(
            here, ObjectSource.find(f"{address}/model"), Reference.parse("model"), cache="none"
        )


# The cache


def test_cached_blobs_are_no_garbage(
    local: LocalStore, objects: ObjectStore, other: LocalStore
) -> None:
    push_model("one", objects.address, store=local)
    with blobstore.open(f"{objects.address}/one", store=other) as model:
        model.tensors()
    assert collect_garbage(store=other, older_than=0).blobs == ()
    assert kept(other, local, "one") == len(local.resolve("one").blobs)


def test_the_cache_drops_what_was_not_used_for_longest(
    tmp_path: Path, objects: ObjectStore, other: LocalStore
) -> None:
    local = LocalStore(tmp_path / "store")
    sizes = {}
    for number, name in enumerate(("a", "b", "c")):
        frozen.put(local, name, {"shared": 9, name: number})
        push_model(name, objects.address, store=local)
        sizes[name] = sum(item.size for item in local.resolve(name).blobs)
    limit = int(1.6 * sizes["a"])
    for name in ("a", "b", "a", "c"):
        with blobstore.open(f"{objects.address}/{name}", store=other, cache_limit=limit) as model:
            model.tensors()
    assert kept(other, local, "a") == len(local.resolve("a").blobs)
    assert kept(other, local, "c") == len(local.resolve("c").blobs)
    assert not other.has(frozen.layers(local, "b")["b"].digest)


def test_the_cache_never_drops_blobs_of_models_or_of_running_programs(
    tmp_path: Path, objects: ObjectStore, other: LocalStore
) -> None:
    local = LocalStore(tmp_path / "store")
    for number, name in enumerate(("a", "b", "c")):
        frozen.put(local, name, {name: number})
        push_model(name, objects.address, store=local)
    blobstore.pull(f"{objects.address}/a", store=other)
    limit = sum(item.size for item in local.resolve("c").blobs)
    for name in ("a", "b"):
        with blobstore.open(f"{objects.address}/{name}", store=other) as model:
            model.tensors()
    with (
        blobstore.open(f"{objects.address}/b", store=other),
        blobstore.open(f"{objects.address}/c", store=other, cache_limit=limit) as model,
    ):
        model.tensors()
    assert kept(other, local, "a") == len(local.resolve("a").blobs)
    assert kept(other, local, "b") == len(local.resolve("b").blobs)
    assert not other.has(frozen.layers(local, "c")["c"].digest)


def cached_models(store: LocalStore, blobs: dict[str, list[bytes]]) -> dict[str, Digest]:
    """Keep models as if they had been opened elsewhere, the first one longest ago; return their digests."""
    found = {}
    for used, (name, contents) in enumerate(blobs.items()):
        add_blobs(store, name, {str(number): data for number, data in enumerate(contents)})
        data = store.read_manifest(name)
        store.remote_cache.keep(data)
        found[name] = Digest.of(data)
        os.utime(store.folder("cache") / found[name].hex, (used + 1, used + 1))
    blobstore.remove(list(blobs), store=store)
    return found


def test_a_model_that_is_opened_again_keeps_the_blobs_that_it_shares_with_newer_ones(
    other: LocalStore,
) -> None:
    shared, old, new = (bytes([number]) * 5000 for number in range(3))
    digests = cached_models(other, {"first": [shared], "old": [old], "new": [shared, new]})
    assert evict_models(other, 5000, 9000, digests["first"]) is False
    assert other.has(Digest.of(shared))
    assert not any(other.has(Digest.of(data)) for data in (old, new))


@pytest.mark.slow
def test_evicting_models_looks_at_the_blobs_of_each_a_fixed_number_of_times(
    other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[None] = []

    class Blobs(tuple[str, ...]):
        __slots__ = ()

        def __iter__(self) -> Iterator[str]:
            looks.append(None)
            return super().__iter__()

    names = [f"m{number}" for number in range(30)]
    cached_models(other, {name: [name.encode() * 2000] for name in names})
    models = [one._replace(blobs=Blobs(one.blobs)) for one in other.remote_cache.all()]
    monkeypatch.setattr(
        type(other.remote_cache), "all", lambda _, within=0: iter(models if within != -1 else ())
    )
    assert evict_models(other, 1, 1, Digest.of(b""))
    assert not list(other.folder("cache").iterdir())
    assert len(looks) <= 5 * len(names)


def test_the_environment_limits_the_cache(
    local: LocalStore, objects: ObjectStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_model("one", objects.address, store=local)
    monkeypatch.setenv("BLOBSTORE_CACHE_LIMIT", "1kB")
    with blobstore.open(f"{objects.address}/one", store=other) as model:
        model.tensors()
    assert kept(other, local, "one") == 0
    monkeypatch.setenv("BLOBSTORE_CACHE_LIMIT", "much")
    with pytest.raises(UsageError, match="'much' is not a size such as 5GB or 500MiB"):
        blobstore.open(f"{objects.address}/one", store=other)


def test_a_store_that_cannot_be_written_keeps_nothing(
    local: LocalStore,
    objects: ObjectStore,
    other: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    push_model("one", objects.address, store=local)

    def refuse(*_: object) -> None:
        raise StoreError("no space left")

    monkeypatch.setattr(Ingest, "add_hashed", refuse)
    with blobstore.open(f"{objects.address}/one", store=other) as model:
        assert len(model.tensors()) == 2
    assert kept(other, local, "one") == 0


def test_an_unknown_cache_is_refused(objects: ObjectStore) -> None:
    with pytest.raises(UsageError, match="cache must be keep or none, got 'all'"):
        blobstore.open(f"{objects.address}/one", cache="all")  # type: ignore[call-overload]


def test_opening_reads_all_headers_at_once_and_no_blob_of_a_tensor(
    local: LocalStore, objects: ObjectStore, other: LocalStore, read: Read
) -> None:
    push_model("one", objects.address, store=local)
    tensors = {str(layer.digest) for layer in frozen.layers(local, "one").values()}
    with blobstore.open(f"{objects.address}/one", store=other) as model:
        assert len(model) == len(tensors)
        assert not read.blobs() & tensors


@pytest.mark.parametrize("headers", [None, b"", b"x" * 70, pack_headers({})])
def test_a_model_opens_if_the_file_of_its_headers_is_of_no_use(
    local: LocalStore, objects: ObjectStore, other: LocalStore, headers: bytes | None
) -> None:
    push_model("one", objects.address, store=local)
    digest = Digest.of(objects.read_manifest("one"))
    if headers is None:
        objects.client.delete([f"{HEADERS}/{digest.hex}"])
    else:
        objects.put_headers(digest, headers)
    with blobstore.open(f"{objects.address}/one", store=other) as model:
        assert len(model.tensors()) == len(frozen.layers(local, "one"))


def test_a_header_that_is_not_that_of_the_blob_is_an_error_when_the_blob_is_read(
    local: LocalStore, objects: ObjectStore, other: LocalStore
) -> None:
    push_model("one", objects.address, store=local)
    digest = Digest.of(objects.read_manifest("one"))
    blobs = [blob.digest for blob in local.resolve("one").blobs]
    starts = unpack_headers(objects.read_for_manifest(HEADERS, digest), blobs)
    changed = {key: start.replace(b'"BF16"', b'"I16" ') for key, start in starts.items()}
    assert changed != starts
    objects.put_headers(digest, pack_headers(changed))
    with (
        blobstore.open(f"{objects.address}/one", store=other) as model,
        pytest.raises(BlobDamaged, match="another header"),
    ):
        model.tensors()
    # Neither stays in the cache once the remote is right again.
    objects.put_headers(digest, pack_headers(starts))
    with blobstore.open(f"{objects.address}/one", store=other) as model:
        assert len(model.tensors()) == len(blobs) - 1


def test_headers_of_one_remote_are_not_used_for_another(
    local: LocalStore, objects: ObjectStore, other: LocalStore, tmp_path: Path
) -> None:
    altered = f"file://{tmp_path}/altered"
    for address in (objects.address, altered):
        push_model("one", address, store=local)
    digest = Digest.of(objects.read_manifest("one"))
    file = tmp_path / "altered" / HEADERS / digest.hex
    starts = unpack_headers(file.read_bytes(), [one.digest for one in local.resolve("one").blobs])
    changed = {key: start.replace(b'"BF16"', b'"I16" ') for key, start in starts.items()}
    file.write_bytes(pack_headers(changed))
    found = []
    for address in (altered, objects.address):
        with blobstore.open(f"{address}/one", store=other) as model:
            found.append({spec.dtype.value for spec in model.specs.values()})
    assert found[0] != found[1]
    assert "BF16" in found[1]


def test_a_blob_that_the_manifest_does_not_list_with_that_size_is_refused(
    local: LocalStore, objects: ObjectStore, other: LocalStore
) -> None:
    push_model("one", objects.address, store=local)
    store = RemoteStore(other, ObjectSource.find(f"{objects.address}/one"), Reference.parse("one"))
    listed = local.resolve("one").blobs[0]
    store.check_size(*listed.id)
    with pytest.raises(BlobDamaged, match=f"{listed.size} bytes, expected {listed.size + 1}"):
        store.check_size(listed.digest, listed.size + 1)
    with pytest.raises(BlobDamaged, match="expected"):
        store.read_into(listed.digest, listed.size + 1, 0, memoryview(bytearray(1)))
    with pytest.raises(BlobMissing, match="no model here has the blob"):
        store.check_size(Digest.of(b"other"), 5)
