from __future__ import annotations

import enum
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

import blobstore
from blobstore.errors import (
    CheckpointRefused,
    DamagedSource,
    SourceError,
    UnsupportedSource,
    UsageError,
)
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.sources.base import SourceOptions
from blobstore.sources.file_tree import FileTree
from blobstore.sources.huggingface import HuggingFaceFolder
from blobstore.sources.small_files import counted
from blobstore.store.local import LocalStore
from tests.support.descriptors import open_files
from tests.support.models import dense_tensors, write_folder
from tests.support.ollama_store import GGUF_FILE

ONE = {"a": np.arange(3.0)}
TWO = {"b": np.arange(4.0)}
INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture(autouse=True)
def no_descriptor_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert open_files(tmp_path) == []


class Found:
    """The contents of a folder, which is closed again."""

    def __init__(self, folder: Path, **options: Any) -> None:
        source = HuggingFaceFolder(folder, SourceOptions(**options))
        self.names = set(source.specs)
        self.files = [file.name for file in source.files]
        self.paths = {file.name: file.path for file in source.files}
        self.notices = source.notices
        self.config = source.config
        source.close()


def put(folder: Path, **tensors: Any) -> Path:
    """Write a weight file for each keyword; ``__`` is a dot in its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tensors.items():
        save_file(content, folder / f"{name.replace('__', '.')}.safetensors")
    return folder


def touch(folder: Path, *names: str, content: str = "{}") -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def unchosen(folder: Path, *names: str) -> list[str]:
    """Return the notice about weight files that were not chosen."""
    listed = counted(FileTree(folder), names, "weight file")
    return [f"left out: {listed}; choose other weights with --weights"]


def left_out(folder: Path, what: str) -> str:
    """Return the notice about other files that are not imported; ``what`` has their names in the folder."""
    what = re.sub(r"'([^']+)'", rf"'{folder}/\1'", what)
    return f"left out: {what}; --keep PATTERN stores files as they are"


# Choice of weights


def test_reads_one_file(tmp_path: Path) -> None:
    found = Found(write_folder(tmp_path, dense_tensors()))
    assert found.names == set(dense_tensors())
    assert found.files == ["config.json"]
    assert found.config == {"model_type": "tiny"}
    assert found.notices == []


@pytest.mark.parametrize("index", [True, False])
def test_reads_shards_with_and_without_an_index(tmp_path: Path, index: bool) -> None:
    write_folder(tmp_path, dense_tensors(), shards=3)
    if not index:
        (tmp_path / INDEX).unlink()
    found = Found(tmp_path)
    assert found.names == set(dense_tensors())
    assert found.files == ["config.json"]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_shards_without_an_index_must_all_be_there(tmp_path: Path, number: int) -> None:
    write_folder(tmp_path, dense_tensors(), shards=3)
    (tmp_path / INDEX).unlink()
    (tmp_path / f"model-{number:05}-of-00003.safetensors").unlink()
    with pytest.raises(
        DamagedSource, match="not a complete set of shards, and there is no index: 2 found"
    ):
        Found(tmp_path)


@pytest.mark.parametrize("other", ["00002-of-00003", "00003-of-00002"])
def test_shards_without_an_index_need_all_numbers_of_one_set(tmp_path: Path, other: str) -> None:
    write_folder(tmp_path, ONE | TWO, shards=2)
    (tmp_path / INDEX).unlink()
    (tmp_path / SHARDS[1]).rename(tmp_path / f"model-{other}.safetensors")
    with pytest.raises(DamagedSource, match="not a complete set"):
        Found(tmp_path)


def test_a_shard_that_an_index_names_must_be_there(tmp_path: Path) -> None:
    write_folder(tmp_path, ONE | TWO, shards=2)
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(
        DamagedSource,
        match=f"shard '.*{SHARDS[1]}' is missing; tensors that .*{INDEX}' places in it: 1",
    ):
        Found(tmp_path)


def test_a_missing_shard_next_to_other_weights_names_the_option(tmp_path: Path) -> None:
    write_folder(tmp_path, ONE | TWO, shards=2)
    for name in SHARDS:
        (tmp_path / name).rename(tmp_path / name.replace("of-00002", "of-00001"))
    message = "or choose other weights with --weights model-00001-of-00001.safetensors"
    with pytest.raises(DamagedSource, match=message):
        Found(tmp_path)
    assert Found(tmp_path, weights="model-00001-*").names == {"a"}


def test_the_index_decides_between_two_sets_of_shards(tmp_path: Path) -> None:
    others = [f"model-{number:05}-of-00004.safetensors" for number in range(1, 5)]
    put(tmp_path, **{name.removesuffix(".safetensors"): TWO for name in others})
    found = Found(write_folder(tmp_path, ONE | {"c": np.arange(2.0)}, shards=2))
    assert found.names == {"a", "c"}
    assert found.notices == unchosen(tmp_path, *others)


def test_an_index_may_name_files_of_any_name(tmp_path: Path) -> None:
    put(tmp_path, model=ONE, mm_projector=TWO)
    weight_map = {"a": "model.safetensors", "b": "mm_projector.safetensors"}
    touch(tmp_path, INDEX, content=json.dumps({"weight_map": weight_map}))
    found = Found(tmp_path)
    assert found.names == {"a", "b"}
    assert found.notices == []


@pytest.mark.parametrize("weight_map", [{}, {"a": "model.safetensors"}])
def test_reads_one_file_next_to_its_own_or_an_empty_index(
    tmp_path: Path, weight_map: dict[str, str]
) -> None:
    put(tmp_path, model=ONE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert Found(tmp_path).names == {"a"}


def test_rejects_one_file_next_to_an_index_of_others(tmp_path: Path) -> None:
    write_folder(tmp_path, ONE | TWO, shards=2)
    put(tmp_path, model=dense_tensors())
    with pytest.raises(SourceError, match="both model.safetensors and the shards of .*choose with"):
        Found(tmp_path)
    assert Found(tmp_path, weights="model.safetensors").names == set(dense_tensors())
    assert Found(tmp_path, weights="model-*.safetensors").names == {"a", "b"}


def test_a_broken_index_is_an_error_even_with_an_intact_file(tmp_path: Path) -> None:
    put(tmp_path, model=ONE)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(DamagedSource, match="weight index .*: not valid JSON"):
        Found(tmp_path)


@pytest.mark.parametrize(
    "other", ["consolidated", "model.fp16", "model.bf16-00001-of-00002", "adapter_model", "Model"]
)
def test_other_weights_are_left_out_with_a_notice(tmp_path: Path, other: str) -> None:
    put(tmp_path, model=ONE)
    save_file(TWO, tmp_path / f"{other}.safetensors")
    found = Found(tmp_path)
    assert found.names == {"a"}
    assert found.notices == unchosen(tmp_path, f"{other}.safetensors")


def test_a_pattern_chooses_other_weights(tmp_path: Path) -> None:
    put(tmp_path, model=ONE, consolidated=TWO)
    found = Found(tmp_path, weights="consolidated*")
    assert found.names == {"b"}
    assert found.notices == unchosen(tmp_path, "model.safetensors")


def test_a_pattern_chooses_shards_by_their_index(tmp_path: Path) -> None:
    write_folder(tmp_path, ONE | TWO, shards=2)
    put(tmp_path, model__fp16=dense_tensors())
    assert Found(tmp_path, weights="model-0*").names == {"a", "b"}
    # One shard of an indexed set stands for the set, so that a model is never half.
    assert Found(tmp_path, weights=SHARDS[0]).names == {"a", "b"}


@pytest.mark.parametrize(
    ("shard", "index"),
    [
        ("model.fp16-{}.safetensors", "model.safetensors.index.fp16.json"),
        ("model-{}.fp16.safetensors", "model.safetensors.fp16.index.json"),  # of older diffusers
    ],
)
def test_reads_the_shards_of_a_variant_by_its_index(tmp_path: Path, shard: str, index: str) -> None:
    write_folder(tmp_path, ONE | TWO, shards=2)
    text = (tmp_path / INDEX).read_text()
    for name in SHARDS:
        new = shard.format(name[len("model-") : -len(".safetensors")])
        (tmp_path / name).rename(tmp_path / new)
        text = text.replace(name, new)
    (tmp_path / INDEX).unlink()
    (tmp_path / index).write_text(text)
    assert Found(tmp_path).names == {"a", "b"}
    assert Found(tmp_path).files == ["config.json"]
    next(tmp_path.glob("*00002*")).unlink()
    with pytest.raises(DamagedSource, match=r"shard .*00002.* is missing"):
        Found(tmp_path)


def test_shards_of_two_variants_need_a_choice(tmp_path: Path) -> None:
    put(tmp_path, model__fp16=ONE, model__ema=TWO)
    for name in ("fp16", "ema"):
        index = {"weight_map": {"a": f"model.{name}.safetensors"}}
        (tmp_path / f"model.safetensors.index.{name}.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match="several weight files"):
        Found(tmp_path)


def test_a_pattern_must_not_mix_sets(tmp_path: Path) -> None:
    write_folder(tmp_path, ONE | TWO, shards=2)
    put(tmp_path, model__fp16=dense_tensors())
    with pytest.raises(SourceError, match="chooses files of .* and others; give a narrower"):
        Found(tmp_path, weights="model*")


def test_a_pattern_that_nothing_matches_is_an_error(tmp_path: Path) -> None:
    put(tmp_path, model=ONE)
    with pytest.raises(SourceError, match="no file in .* matches --weights 'fp16'"):
        Found(tmp_path, weights="fp16")


def test_a_single_file_of_any_name_is_taken(tmp_path: Path) -> None:
    assert Found(put(tmp_path, anything=ONE)).names == {"a"}


def test_rejects_several_files_without_a_usual_name(tmp_path: Path) -> None:
    put(tmp_path, x=ONE, y=TWO)
    with pytest.raises(
        SourceError, match="several weight files .*'x.safetensors', 'y.safetensors'"
    ):
        Found(tmp_path)
    assert Found(tmp_path, weights="[xy].safetensors").names == {"a", "b"}


def test_adapters_of_mlx_win_over_those_of_earlier_steps(tmp_path: Path) -> None:
    steps = ("0000100_adapters", "0000200_adapters")
    put(tmp_path, adapters=ONE, **dict.fromkeys(steps, TWO))
    found = Found(tmp_path)
    assert found.names == {"a"}
    assert found.notices == unchosen(tmp_path, *(f"{step}.safetensors" for step in steps))
    assert Found(tmp_path, weights="0000200*").names == {"b"}
    put(tmp_path, other=TWO)
    with pytest.raises(SourceError, match="several weight files"):
        Found(tmp_path)


def test_a_file_is_a_source(tmp_path: Path) -> None:
    put(tmp_path, x=ONE)
    touch(tmp_path, "config.json")
    found = Found(tmp_path / "x.safetensors")
    assert (found.names, found.files, found.notices, found.config) == ({"a"}, [], [], {})


@pytest.mark.parametrize("name", ["optimizer.pt", "training_args.bin"])
def test_training_state_alone_is_not_a_model(tmp_path: Path, name: str) -> None:
    touch(tmp_path, "config.json", name)
    with pytest.raises(UnsupportedSource, match=f"'{name}': this is the state of a training"):
        Found(tmp_path)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("tf_model.h5", "an HDF5 file"),
        ("flax_model.msgpack", "a msgpack file of Flax"),
        ("rust_model.ot", "a weight file of tch"),
        ("onnx/model.onnx", "an ONNX file"),
        ("weights.npz", "a NumPy archive"),
        ("x.tflite", "a TensorFlow Lite file"),
        ("x.mlmodel", "a Core ML file"),
    ],
)
def test_formats_that_are_not_read_are_named(tmp_path: Path, name: str, what: str) -> None:
    touch(tmp_path, "config.json", name)
    with pytest.raises(
        UnsupportedSource, match=f"but '{name}': this is {what}; .* --keep {name}$"
    ) as caught:
        Found(tmp_path)
    assert caught.value.exit_code == 1


def test_other_formats_are_left_out_with_a_notice(tmp_path: Path) -> None:
    files = ("pytorch_model.bin", "rust_model.ot", "onnx/model.onnx", ".git/x", ".cache/y")
    touch(put(tmp_path, model=ONE), *files)
    what = "1 folder ('onnx') and 2 files ('pytorch_model.bin', 'rust_model.ot')"
    assert Found(tmp_path).notices == [left_out(tmp_path, what)]


def test_a_folder_without_weights_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=f"'{tmp_path}' is empty; expected a Hugging Face model"):
        Found(tmp_path)
    with pytest.raises(SourceError, match="has no weight files"):
        Found(touch(tmp_path, "config.json"))


def test_a_folder_named_like_a_weight_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(SourceError, match="is not a regular file"):
        Found(tmp_path)


# Pipelines and modules


def pipeline(folder: Path, **components: Any) -> Path:
    listed = {"_class_name": "P", "_diffusers_version": "0.1", "x": None, "y": [None, None]}
    touch(folder, "model_index.json", content=json.dumps(listed | components))
    return folder


def test_reads_the_components_of_a_pipeline(tmp_path: Path) -> None:
    pipeline(
        tmp_path,
        unet=["diffusers", "U"],
        text_encoder=["transformers", "T"],
        s=["diffusers", "DDIMScheduler"],
    )
    put(tmp_path / "unet", diffusion_pytorch_model=ONE)
    put(tmp_path / "text_encoder", model=ONE, model__fp16=TWO)
    touch(tmp_path, "s/scheduler_config.json", "unet/config.json", "safety/x.json", "README.md")
    found = Found(tmp_path)
    assert found.names == {"unet/a", "text_encoder/a"}
    assert found.files == [
        "README.md",
        "model_index.json",
        "s/scheduler_config.json",
        "unet/config.json",
    ]
    assert found.notices == [
        *unchosen(tmp_path, "text_encoder/model.fp16.safetensors"),
        left_out(tmp_path, "1 folder ('safety')"),
    ]


def test_a_listed_component_must_be_there(tmp_path: Path) -> None:
    put(pipeline(tmp_path, unet=["diffusers", "U"]), model=ONE)
    with pytest.raises(DamagedSource, match="lists component 'unet', but there is no such folder"):
        Found(tmp_path)


def test_a_single_file_copy_of_a_pipeline_is_left_out(tmp_path: Path) -> None:
    pipeline(tmp_path, unet=["diffusers", "U"])
    put(tmp_path / "unet", diffusion_pytorch_model=ONE)
    put(tmp_path, everything_in_one=TWO)
    found = Found(tmp_path)
    assert found.names == {"unet/a"}
    assert any("everything_in_one.safetensors" in notice for notice in found.notices)


def test_reports_a_file_whose_name_a_store_cannot_hold(tmp_path: Path) -> None:
    put(tmp_path, model=ONE)
    touch(tmp_path, "my notes.txt", "tokenizer.json")
    found = Found(tmp_path)
    assert found.files == ["tokenizer.json"]
    assert [notice for notice in found.notices if "my notes.txt" in notice]


def test_reports_weights_that_a_pattern_skips(tmp_path: Path) -> None:
    pipeline(tmp_path, unet=["diffusers", "U"], vae=["diffusers", "V"])
    put(tmp_path / "unet", diffusion_pytorch_model__fp16=ONE)
    put(tmp_path / "vae", diffusion_pytorch_model=ONE)
    found = Found(tmp_path, weights="*.fp16.safetensors")
    assert found.names == {"unet/a"}
    assert any("vae/diffusion_pytorch_model.safetensors" in notice for notice in found.notices)


def test_a_name_below_a_component_and_one_with_a_slash_collide(tmp_path: Path) -> None:
    pipeline(tmp_path, unet=["diffusers", "U"])
    put(tmp_path, model={"unet/a": np.zeros(1)})
    put(tmp_path / "unet", diffusion_pytorch_model=ONE)
    with pytest.raises(DamagedSource, match="tensor 'unet/a' is in both"):
        Found(tmp_path)


def test_reads_sentence_transformers_modules(tmp_path: Path) -> None:
    modules = [
        {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
        {"idx": 3, "path": "3_Normalize", "type": "sentence_transformers.models.Normalize"},
        {"idx": 4},
        "odd",
    ]
    touch(tmp_path, "modules.json", content=json.dumps(modules))
    touch(put(tmp_path, model=ONE), "1_Pooling/config.json", "2_Dense/config.json", "vocab.txt")
    put(tmp_path / "2_Dense", model={"linear.weight": np.zeros(2)})
    found = Found(tmp_path)
    assert found.names == {"a", "2_Dense/linear.weight"}
    assert found.files == [
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "modules.json",
        "vocab.txt",
    ]


@pytest.mark.parametrize("name", ["..", ".", "../x", "/etc", "a/b", "a b", "\x1b", "é", "~\n"])
def test_hostile_component_names_are_refused(tmp_path: Path, name: str) -> None:
    put(tmp_path / "model", model=ONE)
    for list_name, content in {
        "model_index.json": {name: ["diffusers", "U"]},
        "modules.json": [{"path": name}],
    }.items():
        touch(tmp_path / "model", list_name, content=json.dumps(content))
        with pytest.raises(DamagedSource, match="which is not a folder name") as caught:
            Found(tmp_path / "model")
        assert str(caught.value).isprintable()
        (tmp_path / "model" / list_name).unlink()


@pytest.mark.parametrize("content", ["", "{", '{"a": ', "7", '"x"', "[" * 100_000, "\ud800"])
@pytest.mark.parametrize("name", ["model_index.json", "modules.json", "config.json"])
def test_lists_and_configs_that_cannot_be_read_are_damage(
    tmp_path: Path, name: str, content: str
) -> None:
    put(tmp_path, model=ONE)
    (tmp_path / name).write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(
        DamagedSource, match=rf"{name}' (cannot be read: |is not a JSON )|: this is an empty file"
    ):
        Found(tmp_path)


def test_a_config_of_another_encoding_is_not_damage(tmp_path: Path) -> None:
    put(tmp_path, model=ONE)
    (tmp_path / "config.json").write_bytes('{"a": "é"}'.encode("latin-1"))
    with pytest.raises(SourceError, match="config.json' is not UTF-8 at byte 7; save it") as caught:
        Found(tmp_path)
    assert caught.value.exit_code == 1
    (tmp_path / "config.json").write_bytes('{"a": "é'.encode()[:-1])
    with pytest.raises(DamagedSource, match="unexpected end of data"):
        Found(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbf{"a": "\xc3\xa9"}',
        b'{\r\n"a": "\xc3\xa9"\r\n}',
        '{"a": "é"}'.encode("utf-16"),
        b'{"a": "\xc3\xa9", "b": Infinity}',
    ],
    ids=["a byte order mark", "ends of lines of Windows", "UTF-16", "Infinity"],
)
def test_configs_as_editors_save_them_are_read_and_kept(tmp_path: Path, content: bytes) -> None:
    put(tmp_path, model=ONE)
    (tmp_path / "config.json").write_bytes(content)
    found = Found(tmp_path)
    assert found.config["a"] == "é"
    assert found.paths["config.json"].read_bytes() == content


@pytest.mark.parametrize(
    ("name", "content"), [("model_index.json", "[]"), ("modules.json", "{}"), ("config.json", "[]")]
)
def test_rejects_lists_for_objects_and_objects_for_lists(
    tmp_path: Path, name: str, content: str
) -> None:
    touch(put(tmp_path, model=ONE), name, content=content)
    with pytest.raises(DamagedSource, match=f"{name}' is not a JSON"):
        Found(tmp_path)


@pytest.mark.parametrize(
    "component",
    [("diffusers", "UNet2DConditionModel"), ("transformers", "CLIPTextModel"), ("custom", "X")],
)
def test_a_component_without_its_weights_is_damage(
    tmp_path: Path, component: tuple[str, str]
) -> None:
    pipeline(tmp_path, vae=["diffusers", "AutoencoderKL"], part=component)
    put(tmp_path / "vae", diffusion_pytorch_model=ONE)
    # A component of another library is known by its config.
    touch(tmp_path, "part/config.json", content=json.dumps({"_class_name": component[1]}))
    touch(tmp_path, "part/training_args.bin")
    with pytest.raises(DamagedSource, match=rf"/part', a {component[1]}, has no weights; download"):
        Found(tmp_path)
    assert Found(tmp_path, exclude=("part",)).names == {"vae/a"}
    touch(tmp_path, "part/model.onnx")
    assert "part/model.onnx" in Found(tmp_path, keep=("*.onnx",)).files
    put(tmp_path / "part", diffusion_pytorch_model__fp16=TWO)
    assert Found(tmp_path).names == {"vae/a", "part/b"}
    assert Found(tmp_path, weights="diffusion_pytorch_model.safetensors").names == {"vae/a"}


@pytest.mark.parametrize(
    "class_name",
    [
        *("FlowMatchEulerDiscreteScheduler", "CLIPTokenizer", "T5TokenizerFast", "Mel"),
        *("CLIPFeatureExtractor", "CLIPImageProcessor", "Qwen2VLProcessor"),
        "Qwen2VLImageProcessorFast",
    ],
)
def test_some_components_need_no_weights(tmp_path: Path, class_name: str) -> None:
    pipeline(tmp_path, vae=["diffusers", "AutoencoderKL"], part=["diffusers", class_name])
    put(tmp_path / "vae", diffusion_pytorch_model=ONE)
    touch(tmp_path, "part/config.json", content='{"_class_name": "X"}')
    found = Found(tmp_path)
    assert (found.names, found.notices) == ({"vae/a"}, [])


def test_a_component_of_another_library_may_have_no_weights(tmp_path: Path) -> None:
    pipeline(tmp_path, vae=["diffusers", "AutoencoderKL"], part=["custom", "Notes"])
    put(tmp_path / "vae", diffusion_pytorch_model=ONE)
    touch(tmp_path, "part/x.json")
    assert Found(tmp_path).notices == [f"'{tmp_path}/part', a Notes, has no weights"]


@pytest.mark.parametrize("path", ["2_Dense", "", "3_Absent"])
def test_a_module_without_its_weights_is_damage(tmp_path: Path, path: str) -> None:
    modules = [
        {"path": path, "type": "sentence_transformers.models.Dense"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    touch(tmp_path, "modules.json", content=json.dumps(modules))
    touch(put(tmp_path, **({"model": ONE} if path else {})), "2_Dense/config.json")
    put(tmp_path / "1_Pooling", model=TWO)
    with pytest.raises(DamagedSource, match="a Dense, has no weights; download"):
        Found(tmp_path)


@pytest.mark.parametrize("name", ["secret.txt", "config.json", "model.safetensors", "vae/x.json"])
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = put(tmp_path / "model", model=ONE)
    pipeline(folder, vae=["diffusers", "AutoencoderKL"])
    put(folder / "vae", diffusion_pytorch_model=TWO)
    put(tmp_path, other={"a": np.zeros(1)})
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "other.safetensors")
    with pytest.raises(SourceError, match=r"leads out of the model's folder by a link"):
        Found(folder)


def test_advice_that_names_a_file_is_one_word_of_a_shell(tmp_path: Path) -> None:
    folder = put(tmp_path / "model", model=ONE)
    (folder / "x'; touch y;'.safetensors").symlink_to(
        put(tmp_path, other=TWO) / "other.safetensors"
    )
    with pytest.raises(SourceError, match="link") as caught:
        Found(folder, weights="x*")
    _, command = str(caught.value).split("leave it out with ")
    assert shlex.split(command) == ["--exclude", "x'; touch y;'.safetensors"]


def test_links_within_the_folder_and_to_the_folder_are_followed(tmp_path: Path) -> None:
    folder = put(tmp_path / "real", weights=ONE)
    (folder / "model.safetensors").symlink_to("weights.safetensors")
    (tmp_path / "link").symlink_to(folder)
    assert Found(tmp_path / "link").names == {"a"}
    assert Found(tmp_path / "link" / "model.safetensors").names == {"a"}


# Small files


def test_keeps_the_files_that_runtimes_and_users_need(tmp_path: Path) -> None:
    kept = ["LICENCE", "LICENSE", "NOTICE", "README.md", "USE_POLICY", "chat_template.jinja"]
    kept += ["config.json", "merges.txt", "modeling_x.py", "qwen.tiktoken", "source.spm"]
    kept += ["spiece.model", "tokenizer.json"]
    left = [".gitattributes", INDEX, "pytorch_model.bin.index.json", "x.png", "model.sig"]
    left += ["model.safetensors.index.fp16.json"]
    touch(put(tmp_path, model=ONE), *kept, *left, content='{"weight_map":{}}')
    assert Found(tmp_path).files == kept


def test_keeps_other_files_on_request(tmp_path: Path) -> None:
    touch(put(tmp_path, model=ONE, consolidated=TWO), "x.png", "a b.png", "pytorch_model.bin")
    touch(tmp_path, "onnx/model.onnx", "onnx/x.json", "a/b/c/x.png", ".git/x.png")
    found = Found(tmp_path, keep=("*.png", "onnx/*", "*.safetensors", "pytorch_model.bin"))
    assert found.names == {"a"}
    assert found.files == [
        "consolidated.safetensors",
        "onnx/model.onnx",
        "onnx/x.json",
        "pytorch_model.bin",
        "x.png",
    ]
    assert found.notices == [
        f"left out: 1 file ('{tmp_path}/a b.png'); names in a store have only letters, digits, '_', '.' and '-'",
        left_out(tmp_path, "1 folder ('a')"),
    ]
    found = Found(tmp_path, keep=("onnx/*.onnx", "*.gif"))
    assert f"no file of '{tmp_path}' matches --keep '*.gif'" in found.notices
    assert f"'{tmp_path}/onnx/x.json'" in found.notices[-1]


def test_files_in_folders_that_are_read_are_named_too(tmp_path: Path) -> None:
    pipeline(tmp_path, unet=["diffusers", "U"])
    put(tmp_path / "unet", model=ONE)
    touch(tmp_path, "unet/x.onnx", "unet/old/x.bin", ".gitattributes", ".cache/x", "a.png", ".meta")
    what = "1 folder ('unet/old') and 3 files ('.meta', 'a.png', 'unet/x.onnx')"
    assert Found(tmp_path).notices == [left_out(tmp_path, what)]


def test_many_files_that_are_left_out_are_counted(tmp_path: Path) -> None:
    touch(put(tmp_path, model=ONE), *(f"{number}.png" for number in range(9)))
    shown = ", ".join(f"'{number}.png'" for number in range(5))
    assert Found(tmp_path).notices == [left_out(tmp_path, f"9 files ({shown} and 4 more)")]


def test_a_folder_with_weights_of_its_own_is_advised(tmp_path: Path) -> None:
    put(touch(tmp_path, "ir/openvino_model.bin", "onnx/x.onnx", "states/optimizer.pt"), model=ONE)
    put(tmp_path / "my other", model=TWO)
    *_, advice = Found(tmp_path).notices
    (command,) = re.findall(r"'blobstore create (.*)' imports it", advice)
    assert Found(Path(*shlex.split(command))).names == {"b"}


def test_voices_are_kept_and_are_no_weights(tmp_path: Path) -> None:
    put_bin(tmp_path, "model.pth", a=1)
    put_bin(tmp_path, "speakers_xtts.pth", "spk_dict.pt", voice=1)
    found = Found(tmp_path)
    assert (found.names, found.notices) == ({"a"}, [])
    assert found.files == ["speakers_xtts.pth", "spk_dict.pt"]
    found = Found(tmp_path, weights="spk_dict.pt")
    assert (found.names, found.files) == ({"voice"}, ["speakers_xtts.pth"])


@pytest.mark.parametrize("files", [(), ("adapter_model.safetensors",)])
def test_the_config_of_an_adapter_goes_with_its_weights(
    tmp_path: Path, files: tuple[str, ...]
) -> None:
    touch(put(tmp_path, model=ONE), "config.json", "adapter_config.json")
    for name in files:
        put(tmp_path, **{name.partition(".")[0]: TWO})
    found = Found(tmp_path)
    assert found.files == ["config.json"]
    assert f"left out: '{tmp_path}/adapter_config.json', since its adapter is" in found.notices[0]
    assert "adapter_config.json" in Found(tmp_path, keep=("adapter*",)).files
    (tmp_path / "model.safetensors").unlink()
    if files:
        assert Found(tmp_path).files == ["adapter_config.json", "config.json"]


def test_a_file_that_is_too_large_can_be_kept_on_request(tmp_path: Path) -> None:
    touch(put(tmp_path, model=ONE), "tokenizer.json")
    os.truncate(tmp_path / "tokenizer.json", 64 * 2**20 + 1)
    assert Found(tmp_path, keep=("*.json",)).files == ["tokenizer.json"]


def test_kept_files_alone_are_a_model(tmp_path: Path) -> None:
    touch(tmp_path, "x.gguf", "config.json")
    found = Found(tmp_path, keep=("*.gguf",))
    assert (found.names, found.files) == (set(), ["config.json", "x.gguf"])
    found = Found(tmp_path / "x.gguf", keep=("*.gguf",))
    assert (found.names, found.files) == (set(), ["x.gguf"])
    with pytest.raises(
        UnsupportedSource, match="x.gguf': this is not a gguf file, .*--keep x.gguf$"
    ):
        Found(tmp_path / "x.gguf")
    with pytest.raises(UnsupportedSource, match="nor any other .* --keep config.json$"):
        Found(tmp_path / "config.json")


def test_excluded_files_do_not_exist(tmp_path: Path) -> None:
    touch(put(tmp_path, model=ONE, consolidated=TWO), "huge.txt", "b/x.json", "c.json")
    touch(tmp_path, "config.json", content='{"a": 1}')
    found = Found(tmp_path, exclude=("h*.txt", "consolidated*", "config.json", "b"))
    assert (found.files, found.notices, found.config) == (["c.json"], [], {})
    with pytest.raises(SourceError, match="has no weight files"):
        Found(tmp_path, exclude=("*.safetensors",))


def test_keeps_folders_of_a_component_to_a_depth(tmp_path: Path) -> None:
    pipeline(tmp_path, tokenizer=["transformers", "CLIPTokenizer"])
    touch(
        put(tmp_path, model=ONE), "tokenizer/x.json", "tokenizer/a/x.json", "tokenizer/a/b/x.json"
    )
    touch(tmp_path, "additional_chat_templates/tool.jinja", "other/x.json")
    assert Found(tmp_path).files == [
        "additional_chat_templates/tool.jinja",
        "model_index.json",
        "tokenizer/a/x.json",
        "tokenizer/x.json",
    ]


def test_only_regular_files_with_plain_names_are_kept(tmp_path: Path) -> None:
    put(tmp_path, model=ONE)
    for name in (b"a\nb.json", b"\xff.json", b"a b.json", b"\x1b[2J.txt", "é.json".encode()):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text("{}")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    assert Found(tmp_path).files == []


def test_a_loop_of_folders_ends(tmp_path: Path) -> None:
    pipeline(tmp_path, t=["transformers", "TTokenizer"])
    touch(put(tmp_path, model=ONE), "t/x.json")
    (tmp_path / "t" / "loop").symlink_to(tmp_path / "t")
    assert Found(tmp_path).files == ["model_index.json", "t/loop/x.json", "t/x.json"]


def test_a_huge_file_is_left_out_unless_it_is_kept(tmp_path: Path) -> None:
    touch(put(tmp_path, model=ONE), "train.txt")
    os.truncate(tmp_path / "train.txt", 64 * 2**20 + 1)
    found = Found(tmp_path)
    assert (found.names, found.files) == ({"a"}, [])
    assert found.notices == [
        f"left out: '{tmp_path}/train.txt', over 64 MiB; store it with --keep train.txt"
    ]
    found = Found(tmp_path, keep=("*.txt",))
    assert (found.files, found.notices) == (["train.txt"], [])


def test_reads_the_links_of_the_hub_cache(tmp_path: Path) -> None:
    blobs = tmp_path / "models--o--m" / "blobs"
    snapshot = blobs.parent / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    write_folder(tmp_path / "real", ONE | TWO, shards=2, files={"1_Pooling/config.json": b"{}"})
    touch(tmp_path / "real", "modules.json", content='[{"path":"1_Pooling"}]')
    for number, path in enumerate(sorted((tmp_path / "real").rglob("*"))):
        link = snapshot / path.relative_to(tmp_path / "real")
        if path.is_dir():
            link.mkdir()
        else:
            path.rename(blobs / str(number))
            link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    found = Found(snapshot)
    assert found.names == {"a", "b"}
    assert found.files == ["1_Pooling/config.json", "config.json", "modules.json"]


# Names of tensors


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "x" * 70_000, "\0", "", "a\nb"])
def test_any_tensor_name_is_only_a_name(tmp_path: Path, name: str) -> None:
    put(tmp_path / "m", model={name: np.zeros(1)})
    assert Found(tmp_path / "m").names == {name}
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("target", ["gone", "tokenizer.json"], ids=["nothing", "itself"])
def test_rejects_a_small_file_that_is_a_link_to_nothing(tmp_path: Path, target: str) -> None:
    put(tmp_path, model=ONE)
    (tmp_path / "tokenizer.json").symlink_to(target)
    with pytest.raises(DamagedSource, match=r"tokenizer\.json' is a broken link"):
        Found(tmp_path)


# PyTorch checkpoints


BIN_INDEX = "pytorch_model.bin.index.json"
BINS = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
TRAINING = [
    *("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt"),
    *("rng_state.pth", "rng_state_0.pth"),
]


class Kind(enum.Enum):
    A = "a"


class Thing:
    def __init__(self) -> None:
        self.value = 1


def put_bin(folder: Path, *names: str, **tensors: int) -> Path:
    """Write checkpoints; each keyword is a tensor and its number of zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        content = {key: torch.zeros(count) for key, count in tensors.items()}
        torch.save(content, folder / name)
    return folder


