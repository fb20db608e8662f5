from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
import torch

import blobstore
from blobstore.core.digest import Digest
from blobstore.integrations.vllm.rank_reads import DeferredCopies, PartTensor, part_tensors
from blobstore.objects.source import ObjectSource
from blobstore.operations.open import Model
from blobstore.store.local import LocalStore
from tests.support.models import write_folder
from tests.support.objects import ObjectServer

ROWS, COLUMNS = 512, 2048


@pytest.fixture(scope="module")
def address(object_server: ObjectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a model in object storage, which these tests only read."""
    folder = tmp_path_factory.mktemp("rank-reads")
    random = np.random.default_rng(0)
    weights = {
        name: random.standard_normal((ROWS, COLUMNS)).astype(ml_dtypes.bfloat16) for name in "ab"
    }
    store = LocalStore(folder / "store")
    blobstore.create(write_folder(folder / "source", weights), "m", store=store)
    place = f"s3://{object_server.bucket}/rank-reads"
    with patch.dict(os.environ, object_server.environment):
        blobstore.push("m", place, store=store)
        yield f"{place}/m"


@pytest.fixture
def model(address: str, tmp_path: Path) -> Iterator[Model]:
    with blobstore.open(address, store=tmp_path / "other", framework="torch") as opened:
        yield opened


def tensor(model: Model, name: str = "a") -> torch.Tensor:
    return dict(part_tensors(model))[name]


@pytest.mark.parametrize(
    "take",
    [
        lambda one: one,
        lambda one: one.narrow(0, 3, 7),
        lambda one: one.narrow(1, COLUMNS // 2, COLUMNS // 2),
        lambda one: one[5],
        lambda one: one[-1, 4:],
        lambda one: one.data[2:900].narrow(1, 4, 4)[:, 1:],
        lambda one: one.unbind(0)[2].narrow(0, 1, 3),
        lambda one: one[4:4],
        lambda one: one[:, ::2],
        lambda one: one.t()[3:5],
        lambda one: one.view(torch.uint8)[1],
        lambda one: one.float().amax(),
        lambda one: torch.stack([one, one]),
    ],
)
def test_a_part_has_the_values_of_the_tensor(
    take: Callable[[torch.Tensor], torch.Tensor], model: Model
) -> None:
    part, expected = take(tensor(model)), take(model["a"])
    assert part.shape == expected.shape
    assert part.dtype == expected.dtype
    values = part.read() if isinstance(part, PartTensor) else part
    assert torch.equal(values, expected)


def test_copies_are_read_together_and_nothing_else_is(model: Model) -> None:
    target = torch.empty(2 * 16, COLUMNS, dtype=torch.bfloat16)
    asked: list[int] = []
    read = ObjectSource.read

    def count(
        source: ObjectSource, digest: Digest, size: int, begin: int, end: int
    ) -> Iterator[memoryview]:
        asked.append(end - begin)
        return read(source, digest, size, begin, end)

    with patch.object(ObjectSource, "read", count):
        with DeferredCopies(model):
            for number, (_, one) in enumerate(part_tensors(model)):
                target[16 * number :][:16].copy_(one.narrow(0, 100, 16))
            assert not asked
        assert asked == [16 * COLUMNS * 2] * 2
    assert torch.equal(target, torch.cat([model[name][100:116] for name in "ab"]))


@pytest.mark.parametrize(
    "use",
    [
        lambda target: target[0, :4].float(),
        lambda target: torch.cat([target, target])[0],
        lambda target: target.fill_(3),
        lambda target: target[:2].zero_(),
    ],
)
def test_memory_has_the_copy_when_it_is_used(
    use: Callable[[torch.Tensor], torch.Tensor], model: Model
) -> None:
    ours, expected = torch.zeros(2, ROWS, COLUMNS, dtype=torch.bfloat16)
    with DeferredCopies(model):
        ours.copy_(tensor(model))
        result = use(ours)
    expected.copy_(model["a"])
    assert torch.equal(result, use(expected))
    assert torch.equal(ours, expected)


def test_a_tensor_that_is_repeated_over_the_target_is_copied(model: Model) -> None:
    target = torch.zeros(3, COLUMNS, dtype=torch.bfloat16)
    with DeferredCopies(model):
        target.copy_(tensor(model)[7])
    assert torch.equal(target, model["a"][7].expand(3, -1))


def test_nothing_is_copied_after_an_error(model: Model) -> None:
    target = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    with pytest.raises(KeyError), DeferredCopies(model):
        target.copy_(tensor(model))
        raise KeyError
    assert not target.any()
