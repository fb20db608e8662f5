"""Each integration reports a faulty model in one line, before it loads any weights."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import blobstore
from blobstore.errors import BlobDamaged, BlobMissing, BlobstoreError, UnsupportedDType
from blobstore.manifests.reference import Reference
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from tests.real.tiny import make
from tests.support.clients import run_python
from tests.support.models import blob
from tests.support.options import grouped

ROOT = Path(__file__).parents[2]
NAME = Reference.parse("m")
NORM = "model.norm.weight"


@pytest.fixture(params=["transformers", "mlx_lm"])
def library(request: pytest.FixtureRequest) -> str:
    if request.param == "mlx_lm":
        pytest.importorskip("mlx_lm", reason="mlx-lm does not run on this machine")
    return str(request.param)


def load(library: str, name: str, store: LocalStore, **opening: Any) -> Any:
    module = importlib.import_module(f"blobstore.integrations.{library}")
    if library == "mlx_lm":
        return module.load_model(name, store=store, **opening)[0]
    return module.from_store(name, store=store, **opening)


def refused(library: str, store: LocalStore, **opening: Any) -> BlobstoreError:
    """Return the error of one line that an integration raises for the model ``m``."""
    with pytest.raises(BlobstoreError) as caught:
        load(library, "m", store, **opening)
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


def saved(kind: str, folder: Path) -> Path:
    make(kind, torch.bfloat16).save_pretrained(folder)
    return folder


# Damaged blobs.


def blob_of(store: LocalStore, name: str) -> Path:
    layers = store.resolve(NAME).layers
    path = Path(store.blob_path(next(layer for layer in layers if layer.name == name).digest))
    path.chmod(0o644)
    return path


@pytest.mark.parametrize("verify", ["size", "header", "digest"])
def test_a_blob_of_another_size_is_named(
    library: str, verify: str, store: LocalStore, tmp_path: Path
) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), NAME, store=store)
    path = blob_of(store, NORM)
    os.truncate(path, path.stat().st_size - 1)
    error = refused(library, store, verify=verify)
    assert isinstance(error, BlobDamaged)
    assert f"m:latest: layer '{NORM}'" in str(error)


@pytest.mark.parametrize("place", [0, 7, 8, 40])
def test_a_blob_with_a_changed_header_is_named(
    place: int, library: str, store: LocalStore, tmp_path: Path
) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), NAME, store=store)
    path = flip_bit_of_norm(store, place)
    for verify in ("header", "digest"):
        error = refused(library, store, verify=verify)
        assert isinstance(error, BlobDamaged)
        assert "m:latest" in str(error)
        assert NORM in str(error) or path.name in str(error)


@pytest.mark.parametrize("place", [0, 7, 8])
def test_a_broken_header_is_named_without_an_index(
    place: int, library: str, store: LocalStore, tmp_path: Path
) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), NAME, store=store)
    flip_bit_of_norm(store, place)
    shutil.rmtree(store.folder("headers"))
    error = refused(library, store)
    assert isinstance(error, BlobDamaged)
    assert f"m:latest: layer '{NORM}': blob " in str(error)


@pytest.mark.parametrize("read", ["auto", "pread"])
def test_a_flipped_bit_is_found_by_default(
    read: str, library: str, store: LocalStore, tmp_path: Path
) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), NAME, store=store)
    flip_bit_of_norm(store, -1)
    error = refused(library, store, read=read)
    assert isinstance(error, BlobDamaged)
    assert str(error).startswith(f"m:latest: layer '{NORM}': blob ")
    load(library, "m", store, read=read, verify="size")


@pytest.mark.parametrize("server", ["mlx_lm", "vllm"])
def test_a_server_whose_model_has_a_flipped_bit_does_not_start(
    server: str, store: LocalStore, tmp_path: Path
) -> None:
    if server == "mlx_lm":  # that of vLLM checks the model before it imports vLLM
        pytest.importorskip("mlx_lm", reason="mlx-lm does not run on this machine")
    blobstore.create(saved("llama", tmp_path / "source"), NAME, store=store)
    flip_bit_of_norm(store, -1)
    command = [sys.executable, "-m", f"blobstore.integrations.{server}.server", "m"]
    ended = subprocess.run(
        [*command, "--store", store.root], capture_output=True, text=True, check=False
    )
    assert ended.returncode == BlobDamaged.exit_code
    assert f"layer '{NORM}'" in ended.stderr


def test_the_environment_says_how_closely_to_check(
    library: str, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), NAME, store=store)
    flip_bit_of_norm(store, -1)
    monkeypatch.setenv("BLOBSTORE_VERIFY", "size")
    load(library, "m", store)
    refused(library, store, verify="digest")
    monkeypatch.setenv("BLOBSTORE_VERIFY", "all")
    assert "verify must be none, size, header, digest or rehash" in str(refused(library, store))


def test_a_missing_blob_is_named(library: str, store: LocalStore, tmp_path: Path) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), NAME, store=store)
    blob_of(store, NORM).unlink()
    error = refused(library, store)
    assert isinstance(error, BlobMissing)
    assert f"m:latest: layer '{NORM}'" in str(error)


# Types that cannot be those of parameters


def flip_bit_of_norm(store: LocalStore, place: int) -> Path:
    path = blob_of(store, NORM)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    return path


def with_norm(folder: Path, dtype: str, shape: tuple[int, ...], size: int) -> Path:
    """Replace a norm weight of a saved model by a tensor of another type and shape."""
    tensors = load_file(folder / "model.safetensors")
    del tensors[NORM]
    parts = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    save_file(tensors, folder / parts[0], metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / parts[1]).write_bytes(blob((NORM, dtype, shape, bytes(size))))
    weight_map = dict.fromkeys(tensors, parts[0]) | {NORM: parts[1]}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("dtype", "size", "named"),
    [
        ("C64", 512, "complex64"),
        ("U64", 512, "uint64"),
        ("I64", 512, "int64"),
        ("BOOL", 64, "bool"),
        ("U8", 64, "uint8"),
    ],
)
def test_a_weight_that_cannot_be_a_parameter_is_named(
    dtype: str, size: int, named: str, library: str, store: LocalStore, tmp_path: Path
) -> None:
    source = with_norm(saved("llama", tmp_path / "source"), dtype, (64,), size)
    blobstore.create(source, NAME, store=store)
    message = str(refused(library, store))
    assert "m:latest: 1 tensor of another type: " in message
    assert f"'{NORM}' {named} where " in message


@pytest.mark.parametrize(("dtype", "size"), [("F6_E2M3", 48), ("F6_E3M2", 48)])
def test_a_type_that_a_library_lacks_is_named(
    dtype: str, size: int, library: str, store: LocalStore, tmp_path: Path
) -> None:
    source = with_norm(saved("llama", tmp_path / "source"), dtype, (64,), size)
    blobstore.create(source, NAME, store=store)
    error = refused(library, store)
    assert isinstance(error, UnsupportedDType)
    assert NORM in str(error)
    assert dtype in str(error)


# What takes no memory.


def without_norm(folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    del tensors[NORM]
    tensors["model.extra"] = torch.ones(2, 2)
    tensors["model.layers.0.input_layernorm.weight"] = torch.ones(32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("quant_type", [None, "int4", "mxfp8"])
@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_mlx_lm_receives_no_array_of_a_model_that_does_not_fit(
    kind: str,
    quant_type: str | None,
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm does not run on this machine")
    from blobstore.integrations.mlx_lm import weights as mlx_weights

    source = without_norm(saved(kind, tmp_path / "source"))
    options: Any = {"quantize": quant_type, "policy": "uniform"} if quant_type else {}
    blobstore.create(source, NAME, store=store, **grouped(options))
    monkeypatch.setattr(mlx_weights, "copied", lambda *_: pytest.fail("a tensor was copied"))
    message = str(refused("mlx_lm", store))
    assert message == (
        f"{kind.replace('-', '_')} of mlx-lm cannot take the tensors of m:latest: "
        f"1 tensor missing: '{NORM}'; 1 tensor unexpected: 'model.extra'; 1 tensor of another "
        "shape: 'model.layers.0.input_layernorm.weight' [32] where [64] is expected"
    )


def test_mlx_lm_receives_no_array_of_quantized_layers_that_do_not_fit(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm does not run on this machine")
    from blobstore.integrations.mlx_lm import weights as mlx_weights

    source = saved("llama", tmp_path / "source")
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 96}))
    blobstore.create(source, NAME, store=store, quantize=QuantizeOptions("int8", policy="uniform"))
    monkeypatch.setattr(mlx_weights, "copied", lambda *_: pytest.fail("a tensor was copied"))
    message = str(refused("mlx_lm", store))
    assert "4 tensors of another shape: 'model.layers.0.mlp.gate_proj.weight' [64, 16]" in message
    assert "where [96, 16] is expected" in message


ABSURD: dict[str, dict[str, Any]] = {
    "hidden": {"hidden_size": 10**6},
    "huge": {"hidden_size": 10**12},
    "vocabulary": {"vocab_size": 10**9},
    "projections": {"intermediate_size": 10**9},
    "layers": {"num_hidden_layers": 10**7},
    "infinite": {"num_hidden_layers": 10**18},
    "negative": {"hidden_size": -64},
    "none": {"num_attention_heads": 0},
}
ABSURD_EXPERTS = {"projections": {"moe_intermediate_size": 10**8}}
PROGRAM = """
import json, resource, sys
from blobstore.errors import BlobstoreError
from blobstore.store.local import LocalStore
from tests.real.test_integration_faults import load
library, root, *names = sys.argv[1:]
store = LocalStore(root)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
found = {}
for name in names:
    before = peak()
    try:
        load(library, name, store)
        found[name] = "it was built", 0
    except BlobstoreError as error:
        found[name] = str(error), peak() - before
print(json.dumps(found))
"""


def test_absurd_numbers_in_a_config_take_no_memory(
    library: str, store: LocalStore, tmp_path: Path
) -> None:
    names = []
    for kind in ("llama", "qwen3-moe"):
        source = saved(kind, tmp_path / kind)
        path = source / "config.json"
        config = json.loads(path.read_text())
        absurd = ABSURD | (ABSURD_EXPERTS if kind == "qwen3-moe" else {})
        for quantize in (None, "int8"):
            for what, keys in {"whole": {}, **absurd}.items():
                names.append(name := f"{kind}-{quantize}-{what}".lower())
                path.write_text(json.dumps(config | keys))
                blobstore.create(source, name, store=store, quantize=QuantizeOptions(quantize))

    program = [sys.executable, "-c", PROGRAM, library, str(store.root), *names]
    done = run_python(program, os.environ)

    assert done.code == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == names
    for name, (message, taken) in found.items():
        if name.endswith("whole"):
            assert message == "it was built"
            continue
        assert f"{name}:latest" in message
        assert len(message.splitlines()) == 1
        assert taken < 64 << 20, (name, message, taken)
        if name.endswith("layers"):
            assert message.endswith("num_hidden_layers is 10000000")
