"""Models loaded from the store into mlx-lm give the same results as mlx-lm's own conversions."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import blobstore
from blobstore.errors import (
    BlobDamaged,
    BlobstoreError,
    ModelNotFound,
    UnsupportedDType,
    UsageError,
)
from blobstore.manifests.reference import Reference
from blobstore.operations.export.export import export_model
from blobstore.planning.grouping import ExpertForm
from blobstore.planning.plan import QuantizeOptions
from blobstore.quantization.formats import FORMATS
from blobstore.store.local import LocalStore
from tests.real import tiny
from tests.real.tiny import changed
from tests.support import damage
from tests.support.models import blob, write_folder
from tests.support.ports import free_port

mx = pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm does not run on this machine")
mlx_utils = pytest.importorskip("mlx_lm.utils")
mlx_server = pytest.importorskip("mlx_lm.server")
integration = import_module("blobstore.integrations.mlx_lm")
program = import_module("blobstore.integrations.mlx_lm.server")
provider = import_module("blobstore.integrations.mlx_lm.provider")

ROOT = Path(__file__).parents[2]
NAME = Reference.parse("m")
GROUPS = {"int4": 64, "int8": 64, "nvfp4": 16, "mxfp8": 32, "mxfp4": 32}
THETA = 500_000.0
TEXT: dict[str, Any] = {
    **tiny.TEXT,
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
}


def saved(kind: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a model with reproducible random weights in the layout of transformers."""
    torch.manual_seed(0)
    model: Any
    if kind == "qwen3-moe":
        model = transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**TEXT, **tiny.EXPERTS)
        )
    elif kind == "mixtral":
        config = transformers.MixtralConfig(**TEXT, num_local_experts=12)
        model = transformers.MixtralForCausalLM(config)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))
    model.to(dtype).save_pretrained(folder)
    tiny.write_tokenizer(folder)
    return folder


def readable(folder: Path) -> Path:
    """Add the keys that mlx-lm requires to a config, so that mlx-lm can load the folder itself."""
    return changed(folder, rope_theta=THETA, num_experts=12)


def logits(model: Any) -> Any:
    result = model(mx.arange(1, 33)[None])
    mx.eval(result)
    return result


def create_as_mlx_lm_does(
    source: Path, quant_type: str, experts: ExpertForm, store: LocalStore
) -> None:
    """Create model ``m`` with the quantization types that mlx-lm's own conversion chooses."""
    # What mlx-lm quantizes too, and the one module of these models that it treats in its own way.
    overrides = [f"*embed_tokens.weight={quant_type}"]
    if "num_experts_per_tok" in (source / "config.json").read_text():
        overrides.append("*.mlp.gate.weight=int8")
    blobstore.create(
        source,
        NAME,
        store=store,
        quantize=QuantizeOptions(
            quant_type, group_size=GROUPS[quant_type], policy="uniform", overrides=overrides
        ),
        experts=experts,
    )


def converted_by_mlx_lm(source: Path, quant_type: str) -> Any:
    """Return mlx-lm's own conversion of a folder, after adding the keys that it requires."""
    item = FORMATS[quant_type]
    model, stated = mlx_utils.load_model(readable(source))
    model, _ = mlx_utils.quantize_model(model, stated, GROUPS[quant_type], item.bits, item.mode)
    return model


