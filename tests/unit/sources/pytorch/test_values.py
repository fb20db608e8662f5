from __future__ import annotations

import argparse
import json
import math
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from blobstore.core import strict_json
from blobstore.sources.base import SourceFile
from blobstore.sources.huggingface import HuggingFaceFolder
from blobstore.sources.pytorch import values
from blobstore.sources.pytorch.checkpoint import open_checkpoint
from blobstore.sources.pytorch.values import VALUES_FILE, PlainValues, plain_values, with_values
from blobstore.unpickler.machine import run
from tests.support.checkpoints import (
    listed,
    mapping,
    named,
    number,
    pickled,
    tensor,
    text,
    zip_file,
)
from tests.support.torch_files import save

T = torch.zeros(2)


def kept(folder: Path, value: Any, **options: Any) -> tuple[Any, list[str]]:
    """Return the values of a checkpoint that torch writes, after a turn through JSON, and notices."""
    with open_checkpoint(save(folder, value, **options)) as checkpoint:
        again = strict_json.loads(strict_json.dumps(checkpoint.values).encode())
        assert again == checkpoint.values
        return again, list(checkpoint.notices)


def of_pickle(opcodes: bytes) -> PlainValues:
    return plain_values(run(pickled(opcodes)).value)


@pytest.mark.parametrize("protocol", [2, 4])
def test_keeps_simple_values(tmp_path: Path, protocol: int) -> None:
    simple = {
        "epoch": 3,
        "lr": 1e-3,
        "name": "a 'name' \u00e9",
        "flag": True,
        "nothing": None,
        "list": [1, [2.5, "x"], {"deep": [False]}],
        "empty": {"list": [], "dict": {}},
        "size": -(2**63),
        "largest": 2**64 - 1,
    }
    value = {"state_dict": {"a": T}, **simple}
    assert kept(tmp_path, value, pickle_protocol=protocol) == (simple, [])


def test_other_containers_become_lists_and_dicts(tmp_path: Path) -> None:
    value = {
        "model": {"a": T},
        "tuple": (1, 2),
        "set": {"x"},
        "ordered": OrderedDict(a=1),
        "counter": Counter("aab"),
        "default": defaultdict(list, b=[2]),
        "shape": torch.Size([2, 3]),
    }
    assert kept(tmp_path, value)[0] == {
        "tuple": [1, 2],
        "set": ["x"],
        "ordered": {"a": 1},
        "counter": {"a": 2, "b": 1},
        "default": {"b": [2]},
        "shape": [2, 3],
    }


def test_keeps_the_arguments_of_a_program(tmp_path: Path) -> None:
    args = argparse.Namespace(lr=0.1, layers=[1, 2], inner=argparse.Namespace(a="b"))
    value = {"model": {"a": T}, "args": args}
    expected = {"args": {"lr": 0.1, "layers": [1, 2], "inner": {"a": "b"}}}
    for protocol in (1, 2, 4):
        assert kept(tmp_path, value, pickle_protocol=protocol) == (expected, [])


def test_tensors_leave_no_trace_in_dicts_and_none_in_lists(tmp_path: Path) -> None:
    optimizer = {
        "state": {0: {"exp_avg": T, "step": T}},
        "param_groups": [{"lr": 0.1, "params": [0]}],
    }
    value = {"model": {"a": T, "n": 1}, "optimizers": [optimizer], "mixed": [T, 5], "pair": [T, T]}
    expected = {
        "model": {"n": 1},
        "optimizers": [{"param_groups": [{"lr": 0.1, "params": [0]}]}],
        "mixed": [None, 5],
    }
    found, notices = kept(tmp_path, value)
    assert found == expected
    assert [notice for notice in notices if "simple" in notice] == []


@pytest.mark.parametrize("value", [{"a": T}, [T], T, {"m": {"a": T}}, nn.Linear(2, 2)])
def test_tensors_alone_have_no_values(tmp_path: Path, value: Any) -> None:
    assert kept(tmp_path, value) == (None, [])


