"""The addresses of upstreams, and what is asked of them first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blobstore.errors import UsageError
from blobstore.operations.create.create import create
from blobstore.serve.refusal import Refusal
from blobstore.serve.server import PATIENCE_SECONDS
from blobstore.serve.upstream import IMPATIENT, Revision, Upstream, UpstreamClient
from blobstore.store.local import LocalStore
from tests.support.hub_server import HubServer
from tests.support.models import dense_tensors, write_folder
from tests.support.serve_process import serving


@pytest.mark.parametrize(
    "url",
    ["https://huggingface.co", "http://127.0.0.1:8080/", "https://[::1]:9/prefix", "http://cache"],
)
def test_an_upstream_is_a_url(url: str) -> None:
    assert Upstream.parse(url).url == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "huggingface.co",
        "file:///etc",
        "ftp://host",
        "https://",
        "https://user:password@host",
        "https://host?query",
        "https://host#fragment",
        "https://ho st",
        "https://host:0",
        "https://host:x",
        "https://[::1",
        "https://h\u00f6st",
        "https://host\n",
    ],
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="not the URL of an upstream"):
        Upstream.parse(url)


@pytest.mark.parametrize(
    ("names", "probe"),
    [
        (["README.md", "model.safetensors"], "model.safetensors"),
        (["README.md", "a/pytorch_model.bin"], "a/pytorch_model.bin"),
        (["README.md", "config.json"], ""),
    ],
)
def test_access_is_tried_at_a_file_of_weights(names: list[str], probe: str) -> None:
    assert Revision("a" * 40, names, "org/model").probe == probe


@pytest.mark.parametrize(
    ("files", "is_whole"),
    [
        ({"README.md": 9000, "config.json": 10}, False),
        ({"README.md": 9000, "vocabulary.txt": 2000, "merges.txt": 1500}, True),
    ],
)
def test_without_weights_a_large_file_other_than_the_card_shows_who_may_read_a_repository(
    files: dict[str, int], is_whole: bool, tmp_path: Path
) -> None:
    for name, size in files.items():
        (tmp_path / name).write_bytes(b"a" * size)
    with HubServer() as hub:
        repo = hub.add("org/model", tmp_path)
        with UpstreamClient(Upstream.parse(hub.url), "") as client:
            revision = client.revision("org/model", repo.commit)
            assert client.check_access("org/model", revision) is is_whole
        probe = "vocabulary.txt" if is_whole else "README.md"
        assert hub.requests[f"HEAD /org/model/resolve/{repo.commit}/{probe}"] == 1


def test_an_upstream_says_what_a_model_is_for(tmp_path: Path) -> None:
    with HubServer() as hub:
        repo = hub.add("org/model", write_folder(tmp_path / "model", dense_tensors()))
        info = {
            "id": "org/model",
            "sha": repo.commit,
            "siblings": [{"rfilename": "config.json"}],
            "pipeline_tag": "text-generation",
            "tags": ["tiny"],
        }
        repo.raw["info"] = json.dumps(info).encode()
        with UpstreamClient(Upstream(hub.url), "", IMPATIENT) as client:
            found = client.revision("org/model", "main")
    assert (found.description.task, found.description.tags) == ("text-generation", ("tiny",))


def test_an_upstream_says_who_a_token_belongs_to(store: LocalStore, tmp_path: Path) -> None:
    create(write_folder(tmp_path / "model", dense_tensors()), "org/model", store=store)
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-the-rack\n")
    (tmp_path / "front").mkdir()
    front = LocalStore(tmp_path / "front" / "store")
    with (
        serving(store, tmp_path, f"--token-file={tokens}") as origin,
        serving(front, tmp_path / "front", f"--upstream={origin.url}") as server,
    ):
        status, _, body = server.request(
            "/api/whoami-v2", Authorization="Bearer a-token-of-the-rack"
        )
        assert (status, json.loads(body)["name"]) == (200, "blobstore")
        assert server.request("/api/whoami-v2", Authorization="Bearer hf_wrong")[0] == 401
        assert server.request("/api/whoami-v2")[0] == 401
    with (
        HubServer() as hub,
        UpstreamClient(Upstream(hub.url), "hf_any", IMPATIENT) as client,
        pytest.raises(Refusal),  # it has no such route
    ):
        client.user()


def test_a_branch_that_is_called_like_a_commit_is_none(tmp_path: Path) -> None:
    with HubServer() as hub:
        folder = write_folder(tmp_path / "model", dense_tensors())
        commit = hub.add("org/model", folder).commit
        hub.branch("org/model", "d" * 40, folder)
        with UpstreamClient(Upstream(hub.url), "", IMPATIENT) as client:
            assert client.revision("org/model", commit).commit == commit
            with pytest.raises(Refusal) as refused:
                client.revision("org/model", "d" * 40)
    assert refused.value.code == "RevisionNotFound"


def test_a_refusal_has_the_name_to_which_the_upstream_led(tmp_path: Path) -> None:
    with HubServer() as hub:
        hub.add("org/model", write_folder(tmp_path / "model", dense_tensors()), token="hf_right")
        hub.renamed["org/old"] = "org/model"
        with (
            UpstreamClient(Upstream(hub.url), "", IMPATIENT) as client,
            pytest.raises(Refusal) as refused,
        ):
            client.revision("org/old", "main")
    assert refused.value.repository == "org/model"


def test_a_client_waits_longer_than_an_upstream_may_be_silent_twice_if_the_store_has_an_answer() -> (
    None
):
    """It is asked for a revision, and for a file."""
    assert 2 * IMPATIENT.stall <= PATIENCE_SECONDS
