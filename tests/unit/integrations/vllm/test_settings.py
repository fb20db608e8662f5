from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import blobstore
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import (
    BlobMissing,
    BlobstoreError,
    ModelNotFound,
    UnsupportedDType,
    UsageError,
)
from blobstore.integrations.source_names import PublishedTensors
from blobstore.integrations.vllm import settings
from blobstore.integrations.vllm.settings import Settings, engine_options
from blobstore.operations.export.export import export_model
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, blob, dense_tensors, quantizable_tensors, write_folder
from tests.support.options import grouped
from tests.support.pack_quantized import packed_config, packed_weight, write_packed

WHERE = "--model-loader-extra-config of load format blobstore"


def test_accepts_all_settings() -> None:
    given = {
        "name": "m",
        "store": "here",
        "manifest": "sha256:00",
        "verify": "digest",
        "read": "pread",
        "strict": False,
    }
    settings = Settings.parse(given)
    assert {key: getattr(settings, key) for key in given} == given


def test_requires_only_a_name() -> None:
    assert Settings.parse({"name": "m"}) == Settings(
        name="m", store=None, manifest=None, verify=None, read="auto", strict=True
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "must be a JSON object, got '[]'"),
        ({}, 'must name the model, as in {"name": "llama-3.2:1b"}'),
        (
            {"name": "m", "num\nthreads": 2, "digest": ""},
            r"has unknown keys: 'digest', 'num\nthreads'; known are name, store, manifest, verify, ",
        ),
        ({"name": ""}, "has name '', which must be a non-empty string"),
        ({"name": None}, "has name 'None', which must be a non-empty string"),
        ({"name": "m", "store": ""}, "has store '', which must be a non-empty string"),
        ({"name": "m", "store": 1}, "has store '1', which must be a non-empty string"),
        ({"name": "m", "read": "fast"}, 'has read \'fast\', which must be one of "auto", "mmap", '),
        ({"name": "m", "verify": ["size"]}, "has verify '['size']', which must be one of "),
        ({"name": "m", "strict": 1}, "has strict '1', which must be true or false"),
    ],
)
def test_rejects_invalid_settings(given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{WHERE} {said}")):
        Settings.parse(given)


def test_provides_the_files_and_settings_of_a_model(store: LocalStore, tmp_path: Path) -> None:
    files = {"config.json": b'{"dtype": "float32"}', "tokenizer.json": b"{}"}
    blobstore.create(write_folder(tmp_path / "m", dense_tensors(), files=files), "m", store=store)

    with engine_options("m", store=store, verify="digest", read="pread", strict=False) as options:
        folder = tmp_path / options["model"]
        found = {
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
        }
        settings = Settings.parse(json.loads(json.dumps(options["model_loader_extra_config"])))

    assert found == set(files)
    assert not folder.exists()
    assert options["load_format"] == "blobstore"
    assert options["served_model_name"] == ["m:latest", "m"]
    assert settings.name == "m:latest"
    assert settings.store == str(store.root)
    # The blobs have been hashed by now.
    assert (settings.verify, settings.read, settings.strict) == ("size", "pread", False)
    with settings.open() as model:
        assert "scalar" in model


def test_settings_are_valid_for_one_manifest_only(store: LocalStore, tmp_path: Path) -> None:
    blobstore.create(write_folder(tmp_path / "1", dense_tensors()), "m", store=store)
    with engine_options("m", store=store) as options:
        settings = Settings.parse(options["model_loader_extra_config"])
    source = write_folder(tmp_path / "2", dense_tensors(), files={"tokenizer.json": b"{}"})
    blobstore.create(source, "m", store=store)
    with pytest.raises(BlobstoreError, match="m:latest is another model now"), settings.open():
        pass


def configured(store: LocalStore, tmp_path: Path, config: Any, **options: Any) -> Any:
    """Return the config that vLLM is given of a model with this one."""
    files = {"config.json": json.dumps(config).encode()}
    source = write_folder(tmp_path / "m", quantizable_tensors(), files=files)
    blobstore.create(source, "m", store=store, **grouped(options))
    with engine_options("m", store=store) as engine:
        return json.loads((tmp_path / engine["model"] / "config.json").read_bytes())


def test_the_config_does_not_mention_quantization(store: LocalStore, tmp_path: Path) -> None:
    described = {"bits": 4, "group_size": 64}
    config = {"dtype": "bfloat16", "quantization": described, "quantization_config": described}
    given = configured(store, tmp_path, config)
    assert given == {"dtype": "bfloat16"}


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_the_config_states_the_type_of_the_weights(
    quantize: str | None, store: LocalStore, tmp_path: Path
) -> None:
    given = configured(store, tmp_path, {"model_type": "tiny"}, quantize=quantize)
    assert given == {"model_type": "tiny", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    "config", [{"torch_dtype": "float16"}, {"text_config": {"dtype": "float32"}}]
)
def test_the_config_keeps_its_type(config: Any, store: LocalStore, tmp_path: Path) -> None:
    assert configured(store, tmp_path, config) == config


def test_weights_of_several_types_are_served_as_float32(store: LocalStore, tmp_path: Path) -> None:
    blobstore.create(write_folder(tmp_path / "m", dense_tensors()), "m", store=store)
    with engine_options("m", store=store) as options:
        config = json.loads((tmp_path / options["model"] / "config.json").read_bytes())
    assert config["dtype"] == "float32"


def test_rejects_types_that_vllm_does_not_support(store: LocalStore) -> None:
    add_blobs(store, "m", {"x": blob(("x", "F4", (2, 2), bytes(2)))})
    with (
        pytest.raises(UnsupportedDType, match=r"cannot take m:latest: tensor 'x' is of type F4$"),
        engine_options("m", store=store),
    ):
        pass


def test_reports_missing_models_and_blobs(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="'m:latest'"), engine_options("m", store=store):
        pass
    blobstore.create(write_folder(tmp_path / "m", dense_tensors()), "m", store=store)
    with blobstore.open("m", store=store) as model:
        layer = next(item for item in model.manifest.layers if item.name == "scalar")
    (tmp_path / store.blob_path(layer.digest)).unlink()
    with pytest.raises(BlobMissing, match="'scalar'"), engine_options("m", store=store):
        pass


def test_rejects_a_model_without_a_config(store: LocalStore) -> None:
    add_blobs(store, "m", {"x": blob(("x", "F32", (1,), bytes(4)))})
    with (
        pytest.raises(BlobstoreError, match=r"^m:latest has no config\.json"),
        engine_options("m", store=store),
    ):
        pass


@pytest.mark.parametrize(
    ("section", "kept", "reason"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, True, ""),
        ({"quant_method": "fp8"}, True, ""),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            False,
            "scales of its activations",
        ),
        ({"quant_method": "modelopt"}, False, "scales of its activations"),
        (None, False, "its config does not say how they are quantized"),
    ],
)
def test_the_config_of_8_bit_floats_is_kept_for_kernels_of_vllm(
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    section: Any,
    kept: bool,
    reason: str,
) -> None:
    weight = np.ones((128, 128), ml_dtypes.float8_e4m3fn)
    tensors: Any = {"w.weight": weight, "w.weight_scale": np.array(2, np.float32)}
    config = {"dtype": "bfloat16"} | ({"quantization_config": section} if section else {})
    files = {"config.json": json.dumps(config).encode()}
    blobstore.create(write_folder(tmp_path / "m", tensors, files=files), "m", store=store)

    def written(dequantize: bool | None) -> Any:
        with engine_options("m", store=store, dequantize=dequantize) as options:
            return json.loads(Path(options["model"], "config.json").read_text())

    assert written(True) == {"dtype": "bfloat16"}
    if kept:
        assert written(False) == config
    else:
        with pytest.raises(UsageError, match=f"m:latest must be dequantized: .*{reason}"):
            written(False)
    for has_gpu in (False, True):
        monkeypatch.setattr(settings, "_GPUS", ("/" if has_gpu else str(tmp_path / "no GPU"),))
        assert written(None) == (config if kept and has_gpu else written(True))


