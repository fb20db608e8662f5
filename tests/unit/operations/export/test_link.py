from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - numpy learns bfloat16
import numpy as np
import pytest
from safetensors.numpy import save_file

from blobstore.core.interrupts import Stopped
from blobstore.errors import BlobDamaged, BlobstoreError, InvalidManifest, StoreError
from blobstore.manifests import media_types
from blobstore.operations.create.create import create
from blobstore.operations.export.export import export_model
from blobstore.operations.export.link import Linked, is_linked, link_manifest, link_model
from blobstore.operations.maintenance.names import remove_models
from blobstore.planning.grouping import ExpertForm
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from tests.faults.processes import workspace
from tests.support.damage import blob_path, flip, link
from tests.support.folders import contents
from tests.support.models import (
    Arrays,
    add_blobs,
    blob,
    dense_tensors,
    moe_tensors,
    quantizable_tensors,
    write_folder,
)
from tests.support.reflinks import share_blocks
from tests.unit.operations.export.folders import (
    FORMS,
    NAME,
    add_layers,
    add_old_model,
    assert_holds,
    raw_tensors,
)

INDEX = "model.safetensors.index.json"
FP16_INDEX = "model.safetensors.index.fp16.json"


def assert_as_exported(store: LocalStore, farm: Path) -> None:
    """Check that a folder of links holds what an export does, and has a correct index."""
    exported = farm.with_name("exported")
    export_model(NAME, exported, store=store)
    assert raw_tensors(farm) == raw_tensors(exported)
    others = {name: data for name, data in contents(exported).items() if ".safetensors" not in name}
    assert {name: (farm / name).read_bytes() for name in others} == others
    stated = json.loads((farm / INDEX).read_bytes())
    files = {name: path.name for path in farm.glob("*.safetensors") for name in raw_tensors(path)}
    assert stated["weight_map"] == files
    size = sum(len(data) for _, _, data in raw_tensors(farm).values())
    assert stated["metadata"] == {"total_size": size}


def counts(linked: Linked) -> tuple[int, int, int]:
    """Return the numbers of weight files that are links, that share bytes, and that are copies."""
    return linked.links, linked.shared, linked.copied


def links_of(folder: Path) -> dict[str, str]:
    return {path.name: str(path.readlink()) for path in folder.rglob("*") if path.is_symlink()}


# A request to stop


