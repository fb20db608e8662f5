"""``blobstore serve`` with the clients that people have: each is the real one, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.operations.create.create import create
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.store.local import LocalStore
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
    create(source, "org/tiny:int8", store=store, quantize="int8")
    create(source, "org/frozen", store=store)
    with serving(store, folder) as running:
        yield running


def run(server: Serving, cache: Path, code: str, *arguments: str, **variables: str) -> Any:
    """Run code of a client, with an empty cache; return the JSON that it prints last."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": server.url, "HF_HOME": str(cache), **variables}
    program = textwrap.dedent(COMMON) + textwrap.dedent(code)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
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
    create(folder, "org/llama", store=store, quantize="int4")
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


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_script_downloads_with_curl(server: Serving, source: Path) -> None:
    name = "model.safetensors.index.json"
    url = f"{server.url}/org/tiny/resolve/main/{name}"
    result = subprocess.run(["curl", "-fsSL", url], check=True, capture_output=True)
    assert result.stdout == (source / name).read_bytes()