def modules_of(model: Any) -> dict[str, tuple[Any, ...]]:
    """Return the type and the quantization settings of each module of a model."""
    return {
        name: (
            type(module).__name__,
            *(getattr(module, key, None) for key in ("mode", "bits", "group_size")),
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("quant_type", GROUPS)
@pytest.mark.parametrize(
    ("kind", "experts"), [("llama", "packed"), ("qwen3-moe", "packed"), ("qwen3-moe", "stacked")]
)
def test_a_quantized_model_computes_the_same_as_mlx_lms_conversion(
    kind: str, experts: ExpertForm, quant_type: str, store: LocalStore, tmp_path: Path
) -> None:
    source = saved(kind, tmp_path / "source")
    create_as_mlx_lm_does(source, quant_type, experts, store)
    ours, config = integration.load_model(NAME, store=store)
    theirs = converted_by_mlx_lm(source, quant_type)
    assert type(ours) is type(theirs)
    assert modules_of(ours) == modules_of(theirs)
    assert mx.array_equal(logits(ours), logits(theirs))
    assert config["quantization"]["mode"] == FORMATS[quant_type].mode


@pytest.mark.parametrize(
    ("quant_type", "group_size", "overrides"),
    [
        ("int4", 32, []),
        ("int4", 128, []),
        ("int8", 32, []),
        ("int8", 128, []),
        ("int4", 64, ["*q_proj.weight=mxfp8", "*k_proj.weight=nvfp4", "*.1.mlp.*=int8"]),
    ],
)
def test_any_group_size_and_mixture_computes_the_same_as_its_folder(
    quant_type: str, group_size: int, overrides: list[str], store: LocalStore, tmp_path: Path
) -> None:
    blobstore.create(
        readable(saved("llama", tmp_path / "source")),
        NAME,
        store=store,
        quantize=QuantizeOptions(
            quant_type, group_size=group_size, policy="uniform", overrides=overrides
        ),
    )
    export_model(NAME, tmp_path / "out", store=store)

    ours, _ = integration.load_model(NAME, store=store)

    theirs, _ = mlx_utils.load_model(tmp_path / "out")
    assert mx.array_equal(logits(ours), logits(theirs))
    found = {
        (module.mode, module.bits, module.group_size)
        for module in ours.modules()
        if type(module).__name__ == "QuantizedLinear"
    }
    assert len(found) == (4 if overrides else 1)


# Of plain experts, MLX multiplies only float32 where it runs on a processor.
@pytest.mark.parametrize("experts", ["packed", "stacked"])
@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "mixtral"])
def test_a_plain_model_computes_the_same_as_its_folder(
    kind: str, experts: ExpertForm, store: LocalStore, tmp_path: Path
) -> None:
    source = saved(kind, tmp_path / "source", torch.float32)
    blobstore.create(source, NAME, store=store, experts=experts)
    ours, _ = integration.load_model(NAME, store=store)
    theirs, _ = mlx_utils.load_model(readable(source))
    assert mx.array_equal(logits(ours), logits(theirs))


def test_quantized_mixtral_computes_the_same_as_its_folder(
    store: LocalStore, tmp_path: Path
) -> None:
    source = readable(saved("mixtral", tmp_path / "source"))
    blobstore.create(source, NAME, store=store, quantize=QuantizeOptions("int4", policy="uniform"))
    export_model(NAME, tmp_path / "out", store=store)
    ours, _ = integration.load_model(NAME, store=store)
    theirs, _ = mlx_utils.load_model(tmp_path / "out")
    assert mx.array_equal(logits(ours), logits(theirs))
    assert any(type(module).__name__ == "QuantizedSwitchLinear" for module in ours.modules())


