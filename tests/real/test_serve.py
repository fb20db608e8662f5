"""``blobstore serve`` with the clients that people have: each is the real one, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import socketserver
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.operations.create.create import create
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from tests.support.clients import FRAMEWORKS, HUB, run_client
from tests.support.models import write_folder
from tests.support.serve_process import Serving, serving

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")

COMMON = """
    import json, os, sys
    from pathlib import Path
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of transformers in two shards, with its tokenizer."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("source") / "model"
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    BertModel(config).save_pretrained(folder, max_shard_size="20KB")
    words = {word: number for number, word in enumerate(["[UNK]", "[PAD]", "hello", "world"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("serve")
    store = LocalStore(folder / "store")
    create(source, "org/tiny", store=store)
    create(source, "org/tiny:int8", store=store, quantize=QuantizeOptions("int8"))
    create(source, "org/frozen", store=store)
    with serving(store, folder) as running:
        yield running


def run(server: Serving, cache: Path, code: str, *arguments: str, **variables: str) -> Any:
    """Run code of a client, with an empty cache; return the JSON that it prints last."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": server.url, "HF_HOME": str(cache), **variables}
    program = textwrap.dedent(COMMON) + textwrap.dedent(code)
    uses_torch = re.search(r"import torch|from (transformers|mlx_lm|diffusers)", code)
    modules = FRAMEWORKS if uses_torch else HUB
    result = run_client(program, *arguments, environment=environment, modules=modules)
    assert result.code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def test_a_snapshot_has_the_files_of_the_source(
    server: Serving, source: Path, tmp_path: Path
) -> None:
    found = run(
        server,
        tmp_path,
        """
        from huggingface_hub import snapshot_download
        first = snapshot_download("org/tiny")
        again = snapshot_download("org/tiny", local_files_only=True)
        print(json.dumps([first, again]))
        """,
    )
    assert found[0] == found[1]
    assert contents(Path(found[0])) == contents(source)


def test_clients_ask_what_they_asked_when_this_was_recorded(
    server: Serving, source: Path, tmp_path: Path
) -> None:
    """If a new version of a client asks for more, the server may have to answer it."""
    pytest.importorskip("torch")
    server.request("/begin")
    entry = server.wait_for_log("path", "/begin")
    begin = server.log().index(entry) + 1
    sha = run(
        server,
        tmp_path,
        """
        from huggingface_hub import HfApi, snapshot_download
        from transformers import AutoModel
        snapshot_download("org/tiny", allow_patterns="config.json")
        AutoModel.from_pretrained("org/tiny")
        print(json.dumps(HfApi().model_info("org/tiny").sha))
        """,
    )
    server.request("/healthz")
    server.wait_for_log("path", "/healthz")
    asked = {
        f"{entry['method']} {entry['path'].replace(sha, 'SHA')} {entry['status']}"
        for entry in server.log()[begin:]
        # The Hub's client looks once in a while for more than models.
        if entry["path"] not in ("/healthz", "/api/agent-harnesses")
    }
    recorded = Path(__file__).parents[1] / "data" / "hub_requests.json"
    assert sorted(asked) == json.loads(recorded.read_bytes())


def test_mlx_lm_loads_a_quantized_model(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm", reason="MLX does not run on this machine")
    pytest.importorskip("torch")
    import torch
    import transformers

    from tests.real.tiny import write_tokenizer

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    folder = tmp_path / "llama"
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    store = LocalStore(tmp_path / "store")
    create(folder, "org/llama", store=store, quantize=QuantizeOptions("int4"))
    with serving(store, tmp_path) as server:
        text = run(
            server,
            tmp_path,
            """
            from mlx_lm import generate, load
            model, tokenizer = load("org/llama")
            print(json.dumps(generate(model, tokenizer, "w1 w2", max_tokens=3)))
            """,
        )
    assert text


def test_diffusers_loads_a_pipeline(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    from tests.real.test_adapters_and_pipelines import tiny_pipeline

    folder = tmp_path / "pipeline"
    tiny_pipeline(diffusers, tmp_path).save_pretrained(folder)
    store = LocalStore(tmp_path / "store")
    create(folder, "org/pipeline", store=store)
    with serving(store, tmp_path) as server:
        found = run(
            server,
            tmp_path,
            """
            import torch
            from diffusers import DiffusionPipeline
            served, local = map(DiffusionPipeline.from_pretrained, ("org/pipeline", sys.argv[1]))
            equal = {}
            for name, part in served.components.items():
                if isinstance(part, torch.nn.Module):
                    other = local.components[name].state_dict()
                    equal[name] = all(torch.equal(value, other[key]) for key, value in part.state_dict().items())
            print(json.dumps(equal))
            """,
            str(folder),
        )
    assert found
    assert all(found.values())


def test_the_cache_verifies(server: Serving, tmp_path: Path) -> None:
    run(
        server,
        tmp_path,
        """
        from huggingface_hub import snapshot_download
        print(json.dumps(snapshot_download("org/tiny")))
        """,
    )
    program = Path(sys.executable).with_name("hf")
    environment = os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path)}
    command = [str(program), "cache", "verify", "org/tiny"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (blob,) = (path for path in tmp_path.rglob("blobs/*") if path.stat().st_size > 30_000)
    blob.chmod(0o644)
    blob.write_bytes(b"x" + blob.read_bytes()[1:])
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode != 0


def test_one_file_of_a_tag_of_a_commit_and_into_a_folder(
    server: Serving, source: Path, tmp_path: Path
) -> None:
    found = run(
        server,
        tmp_path,
        """
        from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url
        api = HfApi()
        sha = api.model_info("org/tiny").sha
        paths = [
            hf_hub_download("org/tiny", "config.json"),
            hf_hub_download("org/tiny", "config.json", revision=sha),
            hf_hub_download("org/tiny", "config.json", local_dir=sys.argv[1]),
        ]
        other = hf_hub_download("org/tiny", "config.json", revision="int8")
        metadata = get_hf_file_metadata(hf_hub_url("org/tiny", "config.json"))
        print(json.dumps({
            "contents": [Path(path).read_text() for path in paths],
            "other": Path(other).read_text(),
            "etag": metadata.etag, "size": metadata.size, "commit": metadata.commit_hash,
            "sha": sha,
        }))
        """,
        str(tmp_path / "folder"),
    )
    text = (source / "config.json").read_text()
    assert found["contents"] == [text] * 3
    assert "quantization" in json.loads(found["other"])
    assert found["size"] == len(text)
    assert found["commit"] == found["sha"]


def test_what_clients_ask_about_a_repository(server: Serving, source: Path, tmp_path: Path) -> None:
    found = run(
        server,
        tmp_path,
        """
        from huggingface_hub import HfApi, HfFileSystem, get_safetensors_metadata
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
        api = HfApi()
        errors = []
        for call in (
            lambda: api.model_info("org/none"),
            lambda: api.model_info("org/tiny", revision="none"),
            lambda: api.hf_hub_download("org/tiny", "none.json"),
        ):
            try:
                call()
            except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError) as error:
                errors.append(type(error).__name__)
        refs = api.list_repo_refs("org/tiny")
        files = HfFileSystem(endpoint=os.environ["HF_ENDPOINT"])
        print(json.dumps({
            "errors": errors,
            "branches": [ref.name for ref in refs.branches], "tags": [ref.name for ref in refs.tags],
            "files": sorted(api.list_repo_files("org/tiny")),
            "exists": [api.file_exists("org/tiny", name) for name in ("config.json", "none")],
            "paths": [item.size for item in api.get_paths_info("org/tiny", ["config.json", "none"])],
            "tensors": sorted(get_safetensors_metadata("org/tiny").weight_map),
            "part": files.cat_file("org/tiny/config.json", start=1, end=9).decode(),
            "models": [model.id for model in api.list_models(author="org")],
        }))
        """,
    )
    assert found["errors"] == [
        "RepositoryNotFoundError",
        "RevisionNotFoundError",
        "RemoteEntryNotFoundError",
    ]
    assert (found["branches"], found["tags"]) == (["main"], ["int8"])
    assert found["files"] == sorted(contents(source))
    assert found["exists"] == [True, False]
    assert found["paths"] == [(source / "config.json").stat().st_size]
    index = json.loads((source / "model.safetensors.index.json").read_bytes())
    assert found["tensors"] == sorted(index["weight_map"])
    assert found["part"] == (source / "config.json").read_text()[1:9]
    assert found["models"] == ["org/frozen", "org/tiny"]


def test_a_tree_of_several_pages_is_listed_completely(source: Path, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    create(source, "org/tiny", store=store)
    with serving(store, tmp_path, limits={"hub_files.PAGE": 2}) as server:
        found = run(
            server,
            tmp_path,
            """
            from huggingface_hub import HfApi
            print(json.dumps([item.path for item in HfApi().list_repo_tree("org/tiny")]))
            """,
        )
        server.stop()
        pages = [entry for entry in server.log() if "/tree/" in entry.get("path", "")]
    assert found == sorted(contents(source))
    assert len(pages) == -(-len(found) // 2)


def test_a_download_that_was_cut_is_continued(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weights = {"weight": random.standard_normal((5000, 1000), dtype=np.float32)}  # 20 MB
    folder = write_folder(tmp_path / "large", weights)
    store = LocalStore(tmp_path / "store")
    create(folder, "org/large", store=store)
    with (
        serving(store, tmp_path) as large,
        cutting_proxy(large.host, limit=12 << 20) as host,
    ):
        through_proxy = replace(large, url=f"http://{host}")
        found = run(
            through_proxy,
            tmp_path,
            """
            from huggingface_hub import hf_hub_download
            print(json.dumps(hf_hub_download("org/large", "model.safetensors")))
            """,
        )
        large.stop()
        parts = [entry for entry in large.log() if entry.get("range")]
    assert Path(found).read_bytes() == (folder / "model.safetensors").read_bytes()
    assert parts


def test_a_client_that_has_a_model_needs_no_server(source: Path, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    create(source, "org/tiny", store=store)
    code = """
        from huggingface_hub import snapshot_download
        print(json.dumps(snapshot_download("org/tiny")))
        """
    with serving(store, tmp_path) as server:
        first = run(server, tmp_path, code)
    assert run(server, tmp_path, code) == first
    assert run(server, tmp_path, code, HF_HUB_OFFLINE="1") == first


def test_a_model_of_a_registry_is_downloaded(source: Path, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    create(source, "ghcr.io/team/tiny", store=store)
    with serving(store, tmp_path) as server:
        found = run(
            server,
            tmp_path,
            """
            from huggingface_hub import HfApi, snapshot_download
            names = [model.id for model in HfApi().list_models()]
            print(json.dumps([names, snapshot_download("ghcr.io.team/tiny")]))
            """,
        )
    assert found[0] == ["ghcr.io.team/tiny"]
    assert contents(Path(found[1])) == contents(source)


def test_a_file_system_of_the_hub_reads_ranges(
    server: Serving, source: Path, tmp_path: Path
) -> None:
    found = run(
        server,
        tmp_path,
        """
        from huggingface_hub import HfFileSystem
        files = HfFileSystem(endpoint=os.environ["HF_ENDPOINT"])
        with files.open("org/tiny/tokenizer.json", "rb", block_size=64) as file:
            file.seek(100)
            part = file.read(50)
        print(json.dumps({
            "part": part.decode(), "size": files.size("org/tiny/config.json"),
            "found": sorted(files.glob("org/tiny/*.safetensors")),
            "tag": files.exists("org/tiny@int8/config.json"),
            "none": files.exists("org/tiny/none"),
        }))
        """,
    )
    assert found["part"] == (source / "tokenizer.json").read_bytes()[100:150].decode()
    assert found["size"] == (source / "config.json").stat().st_size
    names = sorted(path.name for path in source.glob("*.safetensors"))
    assert found["found"] == [f"org/tiny/{name}" for name in names]
    assert (found["tag"], found["none"]) == (True, False)


def test_transformers_loads_the_model_and_its_tokenizer(
    server: Serving, source: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    found = run(
        server,
        tmp_path,
        """
        import torch
        from transformers import AutoModel, AutoTokenizer
        served, local = AutoModel.from_pretrained("org/tiny"), AutoModel.from_pretrained(sys.argv[1])
        first, second = served.state_dict(), local.state_dict()
        tokens = AutoTokenizer.from_pretrained("org/tiny")("hello world")["input_ids"]
        print(json.dumps([
            first.keys() == second.keys(), all(torch.equal(first[name], second[name]) for name in first), tokens
        ]))
        """,
        str(source),
    )
    assert found == [True, True, [2, 3]]


def test_a_frozen_model_is_downloaded(server: Serving, source: Path, tmp_path: Path) -> None:
    freeze_models(["org/frozen"], store=server_store(server))
    found = run(
        server,
        tmp_path,
        """
        from huggingface_hub import snapshot_download
        print(json.dumps(snapshot_download("org/frozen")))
        """,
    )
    assert contents(Path(found)) == contents(source)


def server_store(server: Serving) -> LocalStore:
    return LocalStore(server.log_file.parent / "store")


DOWNLOADERS = {
    "curl": ["curl", "-fsSL", "-C", "-", "-o", "file"],
    "wget": ["wget", "-q", "-c", "-O", "file"],
    "aria2c": [
        *["aria2c", "-q", "-c", "-x16", "-s16", "-k1M", "-o", "file", "--auto-file-renaming=false"]
    ],
}
"""Programs that continue a download of ``file``; the last one by 16 connections."""


@pytest.mark.parametrize("program", DOWNLOADERS)
@pytest.mark.parametrize("begun", [0, 70_000])
def test_a_script_downloads_and_continues(program: str, begun: int, tmp_path: Path) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    random = np.random.default_rng(1)
    tensors = {
        f"layers.{number}.weight": random.standard_normal((1000, 1000), dtype=np.float32)
        for number in range(5)
    }
    folder = write_folder(tmp_path / "model", tensors)
    data = (folder / "model.safetensors").read_bytes()
    store = LocalStore(tmp_path / "store")
    create(folder, "org/model", store=store)
    if begun:
        (tmp_path / "file").write_bytes(data[:begun])
    with serving(store, tmp_path) as server:
        url = f"{server.url}/org/model/resolve/main/model.safetensors"
        subprocess.run([*DOWNLOADERS[program], url], check=True, cwd=tmp_path)
        server.stop()
        ranges = {entry["range"] for entry in server.log() if entry.get("range")}
    assert (tmp_path / "file").read_bytes() == data
    if program == "aria2c":
        assert len(ranges) > 5
    elif begun:
        assert f"bytes={begun}-" in ranges


@contextlib.contextmanager
def cutting_proxy(host: str, limit: int) -> Iterator[str]:
    """Pass bytes on to a server, but end the first connection that gets more than ``limit`` bytes."""
    address, _, port = host.partition(":")
    has_cut = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection((address, int(port))) as server:
                threading.Thread(target=self.pass_on, args=(server,), daemon=True).start()
                received = 0
                while piece := server.recv(1 << 16):
                    received += len(piece)
                    if received > limit and not has_cut.is_set():
                        has_cut.set()
                        break
                    self.request.sendall(piece)

        def pass_on(self, server: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while piece := self.request.recv(1 << 16):
                    server.sendall(piece)
                server.shutdown(socket.SHUT_WR)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as proxy:
        proxy.daemon_threads = True
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{proxy.server_address[1]}"
        finally:
            proxy.shutdown()
            thread.join()
    assert has_cut.is_set()
