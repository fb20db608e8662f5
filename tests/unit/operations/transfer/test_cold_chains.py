"""Clients that skipped versions of a model: each is sent as a delta against the one before it."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.compression.delta import MAX_CHAIN
from blobstore.core import limits
from blobstore.core.digest import BlobId, Digest
from blobstore.manifests.descriptor import Descriptor
from blobstore.objects.conditional_writes import ConditionalClient
from blobstore.objects.store import COLD_BASES, COLD_INDEXES, ObjectStore, blob_key
from blobstore.operations.maintenance.gc_objects import collect_objects
from blobstore.operations.transfer import pull
from blobstore.operations.transfer.object_target import ObjectTarget
from blobstore.operations.transfer.registry_target import RegistryTarget
from blobstore.registry.client import RegistryClient
from blobstore.remotes.cold_layers import (
    MAX_LINKS,
    ColdLayer,
    bases_of,
    chain_of,
    format_cold_layers,
    parse_cold_layers,
)
from blobstore.remotes.send_cold import send_cold_manifests
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.cold import cold
from tests.support.cold_registry import ColdCase
from tests.support.models import add_blobs
from tests.support.options import grouped
from tests.support.serve_process import serving
from tests.support.stub_registry import StubRegistry

VERSIONS = 5
LIMIT = 120
"""Seconds until a command hangs."""


@pytest.fixture(scope="module")
def run() -> list[dict[str, bytes]]:
    """Return the blobs of the versions of a model: two that each step changes, and one that none changes."""
    same = frozen.layer("c", frozen.weights(9))
    return [
        {"a": frozen.layer("a", a), "b": frozen.layer("b", b), "c": same}
        for a, b in zip(frozen.steps(5, 1, VERSIONS), frozen.steps(6, 2, VERSIONS), strict=True)
    ]


@pytest.fixture
def trainer(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "trainer")


@pytest.fixture(params=["registry", "objects"])
def address(request: pytest.FixtureRequest) -> str:
    """Return where versions are published, in a real registry or in real object storage."""
    if request.param == "registry":
        return f"oci://{request.getfixturevalue('remote')}:latest"
    return f"{request.getfixturevalue('objects').address}/policy:latest"


def publish(
    trainer: LocalStore,
    run: list[dict[str, bytes]],
    address: str,
    numbers: range = range(VERSIONS),
    **options: Any,
) -> list[int]:
    """Push versions as deltas, each against the one before; return the sizes of the forms."""
    sizes = []
    for number in numbers:
        add_blobs(trainer, f"policy:{number}", run[number])
        base = f"policy:{number - 1}" if number else None
        pushed = push(f"policy:{number}", address, trainer, base, **grouped(options))
        sizes.append(pushed.bytes_cold)
    return sizes


def push(
    name: str, address: str, trainer: LocalStore, base: str | None, **options: Any
) -> blobstore.Pushed:
    return blobstore.push(name, address, store=trainer, cold=True, base=base, **grouped(options))


def client(folder: Path, run: list[dict[str, bytes]], number: int) -> LocalStore:
    """Return a store that has a version."""
    store = LocalStore(folder / f"client-{number}")
    add_blobs(store, "policy", run[number])
    return store


def assert_is_last(store: LocalStore, trainer: LocalStore, last: int = VERSIONS - 1) -> None:
    assert store.read_manifest("policy") == trainer.read_manifest(f"policy:{last}")
    for blob in store.resolve("policy").blobs:
        store.check_digest(*blob.id)
    for folder in ("partial", "temporary"):
        assert not list(store.folder(folder).glob("*"))


def of_step(trainer: LocalStore, number: int) -> list[int]:
    """Return the sizes of the blobs that a step changes."""
    return [layer.size for layer in trainer.resolve(f"policy:{number}").layers if layer.name != "c"]


def assert_only_deltas_travel(
    store: LocalStore, address: str, trainer: LocalStore, last: int = VERSIONS - 1
) -> None:
    """Pull the last version into a store that has an earlier one: it takes far fewer bytes than its blobs."""
    pulled = blobstore.pull(address, "policy", store=store, force=True)
    assert_is_last(store, trainer, last)
    assert pulled.bytes_fetched < 0.1 * sum(of_step(trainer, last))


def test_a_client_that_skipped_versions_pulls_their_deltas(
    trainer: LocalStore, run: list[dict[str, bytes]], address: str, tmp_path: Path
) -> None:
    publish(trainer, run, address)
    fetched = []
    for number in range(VERSIONS):
        store = client(tmp_path, run, number)
        planned = blobstore.pull(address, "policy", store=store, force=True, dry_run=True)
        pulled = blobstore.pull(address, "policy", store=store, force=True)
        assert_is_last(store, trainer)
        assert not any(notice.startswith(pull.WITHOUT_BASES) for notice in pulled.notices)
        assert (planned.bytes_fetched, planned.bytes_saved) == (
            pulled.bytes_fetched,
            pulled.bytes_saved,
        )
        fetched.append(pulled.bytes_fetched)
        if number < VERSIONS - 1:
            whole = sum(of_step(trainer, VERSIONS - 1))
            assert pulled.bytes_fetched + pulled.bytes_saved == whole
            assert pulled.bytes_fetched < 0.03 * whole * (VERSIONS - 1 - number)
    assert fetched == sorted(fetched, reverse=True)
    assert fetched[-1] == 0
    # Each version that was skipped costs its own delta, and no more.
    steps = [before - after for before, after in itertools.pairwise(fetched)]
    assert max(steps) < 2 * min(steps)


def test_opening_what_a_skipped_version_leads_to_reads_the_deltas(
    trainer: LocalStore, run: list[dict[str, bytes]], address: str, tmp_path: Path
) -> None:
    publish(trainer, run, address)
    store = client(tmp_path, run, 0)
    plan = blobstore.open(address, store=store, plan=True)
    assert 0 < plan.bytes_to_read < 0.1 * sum(of_step(trainer, VERSIONS - 1))
    with (
        blobstore.open(f"policy:{VERSIONS - 1}", store=trainer, framework="numpy") as expected,
        blobstore.open(address, store=store, cache="none", framework="numpy") as model,
    ):
        found = {name: array.tobytes() for name, array in model.tensors().items()}
        assert found == {name: array.tobytes() for name, array in expected.tensors().items()}
    pulled = blobstore.pull(address, "policy", store=store, force=True, dry_run=True)
    assert plan.bytes_to_read == pulled.bytes_fetched


def test_the_layers_of_a_base_are_not_hashed_to_find_its_forms(
    trainer: LocalStore, run: list[dict[str, bytes]], remote: str
) -> None:
    publish(trainer, run, remote, range(1))  # in another layout
    steps: list[str] = []
    publish(
        trainer,
        run,
        remote,
        range(1, 2),
        layout="image",
        progress=lambda *step: steps.append(step[0]),
    )
    order = [what for what, _ in itertools.groupby(steps)]
    assert order.count("hashing layers") == 1


@pytest.mark.parametrize("layout", ["ollama", "image"])
def test_other_layouts_have_chains_too(
    trainer: LocalStore, run: list[dict[str, bytes]], remote: str, tmp_path: Path, layout: str
) -> None:
    publish(trainer, run, remote, range(3), layout=layout)
    assert_only_deltas_travel(client(tmp_path, run, 0), remote, trainer, 2)


def test_a_client_without_any_version_begins_with_the_compressed_first_one(
    trainer: LocalStore, run: list[dict[str, bytes]], address: str, tmp_path: Path
) -> None:
    sizes = publish(trainer, run, address)
    store = LocalStore(tmp_path / "new")
    pulled = blobstore.pull(address, "policy", store=store)
    assert_is_last(store, trainer)
    assert pulled.bytes_fetched <= sum(sizes)
    whole = sum(blob.size for blob in trainer.resolve("policy:0").blobs)
    assert pulled.bytes_fetched < 0.8 * whole


def test_the_client_may_have_frozen_its_version(
    trainer: LocalStore, run: list[dict[str, bytes]], address: str, tmp_path: Path
) -> None:
    publish(trainer, run, address)
    store = client(tmp_path, run, 0)
    add_blobs(store, "first", run[1])
    blobstore.freeze("policy", base="first", store=store)
    blobstore.remove("first", store=store)
    assert_only_deltas_travel(store, address, trainer)


def test_following_over_skipped_versions_costs_their_deltas(
    trainer: LocalStore, run: list[dict[str, bytes]], address: str, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path / "replica")
    publish(trainer, run, address, range(1))
    (first,) = blobstore.follow("policy", address, store=store, once=True)
    publish(trainer, run, address, range(1, VERSIONS))
    (last,) = blobstore.follow("policy", address, store=store, once=True)
    assert last.bytes_fetched < 0.1 * first.bytes_fetched
    assert_is_last(store, trainer)


def test_clients_that_have_the_base_do_not_read_the_list_of_others(
    trainer: LocalStore,
    run: list[dict[str, bytes]],
    objects: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = f"{objects.address}/policy:latest"
    publish(trainer, run, address)
    asked: list[str] = []
    really_get = ConditionalClient.get

    def get(self: ConditionalClient, key: str, *others: Any) -> Any:
        asked.append(key.rpartition("/")[0])
        return really_get(self, key, *others)

    monkeypatch.setattr(ConditionalClient, "get", get)
    for number in (VERSIONS - 2, VERSIONS - 3):
        store = client(tmp_path, run, number)
        with blobstore.open(address, store=store, cache="none"):
            pass
        blobstore.pull(address, "policy", store=store, force=True)
        assert (COLD_BASES in asked) == (number == VERSIONS - 3)
    assert asked.count(COLD_BASES) == asked.count(COLD_INDEXES) / 2 == 2


def test_the_list_of_the_models_own_forms_is_what_it_was(
    trainer: LocalStore, run: list[dict[str, bytes]], objects: ObjectStore
) -> None:
    """Clients that know no other list read what they always did."""
    publish(trainer, run, f"{objects.address}/policy:latest")
    for number in range(VERSIONS):
        manifest = Digest.of(trainer.read_manifest(f"policy:{number}"))
        listed = parse_cold_layers(objects.read_for_manifest(COLD_INDEXES, manifest) or b"")
        own = {layer.digest for layer in trainer.resolve(f"policy:{number}").layers}
        assert listed.keys() == own
        bases = parse_cold_layers(objects.read_for_manifest(COLD_BASES, manifest) or b"")
        assert len(bases) == 2 * number
        assert not bases.keys() & (own - {frozen.layers(trainer, "policy:0")["c"].digest})


def test_a_list_that_is_too_large_is_not_written(
    trainer: LocalStore,
    run: list[dict[str, bytes]],
    objects: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = f"{objects.address}/policy:latest"
    publish(trainer, run, address, range(2))
    manifest = Digest.of(trainer.read_manifest("policy:1"))
    own = objects.read_for_manifest(COLD_INDEXES, manifest)
    monkeypatch.setattr(limits, "COLD_INDEX", limits.Limit(len(own or b"") + 20))
    publish(trainer, run, address, range(2, VERSIONS))
    collect_objects(objects.address, older_than=0, force=True)
    store = client(tmp_path, run, 0)
    blobstore.pull(address, "policy", store=store, force=True)
    assert_is_last(store, trainer)


def test_without_that_list_the_blobs_are_fetched(
    trainer: LocalStore, run: list[dict[str, bytes]], objects: ObjectStore, tmp_path: Path
) -> None:
    """As after a push by an older version."""
    address = f"{objects.address}/policy:latest"
    publish(trainer, run, address)
    objects.client.delete([item.key for item in objects.client.list(COLD_BASES)])
    store = client(tmp_path, run, 0)
    pulled = blobstore.pull(address, "policy", store=store, force=True)
    assert_is_last(store, trainer)
    assert pulled.bytes_saved == 0
    assert any(notice.startswith(pull.WITHOUT_BASES) for notice in pulled.notices)


def test_forms_of_versions_without_names_survive_gc(
    trainer: LocalStore, run: list[dict[str, bytes]], objects: ObjectStore, tmp_path: Path
) -> None:
    address = f"{objects.address}/policy:latest"
    publish(trainer, run, address)
    removed = collect_objects(objects.address, older_than=0, force=True).removed
    folders = [item.key.rpartition("/")[0] for item in removed]
    # The first has no bases.
    assert folders.count(COLD_BASES) == folders.count(COLD_INDEXES) - 1 == VERSIONS - 2
    assert_only_deltas_travel(client(tmp_path, run, 0), address, trainer)


def test_a_chain_must_pay_for_the_blob_of_the_model_and_not_for_a_stated_size(
    trainer: LocalStore, run: list[dict[str, bytes]], objects: ObjectStore, tmp_path: Path
) -> None:
    address = f"{objects.address}/policy:latest"
    publish(trainer, run, address, range(3))
    manifest = Digest.of(trainer.read_manifest("policy:2"))

    def grown(times: int, data: bytes | None) -> bytes:
        return format_cold_layers(
            ColdLayer(
                BlobId(form.blob.digest, form.blob.size * 10**12),
                BlobId(form.stored.digest, form.stored.size * times),
                form.base and BlobId(form.base.digest, form.base.size * 10**12),
            )
            for form in parse_cold_layers(data or b"").values()
        )

    objects.change_cold_index(COLD_INDEXES, manifest, partial(grown, 1))
    objects.change_cold_index(COLD_BASES, manifest, partial(grown, 10**12))
    store = client(tmp_path, run, 0)
    pulled = blobstore.pull(address, "policy", store=store, force=True)
    assert_is_last(store, trainer, 2)
    assert pulled.bytes_saved == 0


@pytest.mark.parametrize("way", ["pull", "open"])
def test_a_form_that_is_gone_costs_the_blob(
    trainer: LocalStore, run: list[dict[str, bytes]], objects: ObjectStore, tmp_path: Path, way: str
) -> None:
    address = f"{objects.address}/policy:latest"
    publish(trainer, run, address)
    manifest = Digest.of(trainer.read_manifest("policy:2"))
    listed = parse_cold_layers(objects.read_for_manifest(COLD_INDEXES, manifest) or b"")
    lost = listed[frozen.layers(trainer, "policy:2")["a"].digest]
    objects.client.delete([blob_key(lost.stored.digest)])
    store = client(tmp_path, run, 0)
    if way == "open":
        with blobstore.open(address, store=store) as model:
            model.tensors()
        for blob in trainer.resolve(f"policy:{VERSIONS - 1}").blobs:
            store.check_digest(*blob.id)
        return
    pulled = blobstore.pull(address, "policy", store=store, force=True)
    assert_is_last(store, trainer)
    size = frozen.layers(trainer, "policy:0")["a"].size
    assert size < pulled.bytes_fetched < 1.2 * size
    assert sum("could not be used" in notice for notice in pulled.notices) == 1


def test_a_version_that_was_pushed_without_forms_ends_the_chain(
    trainer: LocalStore, run: list[dict[str, bytes]], address: str, tmp_path: Path
) -> None:
    publish(trainer, run, address, range(2))
    add_blobs(trainer, "policy:2", run[2])
    blobstore.push("policy:2", address, store=trainer)
    publish(trainer, run, address, range(3, 4))
    store = client(tmp_path, run, 1)
    pulled = blobstore.pull(address, "policy", store=store, force=True)
    assert_is_last(store, trainer, 3)
    assert pulled.bytes_saved == 0


def test_a_base_that_is_not_in_the_store_any_more_ends_the_chain(
    trainer: LocalStore, run: list[dict[str, bytes]], address: str, tmp_path: Path
) -> None:
    publish(trainer, run, address, range(3))
    for number in range(3):
        blobstore.remove(f"policy:{number}", store=trainer)
    add_blobs(trainer, "policy:3", run[3])
    # The search for a base finds no model.
    assert push("policy:3", address, trainer, None).cold_blobs == 3
    store = client(tmp_path, run, 0)
    blobstore.pull(address, "policy", store=store, force=True)
    assert_is_last(store, trainer, 3)


def test_a_second_push_lists_nothing_again(
    trainer: LocalStore, run: list[dict[str, bytes]], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(trainer, run, address, range(3))
    monkeypatch.setattr(RegistryClient, "put_manifest", None)
    monkeypatch.setattr(ConditionalClient, "replace", None)
    assert push("policy:2", address, trainer, "policy:1").is_unchanged


def test_a_client_of_a_server_skips_versions_without_a_chain(
    trainer: LocalStore, run: list[dict[str, bytes]], tmp_path: Path
) -> None:
    """A store has chains of one link: each frozen version is a delta against the first."""
    for number, blobs in enumerate(run):
        add_blobs(trainer, f"policy:{number}", blobs)
    for number in range(1, VERSIONS):
        blobstore.freeze(f"policy:{number}", base="policy:0", store=trainer)
    blobstore.copy(f"policy:{VERSIONS - 1}", "policy", store=trainer)
    store = client(tmp_path, run, 0)
    with serving(trainer, tmp_path) as server:
        pulled = blobstore.pull(f"{server.url}/policy", "policy", store=store, force=True)
    assert_is_last(store, trainer)
    assert pulled.bytes_fetched < 0.2 * sum(of_step(trainer, 0))


# Killed


class _Killed(BaseException):
    pass


def test_a_push_that_ends_between_its_two_lists_sends_both_again(
    trainer: LocalStore,
    run: list[dict[str, bytes]],
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish(trainer, run, address, range(2))
    really_add = ObjectTarget._add_to_list

    def add(self: ObjectTarget, folder: str, layers: Sequence[ColdLayer]) -> None:
        if folder == COLD_INDEXES:
            raise _Killed
        really_add(self, folder, layers)

    def send(client: RegistryClient, *others: Any) -> None:
        if others[-1] != "application/vnd.blobstore.cold.bases.v1":
            raise _Killed
        send_cold_manifests(client, *others)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectTarget, "_add_to_list", add)
        patch.setattr(f"{RegistryTarget.__module__}.send_cold_manifests", send)
        with pytest.raises(_Killed):
            publish(trainer, run, address, range(2, 3))
    push("policy:2", address, trainer, "policy:1")
    assert_only_deltas_travel(client(tmp_path, run, 0), address, trainer, 2)


def test_a_killed_pull_does_not_fetch_the_forms_of_bases_again(tmp_path: Path) -> None:
    goes_on = threading.Event()
    with StubRegistry() as registry:
        case = ChainCase(tmp_path, registry)
        case.offer(case.top)
        case.offer_bases(*case.links)
        registry.alter = lambda digest, _, data: (
            data if digest != case.top["digest"] or goes_on.wait(LIMIT) else b""
        )
        command = [sys.executable, "-m", "blobstore", "pull", case.remote, "tune"]
        process = subprocess.Popen(
            [*command, "--store", str(case.store.root)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + LIMIT
        # The blob itself comes last. All before it is there when it is asked for.
        while f"GET /v2/team/tune/blobs/{case.top['digest']}" not in registry.requests:
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        goes_on.set()
        assert not case.store.has_model("tune")
        pulled = case.pull()
        assert case.sent(*case.links) == [link["size"] for link in case.links]
        assert pulled.bytes_resumed >= sum(case.sent(*case.links))


# Lists that lie


class ChainCase(ColdCase):
    """A registry whose blob ``x`` is a delta against the second of two blobs, of which the store has neither."""

    def __init__(self, folder: Path, registry: StubRegistry, length: int = 2) -> None:
        super().__init__(folder, registry)
        first = frozen.layer("z", frozen.weights(1))
        add_blobs(self.store, "first", {"z": first})
        blobs = [first, *(frozen.layer("x", data) for data in frozen.steps(3, 1, length))]
        self.described = [Descriptor("", Digest.of(data), len(data)) for data in blobs]
        deltas = [self.delta_of(*pair) for pair in itertools.pairwise(blobs)]
        self.links = [
            self.form(blob, delta, base)
            for (base, blob), delta in zip(itertools.pairwise(self.described), deltas, strict=True)
        ]
        self.top = self.form(self.layers["x"], self.delta("x", blobs[-1]), self.described[-1])

    @staticmethod
    def delta_of(base: bytes, data: bytes) -> bytes:
        from blobstore.compression.base import BaseBlob
        from blobstore.compression.spans import Span
        from blobstore.core.tensor import DType

        begin = len(data) - 2 * frozen.COUNT
        spans = [Span(begin, None), Span(2 * frozen.COUNT, DType.BF16, base_begin=begin)]
        return cold(data, spans=spans, base=BaseBlob.hot(base))

    def assert_fetches_the_blob(self, notices: int) -> None:
        pulled = self.pull()
        assert pulled.bytes_saved == 0
        assert self.registry.sent[str(self.layers["x"].digest)] == self.layers["x"].size
        assert len(pulled.notices) == notices


@pytest.fixture
def case(tmp_path: Path) -> Iterator[ChainCase]:
    with StubRegistry() as registry:
        yield ChainCase(tmp_path, registry)


@pytest.mark.parametrize("streams", [1, 8])
def test_an_honest_chain_is_used(case: ChainCase, streams: int) -> None:
    case.offer(case.top)
    case.offer_bases(*case.links)
    pulled = case.pull(streams=streams)
    forms = (case.top, *case.links)
    assert case.sent(*forms) == [form["size"] for form in forms]
    assert case.registry.sent[str(case.layers["x"].digest)] == 0
    assert pulled.bytes_saved == case.layers["x"].size - sum(case.sent(*forms))
    assert pulled.blobs_fetched == 2
    assert not pulled.notices


def _missing(case: ChainCase) -> None:
    del case.registry.blobs[case.links[0]["digest"]]


def _truncated(case: ChainCase) -> None:
    digest = case.links[0]["digest"]
    case.registry.blobs[digest] = case.registry.blobs[digest][:-100]


def _altered(case: ChainCase) -> None:
    case.registry.alter = lambda digest, _, sent: (
        bytes(len(sent)) if digest == case.links[1]["digest"] else sent
    )


def _of_another_blob(case: ChainCase) -> None:
    case.links[0] = case.form(case.described[1], cold(case.data("y")), case.described[0])


def _without_its_base(case: ChainCase) -> None:
    case.links[0] = case.form(
        case.described[1], cold(frozen.layer("x", frozen.weights(4))), case.described[0]
    )


def _a_bomb(case: ChainCase) -> None:
    case.links[0] = case.form(case.described[1], cold(bytes(2**26)), case.described[0])


@pytest.mark.parametrize(
    "spoil", [_missing, _truncated, _altered, _of_another_blob, _without_its_base, _a_bomb]
)
def test_a_chain_with_a_wrong_form_costs_the_blob(
    case: ChainCase, spoil: Callable[[ChainCase], None]
) -> None:
    spoil(case)
    case.offer(case.top)
    case.offer_bases(*case.links)
    case.assert_fetches_the_blob(notices=1)


def _cycle(case: ChainCase) -> list[dict[str, Any]]:
    return [case.links[1], case.links[0] | {"annotations": _against(case, case.described[2])}]


def _against(case: ChainCase, base: Descriptor) -> dict[str, str]:
    return {
        **case.links[0]["annotations"],
        "blobstore.cold.base.digest": str(base.digest),
        "blobstore.cold.base.size": str(base.size),
    }


def _through_a_blob_of_the_model(case: ChainCase) -> list[dict[str, Any]]:
    y = case.form(case.layers["y"], case.delta("y", "x"), case.described[0])
    return [case.links[1] | {"annotations": case.links[1]["annotations"] | _base(y)}, y]


def _base(form: dict[str, Any]) -> dict[str, str]:
    of = form["annotations"]
    return {
        "blobstore.cold.base.digest": of["blobstore.cold.digest"],
        "blobstore.cold.base.size": of["blobstore.cold.size"],
    }


def _of_another_size(case: ChainCase) -> list[dict[str, Any]]:
    size = {"blobstore.cold.size": str(case.described[1].size + 1)}
    return [case.links[0] | {"annotations": case.links[0]["annotations"] | size}, case.links[1]]


def _as_large_as_the_blob(case: ChainCase) -> list[dict[str, Any]]:
    half = case.layers["x"].size // 2
    return [link | {"size": half} for link in case.links]


def _only_the_nearest(case: ChainCase) -> list[dict[str, Any]]:
    return [case.links[1]]


@pytest.mark.parametrize(
    "lists",
    [
        _cycle,
        _through_a_blob_of_the_model,
        _of_another_size,
        _as_large_as_the_blob,
        _only_the_nearest,
    ],
)
def test_a_chain_that_leads_nowhere_is_not_fetched(
    case: ChainCase, lists: Callable[[ChainCase], list[dict[str, Any]]]
) -> None:
    case.offer(case.top)
    case.offer_bases(*lists(case))
    case.assert_fetches_the_blob(notices=1)
    assert case.sent(case.top, *case.links) == [0, 0, 0]


def test_lists_of_bases_cost_a_bounded_number_of_requests(case: ChainCase) -> None:
    case.offer(case.top)
    case.offer_bases(count=5000)
    digest = case.listed[-1]["digest"]
    case.assert_fetches_the_blob(notices=1)
    assert sum(digest in one for one in case.registry.requests) <= 100


def test_what_is_read_of_lists_of_bases_is_bounded(case: ChainCase) -> None:
    foreign = [
        case.links[0]
        | {"annotations": case.links[0]["annotations"] | {"blobstore.cold.digest": str(digest)}}
        for digest in (Digest.of(b"%d" % number) for number in range(1000))
    ]
    case.offer(case.top)
    case.offer_bases(*foreign, *case.links)
    case.assert_fetches_the_blob(notices=1)


# The walk alone


def layers(sizes: list[int], stored: int = 10) -> list[ColdLayer]:
    """Return forms of blobs of these sizes, each a delta against the next one; the last has no base."""
    ids = [BlobId(Digest.of(b"%d" % number), size) for number, size in enumerate(sizes)]
    return [
        ColdLayer(one, BlobId(Digest.of(b"stored %d" % number), stored), base)
        for number, (one, base) in enumerate(zip(ids, [*ids[1:], None], strict=True))
    ]


def by_digest(forms: list[ColdLayer]) -> dict[Digest, ColdLayer]:
    return {form.blob.digest: form for form in forms}


def test_a_chain_of_a_thousand_is_as_long_as_a_decoder_takes() -> None:
    forms = layers([10**6] * 1000)
    assert list(bases_of(forms[0], by_digest(forms))) == forms[1 : MAX_LINKS + 1]
    assert chain_of(forms[0], by_digest(forms), lambda _: False) is None
    assert MAX_LINKS + 1 == MAX_CHAIN


def test_a_chain_ends_at_the_first_base_that_is_here() -> None:
    forms = layers([1000] * 6)
    here = {forms[3].blob, forms[5].blob}
    assert chain_of(forms[0], by_digest(forms), here.__contains__) == forms[1:3]
    assert chain_of(forms[0], by_digest(forms), lambda _: False) == forms[1:]


def test_a_chain_takes_less_than_the_blob() -> None:
    forms = layers([100] * 12)
    assert len(list(bases_of(forms[0], by_digest(forms)))) == 8
    assert chain_of(forms[0], by_digest(forms[:9]), lambda _: False) is None


def test_a_chain_has_no_cycle_and_no_base_that_is_much_larger() -> None:
    forms = layers([1000] * 4)
    cycle = [*forms[:3], forms[3]._replace(base=forms[1].blob)]
    assert list(bases_of(forms[0], by_digest(cycle))) == forms[1:3] + cycle[3:]
    own = forms[0]._replace(base=forms[0].blob)
    assert not list(bases_of(own, by_digest([own])))
    forms = layers([1000, 1000, 10**9, 1000])
    assert list(bases_of(forms[0], by_digest(forms))) == forms[1:2]
