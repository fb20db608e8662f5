from __future__ import annotations

import copyreg
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from blobstore.errors import CheckpointRefused, UsageError
from blobstore.sources.pytorch import state_dict
from blobstore.sources.pytorch.checkpoint import open_checkpoint
from blobstore.sources.pytorch.state_dict import (
    EVERYTHING,
    MAX_TENSORS,
    Choice,
    Tree,
    check_records,
    find_state_dict,
    find_tensors,
    subtrees_of,
)
from blobstore.unpickler.machine import run
from blobstore.unpickler.values import is_tensor
from tests.support.checkpoints import (
    HOOKS,
    call,
    entries,
    listed,
    mapping,
    named,
    number,
    pickled,
    several,
    storage,
    tensor,
    text,
)
from tests.support.torch_files import check, save


class Opcodes(bytes):
    """Opcodes that stand for themselves."""

    __slots__ = ()


T = Opcodes(tensor())
"""A tensor."""
STEP = Opcodes(tensor((), ()))
"""A tensor of one number."""
STATE = {"state": {0: {"exp_avg": T, "step": STEP}}, "param_groups": [{"lr": 1, "params": [0]}]}
"""What an optimizer keeps."""


def opcodes(value: Any) -> bytes:
    """Return the opcodes that push a value."""
    match value:
        case Opcodes():
            return value
        case dict():
            return entries(*((opcodes(key), opcodes(item)) for key, item in value.items()))
        case list():
            return listed(*map(opcodes, value))
        case tuple():
            return several(*map(opcodes, value))
        case str():
            return text(value)
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            return number(value)
        case _:
            assert value is None
            return b"N"


def tree_of(value: Any) -> Tree:
    data = pickled(opcodes(value))
    return find_tensors(run(data), len(data))


def chosen(value: Any, subtree: str | None = None) -> Choice:
    return find_state_dict(tree_of(value), subtree)


def names(value: Any, subtree: str | None = None) -> list[str]:
    return sorted(chosen(value, subtree).tensors)


