from __future__ import annotations

import errno
import fcntl
import fnmatch
import gc
import json
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import blobstore
from blobstore.core.digest import Digest
from blobstore.core.system import map_counts
from blobstore.core.tensor import DType
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    FileNotFound,
    InvalidManifest,
    InvalidReference,
    ModelNotFound,
    TensorNotFound,
    UnsupportedDType,
    UsageError,
)
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.reference import Reference
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.operations.open import Verify
from blobstore.planning.grouping import ExpertForm
from blobstore.planning.plan import QuantizeOptions
from blobstore.quantization import quantize_numpy as reference
from blobstore.quantization.formats import FORMATS
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support import sandbox
from tests.support.damage import blob_path, flip, forge_index, index_file
from tests.support.descriptors import open_files
from tests.support.maps import use_up_maps
from tests.support.models import (
    add_blobs,
    blob,
    dense_tensors,
    moe_tensors,
    quantizable_tensors,
    replace_file,
    with_layers,
    write_folder,
)

NAME = Reference.parse("m")
TENSORS = dense_tensors() | moe_tensors()


@pytest.fixture
def store(store: LocalStore, tmp_path: Path) -> LocalStore:
    blobstore.create(write_folder(tmp_path / "model", TENSORS), "m", store=store)
    return store


@pytest.fixture(params=["index", "no index"])
def either(request: pytest.FixtureRequest, store: LocalStore) -> LocalStore:
    if request.param == "no index":
        drop_index(store)
    return store


def drop_index(store: LocalStore) -> None:
    for path in store.folder("headers").iterdir():
        path.unlink()


def contents(store: LocalStore) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in store.folder("blobs").iterdir()}


# Tensors


def test_numpy_returns_every_tensor(either: LocalStore) -> None:
    with blobstore.open("m", store=either) as model:
        assert set(model) == set(TENSORS)
        assert len(model) == len(TENSORS)
        assert repr(model) == f"<Model m:latest: {len(TENSORS)} tensors>"
        for name, expected in TENSORS.items():
            assert model[name].dtype == expected.dtype
            np.testing.assert_array_equal(model[name], expected, strict=True)
            assert model.specs[name].shape == expected.shape
            assert bytes(model.view(name).data) == expected.tobytes()


def test_torch_returns_every_tensor(either: LocalStore) -> None:
    with blobstore.open("m", store=either, framework="torch") as model:
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, torch.from_numpy(TENSORS[name].copy()))


def test_mlx_returns_every_tensor(either: LocalStore) -> None:
    pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
    with blobstore.open("m", store=either, framework="mlx") as model:
        for name, expected in TENSORS.items():
            assert model[name].shape == expected.shape
            if expected.dtype != np.float64:  # numpy cannot ask MLX for doubles
                np.testing.assert_array_equal(np.array(model[name]), expected)


def test_experts_can_be_stacked_or_packed(tmp_path: Path, store: LocalStore) -> None:
    blobstore.create(tmp_path / "model", "stacked", store=store, experts="stacked")
    layer = "model.layers.0.mlp"
    with blobstore.open("stacked", store=store) as model:
        stack = model[f"{layer}.experts.up_proj.weight"]
        each = [TENSORS[f"{layer}.experts.{number}.up_proj.weight"] for number in range(12)]
        np.testing.assert_array_equal(stack, np.stack(each))
        np.testing.assert_array_equal(
            model[f"{layer}.shared_experts.up_proj.weight"],
            TENSORS[f"{layer}.shared_experts.up_proj.weight"],
        )


