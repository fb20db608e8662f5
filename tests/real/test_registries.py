"""A model that goes to a registry and comes back, and what other libraries load of it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

import blobstore
from blobstore.core.digest import Digest
from blobstore.operations.transfer.registry_target import RegistryOptions
from blobstore.registry.client import RegistryClient
from blobstore.registry.layouts.plan import RemoteLayout
from blobstore.registry.reference import RemoteReference
from blobstore.store.local import LocalStore
from tests.real.tiny import make
from tests.support.registry import Server, running_registry

IDS = torch.tensor([[1, 5, 9, 2]])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store with a small Llama."""
    make("llama").save_pretrained(tmp_path / "source")
    store = LocalStore(tmp_path / "store")
    blobstore.create(tmp_path / "source", "llama", store=store)
    return store


def logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
        return found


@pytest.mark.parametrize("layout", ["oci", "ollama", "image"])
def test_a_model_computes_the_same_after_a_registry(
    store: LocalStore, server: Server, tmp_path: Path, layout: RemoteLayout
) -> None:
    remote = f"{server.host}/real/{layout}"
    blobstore.push("llama", remote, store=store, registry=RegistryOptions(layout=layout))
    other = LocalStore(tmp_path / "other")
    blobstore.pull(remote, "llama", store=other)
    assert other.read_manifest("llama") == store.read_manifest("llama")
    blobstore.export("llama", tmp_path / "export", store=other)
    assert torch.equal(logits(tmp_path / "export"), logits(tmp_path / "source"))


def test_a_fine_tune_computes_the_same_after_coming_as_deltas(
    store: LocalStore, server: Server, tmp_path: Path
) -> None:
    model = make("llama")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=1e-4)
    model.save_pretrained(tmp_path / "tuned")
    blobstore.create(tmp_path / "tuned", "tuned", store=store)
    base, tuned = f"{server.host}/real/base", f"{server.host}/real/tuned"
    blobstore.push("llama", base, store=store)
    blobstore.push("tuned", tuned, store=store, cold=True)
    other = LocalStore(tmp_path / "other")
    blobstore.pull(base, "llama", store=other)
    assert blobstore.pull(tuned, "tuned", store=other).bytes_saved > 0
    assert other.read_manifest("tuned") == store.read_manifest("tuned")
    blobstore.export("tuned", tmp_path / "export", store=other)
    assert torch.equal(logits(tmp_path / "export"), logits(tmp_path / "tuned"))


def test_transformers_loads_the_files_of_a_modelpack_artifact(
    store: LocalStore, server: Server, tmp_path: Path
) -> None:
    """Any ModelPack tool writes each layer as a file, at the path that its annotation names."""
    remote = RemoteReference.parse(f"{server.host}/real/files")
    blobstore.push("llama", remote, store=store)
    folder = tmp_path / "files"
    with RegistryClient(remote.host) as client:
        manifest = json.loads(client.get_manifest(remote.repository, "latest").data)
        for layer in manifest["layers"]:
            path = folder / layer["annotations"]["org.cncf.model.filepath"]
            path.parent.mkdir(parents=True, exist_ok=True)
            digest = Digest.parse(layer["digest"])
            pieces = client.read_blob(remote.repository, digest, 0, layer["size"])
            path.write_bytes(b"".join(pieces))
    assert torch.equal(logits(folder), logits(tmp_path / "source"))


def test_transformers_loads_the_folder_of_an_image(
    store: LocalStore, server: Server, tmp_path: Path
) -> None:
    for tool in ("skopeo", "umoci"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (Debian: apt-get install {tool})")
    remote = f"{server.host}/real/mounted"
    blobstore.push("llama", remote, store=store, registry=RegistryOptions(layout="image"))
    layout, unpacked = tmp_path / "layout", tmp_path / "unpacked"
    source, target = f"docker://{remote}", f"oci:{layout}:latest"
    subprocess.run(["skopeo", "copy", "--src-tls-verify=false", source, target], check=True)
    subprocess.run(
        ["umoci", "raw", "unpack", "--rootless", "--image", f"{layout}:latest", unpacked],
        check=True,
    )
    assert torch.equal(logits(unpacked / "models"), logits(tmp_path / "source"))