def refusal(function: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(CheckpointRefused) as caught:
        function(*arguments)
    return str(caught.value)


# The model

WRAPPED = {"layer": T, "deep.bias": T}
MODELS: dict[str, tuple[Any, list[str], list[str]]] = {
    "plain": (WRAPPED, ["deep.bias", "layer"], []),
    "trainer": (
        {"model": WRAPPED, "optimizer": STATE, "epoch": 3},
        ["deep.bias", "layer"],
        ["left out: 'optimizer' (2 tensors); choose another part with --subtree"],
    ),
    "lightning": (
        {
            "epoch": 1, "global_step": 2, "pytorch-lightning_version": "2",
            "state_dict": {"model.layer": T}, "loops": {"fit": {"x": T}}, "callbacks": {},
            "optimizer_states": [STATE], "lr_schedulers": [{}],
        },
        ["model.layer"],
        [
            ("left out: 'loops' (1 tensor), 'optimizer_states' (2 tensors); choose another part "
            "with --subtree"),
        ],
    ),
    "deepspeed": (
        {"module": WRAPPED, "buffer_names": [], "optimizer": None, "ds_version": "0.9"},
        ["deep.bias", "layer"],
        [],
    ),
    "a model with a state dict": (
        {"model": {"state_dict": WRAPPED, "model_args": {"n": 1}}, "norm": T},
        ["model.state_dict.deep.bias", "model.state_dict.layer", "norm"],
        [],
    ),
    "chgnet": (
        {"model": {"state_dict": WRAPPED, "model_args": {"n": 1}}, "epoch": 1},
        ["deep.bias", "layer"],
        [],
    ),
    "ema next to it": (
        {"ema": WRAPPED, "model": {"other": T}},
        ["other"],
        ["left out: 'ema' (2 tensors); choose another part with --subtree"],
    ),
    "ema alone": ({"ema": WRAPPED, "step": 1}, ["deep.bias", "layer"], []),
    "two models": (
        {"generator": WRAPPED, "discriminator": {"layer": T}},
        ["discriminator.layer", "generator.deep.bias", "generator.layer"],
        [],
    ),
    "two models and training": (
        {"g": {"w": T}, "d": {"w": T}, "optim_g": STATE, "optim_d": STATE, "scaler": {"s": T}},
        ["d.w", "g.w"],
        [
            ("left out: 'optim_g' (2 tensors), 'optim_d' (2 tensors), 'scaler' (1 tensor); choose "
            "another part with --subtree"),
        ],
    ),
    "scores next to it": (
        {"state_dict": WRAPPED, "best_acc1": STEP, "best": Opcodes(tensor((1,), (1,))), "arch": "x"},
        ["deep.bias", "layer"],
        [
            ("left out: 'best_acc1' (1 tensor), 'best' (1 tensor); choose another part with "
            "--subtree"),
        ],
    ),
    "weights next to it": ({"model": WRAPPED, "head": T}, ["head", "model.deep.bias", "model.layer"], []),
    "an empty model": ({"model": {}, "params": WRAPPED}, ["deep.bias", "layer"], []),
    "a model of no tensors": ({"model": "resnet", "net": WRAPPED}, ["deep.bias", "layer"], []),
    "list": ([T, {"a": T}, [T]], ["0", "1.a", "2.0"], []),
    "tuple": ((WRAPPED, 1), ["0.deep.bias", "0.layer"], []),
    "numbers as keys": ({0: T, 1: {7: T}}, ["0", "1.7"], []),
    "bare tensor": (T, ["tensor"], []),
    "names like parts": ({"model": T, "state_dict": T}, ["model", "state_dict"], []),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_finds_the_model(kind: str) -> None:
    value, expected, notices = MODELS[kind]
    found = chosen(value)
    assert sorted(found.tensors) == expected
    assert found.notices == notices


def test_an_optimizer_alone_has_no_model() -> None:
    found = chosen({"optimizer": STATE})
    assert not found.tensors
    assert names({"optimizer": STATE}, "optimizer") == ["state.0.exp_avg", "state.0.step"]


def test_reads_the_file_of_an_optimizer() -> None:
    assert names(STATE) == ["state.0.exp_avg", "state.0.step"]


@pytest.mark.parametrize(
    "key",
    [
        *("optimizer", "optim", "Optimizer_states", "optimizers", "scheduler", "lr_scheduler"),
        *("lrscheduler", "schedule", "scaler", "grad_scaler", "gradscaler", "amp", "rng_state"),
        *("rng", "random_state", "callbacks", "loops", "criterion", "loss", "losses", "loss_fn"),
    ],
)
def test_leaves_out_training_state(key: str) -> None:
    value = {"one": {"a": T}, "two": {"a": T}, key: {"x": T}}
    assert names(value) == ["one.a", "two.a"]
    assert names(value, EVERYTHING) == sorted([f"{key}.x", "one.a", "two.a"])
    # A tensor of that name is one of the model's.
    assert names({"one": {"a": T}, key: T}) == sorted([key, "one.a"])
    assert names({"model": {"a": T}, key: T}) == ["a"]


@pytest.mark.parametrize(
    "key", ["amplifier", "criterion_head", "decoder", "lr", "flows", "my_optim"]
)
def test_keeps_keys_that_only_resemble_training_state(key: str) -> None:
    assert names({"one": {"a": T}, key: {"x": T}}) == sorted([f"{key}.x", "one.a"])


@pytest.mark.parametrize(("first", "second"), list(pairwise(state_dict._MODEL_KEYS)))
def test_prefers_the_likelier_name(first: str, second: str) -> None:
    assert names({second: {"b": T}, first: {"a": T}, "other": {"c": T}}) == ["a"]


def test_a_tensor_of_several_elements_belongs_to_the_model() -> None:
    for shape in ((2,), (1, 1), (0,)):
        other = Opcodes(tensor(shape, (1,) * len(shape)))
        assert names({"model": {"a": T}, "b": other}) == ["b", "model.a"]
        assert names({"model": {"a": T, "state_dict": {"c": T}, "b": other}}) == [
            *("a", "b", "state_dict.c")
        ]


@pytest.mark.parametrize("key", ["Model", "my_model", "models", 0])
def test_other_keys_are_not_the_model(key: str | int) -> None:
    assert names({key: {"a": T}, "b": {"a": T}}) == sorted([f"{key}.a", "b.a"])


@pytest.mark.parametrize("key", state_dict._INNER_KEYS)
def test_follows_a_state_dict_within_a_model(key: str) -> None:
    assert names({"net": {key: {"state_dict": {"a": T}}, "x": {"b": T}}}) == ["a"]


@pytest.mark.parametrize("key", ["model", "module", "net", "ema"])
def test_a_model_within_a_model_is_a_part_of_it(key: str) -> None:
    assert names({"model": {key: {"a": T}}}) == [f"{key}.a"]


# Names


@pytest.mark.parametrize(
    "name",
    [
        *("0 self connection intro.linear.weight", "\u4f60\u597d.weight", "\x1b[31mred\x1b[0m"),
        *("../../etc/passwd", "a\nb", "\0", "\u202eabc", ".", ".."),
    ],
)
def test_a_name_can_be_any_text(name: str) -> None:
    assert names({name: T}) == [name]
    assert names({"model": {name: T}}) == [name]
    assert names([{name: T}]) == [f"0.{name}"]


def test_a_name_can_be_empty() -> None:
    assert names({"": T}) == [""]
    assert names({"model": {"": {"": T}}}) == ["."]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"a.b": T, "a": {"b": T}}, "a.b"),
        ({"a": {"b": T}, "a.b": T}, "a.b"),
        ({"x": {"y.z": T}, "x.y": {"z": T}}, "x.y.z"),
        ({0: T, "0": T}, "0"),
        ([{"1": T, 1: T}], "0.1"),
        ({"": {"": T}, ".": T}, "."),
    ],
)
def test_rejects_two_tensors_of_one_name(value: Any, name: str) -> None:
    assert refusal(chosen, value) == f"two tensors would be called '{name}'"


