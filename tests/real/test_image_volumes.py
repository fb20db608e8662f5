"""Models as image volumes: a base and two fine-tunes, pulled and mounted by the library that podman and CRI-O use."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import blobstore
from blobstore.operations.transfer.registry_target import RegistryOptions
from blobstore.store.local import LocalStore
from tests.support.models import write_folder
from tests.support.registry import running_registry

pytestmark = pytest.mark.skipif(
    shutil.which("buildah") is None, reason="buildah is not installed (Debian: apt-get install)"
)
NAMES = ("base", "first", "second")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "registry").mkdir()
    with running_registry(tmp_path / "registry") as server:
        yield server.host


def test_a_base_and_two_fine_tunes_are_mounted_and_share_layers(
    store: LocalStore, tmp_path: Path, registry: str
) -> None:
    random = np.random.default_rng(0)
    shared = {f"layer.{number}": random.standard_normal((128, 64), np.float32) for number in "01"}
    models = {}
    for name in NAMES:
        # In the order of names, the last tensor is in the last of two shards.
        models[name] = {**shared, "tuned": random.standard_normal((256, 64), np.float32)}
        folder = write_folder(tmp_path / name, models[name], shards=2)
        blobstore.create(folder, f"team/{name}", store=store)
        options = RegistryOptions(layout="image", plain_http=True)
        blobstore.push(f"team/{name}", f"{registry}/team/{name}", store=store, registry=options)

    storage = [f"--root={tmp_path / 'root'}", f"--runroot={tmp_path / 'run'}"]

    def buildah(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["buildah", "--storage-driver=vfs", *storage, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)

    layers = list[dict[str, int]]()
    try:
        for name in NAMES:
            image = f"{registry}/team/{name}"
            buildah("pull", "--tls-verify=false", f"docker://{image}")
            manifest = json.loads(buildah("inspect", "--format={{.Manifest}}", image).stdout)
            layers.append({one["digest"]: one["size"] for one in manifest["layers"]})
            container = buildah("from", "--pull-never", image).stdout.strip()
            mounted = Path(buildah("mount", container).stdout.strip()) / "models"
            found = {}
            for file in sorted(mounted.glob("*.safetensors")):
                found.update(load_file(file))
            assert found.keys() == models[name].keys()
            for tensor, value in models[name].items():
                assert np.array_equal(found[tensor], value)
    finally:
        buildah("rm", "--all")
    both = set.intersection(*map(set, layers))
    size = (tmp_path / "base/model-00002-of-00002.safetensors").stat().st_size
    assert any(layers[0][digest] >= size for digest in both), "the shard that none of them changes"
    assert all(len(both) < len(one) for one in layers)
