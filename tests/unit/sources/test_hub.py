"""The Hub's own client against a server on loopback, each download in a process of its own.

The client reads its environment when it is imported, so a process is what its users configure.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blobstore.errors import DamagedSource, SourceError, UsageError
from blobstore.operations.compare.diff import diff_models
from blobstore.operations.create.create import create
from blobstore.sources import hub_files
from blobstore.sources.base import SourceOptions
from blobstore.sources.hub import is_hub_id, parse_hub_id, with_quantization
from blobstore.sources.huggingface import HuggingFaceFolder
from blobstore.sources.open import open_source
from tests.faults.processes import Ended
from tests.support.clients import run_client
from tests.support.hub_server import HubServer
from tests.support.models import dense_tensors, moe_tensors, write_folder

_ROOT = Path(__file__).parents[3]
_MAIN = "from blobstore.cli.main import main; main()"
_SHARD = "model-00002-of-00002.safetensors"
_DOWNLOAD = """
import json, os, sys
from blobstore.errors import BlobstoreError
from blobstore.sources import hub, hub_files
from blobstore.sources.base import SourceOptions
options = SourceOptions(**json.loads(os.environ.get("TEST_OPTIONS", "{}")))
results = []
for text in sys.argv[1:]:
    steps = []
    try:
        found = hub.download(text, options, progress=lambda *step: steps.append(step))
        paths = (path for path in found.folder.rglob("*") if path.is_file())
        names = sorted(str(path.relative_to(found.folder)) for path in paths)
        result = {"folder": str(found.folder), "repo": found.repo, "revision": found.revision,
                  "notices": found.notices, "files": names, "digests": found.digests}
    except BlobstoreError as error:
        result = {"error": type(error).__name__, "message": str(error), "exit": error.exit_code,
                  "has_cause": error.__cause__ is not None}
    results.append(result | {"steps": steps})