def sharded(folder: Path, **weight_map: str) -> Path:
    put_bin(folder, BINS[0], a=1, b=2)
    put_bin(folder, BINS[1], c=3)
    weight_map = weight_map or {"a": BINS[0], "b": BINS[0], "c": BINS[1]}
    (folder / BIN_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "x.pth", "x.pt", "x.bin", "x.ckpt", "epoch=1-step=2.ckpt"]
)
def test_reads_one_checkpoint(tmp_path: Path, name: str) -> None:
    put_bin(touch(tmp_path, "config.json"), name, a=3)
    for path in (tmp_path, tmp_path / name):
        source = HuggingFaceFolder(path)
        (piece,) = source.read("a", memoryview(bytearray(100)))
        assert bytes(piece) == bytes(12)
        assert source.specs["a"].shape == (3,)
        assert source.notices == []
        source.close()


@pytest.mark.parametrize("name", ["model", "anything"])
def test_safetensors_of_any_name_are_preferred_to_checkpoints(tmp_path: Path, name: str) -> None:
    put(tmp_path, **{name: ONE})
    put_bin(tmp_path, "pytorch_model.bin", "x.pth", b=1)
    found = Found(tmp_path)
    assert found.names == {"a"}
    assert found.notices == [left_out(tmp_path, "2 files ('pytorch_model.bin', 'x.pth')")]