def test_only_names_within_the_model_must_differ() -> None:
    value = {"model": {"a.b": T}, "optimizer": {"a.b": T, "a": {"b": T}}}
    assert names(value) == ["a.b"]
    assert "two tensors would be called 'optimizer.a.b'" in refusal(chosen, value, EVERYTHING)


@pytest.mark.parametrize(
    "key", [b"N", b"\x88", several(number(1), number(2)), HOOKS, b"G" + bytes(8)]
)
def test_rejects_keys_that_are_neither_strings_nor_integers(key: bytes) -> None:
    odd = {"a": T, Opcodes(key): {"b": T}}
    assert refusal(chosen, odd) == "there is a tensor at '?.b', with a key that is not a string"
    # Such keys harm nobody where no tensor of the model lies below them.
    assert names({"a": T, Opcodes(key): 5}) == ["a"]
    assert names({"model": {"a": T}, "x": {Opcodes(key): T}}) == ["a"]


def test_shows_hostile_names_escaped() -> None:
    message = refusal(chosen, {"\x1b[2J.b": T, "\x1b[2J": {"b": T}})
    assert message == r"two tensors would be called '\x1b[2J.b'"
    notices = chosen({"model": {"a": T}, "\x1b[2J": {"b": T}}).notices
    assert r"'\x1b[2J' (1 tensor)" in notices[0]


# Subtrees


EMA = {"model": {"a": T, "b": T}, "ema": {"shadow": {"a": T}, "n": 1}, "x": [{"y": T}]}


@pytest.mark.parametrize(
    ("subtree", "expected", "left"),
    [
        ("model", ["a", "b"], "'ema' (1 tensor), 'x' (1 tensor)"),
        ("ema", ["shadow.a"], "'model' (2 tensors), 'x' (1 tensor)"),
        ("ema.shadow", ["a"], "'model' (2 tensors), 'x' (1 tensor)"),
        ("x", ["0.y"], "'model' (2 tensors), 'ema' (1 tensor)"),
        ("x.0", ["y"], "'model' (2 tensors), 'ema' (1 tensor)"),
    ],
)
def test_takes_the_requested_subtree(subtree: str, expected: list[str], left: str) -> None:
    found = chosen(EMA, subtree)
    assert sorted(found.tensors) == expected
    assert found.notices == [f"left out: {left}; choose another part with --subtree"]


def test_takes_everything() -> None:
    found = chosen(EMA, EVERYTHING)
    assert sorted(found.tensors) == ["ema.shadow.a", "model.a", "model.b", "x.0.y"]
    assert not found.notices