def test_half_and_eighth_precision_are_numpy_arrays(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    add_blobs(
        store,
        "m",
        {
            "b": blob(("b", "BF16", (2,), b"\x80\x3f\x00\x40")),
            "f": blob(("f", "F8_E4M3", (2,), b"\x38\x40")),
            "p": blob(("p", "F4", (2, 2), b"\x12\x34")),
        },
    )
    with blobstore.open("m", store=store) as model:
        assert model["b"].dtype == ml_dtypes.bfloat16
        assert model["b"].astype(np.float32).tolist() == [1, 2]
        assert model["f"].astype(np.float32).tolist() == [1, 2]
        with pytest.raises(UnsupportedDType, match="tensor 'p': numpy has no packed F4"):
            model["p"]
        assert bytes(model.view("p").data) == b"\x12\x34"
        assert model.specs["p"].dtype is DType.F4
    with blobstore.open("m", store=store, framework="torch") as model:
        assert model["p"].dtype is torch.float4_e2m1fn_x2


def test_tensors_are_chosen_by_prefix(store: LocalStore) -> None:
    with blobstore.open("m", store=store) as model:
        found = model.tensors("model.layers.0.mlp.experts.1")
        assert set(found) == {name for name in TENSORS if ".experts.1" in name}
        assert len(found) == 9  # 1, 10 and 11: a prefix of names, not of parts
        assert model.tensors("none") == {}
        assert set(model.tensors()) == set(model.state_dict()) == set(TENSORS)


def test_mlx_s_own_quantized_blobs_are_read(tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
    with mx.stream(mx.cpu):
        mx.random.seed(1)
        weight = mx.random.normal((64, 64)).astype(mx.bfloat16)
        packed, scale, bias = mx.quantize(weight, group_size=32, bits=4)
        arrays = {"w.weight": packed, "w.weight.scale": scale, "w.weight.bias": bias}
        mx.save_safetensors(
            str(tmp_path / "q.safetensors"), arrays, {"quant_type": "int4", "group_size": "32"}
        )
        mx.save_safetensors(str(tmp_path / "p.safetensors"), {"p": scale[:1, :1]})
    quantized = (tmp_path / "q.safetensors").read_bytes()
    plain = (tmp_path / "p.safetensors").read_bytes()
    assert b'"__metadata__":null' in plain
    assert int.from_bytes(quantized[:8], "little") % 4  # so that the words are not aligned
    store = LocalStore(tmp_path / "store")
    add_blobs(store, "m", {"w.weight": quantized, "p": plain})
    for framework in ("numpy", "torch", "mlx"):
        with blobstore.open("m", store=store, framework=framework) as model:  # type: ignore[arg-type]
            assert set(model) == {"w.weight", "w.weight_scale", "w.weight_qbias", "p"}
            for name, array in zip(
                ("weight", "weight_scale", "weight_qbias"), (packed, scale, bias), strict=True
            ):
                with mx.stream(mx.cpu):
                    bits = bytes(memoryview(np.array(array.view(mx.uint8))))  # type: ignore[arg-type]
                assert bytes(model.view(f"w.{name}").data) == bits
                assert tuple(model[f"w.{name}"].shape) == array.shape
    with blobstore.open("m", store=store) as model:
        np.testing.assert_array_equal(model["w.weight"], np.array(packed))
        assert model["w.weight_scale"].dtype == ml_dtypes.bfloat16


def test_a_constant_key_is_the_layer_s_tensor(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    same = blob(("data", "U8", (3,), b"abc"))
    add_blobs(store, "m", {"x": same, "y": same, "z": blob(("data", "U8", (1,), b"z"))})
    for _ in ("no index", "index"):
        with blobstore.open("m", store=store) as model:
            assert {name: bytes(array) for name, array in model.items()} == {
                "x": b"abc",
                "y": b"abc",
                "z": b"z",
            }


@pytest.mark.parametrize("framework", ["numpy", "mlx"])
def test_a_shape_that_a_framework_cannot_hold_is_a_clear_error(
    tmp_path: Path, framework: Any
) -> None:
    if framework == "mlx":
        pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
    store = LocalStore(tmp_path)
    add_blobs(store, "m", {"x": blob(("x", "U8", (1,) * 65, b"x"))})
    with blobstore.open("m", store=store, framework=framework) as model:
        with pytest.raises(UnsupportedDType, match="tensor 'x': .* cannot hold its shape"):
            model["x"]
        assert bytes(model.view("x").data) == b"x"


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("shape", [(2**63, 0), (0, 2**64 - 1), (0, 2**63, 2)])
def test_an_empty_tensor_of_a_huge_shape_is_imported_and_not_loaded_as_by_the_reference(
    tmp_path: Path, framework: Any, shape: tuple[int, ...]
) -> None:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    header = json.dumps({"x": entry}).encode()
    source = tmp_path / "x.safetensors"
    source.write_bytes(len(header).to_bytes(8, "little") + header)
    with safe_open(source, framework) as theirs:
        assert theirs.keys() == ["x"]
        with pytest.raises((ValueError, TypeError)):
            theirs.get_tensor("x")

    store = LocalStore(tmp_path / "store")
    blobstore.create(source, "m", store=store)
    blobstore.export("m", tmp_path / "out", store=store)
    assert (tmp_path / "out" / source.name).read_bytes() == source.read_bytes()
    with blobstore.open("m", store=store, framework=framework) as model:
        shown = re.escape(str(list(shape)))
        with pytest.raises(
            UnsupportedDType, match=f"'x': {framework} cannot hold its shape {shown}"
        ):
            model["x"]
        assert model.view("x").spec.shape == shape


# Memory


def test_numpy_arrays_are_read_only_views(store: LocalStore) -> None:
    with blobstore.open("m", store=store) as model:
        name = "position_ids"
        assert np.shares_memory(model[name], model[name])
        with pytest.raises(ValueError, match="read-only"):
            model[name][0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            model[name].flags.writeable = True
        assert model.view(name).data.readonly


def test_writes_by_torch_never_reach_the_store(either: LocalStore) -> None:
    before = contents(either)
    with blobstore.open("m", store=either, framework="torch") as model:
        for tensor in model.state_dict().values():
            tensor.fill_(1)
        assert model["position_ids"].tolist() == [1] * 5  # the model's own copy
        assert model.view("position_ids").data.readonly
        with blobstore.open("m", store=either, framework="torch") as other:
            assert other["position_ids"].tolist() == [0, 1, 2, 3, 4]
    assert contents(either) == before
    with blobstore.open("m", store=either, verify="digest") as model:
        assert model["position_ids"].tolist() == [0, 1, 2, 3, 4]


def test_a_forked_process_reads_a_model_although_a_thread_of_its_parent_was_reading(
    store: LocalStore,
) -> None:
    with blobstore.open("m", store=store, verify="none") as model:
        (name,) = (name for name in model if name.endswith("embed_tokens.weight"))
        with model._memory._lock:  # held by a thread that the child does not have
            thread = ThreadPoolExecutor(1)
            outcome = thread.submit(sandbox.call, lambda: model[name].tobytes().hex())
            assert outcome.result() == TENSORS[name].tobytes().hex()


def test_a_closed_model_returns_no_tensors(store: LocalStore) -> None:
    model = blobstore.open("m", store=store)
    model.close()
    model.close()
    uses: list[Callable[[], object]] = [
        lambda: model["scalar"],
        lambda: model.view("scalar"),
        model.state_dict,
    ]
    for use in uses:
        with pytest.raises(BlobstoreError, match="model m:latest is closed"):
            use()


def test_no_file_stays_open(either: LocalStore) -> None:
    with blobstore.open("m", store=either) as model:
        assert open_files(either.root) == []
        model.state_dict()
        assert open_files(either.root) == []


def test_threads_share_one_memory(store: LocalStore) -> None:
    with blobstore.open("m", store=store, framework="torch") as model:
        start = threading.Barrier(8)

        def look(_: int) -> torch.Tensor:
            start.wait(30)
            tensor: torch.Tensor = model["position_ids"]
            return tensor

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(look, range(8)))
        found[0][0] = 99
        assert [tensor[0].item() for tensor in found] == [99] * 8


# Lookups


def test_an_unknown_tensor_is_a_key_error(store: LocalStore) -> None:
    with blobstore.open("m", store=store) as model:
        with pytest.raises(KeyError) as caught:
            model["no\nne"]
        assert isinstance(caught.value, TensorNotFound)
        assert str(caught.value) == "model m:latest has no tensor 'no\\nne'"
        assert model.get("none") is None
        assert "none" not in model
        assert "scalar" in model
        with pytest.raises(TensorNotFound):
            model.view("none")


@pytest.mark.parametrize("read", ["get_tensor", "get_slice", "view", "dequantized"])
def test_a_mistyped_tensor_gets_a_suggestion(store: LocalStore, read: str) -> None:
    name = min(TENSORS, key=len)
    with blobstore.open("m", store=store) as model:
        with pytest.raises(TensorNotFound, match=f"; did you mean '{name}'"):
            getattr(model, read)(f"{name[:-1]}z{name[-1]}")
        with pytest.raises(TensorNotFound, match="no tensor '5'$"):
            model[5]  # type: ignore[index]


def test_a_pattern_is_no_name_of_a_tensor_and_a_hint_says_what_finds_those_that_match(
    store: LocalStore,
) -> None:
    name = min(TENSORS, key=len)
    with blobstore.open("m", store=store) as model:
        with pytest.raises(TensorNotFound, match="it is a pattern; ") as caught:
            model[f"*{name[1:]}"]
        call = str(caught.value).partition("; ")[2].partition("; ")[2].partition(" returns")[0]
        assert name in eval(call, {"fnmatch": fnmatch, "model": model})
        for text in ("*zzz*", "[" * 2000):
            with pytest.raises(TensorNotFound, match=r"has no tensor '[*\[z…]*'$"):
                model[text]


def test_offers_what_safetensors_offers(tmp_path: Path) -> None:
    store, source = LocalStore(tmp_path / "store"), tmp_path / "a.safetensors"
    metadata = {"format": "pt", "title": "x"}
    save_file({"a": torch.arange(6.0).reshape(2, 3)}, source, metadata)
    blobstore.create(source, "m", store=store)
    for framework in ("pt", "np"):
        with (
            safe_open(source, framework=framework) as expected,
            blobstore.open("m", store=store, framework=framework) as model,  # type: ignore[call-overload]
        ):
            assert [*model.keys()] == [*expected.keys()]
            assert type(model.get_tensor("a")) is type(expected.get_tensor("a"))
            assert (model.get_tensor("a") == expected.get_tensor("a")).all()
            assert model.metadata() == expected.metadata() == metadata
            assert model.get_slice("a").get_shape() == expected.get_slice("a").get_shape()


def test_metadata_is_that_of_the_first_file_that_has_it(tmp_path: Path) -> None:
    store, source = LocalStore(tmp_path / "store"), tmp_path / "source"
    source.mkdir()
    for number, metadata in enumerate([None, {"a": "1"}, {"a": "2", "b": "3"}], 1):
        name = f"model-{number:05}-of-00003.safetensors"
        save_file({f"t{number}": torch.zeros(1)}, source / name, metadata)
    blobstore.create(source, "m", store=store)
    with blobstore.open("m", store=store) as model:
        assert model.metadata() == {"a": "1", "b": "3"}
    (source / "model-00002-of-00003.safetensors").unlink()
    torch.save({"a": torch.zeros(1)}, source / "x.pt")
    blobstore.create(source / "x.pt", "other", store=store)
    with blobstore.open("other", store=store) as model:
        assert model.metadata() is None


def test_describes_itself(store: LocalStore) -> None:
    with blobstore.open("m", store=store, framework="pt") as model:
        assert (model.framework, model.device, model.architecture) == ("torch", "cpu", "")
        assert model.parameters == sum(array.size for array in TENSORS.values())
        assert model.nbytes == sum(array.nbytes for array in TENSORS.values())
        assert repr(model) == f"<Model m:latest: {len(TENSORS)} tensors>"
        assert not model.is_closed
    assert repr(model) == f"<Model m:latest: {len(TENSORS)} tensors, closed>"
    assert model.keys() == TENSORS.keys()
    assert str(min(TENSORS)) in repr(model.keys())


def test_models_are_compared_without_their_tensors(store: LocalStore) -> None:
    with blobstore.open("m", store=store) as model, blobstore.open("m", store=store) as other:
        blob_path(store, "scalar").unlink()
        assert len({model, other, model}) == 2
        assert model != other


def test_a_mistyped_model_gets_a_suggestion(store: LocalStore, tmp_path: Path) -> None:
    blobstore.copy("m", "team/tiny-llama:v1", store=store)
    for name in ("tiny-lama", "team/tiny-llama", "team/tinyllama:v1"):
        with pytest.raises(
            ModelNotFound, match="; did you mean 'team/tiny-llama:v1'\\?$"
        ) as caught:
            blobstore.show(name, store=store)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(ModelNotFound, match="no model 'other:latest' in the store '[^']*'$"):
        blobstore.show("other", store=store)
    blobstore.pack("team/tiny-llama:v1", tmp_path / "x.bsar", store=store)
    with pytest.raises(ModelNotFound, match="in the archive .*; did you mean 'team/tiny-llama:v1'"):
        blobstore.unpack(tmp_path / "x.bsar", "tiny-lama", store=store)


def test_is_a_small_table_in_a_notebook(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "<b>store")
    config = json.dumps({"architectures": ["<script>\u202e"]}).encode()
    source = write_folder(tmp_path / "x", {"a": np.zeros(1_500_000)}, files={"config.json": config})
    blobstore.create(source, "m", store=store)
    with blobstore.open("m", store=store) as model:
        table = model._repr_html_()
    assert "<script>" not in table
    assert "<b>" not in table
    rows = re.findall("<tr><th>(.*?)</th><td>(.*?)</td></tr>", table)
    assert rows[:-2] == [
        ("model", "m:latest"),
        ("architecture", "&lt;script&gt;\\u202e"),
        ("tensors", "1"),
        ("parameters", "1,500,000"),
        ("size", "12.0 MB"),
        ("framework", "numpy on cpu"),
    ]
    assert rows[-1] == ("state", "open")
    blob_path(store, "config.json").unlink()
    assert "architecture" not in model._repr_html_()
    assert ("state", "closed") in re.findall("<th>(.*?)</th><td>(.*?)</td>", model._repr_html_())


def test_reads_the_config_and_files(store: LocalStore) -> None:
    with blobstore.open("m", store=store) as model:
        assert model.config == {"model_type": "tiny"}
        assert list(model.files) == ["config.json"]
        assert model.read_file("config.json") == b'{"model_type": "tiny"}\n'
        with pytest.raises(FileNotFound, match="has no file '../x'$"):
            model.read_file("../x")
        with pytest.raises(FileNotFound, match="no file 'confg.json'; did you mean 'config.json'"):
            model.read_file("confg.json")


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"{", "is not JSON"), (b"[" * 100_000, "is not JSON"), (b"[]", "is not a JSON object")],
)
def test_a_broken_config_is_reported_when_it_is_read(
    tmp_path: Path, content: bytes, what: str
) -> None:
    store = LocalStore(tmp_path / "store")
    blobstore.create(write_folder(tmp_path / "model", {"a": np.zeros(1)}), "m", store=store)
    replace_file(store, "m", "config.json", content)
    with blobstore.open("m", store=store) as model, pytest.raises(BlobDamaged, match=what):
        _ = model.config