@pytest.mark.parametrize("weights", ["*.bin", "pytorch_model*", "pytorch_model.bin"])
def test_a_pattern_chooses_checkpoints(tmp_path: Path, weights: str) -> None:
    put(tmp_path, model=ONE)
    put_bin(tmp_path, "pytorch_model.bin", b=1)
    found = Found(tmp_path, weights=weights)
    assert found.names == {"b"}
    assert found.notices == unchosen(tmp_path, "model.safetensors")


def test_a_pattern_does_not_choose_training_state(tmp_path: Path) -> None:
    put_bin(tmp_path, "pytorch_model.bin", b=1)
    touch(tmp_path, "training_args.bin", "optimizer.bin")
    found = Found(tmp_path, weights="*.bin")
    assert found.names == {"b"}
    assert found.notices == unchosen(tmp_path, "optimizer.bin", "training_args.bin")


def test_a_pattern_selects_the_shards_and_not_training_state(tmp_path: Path) -> None:
    touch(sharded(tmp_path), "training_args.bin")
    assert Found(tmp_path, weights="*.bin").names == {"a", "b", "c"}


def test_training_state_can_be_chosen_by_its_exact_name(tmp_path: Path) -> None:
    put_bin(tmp_path, "pytorch_model.bin", b=1)
    put_bin(tmp_path, "optimizer.pt", exp=1)
    assert Found(tmp_path, weights="optimizer.pt").names == {"exp"}


