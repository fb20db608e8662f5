from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.staging import AsyncStager

from blobstore.integrations.torch_checkpoint import StoreWriter
from blobstore.integrations.torch_checkpoint.staging import Staging
from tests.unit.operations.test_load import assert_same


def state(value: int) -> dict[str, Any]:
    weights = OrderedDict(a=torch.full((2, 3), value), turned=torch.full((2, 3), value).t())
    return {
        "model": weights,
        "list": [torch.tensor(value), {"lr": value}],
        "pair": (torch.nn.Parameter(torch.full((1,), float(value))), "x"),
        "object": {1, 2},
    }


def memory(copy: Any) -> list[int]:
    tensors = [*copy["model"].values(), copy["list"][0], copy["pair"][0]]
    return [tensor.data_ptr() for tensor in tensors]


def test_a_copy_keeps_its_values_and_the_next_one_its_memory() -> None:
    staging = Staging()
    source = state(1)
    first = staging.copy(source)
    for tensor in (*source["model"].values(), source["list"][0], source["pair"][0].data):
        tensor.zero_()
    source["object"].add(3)
    assert_same(first["model"], state(1)["model"])
    assert_same(first["list"], state(1)["list"])
    assert first["pair"][0].tolist() == [1]
    assert first["object"] == {1, 2}
    before = memory(first)
    staging.is_free = True
    second = staging.copy(state(2))
    assert memory(second) == before
    assert_same(second["model"], state(2)["model"])
    assert_same(second["list"], state(2)["list"])


def test_memory_that_may_be_in_use_is_not_used_again() -> None:
    staging = Staging()
    first = staging.copy(state(1))
    second = staging.copy(state(2))
    assert not {*memory(first)} & {*memory(second)}
    assert_same(first["model"], state(1)["model"])


def test_tensors_that_share_memory_may_part_later() -> None:
    staging = Staging()
    tied = torch.ones(2)
    copy = staging.copy({"a": tied, "b": tied, "part": torch.ones(1000)[:2]})
    assert copy["part"].untyped_storage().nbytes() == 8
    staging.is_free = True
    copy = staging.copy({"a": tied, "b": torch.zeros(2), "part": tied})
    assert [copy[key].tolist() for key in ("a", "b", "part")] == [[1, 1], [0, 0], [1, 1]]


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(2).double(), 5, [torch.ones(2)]])
def test_what_has_another_form_gets_other_memory(other: Any) -> None:
    staging = Staging()
    staging.copy({"a": torch.full((2,), 7.0), "b": [1]})
    staging.is_free = True
    copy = staging.copy({"a": other, "c": other})
    assert_same(copy, {"a": other, "c": other})


def test_a_writer_is_a_stager_that_other_processes_can_get(tmp_path: Any) -> None:
    writer = StoreWriter(tmp_path)
    assert isinstance(writer, AsyncStager)
    assert not writer.should_synchronize_after_execute
    first = writer.stage({"a": torch.ones(2)})
    again: StoreWriter = pickle.loads(pickle.dumps(writer))
    assert again.stage({"a": torch.zeros(2)})["a"].tolist() == [0, 0]
    assert first["a"].tolist() == [1, 1]
    writer.close()
