from __future__ import annotations

import errno
import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401 - numpy learns bfloat16
import numpy as np
import pytest

from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    InvalidManifest,
    StoreError,
)
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.export.export import export_model
from blobstore.operations.export.link import link_model
from blobstore.store.local import LocalStore
from tests.support.models import (
    Arrays,
    add_blobs,
    blob,
    dense_tensors,
    moe_tensors,
    quantizable_tensors,
    with_layers,
    write_folder,
)
from tests.support.reflinks import share_blocks

if TYPE_CHECKING:
    from blobstore.operations.create.blobs import ExpertForm

NAME = Reference.parse("m")
FORMS: list[ExpertForm] = ["packed", "stacked"]


def raw_tensors(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return type, shape and bytes of the tensors of all files, each of which must be new."""
    found: dict[str, tuple[str, list[int], bytes]] = {}
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                assert name not in found
                begin, end = entry["data_offsets"]
                content = data[start + begin : start + end]
                found[name] = (entry["dtype"], entry["shape"], content)
    return found


def assert_as_exported(store: LocalStore, farm: Path, exported: Path, index: Path) -> None:
    """Check that a farm holds what an export does; ``index`` is the farm's for ``exported``."""
    if not exported.exists():
        export_model(NAME, exported, store=store)
    assert raw_tensors(farm) == raw_tensors(exported)
    others = {
        path.relative_to(exported): path.read_bytes()
        for path in exported.rglob("*")
        if path.is_file() and ".safetensors" not in path.name
    }
    assert {path: (farm / path).read_bytes() for path in others} == others
    stated = json.loads(index.read_bytes())
    files = {
        name: path.name for path in index.parent.glob("*.safetensors") for name in load_names(path)
    }
    assert stated["weight_map"] == files
    data = sum(len(content) for _, _, content in raw_tensors(index.parent).values())
    assert stated["metadata"] == {"total_size": data}


def load_names(path: Path) -> list[str]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [name for name in header if name != "__metadata__"]


def links_of(folder: Path) -> dict[str, str]:
    return {path.name: str(path.readlink()) for path in folder.rglob("*") if path.is_symlink()}


def blob_of(store: LocalStore, name: str) -> Path:
    layers = store.resolve(NAME).layers
    return Path(store.blob_path(next(layer for layer in layers if layer.name == name).digest))


def add_layer(store: LocalStore, media_type: str, name: str, content: bytes) -> None:
    with store.ingest() as ingest:
        item = ingest.add(len(content), partial(list, [content]))
        ingest.publish()
    added = Descriptor(media_type=media_type, digest=item.digest, size=item.size, name=name)
    manifest = store.resolve(NAME)
    store.publish(NAME, with_layers(store, manifest, (*manifest.layers, added)))


def assert_nothing_left(folder: Path, *known: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(known)


# Links


def test_links_every_blob_of_a_plain_model(dense: Path, store: LocalStore, tmp_path: Path) -> None:
    linked = link_model("m", tmp_path / "farm", store=store)
    count = len(dense_tensors())
    layers = store.resolve(NAME).layers_of(media_types.TENSOR)
    blobs = tmp_path.resolve() / "store" / "blobs"
    assert links_of(tmp_path / "farm") == {
        f"model-{number:05}-of-{count:05}.safetensors": str(blobs / layer.digest.file_name)
        for number, layer in enumerate(layers, start=1)
    }
    assert linked.folder == tmp_path / "farm"
    assert (linked.links, linked.shared, linked.copied) == (count, 0, 0)
    assert linked.bytes_linked == sum(layer.size for layer in layers)
    assert linked.bytes_shared == linked.bytes_copied == 0
    assert linked.notices == ()
    assert linked.files == len(list((tmp_path / "farm").iterdir())) == count + 2
    assert linked.tensors == count


def test_has_the_contents_of_an_export(dense: Path, store: LocalStore, tmp_path: Path) -> None:
    link_model(NAME, tmp_path / "farm", store=store)
    index = tmp_path / "farm" / "model.safetensors.index.json"
    assert_as_exported(store, tmp_path / "farm", tmp_path / "out", index)


def test_writes_the_same_folder_every_time(dense: Path, store: LocalStore, tmp_path: Path) -> None:
    for name in ("one", "two"):
        link_model(NAME, tmp_path / name, store=store)
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("one", "two")
    )
    assert one == two


def test_links_to_where_the_blobs_really_are(
    dense: Path, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alias").symlink_to("store")
    monkeypatch.chdir(tmp_path)
    link_model(NAME, "farm", store=LocalStore("alias"))
    targets = links_of(tmp_path / "farm").values()
    assert {Path(target).parent for target in targets} == {tmp_path.resolve() / "store" / "blobs"}


def test_makes_hard_links_when_asked(dense: Path, store: LocalStore, tmp_path: Path) -> None:
    linked = link_model(NAME, tmp_path / "farm", store=store, hard=True)
    assert linked.links == len(dense_tensors())
    assert links_of(tmp_path / "farm") == {}
    before = raw_tensors(tmp_path / "farm")
    for layer in store.resolve(NAME).layers_of(media_types.TENSOR):
        path = Path(store.blob_path(layer.digest))
        assert path.stat().st_nlink == 2
        path.unlink()
    assert raw_tensors(tmp_path / "farm") == before


def test_links_packed_groups_as_one_file(store: LocalStore, tmp_path: Path) -> None:
    create(write_folder(tmp_path / "moe", moe_tensors()), NAME, store=store)
    linked = link_model(NAME, tmp_path / "farm", store=store)
    assert linked.links == len(store.resolve(NAME).layers_of(media_types.TENSOR)) == 3
    assert linked.tensors == len(moe_tensors())
    index = tmp_path / "farm" / "model.safetensors.index.json"
    assert_as_exported(store, tmp_path / "farm", tmp_path / "out", index)


def test_calls_a_lone_blob_as_an_export_does(store: LocalStore, tmp_path: Path) -> None:
    create(write_folder(tmp_path / "one", {"w": np.ones(3, np.int8)}), NAME, store=store)
    link_model(NAME, tmp_path / "farm", store=store)
    assert sorted(path.name for path in (tmp_path / "farm").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert (tmp_path / "farm" / "model.safetensors").is_symlink()


def test_small_files_are_files_of_their_own(store: LocalStore, tmp_path: Path) -> None:
    files = {"tokenizer.json": b"{}", "additional_chat_templates/tool.jinja": b"{{ x }}"}
    source = write_folder(tmp_path / "source", dense_tensors(), files=files)
    create(source, NAME, store=store)
    link_model(NAME, tmp_path / "farm", store=store, hard=True)
    for name, content in files.items():
        path = tmp_path / "farm" / name
        path.write_bytes(b"changed")  # as a server may
        assert blob_of(store, name).read_bytes() == content


@pytest.mark.parametrize("hard", [False, True])
def test_a_config_is_the_sources_unless_old_keys_are_asked_for(
    hard: bool, store: LocalStore, tmp_path: Path
) -> None:
    config = b'{"rope_parameters": {"rope_theta": 3},"hidden_size":4}'
    files = {"config.json": config, "generation_config.json": config}
    create(write_folder(tmp_path / "source", dense_tensors(), files=files), NAME, store=store)

    link_model(NAME, tmp_path / "plain", store=store, hard=hard)
    link_model(NAME, tmp_path / "both", store=store, hard=hard, old_keys=True)

    assert (tmp_path / "plain" / "config.json").read_bytes() == config
    assert json.loads((tmp_path / "both" / "config.json").read_bytes()) == {
        **json.loads(config),
        "rope_theta": 3,
        "rope_scaling": None,
    }
    assert (tmp_path / "both" / "generation_config.json").read_bytes() == config
    assert blob_of(store, "config.json").read_bytes() == config


@pytest.mark.parametrize("config", [b"{", b"[" * 100_000, b"[1]", b'{"rope_theta": 1,"x":2}'])
def test_a_config_without_old_keys_is_unchanged(
    config: bytes, store: LocalStore, tmp_path: Path
) -> None:
    blobs = {"w": blob(("w", "U8", (2,), b"ab"))}
    add_blobs(store, "m", blobs)
    add_layer(store, media_types.JSON, "config.json", config)

    link_model(NAME, tmp_path / "farm", store=store, old_keys=True)

    assert (tmp_path / "farm" / "config.json").read_bytes() == config


def test_does_not_change_the_mode_of_blobs(dense: Path, store: LocalStore, tmp_path: Path) -> None:
    for hard in (False, True):
        link_model(NAME, tmp_path / f"farm-{hard}", store=store, hard=hard)
        for path in (tmp_path / f"farm-{hard}").glob("*.safetensors"):
            assert path.stat().st_mode & 0o777 == 0o444


def test_tensors_never_name_files(store: LocalStore, tmp_path: Path) -> None:
    names = ["../../escape", "/etc/escape", "a\0b", "model-00001-of-00002.safetensors"]
    tensors = {name: blob((name, "U8", (2,), b"ab")) for name in names}
    add_blobs(store, "m", tensors)
    link_model(NAME, tmp_path / "farm", store=store)
    assert_nothing_left(
        tmp_path / "farm",
        "model.safetensors.index.json",
        *(f"model-{number:05}-of-00004.safetensors" for number in (1, 2, 3, 4)),
    )
    assert raw_tensors(tmp_path / "farm").keys() == set(names)


# Files under other headers


def old_model(store: LocalStore, size: int = 30_000) -> dict[str, bytes]:
    """Add model ``m`` of two blobs in the form of old Ollama's and one that is named."""
    contents = {name: bytes([number]) * size for number, name in enumerate(("a", "b", "c"))}
    blobs = {
        name: blob(("data" if name != "c" else name, "U8", (size,), content))
        for name, content in contents.items()
    }
    add_blobs(store, "m", blobs)
    return contents


def test_names_the_tensors_of_blobs_that_do_not(store: LocalStore, tmp_path: Path) -> None:
    contents = old_model(store)
    linked = link_model(NAME, tmp_path / "farm", store=store)
    assert {name: data for name, (_, _, data) in raw_tensors(tmp_path / "farm").items()} == contents
    assert links_of(tmp_path / "farm").keys() == {"model-00003-of-00003.safetensors"}
    assert (linked.links, linked.shared, linked.copied) == (1, 0, 2)
    assert linked.bytes_copied == 60_000
    (notice,) = linked.notices
    assert notice.startswith("weight files that are copies: 2, 60000 bytes; their tensors have")


def test_shares_the_bytes_of_such_blobs_where_it_can(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = old_model(store)
    lengths = share_blocks(monkeypatch)
    linked = link_model(NAME, tmp_path / "farm", store=store)
    assert {name: data for name, (_, _, data) in raw_tensors(tmp_path / "farm").items()} == contents
    assert (linked.links, linked.shared, linked.copied) == (1, 2, 0)
    assert (linked.bytes_shared, linked.bytes_copied) == (60_000, 0)
    assert linked.notices == ()
    assert len(lengths) == 2


def test_shares_bytes_if_possible_and_copies_the_others(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = {
        "small": blob(("data", "U8", (3,), b"abc")),
        "large": blob(("data", "U8", (9000,), bytes(9000))),
    }
    add_blobs(store, "m", blobs)
    share_blocks(monkeypatch)
    linked = link_model(NAME, tmp_path / "farm", store=store)
    assert (linked.shared, linked.bytes_shared) == (1, 9000)
    assert (linked.copied, linked.bytes_copied) == (1, 3)
    assert raw_tensors(tmp_path / "farm") == {
        "small": ("U8", [3], b"abc"),
        "large": ("U8", [9000], bytes(9000)),
    }


@pytest.mark.parametrize("can_share", [False, True])
def test_splits_stacked_experts_without_moving_their_bytes(
    can_share: bool, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(write_folder(tmp_path / "moe", moe_tensors(64)), NAME, store=store, experts="stacked")
    if can_share:
        share_blocks(monkeypatch)
    linked = link_model(NAME, tmp_path / "farm", store=store)
    assert (linked.shared, linked.copied) == ((1, 0) if can_share else (0, 1))
    assert linked.bytes_shared + linked.bytes_copied == 64 * 3 * 24 * 4
    assert linked.links == len(store.resolve(NAME).layers_of(media_types.TENSOR)) - 1
    index = tmp_path / "farm" / "model.safetensors.index.json"
    assert_as_exported(store, tmp_path / "farm", tmp_path / "out", index)


def test_takes_the_components_of_a_pipeline_apart(store: LocalStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_folder(
        source / "unet", {"a": np.zeros(8), "b": np.ones(8)}, stem="diffusion_pytorch_model"
    )
    write_folder(source / "text_encoder", {"a": np.full(8, 2.0)})
    (source / "model_index.json").write_text(
        '{"unet": ["diffusers", "U"], "text_encoder": ["transformers", "T"]}'
    )
    create(source, NAME, store=store)
    linked = link_model(NAME, tmp_path / "farm", store=store)
    assert (linked.links, linked.copied) == (0, 3)
    unet = tmp_path / "farm" / "unet"
    index = json.loads((unet / "diffusion_pytorch_model.safetensors.index.json").read_bytes())
    assert index["weight_map"] == {
        "a": "diffusion_pytorch_model-00001-of-00002.safetensors",
        "b": "diffusion_pytorch_model-00002-of-00002.safetensors",
    }
    assert raw_tensors(unet) == raw_tensors(source / "unet")
    assert raw_tensors(tmp_path / "farm" / "text_encoder") == raw_tensors(source / "text_encoder")
    assert not (tmp_path / "farm" / "text_encoder" / "model.safetensors.index.json").exists()


def test_takes_a_blob_of_two_components_apart(store: LocalStore, tmp_path: Path) -> None:
    parts = [("a/x", "U8", (2,), b"ax"), ("b/x", "U8", (2,), b"bx"), ("a/y", "U8", (2,), b"ay")]
    add_blobs(store, "m", {"group": blob(*parts)})
    add_layer(store, media_types.JSON, "modules.json", b'[{"path": "a"}, {"path": "b"}]')
    linked = link_model(NAME, tmp_path / "farm", store=store)
    assert (linked.links, linked.copied, linked.bytes_copied) == (0, 2, 6)
    found = {part: raw_tensors(tmp_path / "farm" / part) for part in "ab"}
    assert found == {
        "a": {"x": ("U8", [2], b"ax"), "y": ("U8", [2], b"ay")},
        "b": {"x": ("U8", [2], b"bx")},
    }


# Quantized models

PLAIN = {
    "model.embed_tokens.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.0.mlp.gate.weight",
}


@pytest.mark.parametrize("experts", FORMS)
@pytest.mark.parametrize("quant_type", ["int4", "nvfp4"])
def test_quantized_weights_have_the_names_of_mlx(
    quant_type: str, experts: ExpertForm, store: LocalStore, tmp_path: Path
) -> None:
    source = write_folder(tmp_path / "model", quantizable_tensors())
    create(source, NAME, store=store, quantize=quant_type, experts=experts)
    linked = link_model(NAME, tmp_path / "farm", store=store)
    index = tmp_path / "farm" / "model.safetensors.index.json"
    assert_as_exported(store, tmp_path / "farm", tmp_path / "out", index)
    found = raw_tensors(tmp_path / "farm")
    assert "model.layers.0.mlp.switch_mlp.up_proj.scales" in found
    plain = [name for name in found if name in PLAIN]
    assert linked.links == len(plain) == len(PLAIN)
    for path in (tmp_path / "farm").glob("*.safetensors"):
        assert path.is_symlink() == (load_names(path)[0] in plain)


def test_only_what_mlx_has_in_another_order_is_copied_where_bytes_can_be_shared(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_folder(tmp_path / "model", quantizable_tensors())
    share_blocks(monkeypatch, block=512)
    results = {}
    for form in FORMS:
        create(source, form, store=store, quantize="int8", experts=form)
        linked = link_model(form, tmp_path / form, store=store)
        results[form] = (linked.shared, linked.copied)
        export_model(form, tmp_path / f"{form}-out", store=store)
        assert raw_tensors(tmp_path / form) == raw_tensors(tmp_path / f"{form}-out")
        for notice in linked.notices:
            assert "their tensors have another order" in notice
    # lm_head, q_proj and v_proj; and the experts, all at once or not at all.
    assert results == {"packed": (3, 1), "stacked": (4, 0)}


def test_splits_gathered_tensors_into_files_as_an_export_does(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_folder(tmp_path / "model", quantizable_tensors())
    create(source, NAME, store=store, quantize="int4")
    monkeypatch.setattr("blobstore.operations.export.link_plan.SHARD_SIZE", 50_000)
    linked = link_model(NAME, tmp_path / "farm", store=store)
    assert linked.copied > 4
    index = tmp_path / "farm" / "model.safetensors.index.json"
    assert_as_exported(store, tmp_path / "farm", tmp_path / "out", index)
    count = len(list((tmp_path / "farm").glob(f"model-*-of-{linked.links + linked.copied:05}.*")))
    assert count == linked.links + linked.copied


def test_copies_tensors_that_lie_in_several_blobs(store: LocalStore, tmp_path: Path) -> None:
    layer = "model.layers.0.odd.experts"
    blobs = {}
    for number in (1, 0):
        name = f"{layer}.{number}.up.weight"
        parts = [
            ("", "U32", (2, 8), 64),
            (".scale", "BF16", (2, 2), 8),
            (".bias", "BF16", (2, 2), 8),
        ]
        blobs[name] = blob(
            *(
                (name + end, code, shape, bytes([number]) * size)
                for end, code, shape, size in parts
            ),
            quant_type="int4",
            group_size="32",
        )
    add_blobs(store, "m", blobs)
    linked = link_model(NAME, tmp_path / "farm", store=store)
    assert (linked.links, linked.copied, linked.bytes_copied) == (0, 1, 160)
    found = raw_tensors(tmp_path / "farm")
    assert found["model.layers.0.odd.switch_mlp.up.weight"] == (
        "U32",
        [2, 2, 8],
        b"\0" * 64 + b"\1" * 64,
    )


def test_gives_gpt_oss_the_names_that_it_has_itself(store: LocalStore, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    name = "model.layers.0.mlp.experts.down_proj"
    config = json.dumps({"quantization_config": {"quant_method": "mxfp4"}}).encode()
    tensors: Arrays = {
        f"{name}_blocks": random.integers(0, 256, (3, 64, 2, 16), np.uint8),
        f"{name}_scales": random.integers(120, 130, (3, 64, 2), np.uint8),
        f"{name}_bias": random.standard_normal((3, 64)),
    }
    source = write_folder(tmp_path / "source", tensors, files={"config.json": config})
    create(source, NAME, store=store)
    linked = link_model(NAME, tmp_path / "farm", store=store)
    assert (linked.links, linked.copied) == (1, 1)
    assert raw_tensors(tmp_path / "farm") == raw_tensors(source)
    assert (tmp_path / "farm" / "config.json").read_bytes() == config


def test_finds_damage_in_copied_blobs(store: LocalStore, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", quantizable_tensors())
    create(source, NAME, store=store, quantize="int4")
    path = blob_of(store, "lm_head.weight")
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(BlobDamaged, match=r"model m:latest: layer 'lm_head\.weight': .* damaged"):
        link_model(NAME, tmp_path / "farm", store=store)
    assert_nothing_left(tmp_path, "model", "store")


# What is refused


def test_rejects_a_model_with_a_missing_blob(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    path = blob_of(store, "scalar")
    path.unlink()
    with pytest.raises(
        BlobMissing, match=f"m:latest: layer 'scalar': blob '.*{path.name}' is missing"
    ):
        link_model(NAME, tmp_path / "farm", store=store)
    assert_nothing_left(tmp_path, "dense", "store")


def test_rejects_a_model_with_a_blob_of_another_size(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    path = blob_of(store, "mask")
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size + 1)
    with pytest.raises(BlobDamaged, match=r"layer 'mask': blob .* bytes, expected \d+"):
        link_model(NAME, tmp_path / "farm", store=store)
    assert_nothing_left(tmp_path, "dense", "store")


def test_rejects_a_blob_that_is_a_link(dense: Path, store: LocalStore, tmp_path: Path) -> None:
    path = blob_of(store, "mask")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BlobDamaged, match="layer 'mask': .* it is a link"):
        link_model(NAME, tmp_path / "farm", store=store, hard=True)


def test_rejects_a_damaged_small_file(dense: Path, store: LocalStore, tmp_path: Path) -> None:
    path = blob_of(store, "config.json")
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"tiny", b"tiNy"))
    with pytest.raises(BlobDamaged, match="have digest"):
        link_model(NAME, tmp_path / "farm", store=store)
    assert_nothing_left(tmp_path, "dense", "store")


@pytest.mark.parametrize("name", ["../x.json", "/etc/x", "a/b/c/d", ".."])
def test_rejects_layers_with_invalid_file_names(
    name: str, dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    add_layer(store, media_types.FILE, name, b"{}")
    with pytest.raises(InvalidManifest, match="is not a file name"):
        link_model(NAME, tmp_path / "farm", store=store)
    assert_nothing_left(tmp_path, "dense", "store")


@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "model-00002-of-00009.safetensors"]
)
def test_rejects_a_file_in_the_place_of_a_link(
    name: str, dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    add_layer(store, media_types.FILE, name, b"{}")
    with pytest.raises(InvalidManifest, match="two files would both be"):
        link_model(NAME, tmp_path / "farm", store=store)


def test_rejects_weights_in_gguf_files(dense: Path, store: LocalStore, tmp_path: Path) -> None:
    add_layer(store, media_types.MODEL, "", b"GGUF")
    with pytest.raises(BlobstoreError, match="weights in a GGUF file"):
        link_model(NAME, tmp_path / "farm", store=store)


def test_rejects_a_folder_that_holds_something(dense: Path, store: LocalStore) -> None:
    before = sorted(dense.iterdir())
    with pytest.raises(BlobstoreError, match="exists already; choose a new"):
        link_model(NAME, dense, store=store)
    assert sorted(dense.iterdir()) == before


@pytest.mark.parametrize(
    ("number", "complaint"),
    [
        (errno.EXDEV, "are on different file systems, so hard links cannot be made; use symbolic"),
        (errno.EPERM, "belong to another user, or its file system has no hard links"),
        (errno.EMLINK, "blob '.*' has as many names as a file can have"),
    ],
)
def test_says_why_there_can_be_no_hard_links(
    number: int,
    complaint: str,
    dense: Path,
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match=f"model m:latest: .*{complaint}"):
        link_model(NAME, tmp_path / "farm", store=store, hard=True)
    assert_nothing_left(tmp_path, "dense", "store")


def test_rejects_hard_links_to_another_file_system(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    shared_memory = Path("/dev/shm")
    if not shared_memory.is_dir() or shared_memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system")
    target = shared_memory / f"blobstore-test-{os.getpid()}"
    with pytest.raises(StoreError, match="are on different file systems"):
        link_model(NAME, target, store=store, hard=True)
    assert not target.exists()
    assert not list(shared_memory.glob(f".{os.getpid()}-*.tmp"))


def test_says_when_the_folder_cannot_be_written(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for hard in (False, True):
        with pytest.raises(BlobstoreError, match=r"cannot write '.*/file/farm': "):
            link_model(NAME, tmp_path / "file" / "farm", store=store, hard=hard)


def test_passes_other_errors_of_hard_links_on(
    dense: Path, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(BlobstoreError, match=r"cannot write '.*/farm': No space left"):
        link_model(NAME, tmp_path / "farm", store=store, hard=True)
    assert_nothing_left(tmp_path, "dense", "store")


def test_leaves_nothing_behind_when_it_is_interrupted(store: LocalStore, tmp_path: Path) -> None:
    old_model(store)
    seen: list[str] = []

    def interrupt(what: str, _done: int, _total: int) -> None:
        seen.append(what)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        link_model(NAME, tmp_path / "farm", store=store, progress=interrupt)
    assert seen
    assert_nothing_left(tmp_path, "store")