def test_a_model_without_a_config_has_an_empty_one(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    add_blobs(store, "m", {"a": blob(("a", "U8", (1,), b"x"))})
    with blobstore.open("m", store=store) as model:
        assert model.config == {}
        assert model.files == {}


# Damage


@pytest.mark.parametrize("level", ["size", "header", "digest", "rehash"])
def test_a_missing_blob_is_reported_with_model_layer_and_file(
    either: LocalStore, level: Any
) -> None:
    path = blob_path(either, "scalar")
    path.unlink()
    with pytest.raises(BlobMissing) as caught:
        blobstore.open("m", store=either, verify=level)
    message = str(caught.value)
    assert message.startswith("m:latest")
    assert "layer 'scalar'" in message
    assert f"{path.name}' is missing" in message


@pytest.mark.parametrize("size", [0, 1])
def test_a_truncated_blob_is_reported_with_model_layer_and_file(
    either: LocalStore, size: int
) -> None:
    path = blob_path(either, "scalar")
    path.chmod(0o600)
    os.truncate(path, size)
    with pytest.raises(BlobDamaged) as caught:
        blobstore.open("m", store=either)
    message = str(caught.value)
    assert message.startswith("m:latest: layer 'scalar': blob '")
    assert f"{path.name}' is damaged: it has {size} bytes, expected" in message


def test_an_open_model_no_longer_needs_the_store(either: LocalStore) -> None:
    with blobstore.open("m", store=either) as model:
        shutil.rmtree(either.root)
        for name, expected in TENSORS.items():
            np.testing.assert_array_equal(model[name], expected, strict=True)
    assert not either.root.exists()


@pytest.mark.parametrize("is_open", [True, False])
def test_without_checks_a_missing_blob_is_reported_on_first_use(
    store: LocalStore, is_open: bool
) -> None:
    path = blob_path(store, "scalar")
    if not is_open:
        path.unlink()
    with blobstore.open("m", store=store, verify="none") as model:
        if is_open:
            path.unlink()
        assert model["mask"].tolist() == [True, False, True]
        with pytest.raises(BlobMissing, match="^m:latest: layer 'scalar': blob '.*' is missing"):
            model["scalar"]


def test_a_broken_header_is_reported_with_model_layer_and_file(store: LocalStore) -> None:
    drop_index(store)
    path = blob_path(store, "scalar")
    path.chmod(0o600)
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(
        BlobDamaged, match=f"^m:latest: layer 'scalar': blob '.*{path.name}': header"
    ):
        blobstore.open("m", store=store)


@pytest.mark.parametrize("layer", ["scalar", "model.layers.0.mlp.experts", "config.json"])
def test_one_flipped_bit_is_found_on_request(either: LocalStore, layer: str) -> None:
    flip(blob_path(either, layer))
    blobstore.open("m", store=either).close()
    with pytest.raises(
        BlobDamaged, match=f"m:latest: layer '{layer}': blob '.*its bytes have digest"
    ):
        blobstore.open("m", store=either, verify="digest")


@pytest.mark.parametrize("size", [2**62, 2**63 - 1, 2**45])
def test_a_claimed_size_reserves_no_memory(tmp_path: Path, size: int) -> None:
    store = LocalStore(tmp_path)
    add_blobs(store, "m", {"a": blob(("a", "U8", (1,), b"x")), "b": blob(("b", "U8", (1,), b"x"))})
    manifest = store.resolve(NAME)
    wrong = manifest.layers[1]._replace(size=size)
    changed = with_layers(store, manifest, (manifest.layers[0], wrong))
    store.manifest_path(NAME).write_bytes(changed.to_bytes())
    for framework in ("numpy", "torch"):
        with pytest.raises(BlobDamaged, match=f"m:latest: layer 'b': .*expected {size}"):
            blobstore.open("m", store=store, framework=framework)  # type: ignore[arg-type]


def test_a_broken_manifest_is_reported(store: LocalStore) -> None:
    store.manifest_path(NAME).write_text('{"schemaVersion":1}')
    with pytest.raises(InvalidManifest, match=r"^m:latest: \$\.schemaVersion: expected 2"):
        blobstore.open("m", store=store)


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["none", "size", "header", "digest", "rehash"])
def test_a_changed_manifest_is_reported(store: LocalStore, verify: Verify) -> None:
    path = store.manifest_path(NAME)
    path.write_bytes(path.read_bytes().replace(b"image.json", b"image.jsoo", 1))
    indexes = sorted(store.folder("headers").iterdir())
    for _ in range(2):
        with pytest.raises(InvalidManifest, match="^m:latest: the manifest was changed since"):
            blobstore.open("m", store=store, verify=verify)
    gc.collect()
    assert sorted(store.folder("headers").iterdir()) == indexes