print(json.dumps(results))
"""


class Client:
    """Runs processes whose client knows one server and one cache."""

    def __init__(self, server: HubServer, home: Path) -> None:
        self.server = server
        self.home = home

    def environment(self, **variables: str) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        settings = {
            "HF_ENDPOINT": self.server.url,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": str(_ROOT),
        }
        return inherited | settings | variables

    def run(self, program: str, *arguments: object, **variables: str) -> Ended:
        return run_client(program, *arguments, environment=self.environment(**variables))

    def download(self, text: str, **environment: str) -> dict[str, Any]:
        return self.download_all([text], **environment)[text]

    def download_all(self, texts: Sequence[str], **environment: str) -> dict[str, dict[str, Any]]:
        result = self.run(_DOWNLOAD, *texts, **environment)
        assert result.code == 0, result.stderr
        assert result.stdout.count("\n") == 1, "the library printed something"
        assert "%|" not in result.stderr, "a progress bar was printed"
        return dict(zip(texts, json.loads(result.stdout), strict=True))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with HubServer() as server:
        yield Client(server, tmp_path / "hf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return _write(tmp_path / "repo")


def _write(folder: Path) -> Path:
    files = {
        "tokenizer.json": b"{}" * 1000,
        "same.json": b"{}" * 1000,  # the client fetches equal bytes once
        "LICENSE": b"free",
        "1_Pooling/config.json": b"never fetched",
        "pytorch_model.bin": b"never fetched",
        "onnx/model.onnx": b"never fetched",
        "a/b/c/config.json": b"too deep",
    }
    return write_folder(folder, dense_tensors() | moe_tensors(), shards=2, files=files)


@dataclass(frozen=True)
class Outcome:
    """What one process, one server and many repositories made of each other."""

    results: dict[str, dict[str, Any]]
    server: HubServer


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    path = tmp_path_factory.mktemp("hub")
    folder = _write(path / "repo")
    other = write_folder(path / "other", dense_tensors(), files={"LICENSE": b"another"})
    only_bin = path / "bin"
    only_bin.mkdir()
    for name in ("pytorch_model-00001-of-00001.bin", "training_args.bin", "x.pt"):
        (only_bin / name).write_bytes(b"bytes")
    (only_bin / "config.json").write_bytes(b"{}")
    nothing = path / "nothing"
    nothing.mkdir()
    (nothing / "model.onnx").write_bytes(b"never fetched")
    entry = {"type": "file", "path": "config.json", "size": 1, "oid": "0" * 40}

    def listing(**changes: Any) -> dict[str, bytes]:
        return {"tree": json.dumps([entry | changes]).encode()}

    with HubServer() as server:
        server.add("old", folder)
        server.add("org/paged", folder, page=2)
        server.add("org/branched", folder)
        server.branch("org/branched", "refs/pr/1", other)
        server.add("org/bin", only_bin)
        server.add("org/cut", folder, cut={_SHARD: 1})
        server.add("org/flaky", folder, statuses={"config.json": [503]})
        server.add("org/nothing", nothing)
        server.add("org/teapot", folder, status=418)
        server.add("org/denied", folder, status=403)
        server.add("org/busy", folder, status=429, retry_after="7000")
        server.add(
            "org/busy-once", folder, statuses={"info": [429], "tree": [503, 503]}, retry_after="0"
        )
        server.add("org/html", folder, raw={"info": b"<html>log in to the hotel</html>"})
        server.add("org/nameless", folder, raw={"info": b'{"id": "org/nameless", "sha": "../x"}'})
        server.add("org/keyless", folder, raw={"tree": b'[{"type": "file", "path": "a.json"}]'})
        server.add("org/negative", folder, raw=listing(size=-1))
        server.add("org/sizeless", folder, raw=listing(size="1"))
        server.add("org/digestless", folder, raw=listing(oid="\x1b[31m"))
        server.add("org/unending", folder, unending={_SHARD})
        server.add("org/unending-small", folder, unending={"config.json"})
        server.add("org/gone", folder, gone={_SHARD})
        server.add("org/short", folder, short={_SHARD})
        server.add("org/short-small", folder, short={"config.json"})
        server.add("org/corrupt", folder, corrupt={_SHARD})
        server.add("org/corrupt-small", folder, corrupt={"config.json"})
        extra = ("hf://old", "org/branched@refs/pr/1", "org/branched@v9", "org/missing")
        texts = [*extra, *(name for name in server.repos if "/" in name)]
        yield Outcome(Client(server, path / "hf").download_all(texts), server)


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("org/name", "org/name", None),
        ("hf://org/name", "org/name", None),
        ("hf://org/name@v1.0", "org/name", "v1.0"),
        ("org/Name-1.5_x@refs/pr/1", "org/Name-1.5_x", "refs/pr/1"),
        ("hf://gpt2", "gpt2", None),
        ("hf://gpt2@main", "gpt2", "main"),
        ("https://huggingface.co/org/name", "org/name", None),
        ("https://huggingface.co/org/name/?library=x#top", "org/name", None),
        ("http://www.huggingface.co/org/name/tree/v1.0", "org/name", "v1.0"),
        ("https://hf.co/gpt2/tree/refs%2Fpr%2F1/", "gpt2", "refs/pr/1"),
    ],
)
def test_reads_a_hub_id(text: str, repo: str, revision: str | None) -> None:
    assert is_hub_id(text)
    assert parse_hub_id(text) == (repo, revision)


@pytest.mark.parametrize(
    "text",
    ["", "name", "a/b/c", "/a", "a/", "../a", "a/..", "a/.b", "a/b--c", "a b/c", "hf://", "a/b\n",
     "a/" + "b" * 96, "hf://org/name@",
     "name@main", "org/name.git", "hf://-a", "hf://a--b", "hf://../a", "org/name@../../x",
     "org/name@/x", "org/name@a b", "org/name@-x", "org/name@a\n", "https://huggingface.co/",
     "https://huggingface.co/datasets/org/name", "https://huggingface.co/org/name/tree/main/unet",
     "https://huggingface.co/org/name/tree/..%2F..%2Fx", "https://example.org/org/name"],
)  # fmt: skip
def test_rejects_text_that_is_not_a_hub_id(text: str) -> None:
    with pytest.raises(UsageError, match="not a Hub id"):
        parse_hub_id(text)


def test_fetches_the_files_that_a_store_keeps_and_no_others(client: Client, folder: Path) -> None:
    repo = client.server.add("org/model", folder)
    found = client.download("org/model")
    assert found["repo"] == "org/model"
    assert found["revision"] == repo.commit
    assert found["notices"] == []
    assert found["files"] == [
        "LICENSE",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "same.json",
        "tokenizer.json",
    ]
    for name in found["files"]:
        assert (Path(found["folder"]) / name).read_bytes() == (folder / name).read_bytes()


def test_fetches_the_weights_that_are_used_and_no_others(
    client: Client, folder: Path, tmp_path: Path
) -> None:
    for name in ("consolidated", "model.fp16", "transformer/unlisted"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(folder / _SHARD, folder / f"{name}.safetensors")
    (folder / "transformer" / "model.safetensors.index.json").write_text("never fetched")
    client.server.add("org/model", folder)
    found = client.download("org/model")
    weights = {name for name in found["files"] if name.endswith(".safetensors")}
    assert weights == {"model-00001-of-00002.safetensors", _SHARD}
    client.home = tmp_path / "another"
    for options, expected in (
        ({"weights": "model.fp16*"}, {"model.fp16.safetensors"}),
        ({"weights": "con*", "exclude": ["*.index.json"]}, {"consolidated.safetensors"}),
    ):
        shutil.rmtree(client.home, ignore_errors=True)
        found = client.download("org/model", TEST_OPTIONS=json.dumps(options))
        names = set(found["files"])
        assert {name for name in names if name.endswith(".safetensors")} == expected
        assert "transformer/model.safetensors.index.json" not in names
        assert set(found["digests"]) >= expected
    found = client.download("org/model", TEST_OPTIONS=json.dumps({"keep": ["onnx/*"]}))
    assert "onnx/model.onnx" in found["files"]


def test_fetches_kept_files_of_a_repository_without_weights(client: Client, tmp_path: Path) -> None:
    repo = tmp_path / "onnx"
    repo.mkdir()
    for name in ("q4.onnx", "q8.onnx", "README.md"):
        (repo / name).write_bytes(name.encode() * 1000)
    client.server.add("org/onnx", repo)
    refused = client.download("org/onnx")
    assert refused["error"] == "UnsupportedSource"
    assert "--keep '*.onnx'" in refused["message"]
    found = client.download("org/onnx", TEST_OPTIONS=json.dumps({"keep": ["q4*"]}))
    assert found["files"] == ["README.md", "q4.onnx"]


def test_a_repository_of_another_format_is_refused_before_it_is_fetched(
    client: Client, tmp_path: Path
) -> None:
    repo = tmp_path / "whisper"
    repo.mkdir()
    (repo / "model.bin").write_bytes(b"\6\0\0\0\x0c\0WhisperSpec\0" + bytes(200_000))
    (repo / "config.json").write_text("{}")
    client.server.add("org/whisper", repo)
    refused = client.download("org/whisper")
    assert refused["error"] == "UnsupportedSource"
    assert "'model.bin': this is a model of CTranslate2; store the file" in refused["message"]
    assert refused["steps"] == [] or max(done for _, done, _ in refused["steps"]) < 200_000
    assert not [*client.home.rglob("model.bin")]
    found = client.download("org/whisper", TEST_OPTIONS=json.dumps({"keep": ["*.bin"]}))
    assert found["files"] == ["config.json", "model.bin"]


def test_both_looks_at_a_repository_choose_the_same_weights(client: Client, tmp_path: Path) -> None:
    repo = tmp_path / "mixed"
    repo.mkdir()
    torch.save({"a": torch.ones(3)}, repo / "weights.bin")
    (repo / "model.bin").write_bytes(b"\6\0\0\0\x0c\0WhisperSpec\0" + bytes(200_000))
    (repo / "config.json").write_text("{}")
    client.server.add("org/mixed", repo)
    code = (
        "from blobstore.sources.open import open_source; import pickle\n"
        "source = open_source('hf://org/mixed'); print(list(source.specs))\n"
        "again = pickle.loads(pickle.dumps(source.reopen))(); print(list(again.specs))"
    )
    done = client.run(code)
    assert done.stdout == "['a']\n['a']\n", done.stderr


def test_fetches_the_components_of_a_pipeline_and_no_single_file(
    client: Client, tmp_path: Path
) -> None:
    repo = tmp_path / "pipeline"
    parts = {"unet": ["diffusers", "U"], "vae": ["diffusers", "V"], "none": [None, None]}
    files = {"model_index.json": json.dumps(parts).encode(), "README.md": b"x"}
    write_folder(repo, dense_tensors(), files=files)
    (repo / "model.safetensors").rename(repo / "everything.safetensors")
    for part in ("unet", "vae", "safety"):
        write_folder(repo / part, moe_tensors())
        weights = repo / part / "diffusion_pytorch_model.safetensors"
        (repo / part / "model.safetensors").rename(weights)
        shutil.copy(weights, weights.with_suffix(".fp16.safetensors"))
    client.server.add("org/pipeline", repo)
    assert client.download("org/pipeline")["files"] == [
        "README.md",
        "config.json",
        "model_index.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    ]


def test_reports_progress_of_fetching_and_of_checking_up_to_the_total(
    client: Client, folder: Path
) -> None:
    client.server.add("org/model", folder)
    found = client.download("org/model")
    # The index comes first, because it decides which files follow.
    names = [name for name in found["files"] if not name.endswith(".index.json")]
    total = sum((folder / name).stat().st_size for name in names)
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


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("org/missing", "SourceNotFound", ["no Hub repository", "HF_TOKEN"]),
        ("org/branched@v9", "SourceNotFound", ["no such revision"]),
        ("org/nothing", "UnsupportedSource", ["'model.onnx'"]),
        ("org/teapot", "SourceError", ["418", "try again later"]),
        ("org/denied", "SourceError", ["403", "HF_TOKEN"]),
        ("org/busy", "SourceError", ["429", "try again in 7000 seconds"]),
        ("org/html", "SourceError", ["is not a Hub", "address"]),
        ("org/nameless", "SourceError", ["malformed"]),
        ("org/keyless", "SourceError", ["malformed"]),
        ("org/negative", "SourceError", ["malformed"]),
        ("org/sizeless", "SourceError", ["malformed"]),
        ("org/digestless", "SourceError", ["malformed"]),
        ("org/unending", "DamagedSource", [f"'{_SHARD}'", "sends more than", "try again"]),
        ("org/unending-small", "DamagedSource", ["'config.json'", "sends more than", "try again"]),
        ("org/gone", "DamagedSource", [f"'{_SHARD}'", "does not serve it"]),
        ("org/short", "DamagedSource", [f"'{_SHARD}'", "expected", "try again"]),
        ("org/short-small", "DamagedSource", ["'config.json'", "expected", "try again"]),
        ("org/corrupt", "DamagedSource", [f"'{_SHARD}'", "sha256", "try again"]),
        ("org/corrupt-small", "DamagedSource", ["'config.json'", "sha1", "try again"]),
    ],
)
def test_rejects_with_one_line_that_names_the_repository_and_what_to_do(
    outcome: Outcome, text: str, error: str, words: list[str]
) -> None:
    found = outcome.results[text]
    assert found["error"] == error
    assert (
        found["exit"]
        == {"SourceError": 1, "UnsupportedSource": 1, "SourceNotFound": 3, "DamagedSource": 4}[
            error
        ]
    )
    assert found["message"].isprintable()
    for word in [text.partition("@")[0], *words]:
        assert word in found["message"]


def test_an_error_of_the_client_is_the_cause_of_ours(outcome: Outcome) -> None:
    for text in ("org/missing", "org/branched@v9", "org/denied", "org/html", "org/gone"):
        assert outcome.results[text]["has_cause"]


def test_a_changed_body_is_named_with_commit_and_both_digests(outcome: Outcome) -> None:
    repo = outcome.server.repos["org/corrupt"]
    message = outcome.results["org/corrupt"]["message"]
    data = (repo.folder / _SHARD).read_bytes()
    got = hashlib.sha256(bytes([data[0] ^ 1]) + data[1:]).hexdigest()
    for word in (repo.commit, got, hashlib.sha256(data).hexdigest()):
        assert word in message


@pytest.mark.parametrize("keeps", [True, False])
def test_what_a_hub_says_of_a_file_becomes_no_path(
    client: Client, folder: Path, tmp_path: Path, *, keeps: bool
) -> None:
    out = "../" * 9 + f"{tmp_path}/victim"
    said = {"ETag": f'"{out}"', "X-Linked-ETag": f'"{out}"', "X-Repo-Commit": out}
    repo = client.server.add("org/model", folder, headers=said, gone={"config.json"})
    create = ["create", "hf://org/model", "model", "--store", f"{tmp_path}/store"]
    create += ["--keep-hub-cache"] * keeps
    assert client.run(_MAIN, *create).code == 4  # the client notes what is absent, too
    repo.gone.clear()
    assert client.run(_MAIN, *create).code == 0
    assert {path.name for path in tmp_path.iterdir()} <= {"repo", "hf", "store"}


def test_a_link_of_the_cache_that_leads_to_the_file_stays(tmp_path: Path) -> None:
    place = tmp_path / "snapshots" / "config.json"
    hub_files.link(Path("../blobs/a"), place)
    before = place.lstat()
    hub_files.link(Path("../blobs/a"), place)
    assert place.lstat().st_ino == before.st_ino
    hub_files.link(Path("../blobs/b"), place)
    assert place.readlink() == Path("../blobs/b")
    assert [path.name for path in place.parent.iterdir()] == ["config.json"]


def test_a_part_that_is_longer_than_its_file_is_fetched_again(client: Client, folder: Path) -> None:
    repo = client.server.add("org/model", folder, cut={_SHARD: 1})
    digest = repo.entry(_SHARD)["lfs"]["oid"]
    part = client.home / "hub" / "models--org--model" / "blobs" / f"{digest}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes((folder / _SHARD).stat().st_size + 1))
    found = Path(client.download("org/model")["folder"])
    assert (found / _SHARD).read_bytes() == (folder / _SHARD).read_bytes()


def test_wrong_bytes_do_not_stay_in_the_cache(outcome: Outcome) -> None:
    cache = Path(outcome.results["org/branched"]["folder"]).parents[2]
    for name, file in (("org/corrupt", _SHARD), ("org/corrupt-small", "config.json")):
        storage = cache / f"models--{name.replace('/', '--')}"
        assert not [path for path in storage.rglob(file) if path.exists()]
        listed = outcome.server.repos[name].entry(file)
        assert not (storage / "blobs" / listed.get("lfs", listed)["oid"]).exists()


@pytest.mark.parametrize("place", ["cache", "store"])
def test_files_of_the_cache_are_read_through_links_and_stay(
    client: Client, folder: Path, tmp_path: Path, place: str
) -> None:
    client.server.add("org/model", folder)
    create = (_MAIN, "create", "hf://org/model", "model")
    assert client.run(*create, "--keep-hub-cache", "--store", tmp_path / "first").code == 0
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/b")
    if place == "cache":
        client.home.rename(tmp_path / "a" / "b" / "hf")
        client.home = tmp_path / "link" / "hf"
    sent = client.server.sent
    assert client.run(*create, "--store", tmp_path / "link" / "store").code == 0
    full = "import errno, pathlib\ndef fail(*_): raise OSError(errno.ENOSPC, 'full')\n"
    failing = f"{full}pathlib.Path.symlink_to = fail\n{_MAIN}"
    assert client.run(failing, *create[1:], "--store", tmp_path / "other").code == 1
    assert client.server.sent == sent
    assert client.run(*create, "--store", tmp_path / "third").code == 0
    assert client.server.sent == sent


@pytest.mark.parametrize("location", ["http://localhost/\x01", "http://localhost/" + "a" * 70_000])
def test_a_redirect_to_no_url_is_an_error(client: Client, folder: Path, location: str) -> None:
    client.server.add("org/model", folder, headers={"Location": location})
    assert client.download("org/model")["error"] == "SourceError"


def test_fetches_a_repository_of_the_time_before_organizations(outcome: Outcome) -> None:
    assert outcome.results["hf://old"]["repo"] == "old"
    assert _SHARD in outcome.results["hf://old"]["files"]


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model_index.json"])
def test_a_file_that_decides_is_refused_by_its_listed_size(
    client: Client, folder: Path, name: str
) -> None:
    repo = client.server.add("org/model", folder)
    large = {"type": "file", "path": name, "size": 65 << 20, "oid": "a" * 40}
    repo.raw["tree"] = json.dumps([*repo.tree(), large]).encode()
    found = client.download("org/model")
    assert found["error"] == "DamagedSource"
    assert f"'hf://org/model/{name}' has 68157440 bytes" in found["message"]
    assert not any("resolve" in asked for asked in client.server.requests)


def test_reads_a_listing_of_many_pages(outcome: Outcome) -> None:
    assert outcome.results["org/paged"]["files"] == outcome.results["hf://old"]["files"]


def test_fetches_the_revision_that_was_named(outcome: Outcome) -> None:
    found = outcome.results["org/branched@refs/pr/1"]
    assert found["revision"] == outcome.server.repos["org/branched"].branches["refs/pr/1"].commit
    assert (Path(found["folder"]) / "LICENSE").read_bytes() == b"another"
    assert found["folder"] != outcome.results["org/branched"]["folder"]


def test_fetches_checkpoints_only_where_no_safetensors_are(outcome: Outcome) -> None:
    shard = "pytorch_model-00001-of-00001.bin"
    assert outcome.results["org/bin"]["files"] == ["config.json", shard]
    asked = [path for path in outcome.server.requests if path.endswith((".bin", ".onnx", ".pt"))]
    assert {path.rpartition("/")[2] for path in asked} == {shard}


@pytest.mark.parametrize("text", ["org/cut", "org/flaky", "org/busy-once"])
def test_goes_on_after_a_failure_that_passes(outcome: Outcome, text: str) -> None:
    assert outcome.results[text]["files"] == outcome.results["hf://old"]["files"]
    steps = outcome.results[text]["steps"]
    assert all(done <= total for _, done, total in steps)
    fetching = [step for step in steps if step[0].startswith("fetching")]
    assert fetching[-1][1] == fetching[-1][2]


def test_fetches_only_what_the_cache_lacks_and_counts_only_that(
    client: Client, folder: Path
) -> None:
    client.server.add("org/model", folder)
    (Path(client.download("org/model")["folder"]) / _SHARD).resolve().unlink()
    found = client.download("org/model")
    size = (folder / _SHARD).stat().st_size
    fetching = [step for step in found["steps"] if step[0].startswith("fetching")]
    assert fetching[-1] == [f"fetching {_SHARD}", size, size]


def test_importing_the_module_does_not_import_the_client(client: Client) -> None:
    code = "import sys, blobstore.sources.hub; sys.exit('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, env=client.environment())
    assert done.returncode == 0


def test_rejects_a_cached_file_that_was_damaged_later(client: Client, folder: Path) -> None:
    client.server.add("org/model", folder)
    path = Path(client.download("org/model")["folder"]) / "tokenizer.json"
    path.resolve().write_bytes(b"{}" * 999 + b"[]")
    found = client.download("org/model")
    assert found["error"] == "DamagedSource"
    assert str(path.resolve()) in found["message"]
    path.resolve().unlink()  # as the message says
    assert client.download("org/model")["files"]


def test_rejects_a_cached_link_that_leaves_the_cache(
    client: Client, folder: Path, tmp_path: Path
) -> None:
    client.server.add("org/model", folder)
    path = Path(client.download("org/model")["folder"]) / "config.json"
    outside = tmp_path / "outside.json"
    outside.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(outside)
    found = client.download("org/model")
    assert found["error"] == "DamagedSource"
    assert f"remove '{path}'" in found["message"], "never the file outside"


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
    assert client.server.leaks == []


def test_only_requests_that_have_limits_are_sent(client: Client, folder: Path) -> None:
    """The library of the Hub would ask for what runs it, and refresh a token."""
    repo = client.server.add("org/model", folder, token="hf_secret")
    client.home.mkdir()
    (client.home / "token").write_text("hf_secret\n")
    assert client.download("org/model", CLAUDECODE="1", AI_AGENT="any")["files"]
    start, files = "GET /api/models/org/model", f"/org/model/resolve/{repo.commit}/"
    for asked in client.server.requests:
        assert asked.startswith((start, f"GET {files}", f"GET /store{files}")), asked
    assert client.download("org/model", HF_HUB_DISABLE_IMPLICIT_TOKEN="1")["exit"] == 3


def test_a_folder_with_the_name_of_weights_is_refused(client: Client, folder: Path) -> None:
    repo = client.server.add("org/model", folder)
    weights = next(one for one in repo.tree() if one["path"] == _SHARD)
    for name in ("model.safetensors", "model.gguf"):
        repo.raw["tree"] = json.dumps([weights | {"path": f"{name}/x.safetensors"}]).encode()
        found = client.download("org/model")
        assert found["error"] == "DamagedSource"
        assert f"'{name}' is listed as a folder" in found["message"]


def test_a_token_that_no_header_can_hold_is_an_error_without_it(
    client: Client, folder: Path
) -> None:
    client.server.add("org/model", folder)
    found = client.download("org/model", HF_TOKEN="hf_s\u00e9cret")
    assert found["error"] == "SourceError"
    assert "HF_TOKEN" in found["message"]
    assert "cret" not in found["message"]


def test_the_next_page_of_a_listing_is_not_asked_for_at_another_host(
    client: Client, folder: Path
) -> None:
    client.server.add("org/model", folder, page=2, moves=True)
    found = client.download("org/model", HF_TOKEN="hf_secret")
    assert found["error"] == "SourceError"
    assert "lists its next page at" in found["message"]
    assert client.server.leaks == []


def test_a_hub_that_takes_the_connection_only_is_not_waited_for(
    client: Client, folder: Path
) -> None:
    client.server.add("org/model", folder, is_silent=True)
    found = client.download("org/model", HF_HUB_ETAG_TIMEOUT="1", HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert found["error"] == "SourceError"


def test_offline_the_cache_is_used_and_checked(client: Client, folder: Path) -> None:
    repo = client.server.add("org/model", folder)
    online = client.download("org/model")
    client.server.requests.clear()
    found = client.download("org/model", HF_HUB_OFFLINE="1")
    assert not client.server.requests
    assert found["revision"] == repo.commit
    assert found["files"] == online["files"]
    assert found["digests"] == online["digests"]
    assert found["notices"] == [f"offline: 'org/model' is commit {repo.commit} of the cache"]
    assert found["steps"][-1][0].startswith("checking")


def test_the_client_finds_what_was_downloaded(client: Client, folder: Path) -> None:
    client.server.add("org/model", folder)
    found = client.download("org/model")
    code = (
        "import huggingface_hub as hub; names = [f.path for f in hub.get_cached_repo_tree('org/model')]; "
        "print(hub.snapshot_download('org/model', allow_patterns=['*.json'], ignore_patterns=['*/*']), "
        "len(names))"
    )
    result = client.run(code, HF_HUB_OFFLINE="1")
    count = sum(path.is_file() for path in folder.rglob("*"))
    assert result.stdout.split() == [found["folder"], str(count)], result.stderr


def test_offline_a_damaged_cache_is_refused(client: Client, folder: Path) -> None:
    client.server.add("org/model", folder)
    path = Path(client.download("org/model")["folder"]) / "tokenizer.json"
    path.unlink()
    assert client.download("org/model", HF_HUB_OFFLINE="1")["error"] == "DamagedSource"
    path.symlink_to(path.name)
    assert client.download("org/model", HF_HUB_OFFLINE="1")["error"] == "DamagedSource"


def test_offline_without_a_cached_listing_says_that_files_may_be_missing(
    client: Client, folder: Path
) -> None:
    client.server.add("org/model", folder)
    snapshot = Path(client.download("org/model")["folder"])
    shutil.rmtree(snapshot.parents[1] / "trees")
    found = client.download("org/model", HF_HUB_OFFLINE="1")
    assert "files may be missing" in found["notices"][1]
    path = (snapshot / "tokenizer.json").resolve()
    path.write_bytes(b"{}" * 999 + b"[]")
    assert client.download("org/model", HF_HUB_OFFLINE="1")["error"] == "DamagedSource"


def test_without_a_network_an_older_commit_is_not_used_silently(
    client: Client, folder: Path
) -> None:
    repo = client.server.add("org/model", folder)
    client.download("org/model")
    found = client.download("org/model", HF_ENDPOINT="http://127.0.0.1:9")
    assert found["error"] == "SourceError"
    assert found["message"] == (
        "there is no folder 'org/model', and as a Hub id 'org/model': the Hub cannot be reached; "
        "check the network and HF_ENDPOINT, or set HF_HUB_OFFLINE=1 to use commit "
        f"{repo.commit} of the cache"
    )


def test_without_a_network_a_commit_is_read_from_the_cache(client: Client, folder: Path) -> None:
    repo = client.server.add("org/model", folder)
    online = client.download("org/model")
    text = f"org/model@{repo.commit}"
    found = client.download(text, HF_ENDPOINT="http://127.0.0.1:9")
    assert found["folder"] == online["folder"]
    assert found["notices"] == [
        f"the Hub cannot be reached: '{text}' is commit {repo.commit} of the cache"
    ]
    absent = client.download(f"org/model@{'0' * 40}", HF_ENDPOINT="http://127.0.0.1:9")
    assert absent["error"] == "SourceError"
    assert "the Hub cannot be reached" in absent["message"]


# Folders of a cache


def test_a_folder_of_the_cache_is_a_source_with_its_repository_and_commit(
    client: Client, folder: Path
) -> None:
    repo = client.server.add("org/model", folder)
    snapshot = Path(client.download("org/model")["folder"])
    storage = snapshot.parents[1]
    for path in (storage, snapshot):
        opened = open_source(path)
        assert isinstance(opened, HuggingFaceFolder)
        assert (opened.repository, opened.commit) == ("org/model", repo.commit)
        assert set(opened.specs) == set(dense_tensors() | moe_tensors())
        shard = hashlib.sha256((folder / _SHARD).read_bytes()).hexdigest()
        assert opened.digests[_SHARD] == shard
        assert opened.notices == []
        opened.close()
    (snapshot / "LICENSE").unlink()
    opened = open_source(storage)
    assert opened.notices == ["left out: 'LICENSE' of org/model, not in the cache"]
    opened.close()
    (snapshot / "LICENSE").symlink_to("../../blobs/" + "0" * 40)
    with pytest.raises(DamagedSource, match="'LICENSE' .*: it is not in the cache; try again"):
        open_source(storage)
    (snapshot / "LICENSE").unlink()
    opened = open_source(storage)
    opened.close()
    (snapshot / _SHARD).resolve().write_bytes(bytes((folder / _SHARD).stat().st_size))
    with pytest.raises(DamagedSource, match="does not match the Hub's listing: its sha256"):
        open_source(storage)


def test_a_folder_of_the_cache_with_several_commits_needs_the_main_branch(
    client: Client, folder: Path
) -> None:
    client.server.add("org/model", folder)
    snapshot = Path(client.download("org/model")["folder"])
    storage = snapshot.parents[1]
    (storage / "refs" / "main").unlink()
    open_source(storage).close()
    other = snapshot.with_name("f" * 40)
    other.mkdir()
    with pytest.raises(SourceError, match=f"choose one of its snapshots: '{snapshot}', '{other}'"):
        open_source(storage)
    open_source(snapshot).close()
    (storage / "refs" / "main").write_text("../../../elsewhere")
    with pytest.raises(SourceError, match="choose one of its snapshots"):
        open_source(storage)
    (storage / "refs" / "main").write_text(snapshot.name)
    open_source(storage).close()


def test_a_folder_of_the_cache_must_not_link_elsewhere(
    client: Client, folder: Path, tmp_path: Path
) -> None:
    client.server.add("org/model", folder)
    snapshot = Path(client.download("org/model")["folder"])
    outside = tmp_path / hashlib.sha1(b"blob 4\0free").hexdigest()
    outside.write_bytes(b"free")
    (snapshot / "LICENSE").unlink()
    (snapshot / "LICENSE").symlink_to(outside)
    with pytest.raises(DamagedSource, match="it is a link out of the cache"):
        open_source(snapshot)


def test_a_folder_of_a_cache_without_links_is_read(client: Client, folder: Path) -> None:
    client.server.add("org/model", folder)
    snapshot = Path(client.download("org/model")["folder"])
    for path in [it for it in snapshot.rglob("*") if it.is_symlink()]:
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    opened = open_source(snapshot.parents[1])
    assert isinstance(opened, HuggingFaceFolder)
    assert (opened.repository, opened.digests) == ("org/model", {})
    assert set(opened.specs) == set(dense_tensors() | moe_tensors())
    opened.close()


def test_worker_processes_read_the_files_that_were_selected(
    client: Client, folder: Path, tmp_path: Path
) -> None:
    client.server.add("org/model", folder)
    storage = Path(client.download("org/model")["folder"]).parents[1]
    with ProcessPoolExecutor(1) as executor:
        create(storage, "m", store=tmp_path / "store", executor=executor)
    create(storage, "n", store=tmp_path / "store")
    assert diff_models("m", "n", store=tmp_path / "store").is_same


def test_offline_without_a_cache_is_an_error_that_says_so(client: Client) -> None:
    found = client.download("org/model", HF_HUB_OFFLINE="1")
    assert found["error"] == "SourceError"
    assert "HF_HUB_OFFLINE" in found["message"]


@pytest.mark.parametrize(
    ("text", "source", "weights"),
    [
        ("huggingface.co/org/name/resolve/main/x.gguf?download=true", "hf://org/name", "x.gguf"),
        ("hf.co/org/name/blob/main/a/x%20[1].gguf#top", "hf://org/name", "a/x [[]1].gguf"),
        ("hf.co/org/name/resolve/refs%2Fpr%2F1/x.gguf", "hf://org/name@refs/pr/1", "x.gguf"),
    ],
)
def test_the_url_of_a_file_chooses_it_from_its_repository(
    text: str, source: str, weights: str
) -> None:
    options = SourceOptions(keep=("*",))
    found = with_quantization(f"https://{text}", options)
    assert found == (source, replace(options, weights=weights))
    with pytest.raises(UsageError, match="names the weights, and --weights others"):
        with_quantization(f"https://{text}", SourceOptions(weights="y.gguf"))


def test_the_command_creates_a_model_from_the_hub(
    client: Client, folder: Path, tmp_path: Path
) -> None:
    repo = client.server.add("org/model", folder)
    store = str(tmp_path / "store")
    created = client.run(_MAIN, "create", "hf://org/model", "model", "--store", store, "--json")
    assert created.code == 0, created.stderr
    result = json.loads(created.stdout)
    assert result["tensors"] == len(dense_tensors() | moe_tensors())
    assert (result["repository"], result["commit"]) == ("org/model", repo.commit)
    missing = client.run(_MAIN, "create", "org/missing", "other", "--store", store)
    assert missing.code == 3
    assert missing.stderr.count("\n") == 1


def test_an_import_leaves_nothing_in_the_cache_that_was_not_there(
    client: Client, folder: Path, tmp_path: Path
) -> None:
    client.server.add("org/model", folder)
    store = tmp_path / "store"
    create = (_MAIN, "create", "hf://org/model", "model", "--store", str(store))

    def cached() -> set[str]:
        return {str(path) for path in client.home.rglob("*") if "models--" in str(path)}

    assert client.run(*create).code == 0
    assert not cached()
    assert client.run(*create, "--keep-hub-cache").code == 0
    kept, sent = cached(), client.server.sent
    assert any(path.endswith(_SHARD) for path in kept)
    assert client.run(*create).code == 0
    assert cached() == kept
    assert client.server.sent == sent
    assert not list((store / ".blobstore" / "downloads").iterdir())


def test_a_file_that_the_cache_has_of_another_commit_is_not_fetched_again(
    client: Client, folder: Path, tmp_path: Path
) -> None:
    client.server.add("org/model", folder)
    client.server.branch("org/model", "next", folder)
    assert "error" not in client.download("org/model")
    sent = client.server.sent
    store = str(tmp_path / "store")
    next_one = ("create", "hf://org/model@next", "model", "--store", store)
    assert client.run(_MAIN, *next_one).code == 0
    assert client.server.sent == sent


def test_a_download_that_fails_is_continued_by_the_next_import(
    client: Client, folder: Path, tmp_path: Path
) -> None:
    repo = client.server.add("org/model", folder)
    repo.statuses[_SHARD] = [403] * 20
    create = (_MAIN, "create", "hf://org/model", "model", "--store", f"{tmp_path}/store")
    failed = client.run(*create)
    assert failed.code == 1, failed.stderr
    repo.statuses.clear()
    assert client.run(*create).code == 0
    # The first import had the file by which others are chosen; of the others, it may have had some.
    requests = client.server.requests
    assert requests[f"GET /org/model/resolve/{repo.commit}/model.safetensors.index.json"] == 1


def test_a_file_that_was_damaged_on_the_way_is_fetched_again_by_the_next_import(
    client: Client, folder: Path, tmp_path: Path
) -> None:
    repo = client.server.add("org/model", folder, corrupt={_SHARD})
    create = (_MAIN, "create", "hf://org/model", "model", "--store", f"{tmp_path}/store")
    failed = client.run(*create)
    assert failed.code == 4
    assert failed.stderr.rstrip().endswith("; try again")
    repo.corrupt.clear()
    assert client.run(*create).code == 0
