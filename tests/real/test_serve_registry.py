"""``blobstore serve`` with clients of registries: skopeo, ``blobstore pull``, and cosign's place of signatures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from numpy import array_equal
from safetensors.numpy import load_file

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import RemoteError, RemoteRefused, UsageError
from blobstore.http.protocol import Login
from blobstore.operations.create.create import create
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.remote_names import remove_remote, tag_remote
from blobstore.operations.maintenance.verify import verify_models
from blobstore.operations.sign.sign import sign_model
from blobstore.operations.transfer.pull import pull_model
from blobstore.operations.transfer.push import push_model
from blobstore.operations.transfer.registry_target import RegistryOptions
from blobstore.registry.credentials import LoginFiles
from blobstore.remotes.catalog import read_remote_catalog
from blobstore.store.local import LocalStore
from tests.real import record_clients
from tests.support import frozen
from tests.support.models import add_blobs, dense_tensors, moe_tensors, write_folder
from tests.support.ollama_store import GGUF_FILE
from tests.support.recorded_clients import blob_of_ollama, recorded_library
from tests.support.registry import proxied_registry, running_registry
from tests.support.serve_process import Serving, serving
from tests.support.signing import key_files, policy

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")

TOKEN = "a-token-of-the-tests"
needs_skopeo = pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")


@pytest.fixture
def models(store: LocalStore, tmp_path: Path) -> LocalStore:
    create(write_folder(tmp_path / "dense", dense_tensors()), "org/dense", store=store)
    create(write_folder(tmp_path / "moe", moe_tensors()), "org/moe", store=store)
    return store


@pytest.fixture
def server(models: LocalStore, tmp_path: Path) -> Iterator[Serving]:
    with serving(models, tmp_path) as running:
        yield running


def skopeo(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["skopeo", *arguments], check=check, capture_output=True)


def test_pull_gets_the_same_model(server: Serving, models: LocalStore, tmp_path: Path) -> None:
    other = LocalStore(tmp_path / "other")
    for name in ("org/dense", "org/moe"):
        pull_model(f"oci://{server.host}/{name}", name, store=other)
        assert other.read_manifest(name) == models.read_manifest(name)
        assert not verify_models(name, store=other).faults


def test_all_models_of_a_server_are_pulled(
    server: Serving, models: LocalStore, tmp_path: Path
) -> None:
    other = LocalStore(tmp_path / "other")
    command = [sys.executable, "-m", "blobstore", "--store", str(other.root)]
    address = f"oci://{server.host}"
    listed = subprocess.run([*command, "list", address], check=True, capture_output=True, text=True)
    assert all(f"{server.host}/org/{name}:latest" in listed.stdout for name in ("dense", "moe"))
    subprocess.run([*command, "pull", "--all", address], check=True, capture_output=True)
    assert {one.model for one in other.references()} == {"dense", "moe"}


def test_pull_of_a_frozen_model_gets_its_blobs(models: LocalStore, tmp_path: Path) -> None:
    freeze_models(["org/moe"], store=models)
    other = LocalStore(tmp_path / "other")
    with serving(models, tmp_path) as server:
        pull_model(f"oci://{server.host}/org/moe", "org/moe", store=other)
    assert not verify_models("org/moe", store=other).faults


def test_pull_brings_the_signatures_that_a_policy_needs(models: LocalStore, tmp_path: Path) -> None:
    files = key_files(tmp_path)
    sign_model("org/dense", files.private, store=models)
    other = LocalStore(tmp_path / "other")
    policy(other, files)
    with serving(models, tmp_path) as server:
        pull_model(f"oci://{server.host}/org/dense", "org/dense", store=other)
        with pytest.raises(Exception, match="sign"):
            pull_model(f"oci://{server.host}/org/moe", "org/moe", store=other)
    assert list(other.signatures(Digest.of(other.read_manifest("org/dense"))))


@needs_skopeo
def test_skopeo_copies_every_byte(server: Serving, models: LocalStore, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    source = f"docker://{server.host}/org/moe:latest"
    skopeo("copy", "--all", "--src-tls-verify=false", source, f"dir:{target}")
    manifest = json.loads((target / "manifest.json").read_bytes())
    for layer in (manifest["config"], *manifest["layers"]):
        data = (target / layer["digest"].removeprefix("sha256:")).read_bytes()
        assert str(Digest.of(data)) == layer["digest"]
    listed = {layer["digest"] for layer in manifest["layers"]}
    assert {str(blob.digest) for blob in models.resolve("org/moe").blobs} <= listed


@needs_skopeo
def test_skopeo_lists_tags_and_inspects(server: Serving) -> None:
    plain = ("--tls-verify=false", f"docker://{server.host}/org/dense")
    assert json.loads(skopeo("list-tags", *plain).stdout)["Tags"] == ["latest"]
    raw = skopeo("inspect", "--raw", *plain).stdout
    assert raw == server.request("/v2/org/dense/manifests/latest", accept="*/*")[2]


@needs_skopeo
def test_skopeo_mirrors_all_tags(server: Serving, tmp_path: Path) -> None:
    plain = ("--src=docker", "--dest=dir", "--src-tls-verify=false")
    skopeo("sync", *plain, f"{server.host}/org/dense", str(tmp_path))
    raw = server.request("/v2/org/dense/manifests/latest", accept="*/*")[2]
    assert (tmp_path / "dense:latest" / "manifest.json").read_bytes() == raw


@needs_skopeo
def test_a_registry_that_is_a_proxy_keeps_what_it_got(
    models: LocalStore, server: Serving, tmp_path: Path
) -> None:
    with proxied_registry(tmp_path / "proxy", server.url) as proxy:
        source = f"docker://{proxy.host}/org/moe:latest"
        skopeo("copy", "--src-tls-verify=false", source, f"dir:{tmp_path}/first")
        manifest = json.loads((tmp_path / "first" / "manifest.json").read_bytes())
        kept = [proxy.blob(layer["digest"]) for layer in (manifest["config"], *manifest["layers"])]
        deadline = time.monotonic() + 60
        while not all(path.is_file() for path in kept):  # it writes them in the background
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.stop()
        skopeo("copy", "--src-tls-verify=false", source, f"dir:{tmp_path}/second")
    files = {path.name: path.read_bytes() for path in (tmp_path / "second").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    for blob in models.resolve("org/moe").blobs:
        assert Digest.of(files[blob.digest.hex]) == blob.digest


def test_oras_pulls_files(server: Serving, tmp_path: Path) -> None:
    client = pytest.importorskip("oras.client").OrasClient(insecure=True, tls_verify=False)
    assert client.get_tags(f"{server.host}/org/moe") == ["latest"]
    client.pull(f"{server.host}/org/moe:latest", outdir=str(tmp_path / "pulled"))
    assert (tmp_path / "pulled" / "config.json").read_bytes() == (
        tmp_path / "moe" / "config.json"
    ).read_bytes()


@needs_skopeo
@pytest.mark.skipif(shutil.which("umoci") is None, reason="umoci is not installed")
def test_a_container_runtime_unpacks_the_image(server: Serving, tmp_path: Path) -> None:
    image = f"oci:{tmp_path}/image:latest"
    source = f"docker://{server.host}/org/dense:latest.image"
    skopeo("copy", "--src-tls-verify=false", source, image)
    unpack = ["umoci", "unpack", "--rootless", "--image", image.removeprefix("oci:"), "bundle"]
    subprocess.run(unpack, cwd=tmp_path, check=True, capture_output=True)
    unpacked = tmp_path / "bundle" / "rootfs" / "models"
    found: dict[str, Any] = {}
    for path in unpacked.glob("*.safetensors"):
        found |= load_file(path)
    expected = load_file(tmp_path / "dense" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(array_equal(found[name], value) for name, value in expected.items())
    config = tmp_path / "dense" / "config.json"
    assert (unpacked / "config.json").read_bytes() == config.read_bytes()


def test_ollama_gets_what_its_source_asks_for(tmp_path: Path) -> None:
    """It leaves the response to the first request for each blob."""
    with serving(recorded_library(tmp_path).store, tmp_path) as server:
        record_clients.ollama(server.host, tmp_path)
        blob = f"/v2/library/ollama/blobs/{blob_of_ollama()}"
        assert server.request(blob)[2] == GGUF_FILE
        # That of this question, and those of who has just left.
        while server.metric("open_requests") > 1:
            time.sleep(0.05)


@needs_skopeo
def test_a_password_is_a_token(models: LocalStore, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    with serving(models, tmp_path, f"--token-file={tokens}") as server:
        source = f"docker://{server.host}/org/dense"
        plain = ("inspect", "--raw", "--tls-verify=false")
        assert skopeo(*plain, source, check=False).returncode != 0
        assert skopeo(*plain, "--creds", f"anyone:{TOKEN}", source).stdout.startswith(b"{")
        assert TOKEN not in server.log_file.read_text()
        with pytest.raises(RemoteError):
            pull_model(f"oci://{server.host}/org/dense", "x", store=tmp_path / "other")


def test_pull_of_the_image_gets_the_same_model(
    server: Serving, models: LocalStore, tmp_path: Path
) -> None:
    other = LocalStore(tmp_path / "other")
    pull_model(f"oci://{server.host}/org/moe:latest.image", "org/moe", store=other)
    assert other.read_manifest("org/moe") == models.read_manifest("org/moe")
    assert not verify_models("org/moe", store=other).faults


@needs_skopeo
def test_a_fine_tune_moves_as_deltas_to_a_client_that_has_the_base(
    store: LocalStore, tmp_path: Path
) -> None:
    cold_size = put_family(store)
    first, second = LocalStore(tmp_path / "first"), LocalStore(tmp_path / "second")
    with serving(store, tmp_path) as server:
        pull_model(f"{server.url}/org/base", "org/base", store=first)
        before = server.metric("sent_bytes_total")
        pulled = pull_model(f"{server.url}/org/tuned", "org/tuned", store=first)
        sent = server.metric("sent_bytes_total") - before
        assert pulled.bytes_fetched < sent < 1.05 * cold_size
        # Without the base, the blobs come as they are.
        whole = pull_model(f"{server.url}/org/tuned", "org/tuned", store=second)
        assert whole.bytes_saved == 0
        assert whole.bytes_fetched == sum(blob.size for blob in store.resolve("org/tuned").blobs)
    for other in (first, second):
        assert other.read_manifest("org/tuned") == store.read_manifest("org/tuned")
        assert not verify_models("org/tuned", store=other).faults


def put_family(store: LocalStore) -> int:
    """Make a frozen base and a frozen fine-tune of it, and return the bytes of the latter's compressed forms."""
    count = 1 << 19
    frozen.put(store, "org/base", {"a": 1, "b": 2}, count)
    tuned = {
        name: frozen.layer(name, frozen.tuned(seed + 7, of=seed, count=count))
        for name, seed in (("a", 1), ("b", 2))
    }
    add_blobs(store, "org/tuned", tuned)
    freeze_models(["org/base", "org/tuned"], store=store)
    layers = frozen.layers(store, "org/tuned").values()
    assert all(store.open_cold(*layer.id).base is not None for layer in layers)
    return sum(store.open_cold(*layer.id).stored for layer in layers)