def test_gpt_oss_computes_the_same_as_its_folder(store: LocalStore, tmp_path: Path) -> None:
    from tests.real.test_integrations_transformers import write_gpt_oss

    source = write_gpt_oss(tmp_path / "source")
    blobstore.create(source, NAME, store=store)
    ours, _ = integration.load_model(NAME, store=store)
    rope = json.loads((source / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    theirs, _ = mlx_utils.load_model(changed(source, rope_theta=theta, rope_scaling=rope))
    assert mx.array_equal(logits(ours), logits(theirs))


def test_a_model_and_its_tokenizer_generate_the_same_as_their_folder(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved("llama", tmp_path / "source")
    blobstore.create(source, NAME, store=store)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    model, tokenizer = integration.load(NAME, store=store)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert tokenizer.name_or_path == "m:latest"
    expected = mlx_lm.generate(*mlx_lm.load(str(readable(source))), prompt="w5 w6", max_tokens=6)
    assert mlx_lm.generate(model, tokenizer, prompt="w5 w6", max_tokens=6) == expected != ""


def test_settings_reach_the_loader(store: LocalStore, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    blobstore.create(source, NAME, store=store)
    reported: list[int] = []
    ours, _ = integration.load_model(
        NAME, store=store, read="pread", progress=lambda _, done, __: reported.append(done)
    )
    theirs, _ = mlx_utils.load_model(readable(source))
    assert mx.array_equal(logits(ours), logits(theirs))
    assert reported
    with pytest.raises(UsageError, match="nothing"):
        integration.load(NAME, store=store, read="nothing")  # type: ignore[arg-type]


def test_settings_reach_mlx_lm(store: LocalStore, tmp_path: Path) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), NAME, store=store)
    model, tokenizer = integration.load(
        NAME,
        store=store,
        lazy=True,
        model_config={"rope_theta": 1e4},
        tokenizer_config={"eos_token": "w9"},
    )
    assert model.args.rope_theta == 1e4
    assert 9 in tokenizer.eos_token_ids


@pytest.mark.parametrize("lazy", [False, True])
def test_reading_keeps_no_file_open(lazy: bool, store: LocalStore, tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**(TEXT | {"num_hidden_layers": 16}))
    )
    model.save_pretrained(tmp_path / "source")
    blobstore.create(tmp_path / "source", NAME, store=store)
    assert len(store.resolve(NAME).blobs) > 140
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 24, hard))
    try:
        ours, _ = integration.load_model(NAME, store=store, lazy=lazy)
        # Threads of other tests may open files too.
        links = [Path("/dev/fd", name) for name in os.listdir("/dev/fd")]
        opened = [str(link.readlink()) for link in links if link.is_symlink()]
        found = logits(ours)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [name for name in opened if name.startswith(str(store.root))] == []
    theirs, _ = mlx_utils.load_model(readable(tmp_path / "source"))
    assert mx.array_equal(found, logits(theirs))


def test_missing_and_unexpected_tensors_are_listed_in_full(
    store: LocalStore, tmp_path: Path
) -> None:
    source = saved("llama", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    norms = [f"model.layers.{number}.input_layernorm.weight" for number in range(2)]
    tensors["model.extra.weight"] = tensors.pop(norms[0])
    tensors["extra"] = tensors.pop(norms[1])
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    save_file(tensors, source / "model.safetensors")
    blobstore.create(source, NAME, store=store)

    with pytest.raises(BlobstoreError) as caught:
        integration.load(NAME, store=store)

    assert str(caught.value) == (
        "llama of mlx-lm cannot take the tensors of m:latest: "
        f"2 tensors missing: '{norms[0]}', '{norms[1]}'; "
        "2 tensors unexpected: 'extra', 'model.extra.weight'; "
        "1 tensor of another shape: 'model.norm.weight' [64] where [128] is expected"
    )


def test_a_class_that_inspects_values_sees_those_of_the_store(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = pytest.importorskip("mlx_lm.models.llama")
    own = llama.Model.sanitize

    def sanitize(model: Any, weights: dict[str, Any]) -> dict[str, Any]:
        if not mx.all(weights["model.norm.weight"] == 1).item():
            raise ValueError("these are no weights of mine")
        return dict(own(model, weights))

    monkeypatch.setattr(llama.Model, "sanitize", sanitize)
    source = saved("llama", tmp_path / "source")
    blobstore.create(source, NAME, store=store)
    ours, _ = integration.load_model(NAME, store=store)
    assert mx.array_equal(logits(ours), logits(mlx_utils.load_model(readable(source))[0]))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_hidden_layers": None}, "cannot build m:latest: TypeError"),
        ({"model_type": "nothing"}, "cannot build m:latest: .*nothing not supported"),
        ({"model_type": None}, "cannot build m:latest"),
        ({"model_file": "own.py"}, "requires code of its own, 'own.py', which is not run"),
    ],
)
def test_a_config_that_cannot_be_built_is_one_line(
    keys: dict[str, Any], message: str, store: LocalStore, tmp_path: Path
) -> None:
    source = changed(saved("llama", tmp_path / "source"), **keys)
    (source / "own.py").write_text("raise SystemExit")
    blobstore.create(source, NAME, store=store)
    with pytest.raises(BlobstoreError, match=message) as caught:
        integration.load_model(NAME, store=store)
    assert len(str(caught.value).splitlines()) == 1


