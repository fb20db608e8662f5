"""Folders of ``torch.distributed.checkpoint`` give complete tensors, under the names of the model."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties

from blobstore.errors import DamagedSource, SourceError, UnsupportedSource, UsageError
from blobstore.sources.base import SourceOptions, TensorSource
from blobstore.sources.distributed import torch_folder
from blobstore.sources.distributed.torch_folder import TorchFolder, read_metadata
from blobstore.sources.open import open_source
from tests.support.distributed_folders import Box, data_name, grid, write_folder
from tests.support.torch_files import every_type, raw

Tensors = dict[tuple[str | int, ...], tuple[torch.Tensor, list[Box]]]


def opened(folder: Path, **options: Any) -> TensorSource:
    source = open_source(folder, SourceOptions(**options))
    assert isinstance(source, TorchFolder)
    return source


def contents(source: TensorSource, size: int = 1 << 16) -> dict[str, bytes]:
    buffer = memoryview(bytearray(size))
    return {name: b"".join(map(bytes, source.read(name, buffer))) for name in source.specs}


def model(*counts: int) -> Tensors:
    torch.manual_seed(1)
    matrix, vector = torch.randn(6, 8), torch.randn(6)
    return {
        ("model", "layer.weight"): (matrix, grid((6, 8), *counts)),
        ("model", "layer.bias"): (vector, grid((6,), *counts[:1])),
        ("model", "scale"): (torch.tensor(2.0), grid(())),
    }


def with_optimizer(*counts: int) -> Tensors:
    state = {
        ("optim", "state", *path[1:], "exp_avg"): part for path, part in model(*counts).items()
    }
    return model(*counts) | state


@pytest.mark.parametrize("counts", [(1,), (2,), (1, 3), (3, 2), (6, 8)])
@pytest.mark.parametrize("ranks", [1, 4])
def test_reads_the_model_however_it_is_cut(
    tmp_path: Path, counts: tuple[int, ...], ranks: int
) -> None:
    folder = write_folder(tmp_path / "step", with_optimizer(*counts), {("step",): 5}, ranks=ranks)
    source = opened(folder)
    expected = {path[1]: raw(tensor) for path, (tensor, _) in model().items()}
    assert contents(source) == contents(source, 64) == expected
    assert source.specs["layer.weight"].shape == (6, 8)
    assert source.notices == ["left out: 'optim' (3 tensors); choose another part with --subtree"]
    assert [(file.name, file.content) for file in source.files] == [
        ("checkpoint_values.json", b'{"step":5}\n')
    ]
    assert contents(source.reopen()) == expected
    source.check_unchanged()
    record = source.record()
    assert [file.name for file in record.files] == [data_name(rank) for rank in range(ranks)]
    assert record.is_converted
    source.close()


def test_reads_every_type(tmp_path: Path) -> None:
    tensors = {(name,): (tensor, grid(tensor.shape, 3)) for name, tensor in every_type().items()}
    source = opened(write_folder(tmp_path / "step", tensors))
    assert contents(source) == {name: raw(tensor) for name, tensor in every_type().items()}


def test_reads_elements_in_any_order(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).reshape(4, 6).t()
    source = opened(write_folder(tmp_path / "step", {("a",): (tensor, grid((6, 4)))}))
    assert contents(source, 20) == {"a": raw(tensor)}


def test_reads_tensors_without_elements(tmp_path: Path) -> None:
    tensors: Tensors = {
        ("a",): (torch.zeros(0, 3), []),
        ("b",): (torch.ones(1), [((0,), (1,)), ((1,), (0,))]),
    }
    source = opened(write_folder(tmp_path / "step", tensors))
    assert contents(source) == {"a": b"", "b": raw(torch.ones(1))}


def test_a_subtree_can_be_chosen(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "step", with_optimizer(2))
    assert set(opened(folder, subtree="optim.state").specs) == {
        "layer.weight.exp_avg",
        "layer.bias.exp_avg",
        "scale.exp_avg",
    }
    assert len(opened(folder, subtree=".").specs) == 6
    with pytest.raises(UsageError, match="no subtree 'x' with tensors; there are '.', 'model'"):
        opened(folder, subtree="x")


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        # What is saved is the state dict itself, whose keys have dots.
        ([("layer.weight",), ("optimizer", "x")], {"layer.weight"}),
        # An object of the application has both, as in torch's tutorials.
        ([("app", "model", "w"), ("app", "optim", "x")], {"w"}),
        ([("app", "w"), ("app", "v")], {"app.w", "app.v"}),
        ([("state_dict", "w"), ("optimizer_0", "x")], {"w"}),
        ([("blocks", 0, "w"), ("blocks", 1, "w")], {"blocks.0.w", "blocks.1.w"}),
    ],
)
def test_finds_the_model(
    tmp_path: Path, paths: list[tuple[str | int, ...]], names: set[str]
) -> None:
    tensor = torch.ones(2, 2)
    folder = write_folder(tmp_path / "step", {path: (tensor, grid((2, 2))) for path in paths})
    assert set(opened(folder).specs) == names


def test_dots_are_in_names_if_the_writer_lists_no_keys(tmp_path: Path) -> None:
    def forget(metadata: Metadata) -> None:
        metadata.planner_data = None

    tensor = torch.ones(2, 2)
    names = (
        "model.embed.weight",
        "head.weight",
        "chained_0.scale",
        "optimizer.state.exp_avg.head.weight",
        "chained_0.optimizer.state.exp_avg.head.weight",
        "chained_12.optimizer.state.exp_avg.head.weight",
    )
    tensors = {(name,): (tensor, grid((2, 2))) for name in names}
    source = opened(write_folder(tmp_path / "step", tensors, change=forget))
    assert set(source.specs) == {"model.embed.weight", "head.weight", "chained_0.scale"}
    (notice,) = source.notices
    assert notice == (
        "left out: 'optimizer' (1 tensor), 'chained_0.optimizer' (1 tensor), "
        "'chained_12.optimizer' (1 tensor); choose another part with --subtree"
    )
    chosen = opened(tmp_path / "step", subtree="chained_0.optimizer")
    assert set(chosen.specs) == {"state.exp_avg.head.weight"}


def test_an_optimizer_alone_is_no_model(tmp_path: Path) -> None:
    tensors = {("optimizer", "state", "x"): (torch.ones(2), grid((2,)))}
    folder = write_folder(tmp_path / "step", tensors)
    with pytest.raises(SourceError, match="no tensors of a model, only 'optimizer'; choose") as it:
        opened(folder)
    assert it.value.exit_code == 1
    assert set(opened(folder, subtree=".").specs) == {"optimizer.state.x"}


def test_a_prefix_can_be_stripped(tmp_path: Path) -> None:
    part = (torch.ones(2, 2), grid((2, 2)))
    tensors = {("model", f"_orig_mod.module.{name}"): part for name in "ab"}
    folder = write_folder(tmp_path / "step", tensors)
    source = opened(folder)
    assert set(source.specs) == {"_orig_mod.module.a", "_orig_mod.module.b"}
    assert source.notices == [
        "all names begin with '_orig_mod.module.'; --strip-prefix _orig_mod.module. removes it"
    ]
    source = opened(folder, strip_prefix="_orig_mod.module.")
    assert set(source.specs) == {"a", "b"}
    assert source.specs["a"].name == "a"
    assert source.notices == []
    with pytest.raises(UsageError, match="no tensor of '.*' has a name that begins with 'x.'"):
        opened(folder, strip_prefix="x.")


def test_a_prefix_that_would_join_two_names_is_refused(tmp_path: Path) -> None:
    part = (torch.ones(2, 2), grid((2, 2)))
    folder = write_folder(tmp_path / "step", {("model", "module.a"): part, ("model", "a"): part})
    with pytest.raises(UsageError, match="tensor '.*a' of '.*' would have no name of its own"):
        opened(folder, strip_prefix="module.")


def test_the_folders_of_accelerate_are_followed(tmp_path: Path) -> None:
    write_folder(tmp_path / "pytorch_model_fsdp_0", model(2))
    optimizer = {("optimizer", "state", "x"): (torch.ones(2), grid((2,)))}
    write_folder(tmp_path / "optimizer_0", optimizer)
    (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "rng_state_0.pth").write_bytes(b"x")
    source = opened(tmp_path)
    assert set(source.specs) == {"layer.weight", "layer.bias", "scale"}
    assert source.config == {"hidden_size": 8}
    assert [file.name for file in source.files] == ["config.json", "trainer_state.json"]
    (notice,) = source.notices
    folder, file = tmp_path / "optimizer_0", tmp_path / "rng_state_0.pth"
    assert f"1 folder ('{folder}') and 1 file ('{file}')" in notice
    assert source.record().files[0].name == "pytorch_model_fsdp_0/__0_0.distcp"
    (tmp_path / "model.safetensors").write_bytes(b"x")  # the complete model is better
    with pytest.raises(DamagedSource, match="model.safetensors"):
        open_source(tmp_path)


def test_other_files_can_be_kept(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "name.ckpt", model(2))
    (folder / "meta.pt").write_bytes(b"anything")
    assert opened(folder).notices == [
        f"left out: 1 file ('{folder}/meta.pt'); --keep PATTERN stores files as they are"
    ]
    source = opened(folder, keep=("*.pt",))
    assert [file.name for file in source.files] == ["meta.pt"]
    assert source.notices == []


def test_values_that_are_not_simple_are_left_out(tmp_path: Path) -> None:
    values = {("step",): 5, ("rng",): torch.ones(3), ("path",): Path("x"), ("a", "lr"): 0.5}
    folder = write_folder(tmp_path / "step", model(1), values, ranks=3)
    source = opened(folder)
    assert source.files[0].content is not None
    assert json.loads(source.files[0].content) == {"step": 5, "a.lr": 0.5}
    assert source.notices == ["left out: 1 value that is neither a tensor nor simple, in 'path'"]


def test_values_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "step", model(1), {("step",): 5}, ranks=1)
    path = folder / data_name(0)
    path.write_bytes(b"XX" + path.read_bytes()[2:])  # the value is the first item
    source = opened(folder)
    assert source.files == []
    assert source.notices == ["left out: 'step': values that cannot be read, or are too large"]


def test_values_have_a_limit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {("a",): 1, ("b",): 2, ("c",): 3}
    folder = write_folder(tmp_path / "step", model(1), values, ranks=1)
    size = read_metadata(folder / ".metadata").values["a"].size
    monkeypatch.setattr(torch_folder, "_MAX_VALUES_SIZE", 2 * size + 1)
    source = opened(folder)
    assert source.files[0].content is not None
    assert json.loads(source.files[0].content) == {"a": 1, "b": 2}
    assert source.notices == ["left out: 'c': values that cannot be read, or are too large"]


def test_a_value_that_cannot_be_read_counts_for_more_than_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "step", model(1), {("a",): 1, ("b",): 2}, ranks=1)
    path = folder / data_name(0)
    path.write_bytes(b"XX" + path.read_bytes()[2:])  # "a" is the first item
    monkeypatch.setattr(torch_folder, "_MAX_VALUES_SIZE", 2**20)
    assert "left out: 'a', 'b': values" in opened(folder).notices[0]


def test_a_name_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    tensors = {("model", "\udc80"): (torch.ones(2), grid((2,)))}
    with pytest.raises(UnsupportedSource, match=r"'\\udc80' of a tensor is not Unicode"):
        opened(write_folder(tmp_path / "step", tensors))


def test_types_that_safetensors_lacks_can_be_skipped(tmp_path: Path) -> None:
    tensors = model(1) | {("model", "z"): (torch.ones(2, dtype=torch.complex128), grid((2,)))}
    folder = write_folder(tmp_path / "step", tensors)
    with pytest.raises(UnsupportedSource, match="'z': tensors of torch.complex128 have no type"):
        opened(folder)
    source = opened(folder, skip_unreadable=True)
    assert len(source.specs) == 3
    assert source.notices == ["left out: tensors of types that safetensors does not have: 'z'"]


def test_a_model_of_unreadable_tensors_alone_is_refused_with_the_reason(tmp_path: Path) -> None:
    tensors = {("model", "z"): (torch.ones(2, dtype=torch.complex128), grid((2,)))}
    folder = write_folder(tmp_path / "step", tensors)
    with pytest.raises(UnsupportedSource, match="'z': tensors of torch.complex128 have no type"):
        opened(folder, skip_unreadable=True)


def test_a_checkpoint_without_metadata_is_incomplete(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "step", model(1))
    (folder / ".metadata").rename(folder / "__0.metadata")
    with pytest.raises(UnsupportedSource, match="use_collectives=False"):
        opened(folder)
    (folder / "__0.metadata").unlink()
    with pytest.raises(DamagedSource, match="no .metadata, which .* writes last"):
        opened(folder)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "step", model(2))
    (folder / data_name(1)).unlink()
    with pytest.raises(DamagedSource, match="data file '.*__1_0.distcp' is missing"):
        opened(folder)


def test_a_file_that_is_left_out_is_missing(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "step", model(2))
    with pytest.raises(DamagedSource, match="data file '.*__1_0.distcp' is missing"):
        opened(folder, exclude=(data_name(1),))


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "step", model(2))
    source = opened(folder)
    path = folder / data_name(1)
    path.write_bytes(path.read_bytes())
    with pytest.raises(DamagedSource, match="changed while it was read"):
        contents(source)
    with pytest.raises(DamagedSource, match="changed while it was read"):
        source.check_unchanged()


def test_a_file_that_is_too_short_is_noticed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "step", model(2))
    path = folder / data_name(0)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedSource, match="an item ends at byte [0-9]+: the file was truncated"):
        opened(folder)


def test_files_that_are_swapped_are_noticed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "step", model(2))
    first, second = (folder / data_name(rank) for rank in range(2))
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)
    with pytest.raises(DamagedSource, match="distcp"):
        opened(folder)


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "step", {("a",): (torch.zeros(500), grid((500,)))}, ranks=1)
    path = folder / data_name(0)
    data = bytearray(path.read_bytes())
    at = data.index(bytes(400)) + 100
    data[at] = 1
    path.write_bytes(data)
    with pytest.raises(DamagedSource, match="tensor 'a': .* have the CRC"):
        contents(opened(folder))


def change_of(name: str, **changes: Any) -> Any:
    """Return a change of the place of one item."""

    def change(metadata: Metadata) -> None:
        index = next(key for key in metadata.storage_data if key.fqn == name)
        metadata.storage_data[index] = dataclasses.replace(metadata.storage_data[index], **changes)

    return change


def test_items_that_are_compressed_are_refused(tmp_path: Path) -> None:
    change = change_of("model.scale", transform_descriptors=["zstd"])
    folder = write_folder(tmp_path / "step", model(1), change=change)
    with pytest.raises(UnsupportedSource, match="transformed by an extension"):
        opened(folder)


def test_items_that_overlap_are_refused(tmp_path: Path) -> None:
    change = change_of("model.scale", relative_path=data_name(0), offset=1)
    folder = write_folder(tmp_path / "step", model(1), ranks=1, change=change)
    with pytest.raises(DamagedSource, match="two items overlap at byte 1 of"):
        opened(folder)


def test_an_item_must_be_what_the_metadata_say(tmp_path: Path) -> None:
    def change(metadata: Metadata) -> None:
        entry: Any = metadata.state_dict_metadata["model.scale"]
        entry.properties = TensorProperties(dtype=torch.int32)

    folder = write_folder(tmp_path / "step", model(1), change=change)
    message = r"tensor 'scale': it is a tensor of F32 \[\], not of torch.int32 \[\]"
    with pytest.raises(DamagedSource, match=message):
        opened(folder)


def test_a_folder_in_the_place_of_the_metadata_is_refused(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "step", model(1), ranks=1) / ".metadata"
    path.unlink()
    path.mkdir()
    with pytest.raises(SourceError, match=r"\.metadata"):
        read_metadata(path)


def test_an_item_must_have_only_its_own_elements(tmp_path: Path) -> None:
    tensors = model(1) | {("model", "x"): (torch.ones(1).expand(4), grid((4,)))}
    # The helper clones parts of storages, as torch does; so save this one by hand.
    folder = write_folder(tmp_path / "step", tensors, ranks=1)
    whole = torch.zeros(100)
    name = "model.x"
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    data = bytearray((folder / data_name(0)).read_bytes())
    torch.save(whole[:4], tmp_path / "item")
    item = (tmp_path / "item").read_bytes()
    index = MetadataIndex(name, (0,))
    metadata.storage_data[index] = dataclasses.replace(
        metadata.storage_data[index], offset=len(data), length=len(item)
    )
    (folder / data_name(0)).write_bytes(data + item)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedSource, match="has not exactly the 16 bytes of the tensor"):
        opened(folder)
