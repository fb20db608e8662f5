"""The upstream command of OpenSSF Model Signing accepts our bundles, and only for the same files."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

import blobstore
from blobstore.folders.digests import Layout
from blobstore.operations.create.create import create
from blobstore.operations.export.export import export_model
from blobstore.operations.export.link import link_model
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from tests.faults.processes import Ended
from tests.support.clients import run_client
from tests.support.models import dense_tensors, moe_tensors, quantizable_tensors, write_folder
from tests.support.signing import CURVES, KeyFiles, key_files

PROGRAM = "import runpy; runpy.run_module('model_signing', run_name='__main__')"
pytestmark = pytest.mark.skipif(
    find_spec("model_signing") is None, reason="model-signing is not installed"
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    folder = tmp_path_factory.mktemp("models")
    store = LocalStore(folder / "store")
    files = {".gitattributes": b"*.safetensors filter=lfs\n", "onnx/config.json": b"{}"}
    create(write_folder(folder / "a", dense_tensors(), shards=2, files=files), "dense", store=store)
    create(write_folder(folder / "b", moe_tensors()), "moe", store=store)
    quantized = write_folder(folder / "c", quantizable_tensors())
    create(quantized, "quantized", store=store, quantize=QuantizeOptions("int8"))
    return store


def verify(folder: Path, bundle: Path, key: KeyFiles) -> Ended:
    arguments = ["verify", "key", folder, "--signature", bundle, "--public_key", key.public]
    modules = ("model_signing._cli", "model_signing")
    return run_client(PROGRAM, *arguments, environment=os.environ, modules=modules)


def written(store: LocalStore, name: str, layout: Layout, folder: Path) -> Path:
    if layout == "export":
        export_model(name, folder, store=store)
    else:
        link_model(name, folder, store=store, hard=True)
    return folder


@pytest.mark.parametrize("layout", ["export", "link"])
@pytest.mark.parametrize("name", ["dense", "moe", "quantized"])
def test_accepts_the_bundle_of_each_folder(
    store: LocalStore, tmp_path: Path, name: str, layout: Layout
) -> None:
    key, bundle = key_files(tmp_path), tmp_path / "model.sig"
    folder = written(store, name, layout, tmp_path / "folder")

    blobstore.sign(name, key.private, store=store, out=bundle, layout=layout)

    done = verify(folder, bundle, key)
    assert done.code == 0, done.stderr


@pytest.mark.parametrize("curve", CURVES)
def test_accepts_keys_of_each_curve_and_no_other_key(
    store: LocalStore, tmp_path: Path, curve: str
) -> None:
    key, other = (key_files(tmp_path, name, curve) for name in ("ours", "theirs"))
    bundle, folder = tmp_path / "model.sig", written(store, "moe", "export", tmp_path / "folder")

    blobstore.sign("moe", key.private, store=store, out=bundle)

    assert verify(folder, bundle, key).code == 0
    assert verify(folder, bundle, other).code != 0


def test_refuses_a_folder_that_was_changed(store: LocalStore, tmp_path: Path) -> None:
    key, bundle = key_files(tmp_path), tmp_path / "model.sig"
    folder = written(store, "dense", "export", tmp_path / "folder")
    blobstore.sign("dense", key.private, store=store, out=bundle)
    config = folder / "config.json"
    content = config.read_bytes()

    config.write_bytes(content.replace(b"tiny", b"tony"))
    assert verify(folder, bundle, key).code != 0
    config.write_bytes(content)
    assert verify(folder, bundle, key).code == 0
    (folder / "extra.bin").write_bytes(b"x")
    assert verify(folder, bundle, key).code != 0