def test_open_reads_what_is_used_and_deltas_where_the_base_is_here(
    store: LocalStore, tmp_path: Path
) -> None:
    cold_size = put_family(store)
    other = LocalStore(tmp_path / "other")
    with serving(store, tmp_path) as server:
        address = f"{server.url}/org/tuned"
        before = server.metric("sent_bytes_total")
        with (
            blobstore.open(address, store=other, cache="none") as model,
            blobstore.open("org/tuned", store=store) as expected,
        ):
            assert model.get_slice("a")[:100].tobytes() == expected["a"][:100].tobytes()
            part = server.metric("sent_bytes_total") - before
            assert part < 0.5 * model["a"].nbytes
            assert model["b"].tobytes() == expected["b"].tobytes()
        with blobstore.open(f"{server.url}/org/base", store=other) as model:
            model.tensors()
        plan = blobstore.open(address, store=other, plan=True)
        assert plan.bytes_to_read < 1.05 * cold_size
        with (
            blobstore.open(address, store=other) as model,
            blobstore.open("org/tuned", store=store) as expected,
        ):
            for name in expected:
                assert model[name].tobytes() == expected[name].tobytes()


def test_models_of_a_server_are_read_by_address_and_never_changed(
    server: Serving, models: LocalStore, tmp_path: Path
) -> None:
    address = f"{server.url}/org/moe"
    entries = read_remote_catalog(server.url)
    assert [entry.address for entry in entries] == [
        f"{server.url}/org/dense:latest",
        f"{address}:latest",
    ]
    there = blobstore.info(address, store=tmp_path / "other")
    assert there.types == blobstore.info("org/moe", store=models).types
    for change in (
        lambda: push_model("org/moe", f"{server.url}/org/new", store=models),
        lambda: tag_remote(address, "v1"),
        lambda: remove_remote([address]),
    ):
        with pytest.raises(UsageError, match="is the address of a server that only reads"):
            change()