def test_static_scales_of_activations_are_read_from_the_source_layer(
    store: LocalStore, tmp_path: Path
) -> None:
    scale = np.array(0.25, np.float32)
    tensors: Any = {
        "w.weight": np.ones((128, 128), ml_dtypes.float8_e4m3fn),
        "w.weight_scale": np.array(2, np.float32),
        "w.input_scale": scale,
    }
    section = {"quant_method": "fp8", "activation_scheme": "static"}
    config = {"dtype": "bfloat16", "quantization_config": section}
    files = {"config.json": json.dumps(config).encode()}
    blobstore.create(write_folder(tmp_path / "m", tensors, files=files), "m", store=store)
    with engine_options("m", store=store, dequantize=False) as options:
        assert json.loads(Path(options["model"], "config.json").read_text()) == config
    with blobstore.open("m", store=store) as model:
        assert set(model) == {"w.weight", "w.weight_scale"}
        spec = TensorSpec("w.input_scale", DType.F32, ())
        assert PublishedTensors.of(model, config) == ({}, {spec.name: (spec, scale.tobytes())})
        dynamic = {"quantization_config": {"quant_method": "fp8"}}
        assert PublishedTensors.of(model, dynamic) == ({}, {})


def test_weights_of_other_types_are_never_given_as_they_are(
    store: LocalStore, tmp_path: Path
) -> None:
    source = write_folder(tmp_path / "m", quantizable_tensors())
    blobstore.create(source, "m", store=store, quantize=QuantizeOptions("int4"))
    with (
        pytest.raises(
            UsageError, match="must be dequantized: not all of its quantized weights are"
        ),
        engine_options("m", store=store, dequantize=False),
    ):
        pass