def test_a_key_that_mlx_lm_needs_is_named(store: LocalStore, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["hidden_size"]
    (source / "config.json").write_text(json.dumps(config))
    blobstore.create(source, NAME, store=store)
    with pytest.raises(BlobstoreError, match="cannot build m:latest: .*'hidden_size'"):
        integration.load_model(NAME, store=store)


def test_a_type_that_mlx_lacks_is_named(store: LocalStore, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    names = list(load_file(source / "model.safetensors"))
    parts = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (source / "model.safetensors").rename(source / parts[0])
    (source / parts[1]).write_bytes(blob(("extra", "F6_E2M3", (4, 4), bytes(12))))
    weight_map = dict.fromkeys(names, parts[0]) | {"extra": parts[1]}
    index = {"metadata": {}, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    blobstore.create(source, NAME, store=store)
    with pytest.raises(UnsupportedDType, match="'extra'.*F6_E2M3"):
        integration.load_model(NAME, store=store)


def test_reports_a_model_without_a_tokenizer(store: LocalStore, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    for file in source.glob("tokenizer*"):
        file.unlink()
    blobstore.create(source, NAME, store=store)
    with pytest.raises(BlobstoreError, match="cannot make a tokenizer of the files of m:latest"):
        integration.load(NAME, store=store)


def test_tensors_of_other_components_are_left_out(store: LocalStore, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    (source / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "2_Dense"}]))
    write_folder(source / "2_Dense", {"linear.weight": np.ones((2, 2), np.float32)})
    blobstore.create(source, NAME, store=store)
    with blobstore.open(NAME, store=store) as stored:
        assert "2_Dense/linear.weight" in stored
    ours, _ = integration.load_model(NAME, store=store)
    theirs, _ = mlx_utils.load_model(readable(source))
    assert mx.array_equal(logits(ours), logits(theirs))


def largest(store: LocalStore) -> tuple[str, Path]:
    layer = max(store.resolve(NAME).layers, key=lambda item: item.size)
    return layer.name, Path(store.blob_path(layer.digest))


@pytest.mark.parametrize("cut", [True, False])
def test_a_damaged_blob_is_reported(cut: bool, store: LocalStore, tmp_path: Path) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), NAME, store=store)
    layer, path = largest(store)
    (damage.truncate if cut else damage.flip)(path)
    with pytest.raises(BlobDamaged, match=f"m:latest.*'{layer}'"):
        integration.load(NAME, store=store)


def test_a_missing_model_is_not_found(store: LocalStore) -> None:
    with pytest.raises(ModelNotFound, match="'m:latest'"):
        integration.load(NAME, store=store)


# The server.


@pytest.fixture
def _restored() -> Iterator[None]:
    """Restore the parts of the process that the server changes."""
    before, arguments = dict(vars(mlx_server)), sys.argv
    handler, level = signal.getsignal(signal.SIGTERM), logging.getLogger().level
    yield
    vars(mlx_server).update(before)
    sys.argv = arguments
    signal.signal(signal.SIGTERM, handler)
    logging.getLogger().setLevel(level)


@pytest.fixture
def _no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def listen(*_: Any) -> None:
        pytest.fail("a port was opened")

    monkeypatch.setattr(provider, "_listen", listen)


