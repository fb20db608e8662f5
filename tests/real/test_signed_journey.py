"""A signed model travels in an archive to a machine that trusts one key, and other programs check it there."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.store.local import LocalStore
from tests.support.clients import run_client
from tests.support.models import dense_tensors, write_folder
from tests.support.signing import KeyFiles, key_files, policy
from tests.unit.cli.running import run, run_json

PROGRAM = "import runpy; runpy.run_module('model_signing', run_name='__main__')"
pytestmark = pytest.mark.skipif(
    find_spec("model_signing") is None or shutil.which("openssl") is None,
    reason="model-signing or openssl is not installed",
)


def signatures(store: LocalStore, name: str) -> dict[str, bytes]:
    """Return the two signatures of a model, by the kind of program that reads them."""
    found = store.signatures(Digest.of(store.read_manifest(name)))
    return {"cosign" if b"simplesigning" in one else "oms": one for one in found}


def accepts(signature: bytes, key: KeyFiles, folder: Path) -> bool:
    """Return whether openssl finds that a key has made a signature in cosign's form."""
    value = json.loads(signature)
    payload, made = folder / "payload", folder / "made"
    payload.write_bytes(base64.b64decode(value["payload"]))
    made.write_bytes(base64.b64decode(value["signature"]))
    files = ("-verify", str(key.public), "-signature", str(made), str(payload))
    command = ["openssl", "dgst", "-sha256", *files]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_signed_model_is_packed_unpacked_trusted_and_checked_by_other_programs(
    tmp_path: Path,
) -> None:
    release, other = key_files(tmp_path, "release"), key_files(tmp_path, "other")
    build, site, strict = (LocalStore(tmp_path / name) for name in ("build", "site", "strict"))
    archive = tmp_path / "moved.bsar"
    folder = write_folder(tmp_path / "model", dense_tensors(), shards=2)

    # Where the model is made: sign it, and pack it.
    run("create", folder, "team/model", "--store", build.root)
    run("sign", "team/model", "--key", release.private, "--store", build.root)
    assert ", 2 signatures" in run("pack", "team/model", archive, "--store", build.root).stdout

    # A machine that trusts another key imports nothing.
    policy(strict, other)
    refused = run("unpack", archive, "--store", strict.root, exit_code=1).stderr
    assert "the policy refuses model team/model:latest" in refused
    assert not strict.has_model("team/model")

    # Where it is used: the policy accepts it, and the commands say by whom it was signed.
    policy(site, release)
    assert ", 2 signatures" in run("unpack", archive, "--store", site.root).stdout
    assert signatures(site, "team/model") == signatures(build, "team/model")
    info = run("info", "team/model", "--store", site.root).stdout
    assert "signed by     ours (cosign, oms)\n" in info
    (model,) = run_json("verify", "--signatures", "--store", site.root)["signatures"]
    assert (model["trusted"], {one["state"] for one in model["signatures"]}) == (True, {"valid"})
    blobstore.open("team/model", store=site).close()

    # Other programs agree: model_signing about the files, and openssl about what cosign reads.
    run("export", "team/model", tmp_path / "files", "--store", site.root)
    bundle = tmp_path / "model.sig"
    bundle.write_bytes(signatures(site, "team/model")["oms"])
    for key, is_ours in ((release, True), (other, False)):
        arguments = ("--signature", bundle, "--public_key", key.public)
        done = run_client(
            PROGRAM,
            *("verify", "key", tmp_path / "files", *arguments),
            environment=os.environ,
            modules=("model_signing._cli", "model_signing"),
        )
        assert (done.code == 0) is is_ours, done.stderr
        assert accepts(signatures(site, "team/model")["cosign"], key, tmp_path) is is_ours
