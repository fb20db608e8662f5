from __future__ import annotations

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import InvalidManifest, UnsupportedSource
from blobstore.registry.layouts.files import RemoteFile, folder_of
from blobstore.registry.layouts.plan import FILE_PATH, TITLE
from blobstore.registry.manifest import RemoteDescriptor

PACK = "application/vnd.cncf.model."
DOCKER = "application/vnd.docker.ai."


def layer(kind: str, path: str = "", key: str = FILE_PATH) -> RemoteDescriptor:
    annotations = {key: path} if path else {}
    data = f"{kind} {path}".encode()
    return RemoteDescriptor(kind, Digest.of(data), len(data), annotations)


def paths(*layers: RemoteDescriptor) -> list[str]:
    return [file.path for file in folder_of(layers)]


def test_modelpack_layers_have_their_paths_in_annotations() -> None:
    assert paths(
        layer(f"{PACK}weight.v1.raw", "model.safetensors"),
        layer(f"{PACK}weight.config.v1.raw", "config.json"),
        layer(f"{PACK}doc.v1.raw", "README.md", TITLE),
        layer(f"{PACK}weight.v1.safetensors", "unet/model.safetensors"),
        layer(f"{PACK}dataset.v1.tar", "data"),
        layer(f"{PACK}code.v1.raw", "train.py"),
    ) == ["model.safetensors", "config.json", "README.md", "unet/model.safetensors", "train.py"]


def test_dockers_older_weight_files_are_numbered_in_order() -> None:
    layers = [
        RemoteDescriptor(f"{DOCKER}safetensors", Digest.of(bytes([number])), 1)
        for number in range(2)
    ]
    config, license_ = layer(f"{DOCKER}vllm.config.tar"), layer(f"{DOCKER}license")
    files = folder_of([*layers, config, license_])
    assert [file.path for file in files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "",
        "LICENSE",
    ]
    assert files[2] == RemoteFile("", config.digest, config.size, is_tar=True)
    assert paths(layers[0]) == ["model.safetensors"]


def test_dockers_newer_layers_have_paths() -> None:
    assert paths(
        layer(f"{DOCKER}safetensors", "text_encoder/model.safetensors"),
        layer(f"{DOCKER}model.file", "config.json"),
        layer(f"{DOCKER}chat.template.jinja"),
    ) == ["text_encoder/model.safetensors", "config.json", "chat_template.jinja"]


def test_gguf_files_have_names_that_create_reads() -> None:
    docker = f"{DOCKER}gguf.v3"
    parts = [RemoteDescriptor(docker, Digest.of(bytes([number])), 1) for number in range(2)]
    assert paths(*parts, layer(f"{DOCKER}mmproj")) == [
        "model-00001-of-00002.gguf",
        "model-00002-of-00002.gguf",
        "mmproj-model.gguf",
    ]
    assert paths(layer(docker)) == ["model.gguf"]
    assert paths(
        layer(docker, "qwen-Q4_K_M.gguf"),
        layer(f"{PACK}weight.v1.gguf", "model"),
        layer(f"{PACK}weight.v1.raw", "other.gguf"),
    ) == ["qwen-Q4_K_M.gguf", "model.gguf", "other.gguf"]


@pytest.mark.parametrize("form", ["gzip", "zstd"])
def test_tars_may_be_compressed(form: str) -> None:
    (file,) = folder_of([layer(f"{PACK}weight.config.v1.tar+{form}", "tokenizer")])
    assert file.is_tar
    assert file.compression == form


@pytest.mark.parametrize(
    "path",
    ["../escape", "/etc/passwd", "a/../../b", "a//b", ".", "a\\b", "a\nb", "a/b/c/d", "x" * 256],
)
def test_rejects_paths_that_lead_elsewhere(path: str) -> None:
    with pytest.raises(InvalidManifest, match="must not be written"):
        paths(layer(f"{PACK}weight.v1.raw", path))


def test_rejects_a_file_without_a_path() -> None:
    with pytest.raises(InvalidManifest, match="must not be written"):
        paths(layer(f"{PACK}weight.v1.raw"))


@pytest.mark.parametrize(
    ("first", "second"), [("a", "a"), ("A", "a"), ("a", "a/b"), ("a/b", "A/B"), ("a/b/c", "a/B")]
)
def test_rejects_files_that_cannot_be_in_one_folder(first: str, second: str) -> None:
    kind = f"{PACK}weight.v1.raw"
    with pytest.raises(InvalidManifest):
        paths(layer(kind, first), layer(kind, second))


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("application/octet-stream", "model.safetensors"),
        (f"{PACK}weight.v2.raw", "model.safetensors"),
    ],
)
def test_refuses_unknown_layers(kind: str, path: str) -> None:
    with pytest.raises(UnsupportedSource):
        paths(layer(kind, path))