def test_a_model_without_its_config_blob_is_opened_and_not_indexed(store: LocalStore) -> None:
    blob_path(store, "").unlink()
    blobstore.open("m", store=store).close()  # by the index
    shutil.rmtree(store.folder("headers"))
    for _ in range(2):
        with blobstore.open("m", store=store) as model:
            assert len(model) > 0
        assert not store.folder("headers").exists()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"framework": "jax"}, "framework must be numpy, torch or mlx, got 'jax'"),
        ({"verify": "all"}, "verify must be none, size, header, digest or rehash, got 'all'"),
        ({"device": "cuda"}, "device 'cuda' requires framework torch; numpy takes cpu"),
        (
            {"framework": "mlx", "device": "gpu"},
            "device 'gpu' requires framework torch; mlx takes cpu",
        ),
    ],
)
def test_rejects_invalid_arguments(store: LocalStore, options: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        blobstore.open("m", store=store, **options)


# The header index


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b" ",
        lambda data: data.replace(b"U8", b"I8"),
        lambda data: data.replace(b"F32", b"I32", 1),
        lambda data: b"\n",
        lambda data: bytes(len(data)),
        lambda data: data.partition(b"\n")[2],
        lambda data: b"\xff" * 100,
        lambda data: b"sha256:" + b"0" * 64 + b"\n{}",
    ],
)
def test_a_corrupt_index_is_rebuilt(store: LocalStore, damage: Callable[[bytes], bytes]) -> None:
    path = index_file(store)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with blobstore.open("m", store=store) as model:
        for name, expected in TENSORS.items():
            np.testing.assert_array_equal(model[name], expected, strict=True)
    assert path.read_bytes() == whole


