from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from blobstore.errors import DamagedSource, SourceError, UnsupportedSource
from blobstore.sources.huggingface import HuggingFaceFolder
from tests.models import dense_tensors, write_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

ONE = {"a": np.arange(3.0)}
TWO = {"b": np.arange(4.0)}
INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = len(os.listdir("/dev/fd"))
    yield
    assert len(os.listdir("/dev/fd")) == before


class Found:
    """What a folder gives, read and closed."""

    def __init__(self, folder: Path, **options: Any) -> None:
        source = HuggingFaceFolder(folder, **options)
        self.names = set(source.specs)
        self.files = [file.name for file in source.files]
        self.paths = {file.name: file.path for file in source.files}
        self.notices = source.notices
        self.config = source.config
        source.close()


def put(folder: Path, **tensors: Any) -> Path:
    """Write a weight file a keyword; ``__`` is a dot in its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tensors.items():
        save_file(content, folder / f"{name.replace('__', '.')}.safetensors")
    return folder


def touch(folder: Path, *names: str, content: str = "{}") -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


# Which weights


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
    with pytest.raises(DamagedSource, match="2 shards .* are not a complete set, and no index"):
        Found(tmp_path)


def test_shards_of_two_sets_are_no_set(tmp_path: Path) -> None:
    write_folder(tmp_path, ONE | TWO, shards=2)
    (tmp_path / INDEX).unlink()
    (tmp_path / SHARDS[1]).rename(tmp_path / "model-00002-of-00003.safetensors")
    with pytest.raises(DamagedSource, match="not a complete set"):
        Found(tmp_path)


def test_shards_are_counted_by_their_numbers(tmp_path: Path) -> None:
    write_folder(tmp_path, ONE | TWO, shards=2)
    (tmp_path / INDEX).unlink()
    (tmp_path / SHARDS[1]).rename(tmp_path / "model-00003-of-00002.safetensors")
    with pytest.raises(DamagedSource, match="not a complete set"):
        Found(tmp_path)


def test_an_empty_index_counts_for_nothing(tmp_path: Path) -> None:
    put(tmp_path, model=ONE)
    (tmp_path / INDEX).write_text('{"weight_map":{}}')
    assert Found(tmp_path).names == {"a"}


def test_one_file_and_an_index_of_others_is_a_question(tmp_path: Path) -> None:
    write_folder(tmp_path, ONE | TWO, shards=2)
    put(tmp_path, model=dense_tensors())
    with pytest.raises(SourceError, match="both model.safetensors and the shards of .*choose with"):
        Found(tmp_path)
    assert Found(tmp_path, weights="model.safetensors").names == set(dense_tensors())
    assert Found(tmp_path, weights="model-*.safetensors").names == {"a", "b"}


def test_an_index_that_names_the_one_file_is_followed(tmp_path: Path) -> None:
    put(tmp_path, model=ONE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert Found(tmp_path).names == {"a"}


def test_a_broken_index_is_an_error_beside_a_whole_file(tmp_path: Path) -> None:
    put(tmp_path, model=ONE)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(DamagedSource, match="cannot read weight index"):
        Found(tmp_path)


@pytest.mark.parametrize(
    "other", ["consolidated", "model.fp16", "model.bf16-00001-of-00002", "adapter_model", "Model"]
)
def test_other_weights_are_left_out_with_a_notice(tmp_path: Path, other: str) -> None:
    put(tmp_path, model=ONE)
    save_file(TWO, tmp_path / f"{other}.safetensors")
    found = Found(tmp_path)
    assert found.names == {"a"}
    assert found.notices == [
        f"left out: '{tmp_path}/{other}.safetensors'; choose other weights with --weights"
    ]


def test_a_pattern_chooses_other_weights(tmp_path: Path) -> None:
    put(tmp_path, model=ONE, consolidated=TWO)
    found = Found(tmp_path, weights="consolidated*")
    assert found.names == {"b"}
    assert found.notices == [
        f"left out: '{tmp_path}/model.safetensors'; choose other weights with --weights"
    ]


def test_a_pattern_chooses_shards_by_their_index(tmp_path: Path) -> None:
    write_folder(tmp_path, ONE | TWO, shards=2)
    put(tmp_path, model__fp16=dense_tensors())
    assert Found(tmp_path, weights="model-0*").names == {"a", "b"}
    # One shard of an indexed set stands for the set, so that a model is never half.
    assert Found(tmp_path, weights=SHARDS[0]).names == {"a", "b"}


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


def test_several_files_without_a_usual_name_are_a_question(tmp_path: Path) -> None:
    put(tmp_path, x=ONE, y=TWO)
    with pytest.raises(
        SourceError, match="several weight files .*'x.safetensors', 'y.safetensors'"
    ):
        Found(tmp_path)
    assert Found(tmp_path, weights="[xy].safetensors").names == {"a", "b"}


def test_a_file_is_a_source(tmp_path: Path) -> None:
    put(tmp_path, x=ONE)
    touch(tmp_path, "config.json")
    found = Found(tmp_path / "x.safetensors")
    assert (found.names, found.files, found.notices, found.config) == ({"a"}, [], [], {})


@pytest.mark.parametrize("name", ["x.gguf", "x.h5", "optimizer.pt", "training_args.bin"])
def test_only_other_formats_are_not_read(tmp_path: Path, name: str) -> None:
    touch(tmp_path, "config.json", name)
    with pytest.raises(UnsupportedSource, match=f"only in files like '{name}', which"):
        Found(tmp_path)


def test_other_formats_beside_are_left_out_with_a_notice(tmp_path: Path) -> None:
    touch(put(tmp_path, model=ONE), "pytorch_model.bin", "onnx/model.onnx", ".git/x", ".cache/y")
    assert Found(tmp_path).notices == [
        f"left out: folder '{tmp_path}/onnx'",
        f"left out: '{tmp_path}/pytorch_model.bin', which is not of the model's weights",
    ]


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=f"'{tmp_path}' is empty; expected a Hugging Face model"):
        Found(tmp_path)


def test_a_folder_without_weights_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="holds no weight files"):
        Found(touch(tmp_path, "config.json"))


def test_a_folder_in_a_weight_file_s_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(SourceError, match="is not a regular file"):
        Found(tmp_path)


# Pipelines and modules


def pipeline(folder: Path, **components: Any) -> Path:
    listed = {"_class_name": "P", "_diffusers_version": "0.1", "x": None, "y": [None, None]}
    touch(folder, "model_index.json", content=json.dumps(listed | components))
    return folder


def test_reads_a_pipeline_s_components(tmp_path: Path) -> None:
    pipeline(tmp_path, unet=["diffusers", "U"], text_encoder=["transformers", "T"], s=["d", "S"])
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
        (
            f"left out: '{tmp_path}/text_encoder/model.fp16.safetensors'; "
            "choose other weights with --weights"
        ),
        f"left out: folder '{tmp_path}/safety'",
    ]


def test_a_listed_component_must_be_there(tmp_path: Path) -> None:
    put(pipeline(tmp_path, unet=["diffusers", "U"]), model=ONE)
    with pytest.raises(DamagedSource, match="lists component 'unet', but there is no such folder"):
        Found(tmp_path)


def test_a_pipeline_in_one_file_beside_its_components_is_left_out(tmp_path: Path) -> None:
    pipeline(tmp_path, unet=["diffusers", "U"])
    put(tmp_path / "unet", diffusion_pytorch_model=ONE)
    put(tmp_path, everything_in_one=TWO)
    found = Found(tmp_path)
    assert found.names == {"unet/a"}
    assert any("everything_in_one.safetensors" in notice for notice in found.notices)


def test_a_file_whose_name_a_store_cannot_have_is_told(tmp_path: Path) -> None:
    put(tmp_path, model=ONE)
    touch(tmp_path, "my notes.txt", "tokenizer.json")
    found = Found(tmp_path)
    assert found.files == ["tokenizer.json"]
    assert [notice for notice in found.notices if "my notes.txt" in notice]


def test_weights_that_a_pattern_passes_over_are_told(tmp_path: Path) -> None:
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
        {"idx": 0, "path": "", "type": "T"},
        {"idx": 1, "path": "1_Pooling", "type": "P"},
        {"idx": 2, "path": "2_Dense", "type": "D"},
        {"idx": 3, "path": "3_Normalize", "type": "N"},
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
        with pytest.raises(DamagedSource, match="which is no folder name") as caught:
            Found(tmp_path / "model")
        assert str(caught.value).isprintable()
        (tmp_path / "model" / list_name).unlink()


@pytest.mark.parametrize("content", ["", "[]", "{", "null", "7", '"x"', "[" * 100_000, "\ud800"])
@pytest.mark.parametrize("name", ["model_index.json", "modules.json", "config.json"])
def test_lists_that_cannot_be_read_list_nothing(tmp_path: Path, name: str, content: str) -> None:
    put(tmp_path, model=ONE)
    (tmp_path / name).write_bytes(content.encode(errors="surrogatepass"))
    found = Found(tmp_path)
    assert found.names == {"a"}
    assert found.files == [name]  # kept as it is
    assert found.config == {}


# Small files


def test_keeps_what_a_runtime_or_its_user_needs(tmp_path: Path) -> None:
    kept = [
        "LICENCE",
        "LICENSE",
        "NOTICE",
        "README.md",
        "USE_POLICY",
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "modeling_x.py",
        "qwen.tiktoken",
        "source.spm",
        "spiece.model",
        "tokenizer.json",
    ]
    left = [".gitattributes", INDEX, "pytorch_model.bin.index.json", "x.png", "model.sig"]
    left += ["model.safetensors.index.fp16.json"]
    touch(put(tmp_path, model=ONE), *kept, *left, content='{"weight_map":{}}')
    assert Found(tmp_path).files == kept


def test_keeps_folders_of_a_component_to_a_depth(tmp_path: Path) -> None:
    pipeline(tmp_path, tokenizer=["transformers", "T"])
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


def test_kept_names_are_plain(tmp_path: Path) -> None:
    put(tmp_path, model=ONE)
    for name in (b"a\nb.json", b"\xff.json", b"a b.json", b"\x1b[2J.txt", "é.json".encode()):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text("{}")
    assert Found(tmp_path).files == []


def test_what_is_no_file_is_not_kept(tmp_path: Path) -> None:
    put(tmp_path, model=ONE)
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    assert Found(tmp_path).files == []


def test_a_loop_of_folders_ends(tmp_path: Path) -> None:
    pipeline(tmp_path, t=["transformers", "T"])
    touch(put(tmp_path, model=ONE), "t/x.json")
    (tmp_path / "t" / "loop").symlink_to(tmp_path / "t")
    assert Found(tmp_path).files == ["model_index.json", "t/loop/x.json", "t/x.json"]


def test_a_huge_small_file_is_an_error(tmp_path: Path) -> None:
    touch(put(tmp_path, model=ONE), "tokenizer.json")
    os.truncate(tmp_path / "tokenizer.json", 64 * 2**20 + 1)
    with pytest.raises(SourceError, match="is over 67108864 bytes, too large to keep"):
        Found(tmp_path)


def test_reads_the_hub_s_cache_of_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
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
    with pytest.raises(DamagedSource, match=r"tokenizer\.json' is a link to nothing"):
        Found(tmp_path)