def test_a_safetensors_file_is_never_training_state(tmp_path: Path) -> None:
    put(tmp_path, optimizer=ONE, model=TWO)
    assert Found(tmp_path, weights="opt*").names == {"a"}


def test_a_pattern_must_not_mix_files_with_one_tensor(tmp_path: Path) -> None:
    put(tmp_path, model=ONE)
    put_bin(tmp_path, "pytorch_model.bin", a=1)
    with pytest.raises(DamagedSource, match="tensor 'a' is in both .*safetensors' and .*bin'"):
        Found(tmp_path, weights="*model*")


@pytest.mark.parametrize("name", TRAINING)
def test_training_state_is_left_out_with_a_notice(tmp_path: Path, name: str) -> None:
    put_bin(touch(tmp_path, name), "pytorch_model.bin", a=1)
    found = Found(tmp_path)
    assert found.names == {"a"}
    assert found.notices == [left_out(tmp_path, f"1 file ('{name}')")]


@pytest.mark.parametrize("index", [True, False])
def test_reads_shards_of_checkpoints_with_and_without_an_index(tmp_path: Path, index: bool) -> None:
    sharded(touch(tmp_path, "config.json"))
    if not index:
        (tmp_path / BIN_INDEX).unlink()
    found = Found(tmp_path)
    assert found.names == {"a", "b", "c"}
    assert found.files == ["config.json"]
    assert found.notices == []


