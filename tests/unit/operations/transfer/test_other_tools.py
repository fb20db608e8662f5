"""What skopeo and umoci make of a pushed model."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import blobstore
from blobstore.operations.transfer.registry_target import RegistryOptions
from blobstore.registry.client import RegistryClient
from blobstore.registry.reference import RemoteReference
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, write_folder
from tests.support.options import grouped

FORMS: dict[str, dict[str, Any]] = {
    "oci": {},
    "parts": {"max_layers": 4},
    "image": {"layout": "image"},
}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    blobstore.create(write_folder(tmp_path / "dense", dense_tensors()), "dense", store=store)
    return store


def tool(*arguments: object) -> str:
    """Run a program of another project; return what it prints."""
    name, *rest = map(str, arguments)
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install {name})")
    done = subprocess.run([name, *rest], capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def digest_of(remote: str) -> object:
    address = RemoteReference.parse(remote)
    with RegistryClient(address.host) as client:
        return client.head_manifest(address.repository, address.tag)


@pytest.mark.parametrize("form", FORMS)
def test_skopeo_copies_a_model_to_a_folder_and_back(
    store: LocalStore, remote: str, tmp_path: Path, form: str
) -> None:
    pushed = blobstore.push("dense", remote, store=store, **grouped(FORMS[form]))
    plain = "--src-tls-verify=false", "--dest-tls-verify=false"
    tool("skopeo", "copy", "--all", *plain, f"docker://{remote}", f"dir:{tmp_path / 'copy'}")
    tool("skopeo", "copy", "--all", *plain, f"dir:{tmp_path / 'copy'}", f"docker://{remote}-back")
    assert digest_of(f"{remote}-back") == pushed.digest
    blobstore.pull(f"{remote}-back", "back", store=tmp_path / "other")
    other = LocalStore(tmp_path / "other")
    assert other.read_manifest("back") == store.read_manifest("dense")


@pytest.mark.parametrize("form", FORMS)
def test_skopeo_copies_a_model_to_an_oci_layout(
    store: LocalStore, remote: str, tmp_path: Path, form: str
) -> None:
    pushed = blobstore.push("dense", remote, store=store, **grouped(FORMS[form]))
    layout = tmp_path / "layout"
    source, target = f"docker://{remote}", f"oci:{layout}:latest"
    # Otherwise skopeo compresses the tars of an image, and the copy is another image.
    tool("skopeo", "copy", "--all", "--preserve-digests", "--src-tls-verify=false", source, target)
    index = json.loads((layout / "index.json").read_text())
    assert [entry["digest"] for entry in index["manifests"]] == [str(pushed.digest)]


def test_skopeo_shows_the_manifest_byte_for_byte(store: LocalStore, remote: str) -> None:
    blobstore.push("dense", remote, store=store)
    shown = tool("skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{remote}")
    address = RemoteReference.parse(remote)
    with RegistryClient(address.host) as client:
        assert client.get_manifest(address.repository, "latest").data.decode() == shown


def test_umoci_unpacks_an_image_to_a_folder_of_weight_files(
    store: LocalStore, remote: str, tmp_path: Path
) -> None:
    blobstore.push("dense", remote, store=store, registry=RegistryOptions(layout="image"))
    layout = tmp_path / "layout"
    source, target = f"docker://{remote}", f"oci:{layout}:latest"
    tool("skopeo", "copy", "--src-tls-verify=false", source, target)
    unpacked = tmp_path / "unpacked"
    tool("umoci", "raw", "unpack", "--rootless", "--image", f"{layout}:latest", unpacked)
    folder = unpacked / "models"
    assert (folder / "config.json").read_bytes() == (tmp_path / "dense/config.json").read_bytes()
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = dense_tensors()
    assert weight_map.keys() == tensors.keys()
    for name, file in weight_map.items():
        with safe_open(folder / file, "numpy") as weights:
            assert weights.get_tensor(name).tobytes() == tensors[name].tobytes()
