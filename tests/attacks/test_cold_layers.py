"""Registries whose compressed forms lie. A pull fetches the blobs instead, or nothing at all."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blobstore.compression.base import BaseBlob
from blobstore.compression.spans import Span
from blobstore.core.digest import Digest
from blobstore.core.tensor import DType
from blobstore.errors import RemoteError
from blobstore.manifests.descriptor import Descriptor
from blobstore.registry.client import RegistryClient
from blobstore.registry.manifest import OCI_INDEX, OCI_MANIFEST
from blobstore.registry.reference import RemoteReference
from blobstore.remotes.cold_manifests import fetch_cold_layers
from tests.support import frozen
from tests.support.cold import cold
from tests.support.cold_registry import ANNOTATION, COLD, REPOSITORY, ColdCase, manifest_of
from tests.support.raw_server import RawServer, Received, reply
from tests.support.stub_registry import StubRegistry


@pytest.fixture
def case(tmp_path: Path) -> Iterator[ColdCase]:
    with StubRegistry() as registry:
        yield ColdCase(tmp_path, registry)


def test_honest_forms_are_used(case: ColdCase) -> None:
    forms = [case.form(case.layers[name], cold(case.data(name))) for name in "xy"]
    case.offer(*forms)
    pulled = case.pull()
    assert case.sent(*forms) == [form["size"] for form in forms]
    assert pulled.bytes_saved == 2 * case.layers["x"].size - sum(case.sent(*forms))
    assert not pulled.notices


def test_a_bomb_is_refused_before_it_is_decoded(case: ColdCase) -> None:
    bomb = cold(bytes(2**26))
    assert len(bomb) < case.layers["x"].size
    form = case.form(case.layers["x"], bomb)
    case.offer(form)
    pulled = case.pull()
    assert pulled.bytes_saved == 0
    assert len(pulled.notices) == 1


def test_a_form_of_another_blob_is_not_used(case: ColdCase) -> None:
    case.offer(case.form(case.layers["x"], cold(case.data("y"))))
    assert len(case.pull().notices) == 1


def test_forms_of_foreign_blobs_are_not_fetched(case: ColdCase) -> None:
    data = frozen.layer("z", frozen.weights(9))
    other = Descriptor("", Digest.of(data), len(data))
    form = case.form(other, cold(data))
    case.offer(form)
    assert not case.pull().notices
    assert case.sent(form) == [0]


def test_lists_of_foreign_blobs_take_no_memory(case: ColdCase) -> None:
    entry = case.form(case.layers["x"], cold(case.data("x")))
    foreign = []
    for number in range(1000):
        digest = str(Digest.of(b"%d" % number))
        foreign.append(entry | {"annotations": entry["annotations"] | {ANNOTATION: digest}})
    case.offer(*foreign, entry)
    address = RemoteReference.parse(case.remote)
    with RegistryClient(address.host) as client:
        listed = client.referrers(REPOSITORY, case.root.digest)
        blobs = [blob.id for blob in case.layers.values()]
        found = fetch_cold_layers(client, REPOSITORY, listed, blobs)
    assert found.keys() == {case.layers["x"].digest}


def test_a_cycle_of_deltas_does_not_hang_the_pull(case: ColdCase) -> None:
    x, y = case.layers["x"], case.layers["y"]
    forms = [case.form(x, case.delta("x", "y"), y), case.form(y, case.delta("y", "x"), x)]
    case.offer(*forms)
    case.pull()
    assert 0 in case.sent(*forms)


def test_a_delta_against_itself_is_not_fetched(case: ColdCase) -> None:
    form = case.form(case.layers["x"], case.delta("x", "y"), case.layers["x"])
    case.offer(form)
    assert case.pull().bytes_saved == 0
    assert case.sent(form) == [0]


def test_a_wrong_size_of_a_base_does_not_make_it_damaged(case: ColdCase) -> None:
    frozen.put(case.store, "base", {"z": 1})
    base = frozen.layers(case.store, "base")["z"]
    other = Descriptor("", base.digest, base.size + 1)
    data = frozen.layer("z", frozen.weights(1))
    case.offer(case.form(case.layers["x"], case.delta("x", data), other))
    pulled = case.pull()
    assert (pulled.bytes_saved, pulled.repaired) == (0, {})
    case.store.check_digest(*base.id)


def test_a_wrong_size_of_a_base_that_comes_too_reads_no_memory_behind_it(case: ColdCase) -> None:
    x, y = case.layers["x"], case.layers["y"]
    data = case.data("x")
    begin = len(data) - 2 * frozen.COUNT
    longer = case.data("y").ljust(2**20, b"\0") + data[begin:]
    spans = [Span(begin, None), Span(len(data) - begin, DType.BF16, base_begin=2**20)]
    form = cold(data, spans=spans, base=BaseBlob.hot(longer, y.digest))
    case.offer(case.form(x, form, Descriptor("", y.digest, len(longer))))
    assert case.pull().bytes_saved == 0


def test_a_delta_with_an_unknown_base_is_not_fetched(case: ColdCase) -> None:
    base = Descriptor("", Digest.of(b"base"), 10**17)
    form = case.form(case.layers["x"], case.delta("x", "y"), base)
    case.offer(form)
    assert case.pull().bytes_saved == 0
    assert case.sent(form) == [0]


def test_forms_as_large_as_their_blobs_are_not_fetched(case: ColdCase) -> None:
    data = cold(case.data("x"))
    padded = data + bytes(case.layers["x"].size - len(data))
    form = case.form(case.layers["x"], padded)
    case.offer(form, case.form(case.layers["y"], cold(case.data("y")), size=10**18))
    assert case.pull().bytes_saved == 0
    assert case.sent(form) == [0]


@pytest.mark.parametrize("count", [1, 1000])
def test_truncated_forms_are_replaced_by_the_blobs(case: ColdCase, count: int) -> None:
    data = cold(case.data("x"))
    form = case.form(case.layers["x"], data)
    case.registry.blobs[form["digest"]] = data[:-count]
    case.offer(form)
    assert len(case.pull().notices) == 1


def test_a_form_whose_bytes_end_early_is_replaced_by_the_blob(case: ColdCase) -> None:
    case.offer(case.form(case.layers["x"], cold(case.data("x"))[:-1000]))
    assert len(case.pull().notices) == 1


def test_a_form_with_another_digest_is_replaced_by_the_blob(case: ColdCase) -> None:
    data = cold(case.data("x"))
    form = case.form(case.layers["x"], data)
    case.registry.alter = lambda digest, _, sent: (
        bytes(len(sent)) if digest == form["digest"] else sent
    )
    case.offer(form)
    assert len(case.pull().notices) == 1


def test_a_missing_form_is_replaced_by_the_blob(case: ColdCase) -> None:
    form = case.form(case.layers["x"], cold(case.data("x")))
    del case.registry.blobs[form["digest"]]
    case.offer(form)
    assert len(case.pull().notices) == 1


def test_a_useless_form_of_one_blob_leaves_those_of_others(case: ColdCase) -> None:
    case.offer(case.form(case.layers["x"], b"x"), case.form(case.layers["y"], cold(case.data("y"))))
    pulled = case.pull()
    assert len(pulled.notices) == 1
    assert pulled.bytes_saved > 0


@pytest.mark.parametrize("key", ["digest", "size", "base.digest"])
@pytest.mark.parametrize("value", ["", "sha256:../x", "-1", "1" * 5000, "٣", "\x1b[2J"])
def test_malformed_annotations_are_ignored(case: ColdCase, key: str, value: str) -> None:
    form = case.form(case.layers["x"], cold(case.data("x")))
    form["annotations"][f"blobstore.cold.{key}"] = value
    case.offer(form)
    assert case.pull().bytes_saved == 0
    assert case.sent(form) == [0]


def _not_json(_: ColdCase) -> bytes:
    return b"{" * 10_000


def _index_of_itself(case: ColdCase) -> bytes:
    item = {"mediaType": OCI_MANIFEST, "digest": str(case.root.digest), "size": 5}
    value = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [item], "artifactType": COLD}
    return json.dumps(value).encode()


def _other_type(case: ColdCase) -> bytes:
    form = case.form(case.layers["x"], cold(case.data("x")), mediaType="text/plain")
    return json.dumps(manifest_of([form])).encode()


def _model(case: ColdCase) -> bytes:
    return case.root.data


@pytest.mark.parametrize("content", [_not_json, _index_of_itself, _other_type, _model])
def test_manifests_of_other_things_are_ignored(
    case: ColdCase, content: Callable[[ColdCase], bytes]
) -> None:
    case.offer_manifest(content(case))
    assert case.pull().bytes_saved == 0


def test_at_most_100_manifests_are_read(case: ColdCase) -> None:
    manifest = json.dumps(manifest_of([])).encode()
    case.offer_manifest(manifest, 5000)
    case.pull()
    asked = [one for one in case.registry.requests if str(Digest.of(manifest)) in one]
    assert len(asked) <= 100


def test_a_malformed_list_is_ignored(case: ColdCase) -> None:
    tag = f"sha256-{case.root.digest.hex}"
    case.registry.put_manifest(REPOSITORY, tag, OCI_INDEX, b"[]")
    assert case.pull().bytes_saved == 0


def test_a_list_without_end_is_given_up_early() -> None:
    item = {"mediaType": OCI_MANIFEST, "digest": str(Digest.of(b"")), "size": 5}
    index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [item] * 4000}
    body, numbers = json.dumps(index).encode(), itertools.count()

    def answer(_: Received) -> bytes:
        link = f'</v2/a/referrers/{item["digest"]}?page={next(numbers)}>; rel="next"'
        return reply(200, body, link=link, content_type=OCI_INDEX)

    with (
        RawServer(answer) as server,
        RegistryClient(server.host) as client,
        pytest.raises(RemoteError, match="more than 10000 entries"),
    ):
        client.referrers("a", Digest.of(b""))
    assert len(server.requests) == 3