def test_the_outermost_value_can_be_a_list(tmp_path: Path) -> None:
    assert kept(tmp_path, ({"a": T}, 7))[0] == [None, 7]


def test_infinite_numbers_and_large_integers_become_strings(tmp_path: Path) -> None:
    value = {"a": T, "n": [math.nan, math.inf, -math.inf, 2**64, -(2**63) - 1, 10**1000]}
    expected = ["NaN", "Infinity", "-Infinity", str(2**64), str(-(2**63) - 1), str(10**1000)]
    assert kept(tmp_path, value) == ({"n": expected}, [])


def test_integers_as_keys_become_strings(tmp_path: Path) -> None:
    value = {"a": T, "by": {0: "zero", -1: "last", 2**70: "far"}}
    assert kept(tmp_path, value)[0] == {"by": {"0": "zero", "-1": "last", str(2**70): "far"}}


def test_names_what_is_left_out(tmp_path: Path) -> None:
    value = {
        "model": {"a": T},
        "bytes": b"x",
        "scalars": [np.float64(1), 1],
        "keys": {1.5: "x", None: 1, (1,): 2, "ok": 3},
        "twice": {1: "a", "1": "b"},
        "path": Path("x"),
    }
    found, notices = kept(tmp_path, value)
    assert found == {"scalars": [None, 1], "keys": {"ok": 3}, "twice": {"1": "a"}}
    (notice,) = notices
    assert notice == (
        "left out: 7 values that are neither a tensor nor simple, in 'bytes', 'scalars', 'keys', "
        "'twice', 'path'"
    )


def test_leaves_out_strings_that_are_not_unicode() -> None:
    found = of_pickle(mapping(**{"\r": b"C\0"}))
    assert found.notices[0].endswith(r"in '\r'")
    lone = b"X\3\0\0\0\xed\xa0\x80"
    found = of_pickle(b"}(" + text("a") + lone + lone + number(1) + text("b") + number(2) + b"u")
    assert found.kept == {"b": 2}
    assert found.notices[0].startswith("left out: 2 values that are neither")


def test_tensors_in_an_object_are_reported_as_left_out() -> None:
    args = named("argparse", "Namespace") + b")\x81" + mapping(w=tensor(), n=number(1)) + b"b"
    found = of_pickle(mapping(args=args))
    assert found.kept == {"args": {"n": 1}}
    assert found.notices == ["left out: 1 value that is neither a tensor nor simple, in 'args'"]


@pytest.mark.parametrize(
    "made",
    [
        named("argparse", "Namespace") + number(1) + b"\x85\x81}b",
        named("argparse", "Namespace") + b")\x81]b",
        named("pathlib", "PosixPath") + b")\x81}b",
        named("omegaconf.dictconfig", "DictConfig") + b")\x81}b",
    ],
    ids=["arguments", "a list as state", "another class", "a config"],
)
def test_leaves_out_other_objects(made: bytes) -> None:
    assert of_pickle(mapping(a=number(1), b=made)).kept == {"a": 1}


def test_an_object_that_holds_itself_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    itself = named("argparse", "Namespace") + b")\x81q\x00}" + text("x") + b"h\x00sb"
    found = of_pickle(mapping(args=itself, n=number(1)))
    assert found.kept == {"n": 1}
    assert found.notices == ["left out: 1 value that is neither a tensor nor simple, in 'args'"]


