from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from blobstore.core.tensor import DType, TensorSpec
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.reference import Reference
from blobstore.safetensors.header import encode_header
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support.models import (
    add_blob,
    add_blobs,
    blob,
    dense_tensors,
    moe_tensors,
    replace_file,
    with_layers,
    write_folder,
)
from tests.support.ollama_store import add_gguf_model
from tests.support.published import write_published
from tests.unit.cli.running import run, run_forked, run_json, run_process

NAMES = sorted(dense_tensors())
DTYPES = {"float32": "F32", "float16": "F16", "float64": "F64", "int64": "I64", "bool": "BOOL"} | {
    "uint8": "U8",
    "int16": "I16",
}


def layer_named(store: LocalStore, name: str, model: str = "dense") -> Descriptor:
    manifest = store.resolve(Reference.parse(model))
    return next(layer for layer in manifest.layers if layer.name == name)


def remove_blob(store: LocalStore, layer: Descriptor) -> None:
    (store.folder("blobs") / layer.digest.file_name).unlink()


def damage_blob(store: LocalStore, layer: Descriptor) -> None:
    path = store.folder("blobs") / layer.digest.file_name
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data + b"!")


def test_lists_every_tensor_with_type_shape_bytes_and_digest(stored: LocalStore) -> None:
    shown = run_json("show", "dense")

    expected = dense_tensors()
    assert [tensor["name"] for tensor in shown["tensors"]] == NAMES
    for tensor in shown["tensors"]:
        array = expected[tensor["name"]]
        assert tensor["type"] == tensor["dtype"] == DTYPES[array.dtype.name]
        assert tensor["shape"] == list(array.shape)
        assert tensor["bytes"] == array.nbytes
        assert tensor["parameters"] == array.size
        assert tensor["digest"] == str(layer_named(stored, tensor["name"]).digest)
    assert shown["parameters"] == sum(array.size for array in expected.values())
    assert (shown["architecture"], shown["model_type"]) == ("TinyForCausalLM", "tiny")
    assert shown["format"] == "tensors"
    assert shown["faults"] == []


def test_prints_plain_rows_when_piped(stored: LocalStore) -> None:
    done = run_process("show", "dense", COLUMNS="20", FORCE_COLOR="1")
    lines = done.stdout.decode().splitlines()
    assert done.stderr == b""
    assert lines[0] == "dense:latest: TinyForCausalLM (tiny)"
    assert lines[1].split() == ["NAME", "TYPE", "SHAPE", "BITS", "SIZE", "DIGEST"]
    assert [line.split()[0] for line in lines[2:-1]] == NAMES
    row = lines[2 + NAMES.index("model.embed_tokens.weight")]
    short = layer_named(stored, "model.embed_tokens.weight").digest.short
    assert row.split() == ["model.embed_tokens.weight", "F32", "[8,", "4]", "32", "128", "B", short]
    assert lines[-1] == "9 tensors in 9 blobs, 128 parameters, 450 B, 28.1 bits per weight"
    assert "\x1b" not in done.stdout.decode()


@pytest.mark.parametrize("form", ["packed", "stacked"])
def test_resolves_groups(store: LocalStore, moe: Path, form: str) -> None:
    run("create", moe, "moe", "--experts", form)
    shown = run_json("show", "moe")
    assert shown["parameters"] == sum(array.size for array in moe_tensors().values())
    experts = [t for t in shown["tensors"] if t["layer"] == "model.layers.0.mlp.experts"]
    assert len(experts) == (36 if form == "packed" else 3)
    assert len({tensor["digest"] for tensor in experts}) == 1


def test_selects_tensors_by_pattern(stored: LocalStore) -> None:
    shown = run_json("show", "dense", "*.up_proj.*", "scal?r")
    assert [tensor["name"] for tensor in shown["tensors"]] == [
        "model.layers.0.mlp.up_proj.bias",
        "model.layers.0.mlp.up_proj.weight",
        "scalar",
    ]
    text = run("show", "dense", "*.up_proj.*").stdout
    assert text.endswith(
        "\n2 of 9 tensors in 2 blobs, 80 parameters, 256 B, 25.6 bits per weight\n"
    )


