"""``blobstore serve`` with TLS and the clients that people have, which trust the authority of a site."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.operations.create.create import create
from blobstore.store.local import LocalStore
from tests.support.clients import run_client
from tests.support.models import dense_tensors, write_folder
from tests.support.serve_process import Serving, serving
from tests.support.tls import Authority

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")
TOKEN = "a-token-of-the-tests"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def server(folder: Path, authority: Authority) -> Iterator[Serving]:
    store = LocalStore(folder / "store")
    create(write_folder(folder / "dense", dense_tensors()), "org/dense", store=store)
    (folder / "tokens").write_text(f"{TOKEN}\n")
    options = f"--token-file={folder / 'tokens'}", *authority.pair().options
    with serving(store, folder, *options, tls=authority.context()) as running:
        yield running


def environment(authority: Authority, **more: str) -> dict[str, str]:
    others = ("HF_", "CURL_CA_", "REQUESTS_CA_")
    found = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return {**found, "SSL_CERT_FILE": str(authority.file), **more}


def test_hugging_face_hub_downloads(
    server: Serving, folder: Path, authority: Authority, tmp_path: Path
) -> None:
    code = """
from huggingface_hub import snapshot_download, HfApi
assert [one.id for one in HfApi().list_models()] == ["org/dense"]
print(snapshot_download("org/dense"))
"""
    variables = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "HF_TOKEN": TOKEN}
    done = run_client(code, environment=environment(authority, **variables))
    assert done.code == 0, done.stderr
    got = Path(done.stdout.strip().splitlines()[-1]) / "model.safetensors"
    assert got.read_bytes() == (folder / "dense/model.safetensors").read_bytes()
    stranger = environment(authority, **variables)
    del stranger["SSL_CERT_FILE"]
    # One request of the same session: a download would be tried again for twenty seconds.
    once = (
        "import os, huggingface_hub.utils as hub; hub.get_session().get(os.environ['HF_ENDPOINT'])"
    )
    refused = run_client(once, environment=stranger)
    assert refused.code != 0
    assert "CERTIFICATE_VERIFY_FAILED" in refused.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_resumes(server: Serving, folder: Path, authority: Authority, tmp_path: Path) -> None:
    source = (folder / "dense/model.safetensors").read_bytes()
    part = tmp_path / "part"
    part.write_bytes(source[:1001])
    url = f"{server.url}/org/dense/resolve/main/model.safetensors"
    command = ["curl", "--silent", "--show-error", "--fail", "--cacert", str(authority.file)]
    command += ["--oauth2-bearer", TOKEN, "--continue-at", "-", "--output", str(part), url]
    subprocess.run(command, check=True, timeout=120)
    assert part.read_bytes() == source


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
def test_skopeo_copies(server: Serving, authority: Authority, tmp_path: Path) -> None:
    certificates = tmp_path / "certificates"
    certificates.mkdir()
    shutil.copy(authority.file, certificates / "ca.crt")
    login = ["--src-cert-dir", str(certificates), "--src-creds", f"any:{TOKEN}"]
    source, target = f"docker://{server.host}/org/dense:latest", tmp_path / "copy"
    subprocess.run(["skopeo", "copy", *login, source, f"dir:{target}"], check=True, timeout=120)
    assert (target / "manifest.json").exists()


def test_our_own_client_pulls(server: Serving, authority: Authority, tmp_path: Path) -> None:
    code = """
import sys
import blobstore
remote, store = sys.argv[1:]
blobstore.pull(remote, "dense", store=store, plain_http=False)
assert blobstore.verify(store=store).ok
"""
    secret = base64.b64encode(f"any:{TOKEN}".encode()).decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {server.host: {"auth": secret}}}))
    variables = environment(authority, DOCKER_CONFIG=str(tmp_path))
    done = run_client(code, f"{server.host}/org/dense", tmp_path / "store", environment=variables)
    assert done.code == 0, done.stderr