def run_program(*arguments: str) -> int:
    try:
        return int(program.main(arguments))
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.usefixtures("_restored", "_no_port")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["other"], 3, "blobstore: error: no model 'other:latest' in the store"),
        (["m"], 4, "blobstore: error: m:latest: layer "),
        (["m", "--port", "65536"], 2, "blobstore: error: port 65536 is not one of 0 to 65535"),
        (["m", "--draft-model", "x"], 2, "blobstore: error: adapters, draft models"),
        (["m", "--adapter-path", "x"], 2, "blobstore: error: adapters, draft models"),
        (["m", "--model", "x"], 2, "blobstore: error: the model is the first argument"),
        (["a b"], 2, "blobstore: error: not a model name"),
        (["m", "--no-such-option"], 2, "unrecognized arguments: --no-such-option"),
    ],
)
def test_the_program_reports_in_one_line_why_it_does_not_start(
    arguments: list[str],
    code: int,
    message: str,
    store: LocalStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), NAME, store=store)
    damage.truncate(largest(store)[1])
    capsys.readouterr()
    found = run_program(*arguments, "--store", str(store.root))
    error = capsys.readouterr().err
    assert found == code
    assert message in error
    assert "Traceback" not in error
    if message.startswith("blobstore"):
        assert len(error.splitlines()) == 1


@pytest.mark.usefixtures("_restored")
def test_the_program_reports_that_a_port_is_taken(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), NAME, store=store)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        capsys.readouterr()
        code = run_program("m", "--store", str(store.root), "--port", str(port))
    assert code == 1
    assert f"error: cannot listen at '127.0.0.1', port {port}: " in capsys.readouterr().err


def asked(url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Send a request, and return the status and the decoded response."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@contextlib.contextmanager
def served(store: LocalStore, log: Path, *options: str) -> Iterator[str]:
    """Serve the model ``m``, and give the server's address once it responds."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "blobstore.integrations.mlx_lm.server", "m"]
    command += ["--store", str(store.root), "--port", str(port), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            # Neither the Hub's cache nor the Hub, of which this needs nothing.
            env={**os.environ, "HF_HOME": str(log.parent / "none"), "HF_HUB_OFFLINE": "1"},
            cwd=ROOT,
        )
    try:
        while True:
            with contextlib.suppress(URLError):
                assert asked(f"{address}/health") == (200, {"status": "ok"})
                break
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        code = process.wait(timeout=60)
    assert code == 128 + signal.SIGTERM, log.read_text()


def test_the_server_answers_from_the_store(store: LocalStore, tmp_path: Path) -> None:
    source = saved("qwen3-moe", tmp_path / "source")
    blobstore.create(source, NAME, store=store, quantize=QuantizeOptions("int4", policy="uniform"))
    model, tokenizer = integration.load(NAME, store=store)
    expected = mlx_lm.generate(model, tokenizer, prompt="w5 w6 w7", max_tokens=6)
    question = {"prompt": "w5 w6 w7", "max_tokens": 6, "temperature": 0}
    entry = {"id": "m:latest", "object": "model"}

    with served(store, tmp_path / "log", "--read", "pread") as address:
        status, models = asked(f"{address}/v1/models")
        assert status == 200
        assert [entry] == [{key: item[key] for key in ("id", "object")} for item in models["data"]]
        assert asked(f"{address}/v1/models/m")[1]["data"] == models["data"]
        assert asked(f"{address}/v1/models/other")[1]["data"] == []
        for name in ({}, {"model": "m"}, {"model": "m:latest"}, {"model": "default_model"}):
            status, answer = asked(f"{address}/v1/completions", question | name)
            assert status == 200, answer
            assert answer["choices"][0]["text"].split() == expected.split() != []
        status, answer = asked(f"{address}/v1/completions", question | {"model": "org/other"})
        assert status == 404
        assert answer == {"error": "this server serves only m:latest, not 'org/other'"}
        status, answer = asked(f"{address}/v1/completions", question | {"model": "no name"})
        assert status == 404
        assert "not 'no name'" in answer["error"]
        status, answer = asked(f"{address}/v1/completions", question | {"adapters": str(tmp_path)})
        assert (status, "neither adapters" in answer["error"]) == (404, True)

    log = (tmp_path / "log").read_text()
    assert f"serving m:latest at {address}" in log
    assert "Traceback" not in log