def test_a_pattern_that_matches_nothing_is_not_found(stored: LocalStore) -> None:
    result = run("show", "dense", "scalar", "SCALAR*", exit_code=3)
    assert result.stdout == ""
    assert result.stderr == (
        "blobstore: error: nothing in model 'dense:latest' matches 'SCALAR*'\n"
    )


@pytest.mark.parametrize("more", [[], ["--layers"]])
def test_sorts_by_size_and_name(stored: LocalStore, more: list[str]) -> None:
    key = "layers" if more else "tensors"
    by_size = run_json("show", "dense", "--sort", "size", *more)[key]
    by_name = run_json("show", "dense", "--sort", "name", *more)[key]
    assert [row["bytes"] for row in by_size] == sorted((r["bytes"] for r in by_size), reverse=True)
    assert [row["name"] for row in by_name] == sorted(row["name"] for row in by_name)


def test_sorts_by_type_and_parameters(stored: LocalStore) -> None:
    by_type = [row["type"] for row in run_json("show", "dense", "--sort", "type")["tensors"]]
    counts = [
        math.prod(row["shape"]) for row in run_json("show", "dense", "--sort", "params")["tensors"]
    ]
    assert by_type == sorted(by_type)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 64


def test_lists_layers(stored: LocalStore) -> None:
    manifest = stored.resolve(Reference.parse("dense"))
    shown = run_json("show", "dense", "--layers")["layers"]
    assert [
        (layer["media_type"], layer["name"], layer["bytes"], layer["digest"]) for layer in shown
    ] == [
        (blob.media_type, name, blob.size, str(blob.digest))
        for blob in (manifest.config, *manifest.layers)
        for name in [blob.name if blob is not manifest.config else "(config)"]
    ]
    text = run("show", "dense", "--layers").stdout
    assert all(layer.digest.short in text and layer.media_type in text for layer in manifest.layers)
    assert f"\n{len(manifest.layers)} layers and the config, " in text


def test_lists_files(stored: LocalStore) -> None:
    shown = run_json("show", "dense", "--files")["files"]
    assert [file["name"] for file in shown] == ["config.json", "merges.txt", "tokenizer.json"]
    assert shown[1]["bytes"] == 4
    assert run("show", "dense", "--files", "*.txt").stdout.splitlines()[2].startswith("merges.txt ")


def test_prints_the_manifest_byte_for_byte(stored: LocalStore) -> None:
    path = stored.manifest_path(Reference.parse("dense"))
    data = path.read_bytes().replace(b'{"schema', b' {\t"x":"\xe2\x80\xae\\u0000",\r\n"schema')
    path.write_bytes(data)
    assert run_forked("show", "dense", "--manifest").stdout == data
    assert run("show", "dense", "--manifest").stdout_bytes == data


@pytest.mark.parametrize("broken", ["", "[]", '{"architectures": 3}', "\x00", "[" * 100_000])
def test_shows_models_of_unknown_architecture(store: LocalStore, dense: Path, broken: str) -> None:
    run("create", dense, "dense")
    replace_file(store, "dense", "config.json", broken.encode())
    assert run_json("show", "dense")["architecture"] is None
    assert run("show", "dense").stdout.startswith("dense:latest: unknown architecture\n")