@pytest.mark.parametrize("leaf", [b"K\1", text("x" * 1000), b"}", b"C\0", tensor()])
def test_objects_that_share_their_parts_end(leaf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_MAX_SIZE", 1 << 16)
    value = leaf
    for slot in range(60):
        get = b"h" + bytes([slot])
        value += b"q" + bytes([slot]) + b"0(" + get + get + get + b"l"
    args = named("argparse", "Namespace") + b")\x81}" + text("x") + value + b"sb"
    found = of_pickle(mapping(args=args, n=number(1)))
    assert found.kept is None
    assert found.notices == [
        "left out: the values in 'args', 'n', over the limit of 65536 characters"
    ]


@pytest.mark.slow
def test_a_shared_dict_of_unusable_keys_ends() -> None:
    odd = b"}q\x00(" + b"N" * 2000 + b"u0"
    shared = b"](" + b"h\x00" * 3000 + b"eq\x010](" + b"h\x01" * 3000 + b"e"
    args = named("argparse", "Namespace") + b")\x81}" + text("x") + shared + b"sb"
    assert of_pickle(odd + mapping(args=args, n=number(1))).kept is None


def test_values_up_to_the_limit_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_MAX_SIZE", 100)
    found = of_pickle(mapping(a=text("x" * 50), b=text("y" * 50), c=number(1), t=text("z" * 30)))
    assert found.kept == {"a": "x" * 50}
    assert found.notices == [
        "left out: the values in 'b', 'c', 't', over the limit of 100 characters"
    ]


def test_leaves_out_large_values_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_MAX_SIZE", 50)
    found = of_pickle(mapping(n=number(1), a=listed(b"C\0", text("x" * 30), text("y" * 30))))
    assert found.kept == {"n": 1}
    assert found.notices == ["left out: the values in 'a', over the limit of 50 characters"]


# The file


def test_a_source_has_a_file_of_the_values(tmp_path: Path) -> None:
    path = save(tmp_path, {"model": {"a": T}, "epoch": 3, "text": "<&>"})
    source = HuggingFaceFolder(path)
    source.close()
    (file,) = source.files
    assert (file.name, file.path) == (VALUES_FILE, path)
    assert json.loads(file.content or b"") == {"epoch": 3, "text": "<&>"}
    assert source.notices == []


def test_no_values_need_no_file(tmp_path: Path) -> None:
    assert with_values([], {}, tmp_path) == ([], [])
    assert with_values([], {"x.bin": None}, tmp_path) == ([], [])


def test_checkpoints_with_equal_values_share_them(tmp_path: Path) -> None:
    other = SourceFile("z.txt", tmp_path)
    files, _ = with_values([other], {"a.bin": {"n": 1}, "b.bin": {"n": 1}}, tmp_path)
    assert [file.name for file in files] == [VALUES_FILE, "z.txt"]
    assert files[0].content == b'{"n":1}\n'


@pytest.mark.parametrize("other", [{"n": True}, {"n": 1.0}, None])
def test_different_values_are_listed_by_checkpoint(tmp_path: Path, other: Any) -> None:
    (file,), _ = with_values([], {"a.bin": {"n": 1}, "unet/b.bin": other}, tmp_path)
    expected = {"a.bin": {"n": 1}} | ({} if other is None else {"unet/b.bin": other})
    assert strict_json.dumps(json.loads(file.content or b"")) == strict_json.dumps(expected)


def test_a_file_of_the_same_name_is_not_replaced(tmp_path: Path) -> None:
    torch.save({"model": {"a": T}, "epoch": 3}, tmp_path / "pytorch_model.bin")
    (tmp_path / VALUES_FILE).write_text("[]")
    source = HuggingFaceFolder(tmp_path)
    source.close()
    assert [file.content for file in source.files] == [None]
    (notice,) = source.notices
    assert notice == (
        "left out: the values in 'pytorch_model.bin' that are not tensors, because the folder has "
        f"another {VALUES_FILE}"
    )


def test_hostile_names_in_values_are_only_text(tmp_path: Path) -> None:
    value = zip_file(pickled(mapping(a=tensor(), **{"../../x": number(1), "\0": text("\x1b[2J")})))
    (tmp_path / "x.pt").write_bytes(value)
    with open_checkpoint(tmp_path / "x.pt") as checkpoint:
        assert checkpoint.values == {"../../x": 1, "\0": "\x1b[2J"}