@pytest.mark.parametrize("is_in_config", [False, True])
def test_the_file_of_modelopt_is_given_with_its_weights_only(
    is_in_config: bool, store: LocalStore, tmp_path: Path
) -> None:
    tensors: Any = {
        "w.weight": np.ones((2, 32), np.uint8),
        "w.weight_scale": np.ones((2, 4), ml_dtypes.float8_e4m3fn),
        "w.weight_scale_2": np.array(0.5, np.float32),
        "w.input_scale": np.array(0.5, np.float32),
    }
    described = {"quant_algo": "NVFP4"}
    section = {"quantization_config": described | {"quant_method": "modelopt"}}
    config = {"dtype": "bfloat16"} | (section if is_in_config else {})
    contents = {"config.json": config, "hf_quant_config.json": {"quantization": described}}
    files = {name: json.dumps(content).encode() for name, content in contents.items()}
    blobstore.create(write_folder(tmp_path / "m", tensors, files=files), "m", store=store)

    def written(dequantize: bool) -> Any:
        with engine_options("m", store=store, dequantize=dequantize) as options:
            return {
                path.name: json.loads(path.read_text()) for path in Path(options["model"]).iterdir()
            }

    assert written(False) == contents
    assert written(True) == {"config.json": {"dtype": "bfloat16"}}
    export_model("m", tmp_path / "plain", store=store, dequantize=True)
    assert not (tmp_path / "plain" / "hf_quant_config.json").exists()
    export_model("m", tmp_path / "original", store=store)
    assert (tmp_path / "original" / "hf_quant_config.json").exists()


@pytest.mark.parametrize(
    ("bits", "module", "is_for_cpus"),
    [(4, "w", True), (8, "w", False), (4, "layers.0.mlp.experts.0.w1", False)],
)
@pytest.mark.parametrize("has_gpu", [False, True])
def test_int4_is_for_kernels_of_vllm_without_a_gpu_too(
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    bits: int,
    module: str,
    is_for_cpus: bool,
    has_gpu: bool,
) -> None:
    config = {"dtype": "bfloat16", **packed_config({"num_bits": bits})}
    source = write_packed(tmp_path / "m", packed_weight(module, bits=bits).tensors, config)
    blobstore.create(source, "m", store=store)
    monkeypatch.setattr(settings, "_GPUS", ("/" if has_gpu else str(tmp_path / "no GPU"),))
    plain = {"dtype": "bfloat16"}
    usual = config if has_gpu or is_for_cpus else plain
    for dequantize, expected in ((None, usual), (False, config), (True, plain)):
        with engine_options("m", store=store, dequantize=dequantize) as options:
            found = json.loads(Path(options["model"], "config.json").read_text())
        assert found == expected
