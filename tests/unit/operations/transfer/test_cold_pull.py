"""What pulls make of compressed forms: how they are listed, and deltas whose bases come along."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import BlobId, Digest
from blobstore.store.ingest import Ingest
from blobstore.store.local import LocalStore
from blobstore.store.partial import PartialBlob
from tests.support import frozen, ladders
from tests.support.cold import cold
from tests.support.cold_registry import REPOSITORY, ColdCase
from tests.support.models import add_blobs
from tests.support.stub_registry import StubRegistry


@pytest.fixture
def case(tmp_path: Path) -> Iterator[ColdCase]:
    with StubRegistry() as registry:
        yield ColdCase(tmp_path, registry)


def test_a_delta_waits_for_its_base(case: ColdCase) -> None:
    x, y = case.layers["x"], case.layers["y"]
    form = case.form(y, case.delta("y", "x"), x)
    case.offer(form)
    pulled = case.pull()
    assert case.sent(form) == [form["size"]]
    assert case.registry.sent[str(x.digest)] == x.size
    assert case.registry.sent[str(y.digest)] == 0
    assert pulled.bytes_saved == y.size - form["size"]
    assert not pulled.notices


@pytest.mark.parametrize("streams", [1, 8])
def test_a_base_may_come_in_its_compressed_form(case: ColdCase, streams: int) -> None:
    base = case.form(case.layers["x"], cold(case.data("x")))
    delta = case.form(case.layers["y"], case.delta("y", "x"), case.layers["x"])
    case.offer(delta, base)
    case.pull(streams=streams)
    assert case.sent(base, delta) == [base["size"], delta["size"]]


def test_a_base_whose_compressed_form_is_damaged_comes_itself(case: ColdCase) -> None:
    base = case.form(case.layers["x"], cold(case.data("x"))[:-1] + b"x")
    delta = case.form(case.layers["y"], case.delta("y", "x"), case.layers["x"])
    case.offer(base, delta)
    assert len(case.pull().notices) == 1
    assert case.sent(delta) == [delta["size"]]


def test_a_base_may_be_a_delta_against_a_blob_of_the_store(case: ColdCase) -> None:
    z = frozen.layer("z", frozen.weights(1))
    add_blobs(case.store, "base", {"z": z})
    at_hand = frozen.layers(case.store, "base")["z"]
    first = case.form(case.layers["x"], case.delta("x", z), at_hand)
    second = case.form(case.layers["y"], case.delta("y", "x"), case.layers["x"])
    case.offer(second, first)
    pulled = case.pull()
    assert case.sent(first, second) == [first["size"], second["size"]]
    assert pulled.bytes_fetched < pulled.bytes_saved


def test_a_dry_run_counts_deltas_whose_bases_would_come_too(case: ColdCase) -> None:
    case.offer(case.form(case.layers["y"], case.delta("y", "x"), case.layers["x"]))
    planned = blobstore.pull(case.remote, "tune", store=case.store, dry_run=True)
    pulled = case.pull()
    assert planned.bytes_fetched == pulled.bytes_fetched
    assert planned.bytes_saved == pulled.bytes_saved > 0


def test_a_model_with_similar_layers_is_pushed_and_pulled_as_deltas(
    tmp_path: Path, remote: str
) -> None:
    origin = LocalStore(tmp_path / "origin")
    data = frozen.weights(1)
    blobs = {name: frozen.layer(name, data) for name in ("a", "b")}
    add_blobs(origin, "twins", blobs)
    pushed = blobstore.push("twins", remote, store=origin, cold=True)
    target = LocalStore(tmp_path / "target")
    pulled = blobstore.pull(remote, "twins", store=target)
    assert target.read_manifest("twins") == origin.read_manifest("twins")
    assert pushed.bytes_cold < len(data)
    assert pulled.bytes_saved > len(data)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_k_quant_is_pulled_as_its_scales_by_who_has_the_weights(
    tmp_path: Path, remote: str, is_frozen: bool
) -> None:
    matrix = ladders.source(1)
    quantized = ladders.coded_blob("x", "Q4_K", matrix)
    origin, target = LocalStore(tmp_path / "origin"), LocalStore(tmp_path / "target")
    for store in (origin, target):
        add_blobs(store, "weights", {"y": ladders.weight_blob("y", matrix)})
    add_blobs(origin, "q", {"x": quantized})
    if is_frozen:
        blobstore.freeze("q", store=origin)
    blobstore.push("q", remote, store=origin, cold=True, base="weights")
    pulled = blobstore.pull(remote, "q", store=target)
    if is_frozen:
        assert pulled.bytes_fetched < len(quantized) / 5
    item = frozen.layers(target, "q")["x"]
    assert target.read_blob(item.digest, item.size) == quantized


@pytest.mark.parametrize("has_space", [True, False])
def test_a_step_is_pulled_as_a_delta_onto_a_frozen_one(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch, has_space: bool
) -> None:
    origin, target = LocalStore(tmp_path / "origin"), LocalStore(tmp_path / "target")
    for name, data in zip(("base", "one", "two"), frozen.mixed_steps(), strict=True):
        add_blobs(origin, name, {"x": data})
        if name != "two":
            add_blobs(target, name, {"x": data})
    blobstore.freeze("one", store=target, base="base")
    blobstore.push("two", remote, store=origin, cold=True, base="one")
    if not has_space:
        monkeypatch.setattr(tempfile, "TemporaryFile", _no_space)
    pulled = blobstore.pull(remote, "two", store=target)
    size = frozen.layers(target, "two")["x"].size
    assert (pulled.bytes_fetched < 0.03 * size) == has_space
    assert len(pulled.notices) == (not has_space)
    assert target.read_manifest("two") == origin.read_manifest("two")
    target.check_digest(*frozen.layers(target, "two")["x"].id)
    assert not list(target.folder("temporary").glob("*"))


def _no_space(**_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_registry_may_list_compressed_forms_itself(case: ColdCase) -> None:
    form = case.form(case.layers["x"], cold(case.data("x")))
    case.offer(form)
    tagged = case.registry.manifests.pop((REPOSITORY, f"sha256-{case.root.digest.hex}"))
    case.registry.referrers[str(case.root.digest)] = tagged.data
    case.pull()
    assert case.sent(form) == [form["size"]]


def test_compressed_forms_are_not_fetched_if_they_are_not_wanted(case: ColdCase) -> None:
    form = case.form(case.layers["x"], cold(case.data("x")))
    case.offer(form)
    assert case.pull(cold=False).bytes_saved == 0
    assert case.sent(form) == [0]


def test_nothing_is_asked_for_twice(case: ColdCase) -> None:
    case.offer(case.form(case.layers["x"], cold(case.data("x"))))
    case.pull()
    requests = case.registry.requests
    assert sorted(requests) == sorted(set(requests))


def test_space_is_checked_for_both_forms(case: ColdCase, monkeypatch: pytest.MonkeyPatch) -> None:
    form = case.form(case.layers["x"], cold(case.data("x")))
    case.offer(form)
    needed: list[int] = []
    monkeypatch.setattr(LocalStore, "check_space", lambda _, size: needed.append(size))
    case.pull()
    model = sum(blob.size for blob in case.origin.resolve("tune").blobs)
    assert needed == [model + form["size"] + len(case.root.data)]


def test_two_pulls_at_once_fetch_each_form_once(case: ColdCase) -> None:
    forms = [case.form(case.layers[name], cold(case.data(name))) for name in "xy"]
    case.offer(*forms)
    case.registry.pause = 0.002
    with ThreadPoolExecutor(2) as threads:
        pulls = [
            threads.submit(blobstore.pull, case.remote, name, store=LocalStore(case.store.root))
            for name in ("one", "two")
        ]
    assert [pull.result().notices for pull in pulls] == [(), ()]
    assert case.sent(*forms) == [form["size"] for form in forms]
    for name in ("one", "two"):
        assert case.store.read_manifest(name) == case.origin.read_manifest("tune")
    assert not list(case.store.folder("partial").iterdir())


def test_a_form_that_another_pull_is_decoding_is_left_to_it(
    case: ColdCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = case.form(case.layers["x"], cold(case.data("x")))
    case.offer(form)
    stored = BlobId(Digest.parse(form["digest"]), form["size"])
    publish, others = Ingest.publish, []

    def published(self: Ingest) -> None:
        publish(self)
        others.append(PartialBlob.open(case.store.folder("partial"), stored))

    monkeypatch.setattr(Ingest, "publish", published)
    blobstore.pull(case.remote, "tune", store=case.store)
    (other,) = others
    assert other is not None
    with other:
        assert other.path.exists()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_large_form_is_fetched_in_parts(
    case: ColdCase, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    monkeypatch.setattr("blobstore.store.partial.PART", 2**14)
    form = case.form(case.layers["x"], cold(case.data("x")))
    case.offer(form)
    if is_damaged:
        case.registry.blobs[form["digest"]] = case.registry.blobs[form["digest"]][:-1]
    pulled = case.pull(streams=3)
    assert (pulled.bytes_saved == 0, len(pulled.notices)) == (is_damaged, is_damaged)


def test_a_lost_connection_is_continued_at_the_next_byte(case: ColdCase) -> None:
    form = case.form(case.layers["x"], cold(case.data("x")))
    case.offer(form)
    case.registry.cut_after[form["digest"]] = 20_000
    assert not case.pull().notices
    assert case.sent(form)[0] <= form["size"] + 2**15
