from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from blobstore.integrations.vllm.writes import Offered, Watch


def parameter(*shape: int) -> torch.Tensor:
    return torch.nn.Parameter(torch.empty(shape), requires_grad=False)


def watched(parameters: dict[str, torch.Tensor], offered: Offered | None = None) -> Watch:
    return Watch(parameters, offered or Offered([]))


def write_views(data: torch.Tensor) -> None:
    data.narrow(0, 0, 2).copy_(torch.ones(2, 6))
    data[2:, :3].fill_(1)


def write_twice(data: torch.Tensor) -> None:
    data[:2].fill_(1)
    data[:2].copy_(torch.ones(2, 6))


@pytest.mark.parametrize(
    ("use", "count"),
    [
        (write_views, 18),
        (write_twice, 12),
        (lambda data: torch.add(torch.ones(4, 6), 1, out=data), 24),
        (lambda data: torch.ones(4, 6).copy_(data), 0),
        (lambda data: None, 0),
    ],
    ids=["views", "twice", "out argument", "read", "nothing"],
)
def test_counts_the_elements_that_are_written_while_it_watches(
    use: Callable[[torch.Tensor], object], count: int
) -> None:
    weight = parameter(4, 6)
    weight.data.fill_(1)
    watch = watched({"weight": weight})
    with watch:
        use(weight.data)
    weight.data.fill_(1)
    assert watch.written("weight") == count


def test_distinguishes_parameters_that_share_memory() -> None:
    whole = torch.empty(10)
    watch = watched({"first": whole[:4], "second": whole[4:]})
    with watch:
        whole[4:8].fill_(1)
    assert watch.written("first") == 0
    assert watch.written("second") == 4


def test_returns_nothing_for_parameters_with_replaced_memory() -> None:
    weight = parameter(4)
    watch = watched({"weight": weight})
    with watch:
        weight.data = torch.ones(4)
    assert watch.written("weight") is None


def test_returns_nothing_for_parameters_without_memory() -> None:
    watch = watched({"meta": torch.empty(4, device="meta"), "empty": parameter(0)})
    assert watch.written("meta") is None
    assert watch.written("empty") is None


def test_names_the_tensors_that_were_never_read() -> None:
    tensors = {name: torch.ones(2, 2) for name in ("copied", "skipped", "viewed", "joined")}
    offered = Offered(tensors.items())
    weight = parameter(2, 2)
    with watched({"weight": weight}, offered):
        for name, tensor in offered:
            if name == "copied":
                weight.data.copy_(tensor.data)
            elif name == "viewed":
                tensor.narrow(0, 1, 1)
            elif name == "joined":
                torch.cat([torch.ones(2, 2), tensor])
    assert offered.unused == ["skipped"]
    assert offered.names == list(tensors)


def test_a_late_read_counts() -> None:
    offered = Offered([("first", torch.ones(2)), ("second", torch.ones(2))])
    with watched({}, offered):
        torch.stack([tensor for _, tensor in offered])
    assert offered.unused == []


def test_names_skipped_tensors_even_if_their_memory_is_reused() -> None:
    memory = torch.ones(4)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "skipped", memory[:2]
        yield "copied", memory[:2]

    offered = Offered(tensors())
    with watched({}, offered):
        for name, tensor in offered:
            if name == "copied":
                torch.empty(2).copy_(tensor)
    assert offered.unused == ["skipped"]


def test_does_not_count_reads_while_a_tensor_is_computed() -> None:
    whole = torch.ones(2, 3)
    offered = Offered((str(number), whole[0]) for number in range(1))
    again = Offered(offered)
    with watched({}, again):
        list(again)
    assert again.unused == ["0"]


def test_empty_tensors_need_not_be_read() -> None:
    offered = Offered([("empty", torch.empty(0, 3))])
    list(offered)
    assert offered.unused == []


def test_continues_where_it_stopped() -> None:
    offered = Offered((name, torch.ones(1)) for name in "abc")
    first, _ = next(iter(offered))
    given_then = offered.last
    rest = [name for name, _ in offered]
    assert first == "a"
    assert given_then is not None
    assert given_then[0] == "a"
    assert rest == ["b", "c"]
    assert offered.last is None