def test_takes_training_state_on_request() -> None:
    value = {"a": {"w": T}, "b": {"w": T}, "optimizer": STATE}
    assert names(value, "optimizer.state") == ["0.exp_avg", "0.step"]


@pytest.mark.parametrize(
    "subtree", ["", "mode", "model.a", "model.", ".model", "ema.n", "Model", "0"]
)
def test_rejects_a_subtree_that_does_not_exist(subtree: str) -> None:
    with pytest.raises(UsageError) as caught:
        chosen(EMA, subtree)
    assert str(caught.value) == (
        f"there is no subtree '{subtree}' with tensors; there are '.', 'model', 'ema', "
        "'ema.shadow', 'x', 'x.0'"
    )


def test_lists_a_few_of_many_parts() -> None:
    value = {f"part{n}": {"a": T} for n in range(20)}
    with pytest.raises(UsageError, match="there are '.', 'part0', .* 'part6' and 13 more$"):
        chosen(value, "x")


@pytest.mark.parametrize(
    "value",
    [{"a": {"b": {"x": T}}, "a.b": {"y": T}}, {1: {"x": T}, "1": {"y": T}}],
    ids=["dots", "numbers"],
)
def test_rejects_an_ambiguous_subtree(value: Mapping[Any, Any]) -> None:
    subtree = "1" if "1" in value else "a.b"
    with pytest.raises(UsageError, match=f"subtree '{subtree}' can mean 2 parts of the checkpoint"):
        chosen(value, subtree)


def test_a_subtree_can_have_dots_in_its_name() -> None:
    assert names({"v1.0": {"a": T}, "b": {"c": T}}, "v1.0") == ["a"]


def test_lists_all_subtrees() -> None:
    found = subtrees_of(path for path, _ in tree_of(EMA).tensors)
    assert {part.path: part.tensors for part in found} == {
        ".": 4,
        "model": 2,
        "ema": 1,
        "ema.shadow": 1,
        "x": 1,
        "x.0": 1,
    }
    assert found[0].path == EVERYTHING
    assert [tuple(item) for item in subtrees_of(path for path, _ in tree_of(T).tensors)] == []


def test_lists_a_few_of_the_parts_that_are_left_out() -> None:
    value = {"model": {"a": T}, **{f"p{n}": {"a": T} for n in range(10)}}
    (parts,) = chosen(value).notices
    assert parts.startswith("left out: 'p0' (1 tensor), ")
    assert "'p7' (1 tensor) and 2 more; choose" in parts


# Containers


def test_looks_into_sets_and_ordered_dicts() -> None:
    ordered = call(named("collections", "OrderedDict")) + mapping(a=tensor())[1:]
    items = call(named("builtins", "set"), listed(tensor(), tensor()))
    assert names({"o": Opcodes(ordered), "s": Opcodes(items)}) == ["o.a", "s.0", "s.1"]


def test_attributes_of_a_dict_are_not_its_entries() -> None:
    with_metadata = (
        call(named("collections", "OrderedDict"))
        + mapping(a=tensor())[1:]
        + mapping(_metadata=mapping(b=tensor()))
        + b"b"
    )
    found = chosen(Opcodes(with_metadata))
    assert list(found.tensors) == ["a"]
    assert not found.notices


def test_unreadable_tensors_count_as_tensors() -> None:
    sparse = call(named("torch._utils", "_rebuild_sparse_tensor"), b"N")
    assert names({"a": Opcodes(sparse), "b": T}) == ["a", "b"]
    result = run(
        pickled(listed(sparse, tensor(), call(named("argparse", "Namespace")), storage(), b"N"))
    )
    assert [is_tensor(value) for value in result.value] == [True, True, False, False, False]


@pytest.mark.parametrize("value", [None, 5, "x", {}, [], {"a": None}, [[], {}]])
def test_values_without_tensors_have_none(value: Any) -> None:
    tree = tree_of(value)
    assert tree.tensors == []
    assert not find_state_dict(tree, None).tensors


def test_a_storage_is_not_a_tensor() -> None:
    assert tree_of(Opcodes(storage())).tensors == []