def test_shards_of_checkpoints_must_all_be_there(tmp_path: Path) -> None:
    (sharded(tmp_path) / BINS[1]).unlink()
    with pytest.raises(DamagedSource, match=f"shard '.*{BINS[1]}' is missing"):
        Found(tmp_path)
    (tmp_path / BIN_INDEX).unlink()
    with pytest.raises(
        DamagedSource, match="not a complete set of shards, and there is no index: 1 found"
    ):
        Found(tmp_path)


def test_a_tensor_that_no_index_of_checkpoints_names_can_be_ignored(tmp_path: Path) -> None:
    sharded(tmp_path, a=BINS[0], c=BINS[1])
    with pytest.raises(DamagedSource, match=r"has tensor 'b' that .* --ignore-unindexed"):
        Found(tmp_path)
    found = Found(tmp_path, ignore_unindexed=True)
    assert found.names == {"a", "c"}
    assert found.notices[0].startswith(f"left out: shard '{tmp_path}/{BINS[0]}' has tensor 'b'")


def test_an_index_of_checkpoints_names_checkpoints(tmp_path: Path) -> None:
    put(tmp_path, x=ONE)
    (tmp_path / BIN_INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    (tmp_path / "x.safetensors").rename(tmp_path / "x.st")
    put_bin(tmp_path, "pytorch_model.bin", a=1)
    with pytest.raises(DamagedSource, match="is not the plain name of a .bin file"):
        Found(tmp_path)


def test_rejects_one_checkpoint_next_to_an_index_of_others(tmp_path: Path) -> None:
    put_bin(sharded(tmp_path), "pytorch_model.bin", whole=1)
    with pytest.raises(SourceError, match="has both pytorch_model.bin and the shards of .*choose"):
        Found(tmp_path)
    assert Found(tmp_path, weights="pytorch_model.bin").names == {"whole"}
    assert Found(tmp_path, weights="pytorch_model-*.bin").names == {"a", "b", "c"}


def test_the_usual_name_is_taken_among_several_checkpoints(tmp_path: Path) -> None:
    put_bin(tmp_path, "pytorch_model.bin", a=1)
    put_bin(tmp_path, "pytorch_model.fp16.bin", "adapter_model.bin", "x.pth", b=1)
    found = Found(tmp_path)
    assert found.names == {"a"}
    assert found.notices == unchosen(
        tmp_path, "adapter_model.bin", "pytorch_model.fp16.bin", "x.pth"
    )


def test_rejects_several_checkpoints_without_a_usual_name(tmp_path: Path) -> None:
    put_bin(tmp_path, "large.pth", "small.pth", a=1)
    with pytest.raises(SourceError) as caught:
        Found(tmp_path)
    assert str(caught.value) == (
        f"'{tmp_path}' has several weight files ('large.pth', 'small.pth') and none is named "
        "pytorch_model.bin; choose one with --weights large.pth"
    )
    assert Found(tmp_path, weights="small*").names == {"a"}


def test_reads_a_pipeline_of_checkpoints(tmp_path: Path) -> None:
    pipeline(tmp_path, unet=["diffusers", "U"], text_encoder=["transformers", "T"], vae=["d", "V"])
    put_bin(
        tmp_path / "unet", "diffusion_pytorch_model.bin", "diffusion_pytorch_model.fp16.bin", a=1
    )
    put_bin(tmp_path / "text_encoder", "pytorch_model.bin", a=2)
    put(tmp_path / "vae", diffusion_pytorch_model=ONE)
    put_bin(tmp_path / "vae", "diffusion_pytorch_model.bin", b=1)
    put_bin(tmp_path, "v1-5-pruned.ckpt", everything=1)
    found = Found(tmp_path)
    assert found.names == {"unet/a", "text_encoder/a", "vae/a"}
    assert found.notices == [
        *unchosen(tmp_path, "v1-5-pruned.ckpt", "unet/diffusion_pytorch_model.fp16.bin"),
        left_out(tmp_path, "1 file ('vae/diffusion_pytorch_model.bin')"),
    ]


def test_chooses_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(1)}
    torch.save({"model": tensors, "ema": {"b": torch.zeros(1)}}, tmp_path / "x.ckpt")
    found = Found(tmp_path)
    assert found.names == {"a"}
    assert found.notices == [
        f"'{tmp_path}/x.ckpt': left out: 'ema' (1 tensor); choose another part with --subtree"
    ]
    for path in (tmp_path, tmp_path / "x.ckpt"):
        assert Found(path, subtree="ema").names == {"b"}
        assert Found(path, subtree=".").names == {"model.a", "ema.b"}
        with pytest.raises(UsageError, match="there is no subtree 'x'"):
            Found(path, subtree="x")