def test_takes_the_class_of_a_pipeline_for_its_architecture(
    store: LocalStore, tmp_path: Path
) -> None:
    folder = tmp_path / "pipeline"
    tensors = {"w": dense_tensors()["scalar"]}
    write_folder(folder / "unet", tensors, stem="diffusion_pytorch_model")
    index = {"_class_name": "TinyPipeline", "unet": ["diffusers", "UNet"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    run("create", folder, "pipeline")
    shown = run_json("show", "pipeline")
    assert shown["architecture"] == "TinyPipeline"
    assert [tensor["name"] for tensor in shown["tensors"]] == ["unet/w"]


@pytest.mark.parametrize(("harm", "state"), [(remove_blob, "missing"), (damage_blob, "damaged")])
def test_shows_a_missing_or_damaged_tensor_blob(
    stored: LocalStore, harm: object, state: str
) -> None:
    layer = layer_named(stored, "model.embed_tokens.weight")
    assert callable(harm)
    harm(stored, layer)
    result = run("show", "dense", exit_code=4)

    rows = [line.split()[:2] for line in result.stdout.splitlines()[2:-1]]
    assert [name for name, _ in rows] == NAMES
    assert [state.upper()] == [kind for name, kind in rows if name == layer.name]
    assert result.stderr.startswith(
        "blobstore: error: model dense:latest: layer 'model.embed_tokens.weight': blob "
    )
    shown = run_json("show", "dense", exit_code=4)
    assert len(shown["tensors"]) == len(NAMES) - 1
    ((fault,),) = (shown["faults"],)
    assert (fault["name"], fault["state"]) == (layer.name, state)
    assert state in fault["message"]


@pytest.mark.parametrize("name", ["config.json", "merges.txt"])
@pytest.mark.parametrize("view", [[], ["--layers"], ["--files"]])
def test_shows_a_file_blob_that_is_missing(stored: LocalStore, name: str, view: list[str]) -> None:
    remove_blob(stored, layer_named(stored, name))
    result = run("show", "dense", *view, exit_code=4)
    assert any(name in line and "MISSING" in line for line in result.stdout.splitlines())
    assert result.stderr.count("\n") == 1
    assert run_json("show", "dense", *view, exit_code=4)["faults"][0]["name"] == name


def test_shows_that_the_config_blob_is_missing(stored: LocalStore) -> None:
    remove_blob(stored, stored.resolve(Reference.parse("dense")).config)
    result = run("show", "dense", exit_code=4)
    assert any(line.startswith("(config) ") for line in result.stdout.splitlines())
    assert "MISSING" in result.stdout


def test_a_config_with_a_wrong_digest_is_damaged(stored: LocalStore) -> None:
    layer = layer_named(stored, "config.json")
    path = stored.folder("blobs") / layer.digest.file_name
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data.replace(b"Tiny", b"tINY"))
    result = run("show", "dense", "--files", exit_code=4)
    assert "DAMAGED config.json" in result.stdout
    assert result.stdout.startswith("dense:latest: unknown architecture\n")


def test_a_pattern_that_only_damage_can_explain_is_damage(store: LocalStore, moe: Path) -> None:
    run("create", moe, "moe")
    remove_blob(store, layer_named(store, "model.layers.0.mlp.experts", "moe"))
    assert "not all of it can be read" in run("show", "moe", "*.experts.0.*", exit_code=4).stderr


def test_a_damaged_manifest_is_damage(stored: LocalStore) -> None:
    stored.manifest_path(Reference.parse("dense")).write_bytes(b"{}")
    run("show", "dense", exit_code=4)
    assert run("show", "dense", "--manifest").stdout == "{}"


def test_shows_the_tensors_of_a_model_of_ollama(store: LocalStore) -> None:
    manifest = add_gguf_model(store, "llama3:8b")
    result = run("show", "llama3:8b")
    lines = result.stdout.splitlines()
    assert lines[0] == "llama3:8b: llama (8.0B)"
    assert lines[1].startswith("a model of Ollama: ")
    assert lines[3].split()[:5] == ["token_embd.weight", "q8_0", "g32", "[5,", "64]"]
    assert lines[6].startswith("3 tensors in 1 blob, 576 parameters, ")
    shown = run_json("show", "llama3:8b")
    assert (shown["format"], shown["parameters"]) == ("gguf", 576)
    assert shown["tensors"][0]["quant_type"] == "q8_0"
    assert len(run_json("show", "llama3:8b", "--layers")["layers"]) == 1 + len(manifest.layers)


def test_shows_that_the_file_of_a_model_of_ollama_is_damaged(store: LocalStore) -> None:
    add_gguf_model(store, "llama3:8b", b"GGUF")
    result = run("show", "llama3:8b", exit_code=4)
    assert result.stdout.splitlines()[3].split()[:2] == [media_types.MODEL, "DAMAGED"]
    assert f"layer '{media_types.MODEL}': " in result.stderr


def test_shows_the_logical_shape_of_quantized_tensors(store: LocalStore) -> None:
    specs = [
        TensorSpec("w.weight", DType.U32, (6, 8)),
        TensorSpec("w.weight.scale", DType.BF16, (6, 2)),
        TensorSpec("w.weight.bias", DType.BF16, (6, 2)),
    ]
    header = encode_header(specs, {"quant_type": "int4", "group_size": "32"})
    blob = header + bytes(sum(spec.nbytes for spec in specs))
    add_blobs(store, "q", {"w.weight": blob})

    shown = run_json("show", "q")
    assert shown["parameters"] == 6 * 64
    (tensor,) = shown["tensors"]
    assert tensor["type"] == tensor["quant_type"] == "int4"
    assert (tensor["dtype"], tensor["group_size"]) == ("U32", 32)
    assert tensor["shape"] == [6, 64]
    assert tensor["parameters"] == 6 * 64
    assert tensor["bytes"] == 6 * 8 * 4 + 2 * 6 * 2 * 2
    assert tensor["bits_per_weight"] == 5.0
    lines = run("show", "q").stdout.splitlines()
    assert lines[2].split()[:6] == ["w.weight", "int4", "g32", "[6,", "64]", "5"]
    assert lines[3] == "1 tensor in 1 blob, 384 parameters, 240 B, 5 bits per weight"


def test_distinguishes_layers_without_a_name(stored: LocalStore) -> None:
    base = stored.resolve(Reference.parse("dense"))
    contents = [blob((name, "U8", (1,), b"x")) for name in ("one", "two")]
    layers = [Descriptor(media_types.TENSOR, *add_blob(stored, data)) for data in contents]
    stored.names.publish(replace_any("nameless"), with_layers(stored, base, layers))

    assert [tensor["name"] for tensor in run_json("show", "nameless")["tensors"]] == ["one", "two"]
    remove_blob(stored, layers[0])
    shown = run_json("show", "nameless", exit_code=4)
    assert [tensor["name"] for tensor in shown["tensors"]] == ["two"]
    assert [fault["digest"] for fault in shown["faults"]] == [str(layers[0].digest)]


def test_two_views_contradict_each_other(stored: LocalStore) -> None:
    error = run("show", "dense", "--layers", "--files", exit_code=2).stderr
    assert "--layers and --files contradict each other" in error


def test_shows_the_scheme_of_a_model_that_is_kept_as_published(
    stored: LocalStore, tmp_path: Path
) -> None:
    assert "kept as published" not in run("show", "dense").stdout
    assert run_json("show", "dense")["published_scheme"] is None
    created = run("create", write_published(tmp_path / "awq", "awq"), "quantized")
    assert "note: awq, kept as published: tensor 'model." in created.stderr
    assert ", awq, kept as published, " in run("show", "quantized").stdout
    assert "quantization  awq, kept as published\n" in run("info", "quantized").stdout
    for command in ("show", "info"):
        assert run_json(command, "quantized")["published_scheme"] == "awq"
    listed = {model["name"]: model["published_scheme"] for model in run_json("list")["models"]}
    assert listed == {"dense:latest": None, "quantized:latest": "awq"}
    heading, dense, quantized = run("list").stdout.splitlines()
    assert heading.endswith("QUANTIZATION")
    assert quantized.endswith("awq, kept as published")
    assert "published" not in dense
    assert "QUANTIZATION" not in run("list", "dense").stdout


def test_a_part_of_a_name_is_answered_with_the_glob(stored: LocalStore) -> None:
    part = next(name for name in dense_tensors() if "." in name).partition(".")[2]
    for words in (("show", "dense", part), ("find", part)):
        assert f"; '*{part}*' matches " in run(*words, exit_code=3).stderr
    assert "matches '*" not in run("show", "dense", "nothing-like-it", exit_code=3).stderr