# Bounds


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"a": T}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def test_takes_sixty_four_levels() -> None:
    assert names(deep(64), EVERYTHING) == [".".join("a" * 64)]
    message = refusal(tree_of, deep(65))
    assert message == f"'{'.'.join('a' * 64)}' is nested more than 64 levels deep"


@pytest.mark.slow
@pytest.mark.parametrize("one", [b"]", b"}", b"("])
def test_rejects_deeply_nested_containers(one: bytes) -> None:
    depth = 1000 if one == b"(" else 100_000
    ends = {b"]": b"a", b"(": b"t", b"}": b"s"}
    begin = one if one != b"}" else one + text("k")
    data = pickled(begin * depth + b"N" + ends[one] * depth)
    assert "is nested more than 64 levels deep" in refusal(find_tensors, run(data), len(data))


@pytest.mark.parametrize(
    "opcode", [b"]q\x00h\x00a", b"]q\x00(h\x00h\x00h\x00e", b"}q\x00" + text("x") + b"h\x00s"]
)
def test_rejects_containers_that_hold_themselves(opcode: bytes) -> None:
    with pytest.raises(CheckpointRefused, match=r"nested more than 64|shares its parts too often"):
        tree_of(Opcodes(opcode))


@pytest.mark.parametrize("kind", [b"\x86", b"l"])
def test_rejects_containers_shared_too_often(kind: bytes) -> None:
    value = tensor()
    for number_ in range(60):
        slot = bytes([number_])
        again = b"q" + slot + b"0" + (b"(" if kind == b"l" else b"")
        value += again + b"h" + slot + b"h" + slot + kind
    assert "shares its parts too often" in refusal(tree_of, Opcodes(value))


def test_parts_can_be_shared_within_bounds() -> None:
    shared = mapping(a=tensor()) + b"q\x05"
    value = Opcodes(listed(shared, b"h\x05", b"h\x05"))
    assert names(value) == ["0.a", "1.a", "2.a"]


def test_a_tensor_can_be_shared() -> None:
    value = Opcodes(mapping(a=tensor() + b"q\x05", b=b"h\x05"))
    found = chosen(value).tensors
    assert found["a"] is found["b"]


@pytest.mark.slow
def test_rejects_more_tensors_than_any_model_has() -> None:
    many = tensor() + b"q\x050" + b"](" + b"h\x05" * (MAX_TENSORS + 1) + b"e"
    assert refusal(tree_of, Opcodes(many)) == f"the checkpoint has more than {MAX_TENSORS} tensors"


def test_rejects_names_that_are_too_long_together() -> None:
    inner = tensor() + b"q\x050" + b"](" + b"h\x05" * 1000 + b"e"
    value = b"}" + text("x" * 70_000) + inner + b"s"
    assert refusal(tree_of, Opcodes(value)) == (
        f"the names of its tensors are more than {64 * 2**20} characters"
    )


def test_rejects_too_many_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_dict, "_MAX_CONTAINERS", 100)
    assert names([[], [], T]) == ["2"]
    assert refusal(tree_of, [[]] * 101) == "the pickle has more than 100 lists, tuples and dicts"


# Complete modules


class Net(nn.Module):
    """A module of every kind of part, some of which are called like what training needs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, 2, bias=False)
        self.scaler = nn.Linear(2, 2)
        self.loss = nn.Embedding(3, 2)
        self.parts = nn.ModuleDict({"a": nn.Identity(), "b": nn.Conv2d(1, 2, 3)})
        self.values = nn.ParameterList([nn.Parameter(torch.randn(2))])
        self.pos = nn.Parameter(torch.randn(2, 3).t())
        self.register_parameter("nothing", None)
        self.register_buffer("kept", torch.randn(3))
        self.register_buffer("hidden", torch.randn(3), persistent=False)
        self.register_buffer("none", None)
        self.lstm = nn.LSTM(2, 2)
        self.tied = self.head
        self.size = (1, {"k": [1, 2]})
        self.cache = torch.randn(3)


class Wrapper(nn.Module):
    """A module whose only part is called like a model in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(2, 2)