def test_the_index_of_another_model_is_not_used(store: LocalStore, tmp_path: Path) -> None:
    mine = index_file(store)
    swapped = TENSORS | {"scalar": np.array(8, dtype=np.uint8)}
    blobstore.create(write_folder(tmp_path / "other", swapped), "other", store=store)
    (other,) = [path for path in store.folder("headers").iterdir() if path != mine]
    whole = mine.read_bytes()
    mine.write_bytes(other.read_bytes())
    with blobstore.open("m", store=store) as model:
        assert model["scalar"] == 7
    assert mine.read_bytes() == whole


def test_an_index_does_not_hide_that_a_name_was_replaced(store: LocalStore, tmp_path: Path) -> None:
    swapped = TENSORS | {"scalar": np.array(8, dtype=np.uint8)}
    blobstore.create(write_folder(tmp_path / "other", swapped), "m", store=store)
    with blobstore.open("m", store=store) as model:
        assert model["scalar"] == 8


@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_opening_without_an_index_writes_one(tmp_path: Path, experts: ExpertForm) -> None:
    store = LocalStore(tmp_path / "store")
    blobstore.create(write_folder(tmp_path / "model", TENSORS), "m", store=store, experts=experts)
    whole = index_file(store).read_bytes()
    drop_index(store)
    blobstore.open("m", store=store).close()
    assert index_file(store).read_bytes() == whole


# Lifetime and threads


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_tensors_outlive_model_and_store(store: LocalStore, framework: Any) -> None:
    with blobstore.open("m", store=store, framework=framework) as model:
        tensors, view = model.state_dict(), model.view("mask")
    del model
    gc.collect()
    shutil.rmtree(store.root)
    assert bytes(view.data) == b"\1\0\1"
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(np.asarray(tensor), TENSORS[name], strict=True)


def test_many_threads_read_the_right_values(either: LocalStore) -> None:
    names = list(TENSORS)
    with blobstore.open("m", store=either) as model:
        start = threading.Barrier(16)

        def look(shift: int) -> list[str]:
            start.wait(30)
            order = names[shift:] + names[:shift]
            return [
                name for name in order if bytes(model.view(name).data) != TENSORS[name].tobytes()
            ]

        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(look, range(16))) == [[]] * 16


def test_torch_tensors_are_put_on_the_device(store: LocalStore) -> None:
    with blobstore.open("m", store=store, framework="torch", device="meta") as model:
        found = model["position_ids"]
    assert (found.device.type, found.shape, found.dtype) == ("meta", (5,), torch.int64)


# Quantized weights

UP = "model.layers.0.self_attn.q_proj.weight"
PACKED = quantizable_tensors()


@pytest.fixture(scope="module", params=["packed", "stacked"])
def quantized(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LocalStore:
    place = tmp_path_factory.mktemp("quantized")
    store = LocalStore(place / "store")
    folder = write_folder(place / "model", PACKED)
    for name in ("int4", "nvfp4"):
        blobstore.create(
            folder, f"m:{name}", store=store, quantize=QuantizeOptions(name), experts=request.param
        )
    return store


def as_float32(array: Any) -> Any:
    """Convert an array of any framework to numpy."""
    if isinstance(array, torch.Tensor):
        return array.float().numpy()
    if isinstance(array, np.ndarray):
        return array.astype(np.float32)
    import mlx.core as mx

    return np.array(array.astype(mx.float32))


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["int4", "nvfp4"])
def test_dequantizes_quantized_weights(quantized: LocalStore, tag: str, framework: Any) -> None:
    with blobstore.open(f"m:{tag}", store=quantized, framework=framework) as model:
        item, group_size = FORMATS[tag], FORMATS[tag].group_size
        packed = reference.quantize(PACKED[UP], item, group_size)
        for dtype in (None, "bfloat16", "float32", "float16"):
            found = model.dequantized(UP, dtype)
            expected = reference.dequantize(*packed, item, group_size, dtype or "bfloat16")
            assert str(found.dtype).rpartition(".")[2] == (dtype or "bfloat16")
            np.testing.assert_array_equal(as_float32(found), expected.astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["int4", "nvfp4"])
def test_a_model_can_be_opened_dequantized(quantized: LocalStore, tag: str, framework: Any) -> None:
    with (
        blobstore.open(f"m:{tag}", store=quantized, framework=framework) as packed,
        blobstore.open(f"m:{tag}", store=quantized, framework=framework, dequantize=True) as model,
    ):
        state = model.state_dict()
        assert set(state) == set(model) == set(model.specs)
        assert not [name for name in model if name.endswith(("_scale", "_qbias"))]
        assert f"{UP}_scale" in packed
        assert f"{UP}_scale" not in model
        for name, spec in model.specs.items():
            assert tuple(state[name].shape) == spec.shape
            assert spec.dtype is DType.BF16
            expected = packed.dequantized(name)
            np.testing.assert_array_equal(as_float32(state[name]), as_float32(expected))
            assert np.abs(as_float32(model[name])).max() > 0
        with pytest.raises(TensorNotFound):
            model[f"{UP}_scale"]
        assert len(model.tensors("model.layers.0.self_attn")) == 3
        elements = sum(spec.elements for spec in model.specs.values())
        assert packed.parameters == model.parameters == elements
        assert packed.nbytes < model.nbytes == 2 * elements