def test_a_login_is_used_for_addresses_with_http(
    models: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    with serving(models, tmp_path, f"--token-file={tokens}") as server:
        with pytest.raises(RemoteRefused, match="blobstore login"):
            blobstore.open(f"{server.url}/org/dense", store=tmp_path / "other")
        LoginFiles().store(server.host, Login("node", TOKEN))
        with blobstore.open(f"{server.url}/org/dense", store=tmp_path / "other") as model:
            assert model.tensors()
        assert TOKEN not in server.log_file.read_text()


def test_the_image_is_the_one_that_push_sends(
    server: Serving, models: LocalStore, tmp_path: Path
) -> None:
    target = tmp_path / "image"
    source = f"docker://{server.host}/org/moe:latest.image"
    skopeo("copy", "--src-tls-verify=false", source, f"dir:{target}")
    manifest = json.loads((target / "manifest.json").read_bytes())
    found = {}
    for layer in manifest["layers"]:
        path = target / layer["digest"].removeprefix("sha256:")
        assert str(Digest.of(path.read_bytes())) == layer["digest"]
        with tarfile.open(path) as tar:
            for member in tar.getmembers():
                if member.isfile():
                    file = tar.extractfile(member)
                    assert file is not None
                    found[member.name] = file.read()
    assert found["models/config.json"] == (tmp_path / "moe" / "config.json").read_bytes()
    with running_registry(tmp_path) as registry:
        push_model(
            "org/moe",
            f"{registry.host}/org/moe",
            registry=RegistryOptions(layout="image"),
            store=models,
        )
        accept = {"accept": "application/vnd.oci.image.index.v1+json"}
        url = f"http://{registry.host}/v2/org/moe/manifests/latest"
        pushed = httpx2.get(url, headers=accept).content
    served = server.request("/v2/org/moe/manifests/latest.image", accept=accept["accept"])
    assert served[2] == pushed