def modules() -> dict[str, nn.Module]:
    torch.manual_seed(1)
    return {
        "sequential": nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False)),
        "own class": Net(),
        "wrapper": Wrapper(),
        "one layer": nn.Linear(3, 3),
        "attention": nn.MultiheadAttention(4, 2),
        "hidden below": nn.Sequential(Net()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", modules())
@pytest.mark.parametrize("protocol", [1, 2, 4])
def test_reads_a_module_saved_whole(tmp_path: Path, kind: str, protocol: int) -> None:
    module = modules()[kind]
    expected = module.state_dict()
    path = save(tmp_path, module, pickle_protocol=protocol)
    check(path, expected)
    check(path, expected, subtree=EVERYTHING)
    with open_checkpoint(path) as checkpoint:
        assert not [notice for notice in checkpoint.notices if "choose another" in notice]
    check(save(tmp_path, {"model": module, "epoch": 3}, pickle_protocol=protocol), expected)


def test_a_subtree_can_be_part_of_a_module(tmp_path: Path) -> None:
    module = Net()
    check(save(tmp_path, module), module.net.state_dict(), subtree="net")


def test_a_model_next_to_training_state_can_be_a_module(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(2)).sum().backward()
    optimizer.step()
    value = {"net": module, "optimizer": optimizer.state_dict()}
    check(save(tmp_path, value), module.state_dict())


class Config:
    """What a module should not hold."""


class Slotted:
    """An object whose class makes it of arguments."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return Slotted, (self.number,)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            Config(),
            (
                f"it has objects of '{__name__}.Config', which only their own code can read; "
                r"save the model's state_dict\(\) instead$"
            ),
        ),
        (Slotted(3), f"it uses '{__name__}.Slotted', which checkpoints"),
    ],
)
def test_rejects_a_module_that_has_other_objects(tmp_path: Path, config: Any, reason: str) -> None:
    module = nn.Linear(2, 2)
    module.config = config
    with pytest.raises(CheckpointRefused, match=f"pickle byte .*{reason}"):
        open_checkpoint(save(tmp_path, module))


def test_rejects_a_module_with_functions(tmp_path: Path) -> None:
    module = nn.TransformerEncoderLayer(4, 2, 8)
    message = refusal(open_checkpoint, save(tmp_path, module))
    assert "it uses 'torch.nn.functional.relu'" in message
    module.activation = partial(copyreg.constructor)  # type: ignore[assignment]
    assert "'functools.partial'" in refusal(open_checkpoint, save(tmp_path, module))


def record(state: bytes, cls: str = "Net", arguments: bytes = b")") -> bytes:
    return named("some.module", cls) + arguments + b"\x81" + state + b"b"


PARTS = {"_parameters": {"w": T}, "_buffers": {"m": T, "h": T}, "_modules": {}}


def test_knows_a_module_by_its_parts() -> None:
    assert names(Opcodes(record(opcodes(PARTS)))) == ["h", "m", "w"]
    hidden = Opcodes(call(named("builtins", "set"), listed(text("h"), number(1), b"N")))
    state = {**PARTS, "_non_persistent_buffers_set": hidden}
    assert names(Opcodes(record(opcodes(state)))) == ["m", "w"]


def test_hidden_names_apply_only_to_buffers() -> None:
    hidden = Opcodes(call(named("builtins", "set"), listed(*map(text, ("w", "m", "x")))))
    inner = Opcodes(record(opcodes(PARTS)))
    state = {**PARTS, "_modules": {"x": inner}, "_non_persistent_buffers_set": hidden}
    assert names(Opcodes(record(opcodes(state)))) == ["h", "w", "x.h", "x.m", "x.w"]


RECORDS = {
    "no state": record(b"N"),
    "an empty state": record(b"}"),
    "a list as state": record(b"]"),
    "a part too few": record(opcodes({"_parameters": {"w": T}, "_buffers": {}})),
    "a part that is not a dict": record(opcodes({**PARTS, "_buffers": [T]})),
    "arguments": record(opcodes(PARTS), arguments=several(number(1))),
    "entries": named("some.module", "Net")
    + b")\x81"
    + mapping(a=tensor())[1:]
    + opcodes(PARTS)
    + b"b",
}


@pytest.mark.parametrize("kind", RECORDS)
def test_rejects_objects_that_are_not_modules(kind: str) -> None:
    data = pickled(listed(tensor(), RECORDS[kind]))
    message = refusal(check_records, run(data).records)
    assert "it has objects of 'some.module.Net', which only their own code can read" in message
    assert refusal(find_tensors, run(data), len(data)) == message


def test_rejects_objects_outside_the_value() -> None:
    value = listed(tensor(), RECORDS["no state"] + b"0")
    assert "it has objects of 'some.module.Net'" in refusal(tree_of, Opcodes(value))


def test_names_the_classes_of_a_few_objects() -> None:
    parts = [record(b"N", f"Class{n}") for n in range(20)]
    message = refusal(tree_of, Opcodes(listed(*parts, *parts)))
    assert message.startswith("pickle byte ")
    assert "'some.module.Class0', 'some.module.Class1', 'some.module.Class10'" in message
    assert message.count("some.module") == 8


def test_modules_within_modules_are_bounded_too() -> None:
    module: Any = {**PARTS}
    for _ in range(70):
        module = {**PARTS, "_modules": {"x": Opcodes(record(opcodes(module)))}}
    assert "is nested more than 64 levels deep" in refusal(
        tree_of, Opcodes(record(opcodes(module)))
    )


@pytest.mark.slow
def test_the_names_of_hidden_buffers_are_bounded() -> None:
    hidden = call(named("builtins", "set"), listed(*[text("x")] * 20_000)) + b"q\x07"
    inner = record(opcodes({**PARTS, "_non_persistent_buffers_set": Opcodes(hidden)}))
    again = record(opcodes({**PARTS, "_non_persistent_buffers_set": Opcodes(b"h\x07")}))
    assert "shares its parts too often" in refusal(tree_of, Opcodes(listed(inner, *[again] * 500)))


def test_skips_an_object_of_a_training_program() -> None:
    options = call(named("argparse", "Namespace")) + mapping(w=tensor()) + b"b"
    found = chosen({"model": {"a": T}, "args": Opcodes(options)})
    assert list(found.tensors) == ["a"]
    assert found.notices == []


UNKNOWN = Opcodes(call(named("mylib", "Wrap")))


def chosen_part(value: Any, subtree: str | None = None) -> Choice:
    data = pickled(opcodes(value))
    return find_state_dict(find_tensors(run(data), len(data), is_part=True), subtree)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"model": UNKNOWN, "ema": {"w": T}}, "model"),
        ({"state_dict": [UNKNOWN], "ema": {"w": T}}, "state_dict.0"),
        ({"all": {"net": UNKNOWN, "ema": {"w": T}, "optimizer": {"w": T}}}, "all.net"),
    ],
)
def test_an_unknown_object_may_be_the_likeliest_model(value: Any, where: str) -> None:
    reason = refusal(chosen_part, value)
    assert f"the chosen part uses 'mylib.Wrap' at '{where}'" in reason
    assert reason.endswith("save the model's state_dict() instead")


def test_lists_unknown_objects_that_are_left_out() -> None:
    value = {"model": UNKNOWN, "ema": {"w": T}, "args": [UNKNOWN]}
    found = chosen_part(value, "ema")
    note = "left out: 2 objects of unknown classes: 'model' ('mylib.Wrap'), 'args.0' ('mylib.Wrap')"
    assert (list(found.tensors), found.notices) == (["w"], [note])
    found = chosen_part({"state_dict": {"w": T}, "model": UNKNOWN})
    assert list(found.tensors) == ["w"]
    assert found.notices == ["left out: 1 object of unknown classes: 'model' ('mylib.Wrap')"]


def test_reads_a_state_dict_with_its_metadata(tmp_path: Path) -> None:
    state = Net().state_dict()
    assert isinstance(state, OrderedDict)
    check(save(tmp_path, state), state)
    with open_checkpoint(save(tmp_path, state)) as checkpoint:
        assert checkpoint.notices == []


def test_reads_what_a_trainer_writes(tmp_path: Path) -> None:
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    value = {
        "epoch": 3,
        "state_dict": module.state_dict(),
        "best_acc1": torch.tensor(71.5),
        "optimizer": optimizer.state_dict(),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict(),
        "rng_state": torch.get_rng_state(),
    }
    check(save(tmp_path, value), module.state_dict())
