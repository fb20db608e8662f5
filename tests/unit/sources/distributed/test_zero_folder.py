"""Folders of DeepSpeed ZeRO: the weights of all processes are joined as DeepSpeed joins them."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from blobstore.errors import DamagedSource, UnsupportedSource, UsageError
from blobstore.sources.base import SourceOptions, TensorSource
from blobstore.sources.open import open_source
from tests.support.torch_files import TYPES
from tests.support.zero_folders import (
    CONSOLIDATED,
    optimizer_file,
    saved_by_deepspeed,
    write_zero,
)

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def content(source: TensorSource, name: str, size: int = 1 << 16) -> bytes:
    return b"".join(map(bytes, source.read(name, memoryview(bytearray(size)))))


def found(folder: Path, options: SourceOptions | None = None) -> dict[str, list[Any]]:
    source = open_source(folder, options or SourceOptions())
    return {
        name: [spec.dtype.value, [*spec.shape], hashlib.sha256(content(source, name)).hexdigest()]
        for name, spec in source.specs.items()
    }


def groups() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [
        {"a": torch.randn(7, 5), "b": torch.randn(3), "c": torch.randn(())},
        {"d": torch.randn(1), "e": torch.randn(2, 3, 11)},
    ]


def expected(parts: list[dict[str, torch.Tensor]]) -> dict[str, bytes]:
    return {name: it.numpy().tobytes() for group in parts for name, it in group.items()}


# folders of DeepSpeed itself


@pytest.mark.parametrize("name", CONSOLIDATED)
def test_joins_what_deepspeed_joins(name: str, tmp_path: Path) -> None:
    folder = saved_by_deepspeed(name, tmp_path)
    types = {str(key).removeprefix("torch."): value for key, value in TYPES.items()}
    wanted = {
        tensor: [types[dtype], shape, digest]
        for tensor, (dtype, shape, digest) in CONSOLIDATED[name].items()
    }
    result = found(folder)
    if name == "stage1-mixed":  # DeepSpeed loses it
        assert result.pop("b.weight")[:2] == ["BF16", [11, 3]]
    assert result == wanted
    assert len(result) > 8


def test_a_parameter_that_the_optimizer_lacks_is_taken_from_the_module(tmp_path: Path) -> None:
    source = open_source(saved_by_deepspeed("stage1-mixed", tmp_path))
    joined = "joined the parts of 3 processes of DeepSpeed ZeRO stage 1; left out: the states of "
    rest = "not trained, so in the type that the module has: 'b.weight'"
    assert source.notices == [f"{joined}the optimizer", rest]


def test_the_folder_of_the_step_is_a_source_too(tmp_path: Path) -> None:
    folder = saved_by_deepspeed("stage3", tmp_path)
    assert found(folder / "global_step2") == found(folder)


def test_a_checkpoint_without_zero_names_the_file_with_the_model(tmp_path: Path) -> None:
    folder = saved_by_deepspeed("without-zero", tmp_path)
    with pytest.raises(UnsupportedSource) as caught:
        open_source(folder)
    assert str(caught.value).endswith(
        "was saved without ZeRO; import the file with the model: 'mp_rank_00_model_states.pt'"
    )
    assert "a.weight" in found(folder / "global_step2" / "mp_rank_00_model_states.pt")


# the rules


@STAGES
@pytest.mark.parametrize("ranks", [1, 2, 3, 11])
@pytest.mark.parametrize("size", [8, 1000])
def test_joins_any_number_of_processes(stage: int, ranks: int, size: int, tmp_path: Path) -> None:
    frozen = {"f": torch.randn(5, 2).half()}
    folder = write_zero(tmp_path / "x", stage, ranks, groups(), frozen=frozen)
    source = open_source(folder)
    wanted = expected([*groups(), frozen])
    assert {name: content(source, name, size) for name in source.specs} == wanted
    assert source.specs["c"].shape == ()
    assert source.specs["f"].dtype.value == "F16"


def test_skips_the_padding_after_each_parameter(tmp_path: Path) -> None:
    padding = torch.full((2,), torch.nan)

    def pad(_: int, states: dict[str, Any]) -> None:
        first = groups()[0]
        flat = [torch.cat([it.flatten(), padding]) for it in first.values()]
        states["single_partition_of_fp32_groups"][0] = torch.cat(flat)
        states["param_alignment_paddings"] = [[2, 2, 2], [0, 0]]

    folder = write_zero(tmp_path / "x", 2, 1, groups(), change_optimizer=pad)
    source = open_source(folder)
    assert {name: content(source, name) for name in source.specs} == expected(groups())


def test_a_tied_parameter_is_under_both_names(tmp_path: Path) -> None:
    def tie(_: int, states: dict[str, Any]) -> None:
        states["module"]["tied"] = torch.empty(0)
        states["shared_params"] = {"tied": "a"}

    source = open_source(write_zero(tmp_path / "x", 3, 2, groups(), change_model=tie))
    assert content(source, "tied") == content(source, "a")
    assert source.specs["tied"].shape == (7, 5)


def test_removes_a_prefix_and_keeps_small_files(tmp_path: Path) -> None:
    named = [{f"module.{name}": it for name, it in group.items()} for group in groups()]
    folder = write_zero(tmp_path / "x", 3, 2, named)
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "zero_to_fp32.py").write_text("raise SystemExit")
    source = open_source(folder, SourceOptions(strip_prefix="module."))
    assert {name: content(source, name) for name in source.specs} == expected(groups())
    assert source.config == {"a": 1}
    assert [file.name for file in source.files] == ["config.json"]


def test_a_complete_model_wins_over_the_parts(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "x", 3, 2, groups())
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
    assert set(found(folder)) == {"w"}


def test_takes_any_type_of_weights(tmp_path: Path) -> None:
    half = [{name: it.bfloat16() for name, it in group.items()} for group in groups()]
    assert {it[0] for it in found(write_zero(tmp_path / "x", 2, 2, half)).values()} == {"BF16"}


def test_files_of_an_older_torch_are_read(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "x", 2, 2, groups())
    for path in (folder / "tag").iterdir():
        value = torch.load(path)
        torch.save(value, path, _use_new_zipfile_serialization=False)
    source = open_source(folder)
    assert {name: content(source, name) for name in source.specs} == expected(groups())


def test_reads_with_little_memory(tmp_path: Path) -> None:
    import tracemalloc

    folder = write_zero(tmp_path / "x", 3, 2, [{"w": torch.ones(4, 2**20)}])
    source = open_source(folder)
    buffer = memoryview(bytearray(1 << 20))
    tracemalloc.start()
    size = sum(len(part) for part in source.read("w", buffer))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 2**24
    assert peak < 4 * 2**20


# refused


def refusal(folder: Path, kind: type[Exception] = DamagedSource) -> str:
    with pytest.raises(kind) as caught:
        open_source(folder)
    return str(caught.value)


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "x", 2, 2, groups())
    path = folder / "tag" / optimizer_file(1)
    data = bytearray(path.read_bytes())
    at = data.index(groups()[1]["e"].numpy().tobytes()[-4:])
    data[at] ^= 1
    path.write_bytes(data)
    source = open_source(folder)
    for _ in range(2):
        with pytest.raises(DamagedSource, match="CRC"):
            content(source, "e")


@STAGES
def test_a_missing_process_is_named(stage: int, tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "x", stage, 3, groups())
    (folder / "tag" / optimizer_file(1)).unlink()
    assert f"but not '{optimizer_file(1)}'" in refusal(folder)


@STAGES
def test_a_missing_last_process_is_noticed(stage: int, tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "x", stage, 3, groups())
    (folder / "tag" / optimizer_file(2)).unlink()
    assert "saved by 3 processes" in refusal(folder)


def test_a_missing_model_is_noticed(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "x", 3, 2, groups())
    (folder / "tag" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    assert "1 *_model_states.pt files do not belong to ZeRO stage 3 of 2" in refusal(folder)
    (folder / "tag" / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    assert "no *_model_states.pt" in refusal(folder)


def test_two_files_of_a_process_are_refused(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "x", 2, 2, groups())
    path = folder / "tag" / optimizer_file(1)
    shutil.copy(path, path.with_name(f"bf16_{path.name}"))
    assert "two files of process 1" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    [
        "mp_rank_01_model_states.pt",
        "zero_pp_rank_0_mp_rank_01_optim_states.pt",
        "layer_00-model_00-model_states.pt",
        "layer_1_expert_0_mp_rank_00_model_states.pt",
        "expp_rank_0_mp_rank_00_optim_states.pt",
    ],
)
def test_other_kinds_of_parallelism_are_named(name: str, tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "x", 2, 2, groups())
    shutil.copy(folder / "tag" / optimizer_file(1), folder / "tag" / name)
    assert f"such as '{name}'" in refusal(folder, UnsupportedSource)


def test_there_are_no_parts(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "x", 2, 2, groups())
    with pytest.raises(UsageError, match="no parts for --subtree"):
        open_source(folder, SourceOptions(subtree="module"))


def test_a_parameter_without_values_is_an_error(tmp_path: Path) -> None:
    def add(_: int, states: dict[str, Any]) -> None:
        states["module"]["x"] = torch.empty(0)

    folder = write_zero(tmp_path / "x", 3, 2, groups(), change_model=add)
    assert "no file has the values of 'x'" in refusal(folder)


def test_frozen_parts_of_another_size_are_an_error(tmp_path: Path) -> None:
    def cut(rank: int, states: dict[str, Any]) -> None:
        if rank:
            states["frozen_param_fragments"]["f"] = torch.ones(2)

    frozen = {"f": torch.ones(6)}
    folder = write_zero(tmp_path / "x", 3, 2, groups(), frozen=frozen, change_model=cut)
    assert "process 1 has 2 elements of 'f', not 3" in refusal(folder)


def test_frozen_parameters_without_values_are_an_error(tmp_path: Path) -> None:
    def drop(_: int, states: dict[str, Any]) -> None:
        states["frozen_param_fragments"] = None

    frozen = {"f": torch.ones(6)}
    folder = write_zero(tmp_path / "x", 2, 2, groups(), frozen=frozen, change_model=drop)
    assert "no file has the values of 'f'" in refusal(folder)


def test_tied_parameters_that_grow_without_end_are_refused(tmp_path: Path) -> None:
    def tie(_: int, states: dict[str, Any]) -> None:
        states["shared_params"] = {f"x{index}": "a" for index in range(1000)}

    big = [{"a": torch.ones(1000, 100)}]
    folder = write_zero(tmp_path / "x", 2, 1, big, change_model=tie)
    assert "more than 16 times" in refusal(folder, UnsupportedSource)


def test_another_name_of_a_parameter_without_values_is_an_error(tmp_path: Path) -> None:
    def tie(_: int, states: dict[str, Any]) -> None:
        states["module"]["tied"] = torch.empty(0)
        states["shared_params"] = {"tied": "nothing"}

    folder = write_zero(tmp_path / "x", 3, 2, groups(), change_model=tie)
    assert "no file has the values of 'tied'" in refusal(folder)


def test_a_file_that_changes_while_it_is_imported_is_noticed(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "x", 2, 2, groups())
    source = open_source(folder)
    source.check_unchanged()
    path = folder / "tag" / optimizer_file(1)
    path.write_bytes(path.read_bytes())
    with pytest.raises(DamagedSource, match="changed"):
        source.check_unchanged()


def test_processes_that_count_each_other_differently_are_noticed(tmp_path: Path) -> None:
    def change(rank: int, states: dict[str, Any]) -> None:
        states["partition_count"] = 2 + rank

    folder = write_zero(tmp_path / "x", 2, 2, groups(), change_optimizer=change)
    assert "ZeRO stage 2 of 2 processes, but process 1 stage 2 of 3" in refusal(folder)


def test_frozen_parameters_may_have_fewer_elements_than_their_parts(tmp_path: Path) -> None:
    frozen = {"f": torch.randn(5)}  # of four processes with two each, one has none
    source = open_source(write_zero(tmp_path / "x", 3, 4, groups(), frozen=frozen))
    assert content(source, "f") == frozen["f"].numpy().tobytes()


def test_another_name_that_has_values_of_its_own_keeps_them(tmp_path: Path) -> None:
    def tie(_: int, states: dict[str, Any]) -> None:
        states["shared_params"] = {"a": "b"}

    source = open_source(write_zero(tmp_path / "x", 2, 2, groups(), change_model=tie))
    assert {name: content(source, name) for name in source.specs} == expected(groups())


def test_paddings_of_other_parameters_are_an_error(tmp_path: Path) -> None:
    def change(_: int, states: dict[str, Any]) -> None:
        states["param_alignment_paddings"] = [[0, 0], [0, 0]]

    folder = write_zero(tmp_path / "x", 2, 2, groups(), change_optimizer=change)
    assert "have different groups" in refusal(folder)