def test_a_checkpoint_that_asks_for_code_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1), "f": os.getpid}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointRefused, match=r"it uses 'posix\.getpid'.*no code was executed"):
        Found(tmp_path)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_checkpoint_and_a_safetensors_file_of_a_model_give_the_same_blobs(
    tmp_path: Path, is_zip: bool
) -> None:
    torch.manual_seed(1)
    tensors = {
        f"model.layers.{layer}.{name}": torch.randn(8, 6).to(dtype)
        for layer, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))
        for name in ("self_attn.q_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight")
    }
    base = torch.randn(3, 4, 5)
    turned = {"model.part": base[1], "model.turned": base[0].t(), "model.tied": base[1]}
    for name in ("safe", "plain"):
        touch(tmp_path, f"{name}/config.json")
    plain = {
        name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in turned.items()
    }
    save_torch_file(tensors | plain, tmp_path / "safe/model.safetensors")
    path = tmp_path / "plain/pytorch_model.bin"
    torch.save(tensors | turned, path, _use_new_zipfile_serialization=is_zip)
    store = LocalStore(tmp_path / "store")
    found = {}
    for name in ("safe", "plain"):
        created = blobstore.create(tmp_path / name, name, store=store)
        layers = store.resolve(Reference.parse(name)).layers
        found[name] = [layer for layer in layers if layer.media_type == media_types.TENSOR]
    assert found["plain"] == found["safe"]
    assert sum(layer.size for layer in found["plain"]) <= created.bytes_present
    assert created.tensors == 12


