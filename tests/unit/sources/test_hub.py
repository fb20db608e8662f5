"""The Hub's own client against a server on loopback, each download in a process of its own.

The client reads its environment when it is imported, so a process is what its users configure.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from blobstore.errors import UsageError
from blobstore.sources.hub import is_hub_id, parse_hub_id
from tests.hub_server import HubServer
from tests.models import dense_tensors, moe_tensors, write_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path(__file__).parents[3]
_DOWNLOAD = """
import json, sys
from blobstore.errors import BlobstoreError
from blobstore.sources import hub
steps = []
try:
    found = hub.download(sys.argv[1], progress=lambda *step: steps.append(step))
    names = sorted(str(p.relative_to(found.folder)) for p in found.folder.rglob("*") if p.is_file())
    result = {"folder": str(found.folder), "repo": found.repo, "revision": found.revision,
              "notices": found.notices, "files": names}
except BlobstoreError as error:
    result = {"error": type(error).__name__, "message": str(error), "exit": error.exit_code}
print(json.dumps(result | {"steps": steps}))
"""


class Client:
    """Runs processes whose client knows one server and one cache."""

    def __init__(self, server: HubServer, home: Path) -> None:
        self.server = server
        self.home = home

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        settings = {
            "HF_ENDPOINT": self.server.url,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": str(_ROOT),
        }
        return subprocess.run(
            [sys.executable, *command],
            env=inherited | settings | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def download(self, text: str, **environment: str) -> dict[str, Any]:
        result = self.run("-c", _DOWNLOAD, text, **environment)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("\n") == 1, "the library printed something"
        value: dict[str, Any] = json.loads(result.stdout)
        return value


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with HubServer() as server:
        yield Client(server, tmp_path / "hf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "tokenizer.json": b"{}" * 1000,
        "LICENSE": b"free",
        "1_Pooling/config.json": b"{}",
        "pytorch_model.bin": b"never fetched",
        "onnx/model.onnx": b"never fetched",
        "a/b/c/config.json": b"too deep",
    }
    tensors = dense_tensors() | moe_tensors()
    return write_folder(tmp_path / "repo", tensors, shards=2, files=files)


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("org/name", "org/name", None),
        ("hf://org/name", "org/name", None),
        ("hf://org/name@v1.0", "org/name", "v1.0"),
        ("org/Name-1.5_x@refs/pr/1", "org/Name-1.5_x", "refs/pr/1"),
    ],
)
def test_reads_a_hub_id(text: str, repo: str, revision: str | None) -> None:
    assert is_hub_id(text)
    assert parse_hub_id(text) == (repo, revision)


@pytest.mark.parametrize(
    "text",
    ["", "name", "a/b/c", "/a", "a/", "../a", "a/..", "a/.b", "a/b--c", "a b/c", "hf://", "a/b\n",
     "a/" + "b" * 96, "hf://org/name@"],
)  # fmt: skip
def test_refuses_what_is_no_hub_id(text: str) -> None:
    with pytest.raises(UsageError, match="not a Hub id"):
        parse_hub_id(text)


def test_fetches_the_files_that_a_store_keeps_and_no_others(client: Client, folder: Path) -> None:
    repo = client.server.add("org/model", folder)
    found = client.download("org/model")
    assert found["repo"] == "org/model"
    assert found["revision"] == repo.commit
    assert found["notices"] == []
    assert found["files"] == [
        "1_Pooling/config.json",
        "LICENSE",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    for name in found["files"]:
        assert (Path(found["folder"]) / name).read_bytes() == (folder / name).read_bytes()


def test_reports_progress_of_fetching_and_of_checking_up_to_the_total(
    client: Client, folder: Path
) -> None:
    client.server.add("org/model", folder)
    found = client.download("org/model")
    total = sum((folder / name).stat().st_size for name in found["files"])
    for what in ("fetching", "checking"):
        steps = [step for step in found["steps"] if step[0].startswith(what)]
        assert [step[1] for step in steps] == sorted(step[1] for step in steps)
        assert steps[-1][1:] == [total, total]


def test_a_second_download_checks_but_fetches_nothing(client: Client, folder: Path) -> None:
    client.server.add("org/model", folder)
    client.download("org/model")
    client.server.requests.clear()
    found = client.download("org/model")
    assert not [name for name in client.server.requests if "resolve" in name]
    assert {step[0].split()[0] for step in found["steps"]} == {"checking"}


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors"])
def test_refuses_a_body_that_was_changed_on_the_way(
    client: Client, folder: Path, name: str
) -> None:
    client.server.add("org/model", folder, corrupt={name})
    found = client.download("org/model")
    assert found["error"] == "DamagedSource"
    assert found["exit"] == 4
    assert f"'{name}'" in found["message"]
    assert "org/model" in found["message"]


def test_refuses_a_cached_file_that_was_damaged_later(client: Client, folder: Path) -> None:
    client.server.add("org/model", folder)
    path = Path(client.download("org/model")["folder"]) / "tokenizer.json"
    path.resolve().write_bytes(b"{}" * 999 + b"[]")
    found = client.download("org/model")
    assert found["error"] == "DamagedSource"
    assert str(path.resolve()) in found["message"]


def test_refuses_a_cached_link_that_leaves_the_cache(
    client: Client, folder: Path, tmp_path: Path
) -> None:
    client.server.add("org/model", folder)
    path = Path(client.download("org/model")["folder"]) / "config.json"
    outside = tmp_path / "outside.json"
    outside.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(outside)
    assert client.download("org/model")["error"] == "DamagedSource"


def test_a_listed_file_that_is_not_served_is_an_error(client: Client, folder: Path) -> None:
    client.server.add("org/model", folder, gone={"model-00002-of-00002.safetensors"})
    found = client.download("org/model")
    assert found["error"] in {"SourceError", "DamagedSource"}
    assert "org/model" in found["message"]


def test_a_missing_repository_is_not_found(client: Client) -> None:
    found = client.download("org/missing")
    assert found["error"] == "SourceNotFound"
    assert found["exit"] == 3
    assert "org/missing" in found["message"]


def test_a_missing_revision_is_not_found(client: Client, folder: Path) -> None:
    client.server.add("org/model", folder)
    found = client.download("hf://org/model@v9")
    assert found["error"] == "SourceNotFound"
    assert "org/model@v9" in found["message"]


def test_a_commit_can_be_named(client: Client, folder: Path) -> None:
    repo = client.server.add("org/model", folder)
    assert client.download(f"hf://org/model@{repo.commit}")["revision"] == repo.commit


def test_a_gated_repository_needs_a_token_and_never_shows_it(client: Client, folder: Path) -> None:
    client.server.add("org/model", folder, token="hf_secret", gated=True)
    refused = client.download("org/model", HF_TOKEN="hf_wrong")
    assert refused["error"] == "SourceError"
    assert "gated" in refused["message"]
    assert "HF_TOKEN" in refused["message"]
    assert "hf_wrong" not in refused["message"]
    assert client.download("org/model", HF_TOKEN="hf_secret")["files"]


def test_a_server_that_fails_is_an_error_with_its_status(client: Client, folder: Path) -> None:
    client.server.add("org/model", folder, status=418)
    found = client.download("org/model")
    assert found["error"] == "SourceError"
    assert "418" in found["message"]


def test_offline_the_cache_is_used_and_checked(client: Client, folder: Path) -> None:
    repo = client.server.add("org/model", folder)
    online = client.download("org/model")
    client.server.requests.clear()
    found = client.download("org/model", HF_HUB_OFFLINE="1")
    assert not client.server.requests
    assert found["revision"] == repo.commit
    assert found["files"] == online["files"]
    assert found["notices"] == []
    assert found["steps"][-1][0].startswith("checking")


def test_offline_a_damaged_cache_is_refused(client: Client, folder: Path) -> None:
    client.server.add("org/model", folder)
    path = Path(client.download("org/model")["folder"]) / "tokenizer.json"
    path.unlink()
    assert client.download("org/model", HF_HUB_OFFLINE="1")["error"] == "DamagedSource"


def test_offline_without_a_cached_listing_says_that_nothing_was_compared(
    client: Client, folder: Path
) -> None:
    client.server.add("org/model", folder)
    snapshot = Path(client.download("org/model")["folder"])
    shutil.rmtree(snapshot.parents[1] / "trees")
    found = client.download("org/model", HF_HUB_OFFLINE="1")
    assert "not compared" in found["notices"][0]


def test_without_a_network_the_cache_is_used(client: Client, folder: Path) -> None:
    client.server.add("org/model", folder)
    online = client.download("org/model")
    found = client.download("org/model", HF_ENDPOINT="http://127.0.0.1:9")
    assert found["folder"] == online["folder"]


def test_offline_without_a_cache_is_an_error_that_says_so(client: Client) -> None:
    found = client.download("org/model", HF_HUB_OFFLINE="1")
    assert found["error"] == "SourceError"
    assert "HF_HUB_OFFLINE" in found["message"]


def test_no_error_message_spans_lines(client: Client) -> None:
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        message = client.download("org/missing", **environment)["message"]
        assert message.isprintable()


def test_the_command_creates_a_model_from_the_hub(
    client: Client, folder: Path, tmp_path: Path
) -> None:
    client.server.add("org/model", folder)
    store = str(tmp_path / "store")
    main = ("-m", "blobstore.cli")
    created = client.run(*main, "create", "hf://org/model", "model", "--store", store, "--json")
    assert created.returncode == 0, created.stderr
    assert json.loads(created.stdout)["tensors"] == len(dense_tensors() | moe_tensors())
    missing = client.run(*main, "create", "org/missing", "other", "--store", store)
    assert missing.returncode == 3
    assert missing.stderr.count("\n") == 1