def test_dequantizing_leaves_plain_tensors_unchanged(quantized: LocalStore) -> None:
    with blobstore.open("m:int4", store=quantized) as model:
        found = model.dequantized("model.embed_tokens.weight", "float32")
        np.testing.assert_array_equal(found, PACKED["model.embed_tokens.weight"], strict=True)


def test_rejects_an_unknown_element_type(quantized: LocalStore) -> None:
    with (
        blobstore.open("m:int4", store=quantized) as model,
        pytest.raises(UsageError, match="dtype must be bfloat16, float16 or float32, got 'int8'"),
    ):
        model.dequantized(UP, "int8")


@pytest.mark.parametrize("index", [True, False])
def test_a_weight_of_unknown_type_can_only_be_read_as_stored(
    tmp_path: Path, *, index: bool
) -> None:
    store = LocalStore(tmp_path / "store")
    tensors = [
        ("w.weight", "U32", (2, 4), bytes(32)),
        ("w.weight.scale", "BF16", (2, 1), bytes(4)),
        ("w.weight.bias", "BF16", (2, 1), bytes(4)),
    ]
    add_blobs(store, "m", {"w.weight": blob(*tensors)})  # type: ignore[arg-type]
    if index:
        blobstore.open("m", store=store).close()
    with blobstore.open("m", store=store) as model:
        assert model["w.weight"].shape == (2, 4)
        with pytest.raises(UnsupportedDType, match=r"'w\.weight' of m:latest .* does not say how"):
            model.dequantized("w.weight")
    with (
        blobstore.open("m", store=store, dequantize=True) as model,
        pytest.raises(UnsupportedDType, match="does not say how"),
    ):
        model.state_dict()


def test_a_global_scale_is_applied(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    tensors = [
        ("w", "U32", (1, 2), bytes([0x21] * 8)),
        ("w.scale", "U8", (1, 1), bytes([56])),
        ("w.global_scale", "F32", (), np.float32(3).tobytes()),
    ]
    add_blobs(store, "m", {"w": blob(*tensors, quant_type="nvfp4")})  # type: ignore[arg-type]
    for framework in ("numpy", "torch"):
        with blobstore.open("m", store=store, framework=framework, dequantize=True) as model:  # type: ignore[arg-type]
            assert list(model) == ["w"]
            assert model["w"].tolist() == [[1.5, 3.0] * 8]


@pytest.mark.parametrize("end", ["_qbias", ".global_scale"])
@pytest.mark.parametrize("index", [True, False])
def test_a_tensor_of_another_blob_is_not_a_qparam(tmp_path: Path, end: str, *, index: bool) -> None:
    store = LocalStore(tmp_path / "store")
    tensors = [("w", "U32", (1, 2), bytes([0x21] * 8)), ("w.scale", "U8", (1, 1), bytes([56]))]
    other = blob((f"w{end}", "F32", (1,), np.float32(3).tobytes()))
    blobs = {"w": blob(*tensors, quant_type="nvfp4"), f"w{end}": other}  # type: ignore[arg-type]
    add_blobs(store, "m", blobs)
    if index:
        blobstore.open("m", store=store).close()
    with blobstore.open("m", store=store, dequantize=True) as model:
        assert set(model) == set(model.specs) == {"w", f"w{end}"}
        assert model["w"].tolist() == [[0.5, 1.0] * 8]
        assert model[f"w{end}"].tolist() == [3]


@pytest.mark.parametrize("known", [["int4", 64], ["nvfp4", 16], ["int8", 64]])
def test_a_forged_index_cannot_change_the_quantization_type(tmp_path: Path, known: Any) -> None:
    store = LocalStore(tmp_path / "store")
    folder = write_folder(tmp_path / "model", PACKED)
    blobstore.create(folder, "m", store=store, quantize=QuantizeOptions("int4"))
    forge_index(store, lambda value: value[2].update({UP: known}))
    with (
        blobstore.open("m", store=store) as model,
        pytest.raises(BlobDamaged, match=f"tensor '{UP}': "),
    ):
        model.dequantized(UP)


# Ways of reading


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"read": "mmap"}, {"read": "pread"}, {"read": "populate"}])
@pytest.mark.parametrize("framework", ["numpy", "torch", "mlx"])
def test_returns_the_same_tensors_however_they_are_read(
    either: LocalStore, options: dict[str, Any], framework: Any
) -> None:
    with blobstore.open("m", store=either, framework=framework, **options) as model:
        plain = blobstore.open("m", store=either, framework=framework)
        assert set(model) == set(plain)
        for name in plain:
            assert bytes(model.view(name).data) == bytes(plain.view(name).data), name
        assert set(model.tensors()) == set(plain)


def test_read_tensors_are_read_only_in_numpy_and_private_in_torch(store: LocalStore) -> None:
    before = contents(store)
    array = blobstore.open("m", store=store, read="pread")["model.layers.0.norm.weight"]
    assert not array.flags.writeable
    tensor = blobstore.open("m", store=store, framework="torch", read="pread")[
        "model.layers.0.norm.weight"
    ]
    tensor.zero_()
    assert contents(store) == before


def test_read_tensors_survive_a_truncated_blob(store: LocalStore) -> None:
    expected = np.array(blobstore.open("m", store=store)["model.layers.0.norm.weight"])
    model = blobstore.open("m", store=store, read="pread")
    path = blob_path(store, "model.layers.0.norm.weight")
    path.chmod(0o644)
    os.truncate(path, 0)
    assert np.array_equal(model["model.layers.0.norm.weight"], expected)


