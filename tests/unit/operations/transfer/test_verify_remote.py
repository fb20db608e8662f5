from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import ModelNotFound, RemoteRefused, UsageError
from blobstore.operations.transfer.push import push_model
from blobstore.operations.transfer.verify_remote import verify_remote
from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.registry.manifest import OCI_MANIFEST
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.cold import cold
from tests.support.cold_registry import COLD, ColdCase
from tests.support.registry import Server
from tests.support.stub_registry import StubRegistry
from tests.unit.cli.running import run, run_json

EMPTY = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
IMAGE = (
    b'{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": '
    b'{"mediaType": "application/vnd.oci.image.config.v1+json", "digest": "%b", "size": 2}, '
    b'"layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": "%b", "size": 2}]}'
) % (EMPTY.encode(), EMPTY.encode())
"""Of an ordinary container image."""


@pytest.fixture
def origin(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "origin")
    frozen.put(store, "a", {"x": 1, "y": 2})
    return store


@pytest.fixture
def remote(origin: LocalStore, registry: StubRegistry) -> str:
    return registry.put(origin, plan_ollama(origin.read_manifest("a")), "team/a", "latest")


def test_every_byte_of_an_intact_model_is_read(
    remote: str, origin: LocalStore, registry: StubRegistry
) -> None:
    seen: list[tuple[int, int]] = []
    found = verify_remote(remote, progress=lambda _, done, total: seen.append((done, total)))
    size = sum(blob.size for blob in origin.resolve("a").blobs)
    assert found.faults == ()
    assert found.bytes_read == registry.sent.total() == size
    assert seen[-1] == (size, size)


def test_a_part_of_the_blobs_is_read_and_nothing_of_the_others(
    remote: str, origin: LocalStore, registry: StubRegistry
) -> None:
    parts = [verify_remote(remote, sample=f"{part}/2") for part in (1, 2)]
    blobs = origin.resolve("a").blobs
    assert [part.blobs for part in parts] == [len(blobs)] * 2
    assert sum(part.hashed for part in parts) == len(blobs)
    assert registry.sent.total() == sum(part.bytes_read for part in parts)
    assert registry.sent.total() == sum(blob.size for blob in blobs)


def test_each_damaged_blob_is_a_fault(
    remote: str, origin: LocalStore, registry: StubRegistry
) -> None:
    layers = frozen.layers(origin, "a")
    flipped = str(layers["x"].digest)
    data = registry.blobs[flipped]
    registry.blobs[flipped] = data[:-1] + bytes([data[-1] ^ 1])
    del registry.blobs[str(layers["y"].digest)]
    faults = {fault.layer: fault for fault in verify_remote(remote).faults}
    assert faults.keys() == {"x", "y"}
    assert "the remote sent bytes with digest" in faults["x"].message
    assert "does not have" in faults["y"].message
    assert faults["x"].blob == layers["x"].digest


def test_all_models_of_a_registry_are_read_and_each_blob_once_in_each_repository(
    remote: str, origin: LocalStore, registry: StubRegistry
) -> None:
    frozen.put(origin, "b", {"x": 1, "z": 3})
    plan = plan_ollama(origin.read_manifest("b"))
    for tag in ("v1", "v2"):
        registry.put(origin, plan, "team/b", tag)
    for tag in ("v1", str(Digest.of(IMAGE))):
        registry.put_manifest("team/image", tag, OCI_MANIFEST, IMAGE)
    both = {blob.id for name in ("a", "b") for blob in origin.resolve(name).blobs}
    for address in (f"oci://{registry.host}", f"oci://{registry.host}/team"):
        found = verify_remote(address)
        assert (found.models, found.blobs, found.faults) == (2, len(both), ())
        each = (blob for name in ("a", "b") for blob in origin.resolve(name).blobs)
        assert found.bytes_read == sum(blob.size for blob in each)
        assert (found.remote, found.digest) == (address, None)
    registry.put_manifest("team/b", "v2", OCI_MANIFEST, b"{")  # listed, and lost
    (fault,) = verify_remote(f"oci://{registry.host}").faults
    assert (fault.reference, fault.layer) == (f"{registry.host}/team/b:v2", "manifest")
    assert remote.startswith(registry.host)


def test_a_model_of_a_registry_that_cannot_be_asked_for_is_no_intact_one(
    remote: str, origin: LocalStore, registry: StubRegistry
) -> None:
    registry.put(origin, plan_ollama(origin.read_manifest("a")), "team/b", "latest")
    digest = str(Digest.of(origin.read_manifest("a")))
    registry.refused = {("team/b", "latest"), ("team/b", digest)}
    with pytest.raises(RemoteRefused):
        verify_remote(f"oci://{registry.host}")
    assert not verify_remote(remote).faults