def test_says_where_weights_lie_deeper(tmp_path: Path) -> None:
    write_folder(tmp_path / "model" / "weights", dense_tensors())
    with pytest.raises(SourceError, match="has no weight files; .*model/weights' has some"):
        HuggingFaceFolder(tmp_path / "model")


def test_says_that_models_in_folders_are_many(tmp_path: Path) -> None:
    for name in ("a/x.gguf", "b/y.gguf"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(GGUF_FILE)
        torch.save({"state": {}, "param_groups": []}, (tmp_path / name).with_name("optimizer.pt"))
    with pytest.raises(SourceError, match="create --all .* imports each folder that has some"):
        HuggingFaceFolder(tmp_path)


def test_a_checkpoint_of_empty_placeholders_is_refused(tmp_path: Path) -> None:
    put_bin(tmp_path, "pytorch_model.bin", a=0, b=0)
    with pytest.raises(
        UnsupportedSource, match="all tensors of .* are empty, such as 'a'.*the folder of a step"
    ):
        Found(tmp_path)
    put_bin(tmp_path, "pytorch_model.bin", a=0, b=1)
    assert Found(tmp_path).names == {"a", "b"}


def test_a_file_of_one_rank_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    save_file({"a": np.zeros(2)}, path, metadata={"format": "pt", "DCP_SHARDING_INFO": "{}"})
    with pytest.raises(UnsupportedSource, match="has parts of tensors, as torch.distributed.check"):
        Found(path)


def test_a_tied_head_may_be_in_the_index_alone(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, dense_tensors(), shards=2)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_bytes())["weight_map"]
    weight_map["lm_head.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(DamagedSource, match="lacks tensor 'lm_head.weight'"):
        Found(folder)
    (folder / "config.json").write_text('{"tie_word_embeddings": true}')
    found = Found(folder)
    assert found.names == set(dense_tensors())
    (notice,) = found.notices
    assert "places 'lm_head.weight' in" in notice
    weight_map["other.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(DamagedSource, match="lacks tensor 'lm_head.weight'"):
        Found(folder)


def test_two_sets_of_shards_without_an_index_name_the_option(tmp_path: Path) -> None:
    for total in (2, 3):
        names = [f"model-{n + 1:05}-of-{total:05}.safetensors" for n in range(total)]
        for name in names:
            save_file({f"{name}.weight": np.zeros(2)}, tmp_path / name)
    message = r"has 2 sets of shards.*--weights '\*-of-00002.safetensors' or --weights '\*-of-00003"
    with pytest.raises(SourceError, match=message) as caught:
        Found(tmp_path)
    assert not isinstance(caught.value, DamagedSource)
    (tmp_path / names[0]).unlink()
    with pytest.raises(SourceError, match=r"has 2 sets .*--weights '\*-of-00002.safetensors'$"):
        Found(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(DamagedSource, match="are not a complete set of shards"):
        Found(tmp_path)


def test_objects_outside_the_chosen_part_are_not_looked_into(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    tensors = {"a": torch.ones(2)}
    content: dict[str, Any] = {
        "state_dict": tensors,
        "callbacks": {os.getpid: {"b": torch.ones(1)}},
        "hyper_parameters": {"f": os.getpid, "t": Thing(), "e": Kind.A},
        "bad": {"a": torch.ones(2), "f": Kind.A},
    }
    torch.save(content, path)
    for part in (None, ".", "bad"):
        with pytest.raises(CheckpointRefused, match="which checkpoints of tensors do not need"):
            Found(path, subtree=part)
    with pytest.raises(CheckpointRefused, match="choose a part without them: --subtree "):
        Found(path)
    assert Found(path, subtree="state_dict").names == {"a"}