@pytest.mark.parametrize("order", ["file", "name"])
def test_yields_every_tensor_once(store: LocalStore, order: Any) -> None:
    model = blobstore.open("m", store=store)
    found = list(model.iter_tensors(order=order))
    assert sorted(name for name, _ in found) == sorted(model)
    if order == "name":
        assert [name for name, _ in found] == sorted(model)
    for name, tensor in found:
        assert np.array_equal(tensor, model[name], equal_nan=tensor.dtype.kind == "f")


def test_shards_tensors_among_ranks(store: LocalStore) -> None:
    model = blobstore.open("m", store=store)
    shares = [[name for name, _ in model.iter_tensors(shard=(rank, 3))] for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(model)
    assert all(shares)
    prefixed = [name for name, _ in model.iter_tensors("model.layers.0.")]
    assert prefixed
    assert all(name.startswith("model.layers.0.") for name in prefixed)


def test_a_pickled_model_refers_to_its_manifest(store: LocalStore) -> None:
    model = blobstore.open("m", store=store, framework="torch", read="pread")
    again = pickle.loads(pickle.dumps(model))
    blobstore.create(store.root.parent / "model" / "model.safetensors", "m", store=store)
    assert again.manifest == model.manifest
    assert torch.equal(again["model.layers.0.norm.weight"], model["model.layers.0.norm.weight"])


WORKER = """
import pickle, sys

model = pickle.load(sys.stdin.buffer)
total = sum(int(array.sum(dtype="u8")) for array in model.values())
blobs = str(model.store.folder("blobs"))
own = shared = 0
is_blob = False
for line in open("/proc/self/smaps"):
    field, _, rest = line.partition(":")
    if "-" in field.split(" ")[0]:
        is_blob = blobs in line
    elif is_blob and field in ("Private_Clean", "Private_Dirty"):
        own += int(rest.split()[0])
    elif is_blob and field in ("Shared_Clean", "Shared_Dirty"):
        shared += int(rest.split()[0])
print(total, own, shared)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells")
def test_a_worker_process_shares_the_page_cache(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    random = np.random.default_rng(1)
    arrays = {f"w{number}": random.integers(0, 256, 4 << 20, dtype=np.uint8) for number in range(4)}
    blobstore.create(write_folder(tmp_path / "model", arrays), "m", store=store)
    with blobstore.open("m", store=store, read="populate") as model:
        total = sum(int(array.sum(dtype=np.uint64)) for array in model.values())
        found = subprocess.run(
            [sys.executable, "-c", WORKER],
            input=pickle.dumps(model),
            env={**os.environ, "PYTHONPATH": str(Path(blobstore.__file__).parents[2])},
            capture_output=True,
            check=True,
        )
    summed, own, shared = map(int, found.stdout.split())
    assert summed == total
    assert shared >= 16 << 10  # KiB
    assert own < shared * 0.05


def test_a_pickled_model_keeps_its_options(store: LocalStore) -> None:
    with blobstore.open("m", store=store, dequantize=True, verify="header") as model:
        again = pickle.loads(pickle.dumps(model))
        assert again._options == model._options
        assert set(again) == set(model)
    model.close()
    assert pickle.loads(pickle.dumps(model))["scalar"] == 7  # what is closed is opened again


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    """Return a store with a model of 1,000 blobs that has a header index."""
    store = LocalStore(tmp_path_factory.mktemp("many"))
    add_blobs(store, "m", {"w0": blob(("w0", "U32", (), bytes(4)))})
    layers = []
    for number in range(1000):
        data = blob((f"w{number}", "U32", (), number.to_bytes(4, "little")))
        digest = Digest.of(data)
        Path(store.blob_path(digest)).write_bytes(data)
        layers.append(
            Descriptor(
                media_type=media_types.TENSOR, digest=digest, size=len(data), name=f"w{number}"
            )
        )
    store.names.publish(replace_any(NAME), with_layers(store, store.resolve(NAME), layers))
    return store


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"read": "mmap"},
        {"read": "pread"},
        {"read": "pread", "verify": "none"},
        {"read": "populate"},
        {"verify": "header"},
        {"verify": "rehash"},
    ],
)
@pytest.mark.parametrize("index", [True, False])
def test_many_blobs_need_few_open_files(
    many: LocalStore, options: dict[str, Any], *, index: bool
) -> None:
    blobstore.open("m", store=many, verify="none").close()
    if not index:
        drop_index(many)

    def run() -> str:
        before = len(os.listdir("/dev/fd"))
        with blobstore.open("m", store=many, **options) as model:
            parts = dict(model.iter_tensors(parts=lambda _: ...))
            tensors = model.state_dict()
            assert tensors.keys() == parts.keys()
            assert all(tensors[name] == parts[name] == int(name[1:]) for name in tensors)
            return f"{len(tensors)} tensors, {len(os.listdir('/dev/fd')) - before} descriptors"

    outcome = sandbox.call(run, limits={resource.RLIMIT_NOFILE: 256})
    leases = int(options.get("verify") == "none")
    assert outcome == f"1000 tensors, {leases} descriptors"


@pytest.mark.slow
@pytest.mark.skipif(map_counts() is None, reason="the system does not count maps")
@pytest.mark.parametrize(
    ("framework", "verify"),
    [("numpy", "size"), ("torch", "header"), ("numpy", "digest"), ("torch", "rehash")],
)
def test_a_model_opens_in_a_process_that_may_map_few_files(
    store: LocalStore, framework: Any, verify: Verify
) -> None:
    values = {f"unit.{number}": float(number) for number in range(60)}
    blobs = {
        name: blob((name, "F32", (5,), np.full(5, value, np.float32).tobytes()))
        for name, value in values.items()
    }
    add_blobs(store, "many", blobs)

    def load() -> str:
        _kept = use_up_maps(40)
        with blobstore.open("many", store=store, framework=framework, verify=verify) as model:
            found = model.state_dict()
        return str({name: float(array[-1]) for name, array in found.items()})

    assert sandbox.call(load) == str(values)
    blobstore.open("many", store=store).close()  # writes a header index
    assert sandbox.call(load) == str(values)


# Stores that others change or lock


LAZY: list[dict[str, Any]] = [
    {"verify": "none"},
    {"read": "pread", "verify": "header"},
    {"read": "pread", "verify": "none"},
]
WAYS = [{}, {"read": "populate"}, {"read": "pread"}, {"verify": "header"}, *LAZY]

OTHERS = {f"other.{number}": np.arange(number) for number in range(30)}


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def check_tensors(model: Any, expected: dict[str, Any] = TENSORS) -> None:
    for name, array in expected.items():
        np.testing.assert_array_equal(model[name], array, strict=True)


@pytest.mark.parametrize("options", WAYS)
def test_readers_create_no_folder_and_no_lock(store: LocalStore, options: dict[str, Any]) -> None:
    shutil.rmtree(store.root / ".blobstore")
    before = files_below(store.root)
    with blobstore.open("m", store=store, **options) as model:
        check_tensors(model)
    assert files_below(store.root) == before


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS)
def test_readers_need_no_locks_of_the_file_system(
    either: LocalStore, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with blobstore.open("m", store=either, **options) as model:
        check_tensors(model)


@pytest.mark.parametrize("options", WAYS)
def test_readers_do_not_wait_for_other_processes(
    either: LocalStore, options: dict[str, Any]
) -> None:
    either.lock_timeout = 0
    with either.exclusive_lock(), blobstore.open("m", store=either, **options) as model:
        check_tensors(model)


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS)
def test_readers_need_only_read_permission(options: dict[str, Any]) -> None:
    with sandbox.common_folder() as folder:
        store = LocalStore(folder / "store")
        blobstore.create(write_folder(folder / "model", TENSORS), "m", store=store)
        before = files_below(folder)

        def read() -> None:
            with blobstore.open("m", store=store, **options) as model:
                check_tensors(model)

        assert sandbox.call(read, unprivileged=True) == "None"
        assert files_below(folder) == before


def replace_after_reading(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]
) -> None:
    """Change a name and collect its blobs after the next reader has read the manifest."""
    really_read = store.read_manifest

    def read(reference: str | Reference) -> bytes:
        data = really_read(reference)
        monkeypatch.undo()
        change()
        collect_garbage(store=store, older_than=0)
        return data

    monkeypatch.setattr(store, "read_manifest", read)


@pytest.mark.slow
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("options", WAYS)
def test_a_model_that_is_replaced_while_it_is_opened_is_read_again(
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    is_frozen: bool,
) -> None:
    blobstore.create(write_folder(tmp_path / "new", OTHERS), "new", store=store)
    if is_frozen:
        freeze_models(["m"], store=store)
    replace_after_reading(
        store, monkeypatch, lambda: copy_model("new", "m", store=store, force=True)
    )
    with blobstore.open("m", store=store, **options) as model:
        assert set(model) == set(OTHERS)
        check_tensors(model, OTHERS)


@pytest.mark.parametrize("options", LAZY)
def test_a_model_that_is_replaced_before_its_blobs_are_leased_is_read_again(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    blobstore.create(write_folder(tmp_path / "new", OTHERS), "new", store=store)
    really_lease = store.lease_if_writable

    def late(digests: Iterable[Digest]) -> AbstractContextManager[object]:
        monkeypatch.undo()
        copy_model("new", "m", store=store, force=True)
        collect_garbage(store=store, older_than=0)
        return really_lease(digests)

    monkeypatch.setattr(store, "lease_if_writable", late)
    with blobstore.open("m", store=store, **options) as model:
        check_tensors(model, OTHERS)


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS)
def test_a_model_that_is_removed_while_it_is_opened_is_not_found(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    blobstore.create(write_folder(tmp_path / "new", OTHERS), "new", store=store)
    replace_after_reading(store, monkeypatch, lambda: remove_models(["m"], store=store))
    with pytest.raises(ModelNotFound, match="no model 'm:latest'"):
        blobstore.open("m", store=store, **options)


@pytest.mark.parametrize("options", LAZY)
def test_blobs_that_are_opened_later_are_kept(store: LocalStore, options: dict[str, Any]) -> None:
    with blobstore.open("m", store=store, **options) as model:
        assert store.read_leases().digests
        child = os.fork()
        if child == 0:  # a worker process that exits normally
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
            model.close()
            os._exit(0)
        os.waitpid(child, 0)
        remove_models(["m"], store=store)
        collect_garbage(store=store, older_than=0)
        check_tensors(model)
    assert not store.read_leases().digests


def test_help_and_errors_say_open() -> None:
    assert (blobstore.open.__name__, blobstore.open.__module__) == ("open", "blobstore")
    with pytest.raises(TypeError, match=r"^open\(\) has no argument 'dtype'"):
        blobstore.open("x", dtype="float16")  # type: ignore[call-overload]
    assert pickle.loads(pickle.dumps(blobstore.open)) is blobstore.open


@pytest.mark.parametrize(
    ("path", "advice"),
    [("./folder", "create imports a folder"), ("x.safetensors/../y.safetensors", "safe_open")],
)
def test_a_path_is_answered_with_what_reads_it(path: str, advice: str) -> None:
    with pytest.raises(InvalidReference, match=advice):
        blobstore.open(path)


def test_a_store_lists_and_opens_its_models(store: LocalStore) -> None:
    own = blobstore.LocalStore(store.root)

    assert own.list() == blobstore.list(store=store)
    with own.open("m", framework="np", verify="digest") as model:
        assert model.keys() == blobstore.open("m", store=store).keys()
        assert model.store is own
    with blobstore.open("m", store=store.root) as model:
        assert isinstance(model.store, blobstore.LocalStore)
    assert isinstance(blobstore.LocalStore.of(store.root), blobstore.LocalStore)
    assert {"list", "open"} <= set(dir(own))


def test_a_model_of_one_tensor_is_shown_as_such(store: LocalStore) -> None:
    blobstore.save({"w": np.ones(1)}, "m", store=store)
    with blobstore.open("m", store=store) as model:
        assert repr(model) == "<Model m:latest: 1 tensor>"