def test_a_blob_that_only_one_of_two_repositories_has_lost_is_a_fault(
    origin: LocalStore, server: Server
) -> None:
    for name in "bc":
        blobstore.push("a", f"{server.host}/lost/{name}:latest", store=origin)
    digest = frozen.layers(origin, "a")["x"].digest
    shutil.rmtree(server.links("lost/b") / digest.hex)
    (fault,) = verify_remote(f"oci://{server.host}/lost").faults
    assert (fault.reference, fault.blob) == (f"{server.host}/lost/b:latest", digest)


def test_a_truncated_blob_is_a_fault(
    remote: str, origin: LocalStore, registry: StubRegistry
) -> None:
    digest = str(frozen.layers(origin, "a")["x"].digest)
    registry.blobs[digest] = registry.blobs[digest][:-1]
    (fault,) = verify_remote(remote).faults
    assert fault.layer == "x"


def test_arguments_and_addresses_are_checked(remote: str) -> None:
    with pytest.raises(UsageError):
        verify_remote(remote, streams=0)
    with pytest.raises(ModelNotFound):
        verify_remote(remote + "-none")


def test_the_command_line_reports_faults_with_exit_code_4(
    remote: str, origin: LocalStore, registry: StubRegistry
) -> None:
    result = run("verify", "--remote", remote)
    assert result.stdout.startswith("ok: 1 model, 3 blobs, 160 kB read in ")
    digest = str(frozen.layers(origin, "a")["x"].digest)
    registry.blobs[digest] = bytes(len(registry.blobs[digest]))
    result = run("verify", "--remote", remote, exit_code=4)
    assert f"model {remote}, layer x: the remote sent bytes" in result.stdout
    (fault,) = run_json("verify", "--remote", remote, exit_code=4)["faults"]
    assert (fault["layer"], fault["blob"]) == ("x", digest)
    run("verify", "a", "--remote", remote, exit_code=2)


@pytest.fixture
def case(registry: StubRegistry, tmp_path: Path) -> ColdCase:
    return ColdCase(tmp_path / "case", registry)


def test_compressed_forms_are_read_back_too(case: ColdCase, registry: StubRegistry) -> None:
    form = case.form(case.layers["x"], cold(case.data("x")))
    case.offer(form)
    found = verify_remote(case.remote)
    assert (found.faults, found.cold_blobs) == ((), 1)
    assert registry.sent[str(form["digest"])] == form["size"]
    assert found.bytes_read == registry.sent.total()
    result = run("verify", "--remote", case.remote)
    assert result.stdout.startswith("ok: 1 model, 3 blobs and 1 compressed form, ")
    assert run_json("verify", "--remote", case.remote)["cold_blobs"] == 1


def test_a_damaged_compressed_form_is_a_fault(case: ColdCase, registry: StubRegistry) -> None:
    form = case.form(case.layers["x"], cold(case.data("x")))
    case.offer(form)
    registry.blobs[form["digest"]] = bytes(form["size"])
    (fault,) = verify_remote(case.remote).faults
    assert (fault.layer, str(fault.blob)) == ("x (compressed)", form["digest"])


def test_a_damaged_list_of_compressed_forms_is_a_fault(
    case: ColdCase, registry: StubRegistry
) -> None:
    case.offer(case.form(case.layers["x"], cold(case.data("x"))))
    key = next(key for key, one in registry.manifests.items() if COLD.encode() in one.data)
    registry.manifests[key] = replace(registry.manifests[key], data=b"{}")
    (fault,) = verify_remote(case.remote).faults
    assert fault.layer == "compressed forms"
    assert str(fault.blob) == key[1]


@pytest.mark.parametrize("is_gone", [True, False])
def test_the_copy_of_a_manifest_in_object_storage_is_judged_and_pushed_again(
    tmp_path: Path, *, is_gone: bool
) -> None:
    store = LocalStore(tmp_path / "store")
    frozen.put(store, "one", {"own": 2})
    bucket = f"file://{tmp_path}/bucket"
    push_model("one", bucket, store=store)
    intact = verify_remote(f"{bucket}/one")
    assert (intact.blobs, intact.faults) == (2, ())
    digest = Digest.of(store.read_manifest("one"))
    copy = tmp_path / "bucket" / "blobs" / digest.file_name
    if is_gone:
        copy.unlink()
    else:
        copy.write_bytes(copy.read_bytes()[:-1])
    for address in (f"{bucket}/one", bucket):
        (fault,) = verify_remote(address).faults
        assert (fault.layer, fault.blob) == ("copy of the manifest", digest)
    push_model("one", bucket, store=store)
    assert verify_remote(bucket).faults == ()