@pytest.mark.usefixtures("dense")
def test_a_request_to_end_the_program_stops_between_two_links(
    store: LocalStore, out: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def symlink(_: str, path: str) -> None:
        made.append(path)
        request.getfixturevalue("requested")

    monkeypatch.setattr(os, "symlink", symlink)
    with pytest.raises(Stopped):
        link_model(NAME, out, store=store)
    assert len(made) == 1
    assert not out.exists()


# Links


def test_links_every_blob_of_a_plain_model(dense: Path, store: LocalStore, out: Path) -> None:
    linked = link_model("m", out, store=store)
    count = len(dense_tensors())
    layers = store.resolve(NAME).layers_of(media_types.TENSOR)
    blobs = out.parent.resolve() / "store" / "blobs"
    assert links_of(out) == {
        f"model-{number:05}-of-{count:05}.safetensors": str(blobs / layer.digest.file_name)
        for number, layer in enumerate(layers, start=1)
    }
    assert linked.folder == out
    assert counts(linked) == (count, 0, 0)
    assert linked.bytes_linked == sum(layer.size for layer in layers)
    assert linked.bytes_shared == linked.bytes_copied == 0
    assert linked.notices == ()
    assert linked.files == len(list(out.iterdir())) == count + 2
    assert linked.tensors == count
    assert_as_exported(store, out)


def test_writes_the_same_folder_every_time(dense: Path, store: LocalStore, tmp_path: Path) -> None:
    for name in ("one", "two"):
        link_model(NAME, tmp_path / name, store=store)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_links_lead_to_the_real_path_of_the_blobs(
    dense: Path, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alias").symlink_to("store")
    monkeypatch.chdir(tmp_path)
    link_model(NAME, "out", store=LocalStore("alias"))
    targets = links_of(tmp_path / "out").values()
    assert {Path(target).parent for target in targets} == {tmp_path.resolve() / "store" / "blobs"}


def test_makes_hard_links_if_asked(dense: Path, store: LocalStore, out: Path) -> None:
    linked = link_model(NAME, out, store=store, hard=True)
    assert linked.links == len(dense_tensors())
    assert links_of(out) == {}
    before = raw_tensors(out)
    for layer in store.resolve(NAME).layers_of(media_types.TENSOR):
        path = Path(store.blob_path(layer.digest))
        assert path.stat().st_nlink == 2
        path.unlink()
    assert raw_tensors(out) == before


def test_links_packed_groups_as_one_file(store: LocalStore, tmp_path: Path, out: Path) -> None:
    create(write_folder(tmp_path / "moe", moe_tensors()), NAME, store=store)
    linked = link_model(NAME, out, store=store)
    assert linked.links == len(store.resolve(NAME).layers_of(media_types.TENSOR)) == 3
    assert linked.tensors == len(moe_tensors())
    assert_as_exported(store, out)


def test_a_single_blob_has_the_file_name_of_an_export(
    store: LocalStore, tmp_path: Path, out: Path
) -> None:
    create(write_folder(tmp_path / "one", {"w": np.ones(3, np.int8)}), NAME, store=store)
    link_model(NAME, out, store=store)
    assert_holds(out, {"config.json", "model.safetensors"})
    assert (out / "model.safetensors").is_symlink()


def test_small_files_are_copies(store: LocalStore, tmp_path: Path, out: Path) -> None:
    files = {"tokenizer.json": b"{}", "additional_chat_templates/tool.jinja": b"{{ x }}"}
    source = write_folder(tmp_path / "source", dense_tensors(), files=files)
    create(source, NAME, store=store)
    link_model(NAME, out, store=store, hard=True)
    for name, content in files.items():
        (out / name).write_bytes(b"changed")  # as a server may
        assert blob_path(store, name).read_bytes() == content


@pytest.mark.parametrize("hard", [False, True])
def test_the_config_is_unchanged_unless_old_keys_are_requested(
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
    assert blob_path(store, "config.json").read_bytes() == config


@pytest.mark.parametrize("config", [b"{", b"[" * 100_000, b"[1]", b'{"rope_theta": 1,"x":2}'])
def test_a_config_without_old_keys_is_unchanged(
    config: bytes, store: LocalStore, out: Path
) -> None:
    add_blobs(store, "m", {"w": blob(("w", "U8", (2,), b"ab"))})
    add_layers(store, (media_types.JSON, "config.json", config))
    link_model(NAME, out, store=store, old_keys=True)
    assert (out / "config.json").read_bytes() == config


@pytest.mark.parametrize("hard", [False, True])
def test_does_not_change_the_mode_of_blobs(
    hard: bool, dense: Path, store: LocalStore, out: Path
) -> None:
    link_model(NAME, out, store=store, hard=hard)
    assert {path.stat().st_mode & 0o777 for path in out.glob("*.safetensors")} == {0o444}


def test_tensors_never_name_files(store: LocalStore, out: Path) -> None:
    names = ["../../escape", "/etc/escape", "a\0b", "model-00001-of-00002.safetensors"]
    add_blobs(store, "m", {name: blob((name, "U8", (2,), b"ab")) for name in names})
    link_model(NAME, out, store=store)
    assert_holds(out, [INDEX, *(f"model-{n:05}-of-00004.safetensors" for n in (1, 2, 3, 4))])
    assert raw_tensors(out).keys() == set(names)


# Files under other headers


def test_copies_blobs_that_do_not_name_their_tensor(store: LocalStore, out: Path) -> None:
    tensors = add_old_model(store)
    linked = link_model(NAME, out, store=store)
    assert {name: data for name, (_, _, data) in raw_tensors(out).items()} == tensors
    assert links_of(out).keys() == {"model-00003-of-00003.safetensors"}
    assert counts(linked) == (1, 0, 2)
    assert linked.bytes_copied == 60_000
    (notice,) = linked.notices
    assert notice.startswith("weight files that are copies: 2; their tensors have")


def test_shares_the_bytes_of_such_blobs_if_possible(
    store: LocalStore, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = add_old_model(store)
    lengths = share_blocks(monkeypatch)
    linked = link_model(NAME, out, store=store)
    assert {name: data for name, (_, _, data) in raw_tensors(out).items()} == tensors
    assert counts(linked) == (1, 2, 0)
    assert (linked.bytes_shared, linked.bytes_copied) == (60_000, 0)
    assert linked.notices == ()
    assert len(lengths) == 2


def test_files_that_share_bytes_are_synced_when_they_are_complete(
    store: LocalStore, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_old_model(store)
    share_blocks(monkeypatch)
    really_sync = os.fsync
    synced: dict[int, int] = {}

    def sync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size
        really_sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    assert link_model(NAME, out, store=store).shared == 2
    files = [path.stat() for path in out.glob("*.safetensors") if not path.is_symlink()]
    assert len(files) == 2
    assert all(synced[status.st_ino] == status.st_size > 30_000 for status in files)


def test_copies_only_the_blobs_whose_bytes_cannot_be_shared(
    store: LocalStore, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"small": b"abc", "large": bytes(9000)}
    blobs = {name: blob(("data", "U8", (len(data),), data)) for name, data in tensors.items()}
    add_blobs(store, "m", blobs)
    share_blocks(monkeypatch)
    linked = link_model(NAME, out, store=store)
    assert (linked.shared, linked.bytes_shared) == (1, 9000)
    assert (linked.copied, linked.bytes_copied) == (1, 3)
    assert raw_tensors(out) == {name: ("U8", [len(data)], data) for name, data in tensors.items()}


@pytest.mark.parametrize("can_share", [False, True])
def test_splits_stacked_experts_without_moving_their_bytes(
    can_share: bool, store: LocalStore, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(write_folder(tmp_path / "moe", moe_tensors(64)), NAME, store=store, experts="stacked")
    if can_share:
        share_blocks(monkeypatch)
    linked = link_model(NAME, out, store=store)
    assert (linked.shared, linked.copied) == ((1, 0) if can_share else (0, 1))
    assert linked.bytes_shared + linked.bytes_copied == 64 * 3 * 24 * 4
    assert linked.links == len(store.resolve(NAME).layers_of(media_types.TENSOR)) - 1
    assert_as_exported(store, out)


def test_each_component_has_its_own_folder(store: LocalStore, tmp_path: Path, out: Path) -> None:
    source = tmp_path / "source"
    tensors = {"a": np.zeros(8), "b": np.ones(8)}
    write_folder(source / "unet", tensors, stem="diffusion_pytorch_model")
    write_folder(source / "text_encoder", {"a": np.full(8, 2.0)})
    (source / "model_index.json").write_text(
        '{"unet": ["diffusers", "U"], "text_encoder": ["transformers", "T"]}'
    )
    create(source, NAME, store=store)
    assert counts(link_model(NAME, out, store=store)) == (0, 0, 3)
    index = (out / "unet" / "diffusion_pytorch_model.safetensors.index.json").read_bytes()
    assert json.loads(index)["weight_map"] == {
        "a": "diffusion_pytorch_model-00001-of-00002.safetensors",
        "b": "diffusion_pytorch_model-00002-of-00002.safetensors",
    }
    for component in ("unet", "text_encoder"):
        assert raw_tensors(out / component) == raw_tensors(source / component)
    assert not (out / "text_encoder" / INDEX).exists()


def test_splits_a_blob_of_two_components(store: LocalStore, out: Path) -> None:
    parts = [("a/x", "U8", (2,), b"ax"), ("b/x", "U8", (2,), b"bx"), ("a/y", "U8", (2,), b"ay")]
    add_blobs(store, "m", {"group": blob(*parts)})
    add_layers(store, (media_types.JSON, "modules.json", b'[{"path": "a"}, {"path": "b"}]'))
    linked = link_model(NAME, out, store=store)
    assert (linked.links, linked.copied, linked.bytes_copied) == (0, 2, 6)
    assert {part: raw_tensors(out / part) for part in "ab"} == {
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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a folder of weights that can be quantized."""
    return write_folder(tmp_path / "source", quantizable_tensors())


@pytest.mark.parametrize("experts", FORMS)
@pytest.mark.parametrize("quant_type", ["int4", "nvfp4"])
def test_quantized_weights_have_the_names_of_mlx(
    quant_type: str, experts: ExpertForm, store: LocalStore, model: Path, out: Path
) -> None:
    create(model, NAME, store=store, quantize=QuantizeOptions(quant_type), experts=experts)
    linked = link_model(NAME, out, store=store)
    assert_as_exported(store, out)
    found = raw_tensors(out)
    assert "model.layers.0.mlp.switch_mlp.up_proj.scales" in found
    plain = [name for name in found if name in PLAIN]
    assert linked.links == len(plain) == len(PLAIN)
    for path in out.glob("*.safetensors"):
        assert path.is_symlink() == (next(iter(raw_tensors(path))) in plain)


@pytest.mark.slow
def test_copies_only_tensors_that_mlx_has_in_another_order(
    store: LocalStore, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_blocks(monkeypatch, block=512)
    results = {}
    for form in FORMS:
        create(model, form, store=store, quantize=QuantizeOptions("int8"), experts=form)
        linked = link_model(form, tmp_path / form, store=store)
        results[form] = (linked.shared, linked.copied)
        export_model(form, tmp_path / f"{form}-out", store=store)
        assert raw_tensors(tmp_path / form) == raw_tensors(tmp_path / f"{form}-out")
        for notice in linked.notices:
            assert "their tensors have another order" in notice
    # lm_head, q_proj and v_proj; and the experts, all at once or not at all.
    assert results == {"packed": (3, 1), "stacked": (4, 0)}


def test_splits_gathered_tensors_into_files_as_an_export_does(
    store: LocalStore, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(model, NAME, store=store, quantize=QuantizeOptions("int4"))
    monkeypatch.setattr("blobstore.folders.link_plan.SHARD_SIZE", 50_000)
    linked = link_model(NAME, out, store=store)
    assert linked.copied > 4
    assert_as_exported(store, out)
    count = linked.links + linked.copied
    assert len(list(out.glob(f"model-*-of-{count:05}.*"))) == count


def test_copies_tensors_of_several_blobs(store: LocalStore, out: Path) -> None:
    layer = "model.layers.0.odd.experts"
    parts = [("", "U32", (2, 8), 64), (".scale", "BF16", (2, 2), 8), (".bias", "BF16", (2, 2), 8)]
    blobs = {}
    for number in (1, 0):
        name = f"{layer}.{number}.up.weight"
        tensors = [
            (name + end, code, shape, bytes([number]) * size) for end, code, shape, size in parts
        ]
        blobs[name] = blob(*tensors, quant_type="int4", group_size="32")
    add_blobs(store, "m", blobs)
    linked = link_model(NAME, out, store=store)
    assert (linked.links, linked.copied, linked.bytes_copied) == (0, 1, 160)
    joined = raw_tensors(out)["model.layers.0.odd.switch_mlp.up.weight"]
    assert joined == ("U32", [2, 2, 8], b"\0" * 64 + b"\1" * 64)


def test_weights_of_gpt_oss_keep_their_own_names(
    store: LocalStore, tmp_path: Path, out: Path
) -> None:
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
    linked = link_model(NAME, out, store=store)
    assert (linked.links, linked.copied) == (1, 1)
    assert raw_tensors(out) == raw_tensors(source)
    assert (out / "config.json").read_bytes() == config


def test_finds_damage_in_copied_blobs(store: LocalStore, model: Path, out: Path) -> None:
    create(model, NAME, store=store, quantize=QuantizeOptions("int4"))
    flip(blob_path(store, "lm_head.weight"))
    with pytest.raises(BlobDamaged, match=r"model m:latest: layer 'lm_head\.weight': .* damaged"):
        link_model(NAME, out, store=store)
    assert_holds(out.parent, {"source", "store"})


# Refusals


def test_rejects_a_blob_that_is_a_link(dense: Path, store: LocalStore, out: Path) -> None:
    link(blob_path(store, "mask"))
    with pytest.raises(BlobDamaged, match="layer 'mask': .* it is a link"):
        link_model(NAME, out, store=store, hard=True)


@pytest.mark.parametrize("name", [INDEX, "model-00002-of-00009.safetensors"])
def test_rejects_a_file_with_the_name_of_a_link(
    name: str, dense: Path, store: LocalStore, out: Path
) -> None:
    add_layers(store, (media_types.FILE, name, b"{}"))
    with pytest.raises(InvalidManifest, match="two files would both be"):
        link_model(NAME, out, store=store)


@pytest.mark.parametrize(
    ("number", "error", "complaint"),
    [
        (errno.EXDEV, StoreError, "are on different file systems, so hard links cannot be made"),
        (errno.EPERM, StoreError, "belong to another user, or its file system has no hard links"),
        (errno.EMLINK, StoreError, "blob '.*' has as many names as a file can have"),
        (errno.ENOSPC, BlobstoreError, "cannot write '.*/out': No space left"),
    ],
)
def test_an_error_of_hard_links_says_why(
    number: int,
    error: type[Exception],
    complaint: str,
    dense: Path,
    store: LocalStore,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(error, match=f"model m:latest: .*{complaint}") as caught:
        link_model(NAME, out, store=store, hard=True)
    assert str(caught.value).endswith("; use symbolic links") == (error is StoreError)
    assert_holds(out.parent, {"source", "store"})


def test_rejects_hard_links_to_another_file_system(
    dense: Path, store: LocalStore, disk_path: Path
) -> None:
    with workspace() as shared_memory:
        folders = [disk_path, shared_memory]
        others = [path for path in folders if path.stat().st_dev != store.root.stat().st_dev]
        if not others:
            pytest.skip("there is no second file system")
        with pytest.raises(StoreError, match="are on different file systems"):
            link_model(NAME, others[0] / "linked", store=store, hard=True)
        assert list(others[0].iterdir()) == []


ADAPTER = {
    f"base_model.model.layers.{layer}.q_proj.lora_{part}.weight": np.full((4, 2), layer, np.float32)
    for layer in range(2)
    for part in "AB"
}


@pytest.mark.parametrize("has_config", [False, True])
def test_an_adapter_is_one_file_with_the_name_that_peft_reads(
    store: LocalStore, tmp_path: Path, has_config: bool
) -> None:
    files = {"adapter_config.json": b"{}"} | ({"config.json": b"{}"} if has_config else {})
    source = write_folder(tmp_path / "source", ADAPTER, files=files)
    (source / "model.safetensors").rename(source / "adapter_model.safetensors")
    if not has_config:
        (source / "config.json").unlink()
    create(source, NAME, store=store)
    linked = link_model(NAME, tmp_path / "farm", store=store)
    assert counts(linked) == (0, 0, 1)
    assert sorted(path.name for path in (tmp_path / "farm").iterdir()) == sorted(
        [*files, "adapter_model.safetensors"]
    )
    assert raw_tensors(tmp_path / "farm") == raw_tensors(source)
    export_model(NAME, tmp_path / "exported", store=store, shard_size=1)
    assert raw_tensors(tmp_path / "exported" / "adapter_model.safetensors") == raw_tensors(source)


@pytest.mark.parametrize("name", ["unet.mid.to_q.lora_A.weight", "lora_unet_mid.lora_up.weight"])
def test_a_lora_without_a_config_is_the_file_of_the_source(
    store: LocalStore, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "pytorch_lora_weights.safetensors"
    metadata = {"lora_adapter_metadata": '{"lora_alpha": 32}'}
    save_file({name: np.ones((2, 2)), f"{name}.2": np.zeros(2)}, file, metadata=metadata)
    create(file, NAME, store=store)
    link_model(NAME, tmp_path / "farm", store=store)
    export_model(NAME, tmp_path / "exported", store=store, shard_size=1)
    for folder in ("farm", "exported"):
        assert contents(tmp_path / folder) == {file.name: file.read_bytes()}


def test_an_adapter_of_one_tensor_is_a_link(store: LocalStore, tmp_path: Path) -> None:
    files = {"adapter_config.json": b"{}"}
    source = write_folder(tmp_path / "source", {"prompt_embeddings": np.ones((2, 2))}, files=files)
    (source / "config.json").unlink()
    create(source, NAME, store=store)
    assert counts(link_model(NAME, tmp_path / "farm", store=store)) == (1, 0, 0)
    assert (tmp_path / "farm" / "adapter_model.safetensors").is_symlink()


def test_a_model_with_an_adapter_config_keeps_the_names_of_a_model(
    store: LocalStore, tmp_path: Path
) -> None:
    files = {"adapter_config.json": b"{}"}
    create(write_folder(tmp_path / "source", dense_tensors(), files=files), NAME, store=store)
    link_model(NAME, tmp_path / "farm", store=store)
    assert (tmp_path / "farm" / INDEX).exists()


@pytest.mark.parametrize("shards", [1, 2])
def test_the_weight_files_of_a_variant_keep_its_name(
    store: LocalStore, tmp_path: Path, shards: int
) -> None:
    source = write_folder(tmp_path / "source", dense_tensors(), shards=shards)
    for path in [*source.glob("model*")]:
        new = path.name.replace("model", "model.fp16", 1)
        if path.name == INDEX:
            path.write_text(path.read_text().replace("model-", "model.fp16-"))
            new = FP16_INDEX
        path.rename(source / new)
    create(source, NAME, store=store)
    link_model(NAME, tmp_path / "farm", store=store)
    export_model(NAME, tmp_path / "exported", store=store, shard_size=9)
    for folder in ("farm", "exported"):
        names = {path.name for path in (tmp_path / folder).glob("model*")}
        index = json.loads((tmp_path / folder / FP16_INDEX).read_bytes())
        assert names == {FP16_INDEX, *index["weight_map"].values()}
        assert all(name.startswith("model.fp16-0") for name in names - {FP16_INDEX})
    export_model(NAME, tmp_path / "single", store=store, single=True)
    assert (tmp_path / "single" / "model.fp16.safetensors").exists()


def test_a_file_with_the_name_of_a_variant_becomes_a_model_without_one(
    store: LocalStore, tmp_path: Path
) -> None:
    source = write_folder(tmp_path / "source", dense_tensors())
    file = (source / "model.safetensors").rename(source / "model.v2.safetensors")
    create(file, NAME, store=store)
    link_model(NAME, tmp_path / "farm", store=store)
    assert (tmp_path / "farm" / INDEX).exists()


def test_the_links_are_of_a_manifest_whatever_its_name_has_by_now(
    store: LocalStore, model: Path, out: Path
) -> None:
    create(model, NAME, store=store)
    manifest = store.resolve(NAME)
    remove_models([NAME], store=store)
    link_manifest(manifest, NAME, out, store=store)
    assert is_linked(manifest, out, store=store)


def test_a_folder_is_linked_only_while_it_has_all_of_its_files(
    store: LocalStore, model: Path, out: Path
) -> None:
    create(model, NAME, store=store, quantize=QuantizeOptions("int4"))
    assert not is_linked(store.resolve(NAME), out, store=store)
    assert link_model(NAME, out, store=store).copied
    for name in contents(out):
        assert is_linked(store.resolve(NAME), out, store=store)
        (out / name).rename(out / "kept")
        assert not is_linked(store.resolve(NAME), out, store=store)
        (out / name).symlink_to("gone")
        assert not is_linked(store.resolve(NAME), out, store=store)
        (out / "kept").rename(out / name)
