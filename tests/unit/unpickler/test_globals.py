from __future__ import annotations

from typing import Any

import pytest
import torch

from blobstore.core.tensor import DTYPES_BY_LIBRARY_NAME
from blobstore.errors import CheckpointRefused
from blobstore.unpickler.globals import STORAGES, look_up, make_mapping, put
from blobstore.unpickler.values import Global, Items, Key, Number, Record, Use
from tests.support.pickle_values import canonical

TENSOR_V2 = "_rebuild_tensor_v2"
LISTED = [
    *[
        ("torch._utils", f"_rebuild_{name}", Use.TENSOR)
        for name in ("tensor_v2", "tensor", "tensor_v3", "parameter", "parameter_with_state")
    ],
    ("torch._tensor", "_rebuild_from_type_v2", Use.TENSOR),
    ("torch.tensor", "_rebuild_from_type", Use.TENSOR),
    ("torch", "FloatStorage", Use.STORAGE),
    ("torch.cuda", "HalfStorage", Use.STORAGE),
    ("torch.storage", "UntypedStorage", Use.STORAGE),
    *[("torch", name, Use.DTYPE) for name in ("bfloat16", "float8_e4m3fn")],
    *[("torch", "Size", Use.VALUE), ("collections", "OrderedDict", Use.VALUE)],
    *[("__builtin__", "set", Use.VALUE), ("copy_reg", "_reconstructor", Use.VALUE)],
    ("argparse", "Namespace", Use.RECORD),
    ("numpy.core.multiarray", "_reconstruct", Use.RECORD),
    ("torch._utils", "_rebuild_sparse_tensor", Use.UNREADABLE),
    ("torch._utils", "_rebuild_meta_tensor_no_storage", Use.UNREADABLE),
    *[("torch", name, Use.UNREADABLE) for name in ("ComplexDoubleStorage", "complex128")],
    ("torch.storage", "TypedStorage", Use.UNREADABLE),
]


@pytest.mark.parametrize(("module", "name", "use"), LISTED)
def test_knows_the_globals_of_checkpoints(module: str, name: str, use: Use) -> None:
    found = look_up(module, name, 7)
    assert found.use is use
    assert found.offset == 7
    assert str(found) == f"{module}.{name}"  # the name in the file, old ones too


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *[("os", "system"), ("os", "OrderedDict"), ("", "set"), ("", ""), ("torch", "")],
        *[("builtins", name) for name in ("eval", "getattr", "memoryview")],
        *[("__builtin__", "exec"), ("__builtin__.builtins", "set")],
        *[(module, TENSOR_V2) for module in ("torch", "torch.utils", "Torch._utils")],
        *[("torch._utils", f"{TENSOR_V2}{after}") for after in (".__globals__", " ", "\n")],
        *[("torch._utils", "_Rebuild_tensor_v2"), ("torch", f"_utils.{TENSOR_V2}")],
        *[("torch._utils os", "system"), ("torch._utils", "os.system")],
        *[("torch._utils", f"os.{TENSOR_V2}"), ("torch", "DoubleStorage FloatStorage")],
        *[("collections", "OrderedDict.update"), ("collections", "abc.OrderedDict")],
        *[("collections.abc", "OrderedDict"), ("torch.storage", "_load_from_bytes")],
        *[("torch", "load"), ("numpy", "load"), ("_pickle", "loads"), ("functools", "partial")],
        *[("_codecs", "decode"), ("codecs", "encode"), ("copyreg", "add_extension")],
    ],
)
def test_knows_only_pairs_on_the_list(module: str, name: str) -> None:
    found = look_up(module, name, 0)
    assert found.use is None
    assert found.make is None


def test_calls_functions_and_classes_only() -> None:
    assert [use for use in Use if not use.is_function] == [Use.STORAGE, Use.DTYPE]
    assert not look_up("torch", "FloatStorage", 0).is_function
    assert not look_up("torch", "float32", 0).is_function
    assert look_up("torch._utils", "_rebuild_tensor_v2", 0).is_function
    assert look_up("torch", "device", 0).is_function


def test_names_element_types_as_torch_does() -> None:
    bits = {"BOOL": 8, "BF16": 16, "F4": 8}  # F4 elements are pairs in torch
    for name, found in DTYPES_BY_LIBRARY_NAME.items():
        if not hasattr(torch, name):
            continue
        dtype, code = getattr(torch, name), found.value
        digits = "".join(char for char in code.partition("_")[0] if char.isdigit())
        assert dtype.itemsize * 8 == bits.get(code, int(digits or 0))
        assert dtype.is_complex == code.startswith("C")
        assert dtype.is_floating_point == code.startswith(("F", "BF"))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_names_storages_as_torch_does() -> None:
    for name, code in STORAGES.items():
        if name != "UntypedStorage":
            dtype = str(getattr(torch, name).dtype).removeprefix("torch.")
            assert DTYPES_BY_LIBRARY_NAME[dtype].value == code
    assert STORAGES["UntypedStorage"] == "U8"


def make(module: str, name: str, *arguments: Any) -> Any:
    maker = look_up(module, name, 0).make
    assert maker is not None
    return maker(arguments)


def refuse(module: str, name: str, *arguments: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        make(module, name, *arguments)


MAPPINGS = [
    *[("collections", name) for name in ("OrderedDict", "Counter", "defaultdict")],
    *[("builtins", "dict"), ("__builtin__", "dict")],
]


@pytest.mark.parametrize(("module", "name"), MAPPINGS)
def test_makes_plain_dicts_of_all_mappings(module: str, name: str) -> None:
    assert make(module, name) == {}
    content = {"a": 1}
    made = make(module, name, content)
    assert type(made) is dict
    assert made == content
    assert made is not content
    assert canonical(make(module, name, [["b", 1], ("a", 2)])) == canonical({"b": 1, "a": 2})


def test_makes_a_dict_of_a_defaultdict_and_leaves_its_factory_out() -> None:
    factory = Global("os", "system", 0)
    assert make("collections", "defaultdict", factory) == {}
    assert make("collections", "defaultdict", factory, {"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    "arguments",
    [
        *[(1,), (None,), ("ab",), ((),), ({}, {}), ([["a"]],), ([["a", 1, 2]],), (["ab"],)],
        *[([[]],), ([{"a": 1, "b": 2}],), (Items([]),)],
    ],
    ids=lambda value: ascii(value).partition(" object at ")[0],
)
def test_rejects_mappings_of_other_values(arguments: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, ValueError)):
        make_mapping(arguments)


def test_rejects_pairs_with_the_same_key() -> None:
    with pytest.raises(CheckpointRefused, match="a dict has the same key twice"):
        make_mapping(([["a", 1], ["a", 2]],))


def test_puts_texts_and_integers_by_value_and_all_else_by_identity() -> None:
    target: dict[Any, Any] = {}
    keys = ["a", 1, True, 1.0, None, b"a", (1,), (1,), [1]]
    for key in keys:
        put(target, key, "x")
    assert [type(key) for key in target] == [str, Number, *[Key] * 7]
    assert [key.value for key in target if type(key) is Key] == keys[2:]


@pytest.mark.parametrize("key", ["", "a", 0, -1, 2**100])
def test_rejects_a_key_that_is_already_there(key: Any) -> None:
    target: dict[Any, Any] = {}
    put(target, key, 1)
    with pytest.raises(CheckpointRefused, match="a dict has the same key twice"):
        put(target, key, 1)


@pytest.mark.parametrize("name", ["set", "frozenset"])
def test_keeps_the_items_of_sets_in_order_without_hashing_them(name: str) -> None:
    items = [3, {}, 1, 3]
    made = make("builtins", name, items)
    assert type(made) is Items
    assert made.items == items
    assert made.items is not items
    assert make("builtins", name).items == []
    assert make("builtins", name, (1, 2)).items == [1, 2]
    refuse("builtins", name, 5)
    refuse("builtins", name, "ab")
    refuse("builtins", name, [1], [2])


@pytest.mark.parametrize("codec", ["latin1", "latin-1"])
def test_encodes_latin_1(codec: str) -> None:
    assert make("_codecs", "encode", "a\xff", codec) == b"a\xff"
    assert make("builtins", "bytearray", "a\xff", codec) == b"a\xff"


@pytest.mark.parametrize(
    "arguments",
    [
        *[("a", codec) for codec in ("rot13", "utf-8", "LATIN1", None, ["latin1"])],
        *[(text, "latin1") for text in ("€", "\ud800", b"a")],
        *[("a",), (), ("a", "latin1", "strict")],
    ],
    ids=lambda value: ascii(value).partition(" object at ")[0],
)
def test_rejects_other_encodings(arguments: tuple[Any, ...]) -> None:
    refuse("_codecs", "encode", *arguments)


@pytest.mark.parametrize("name", ["bytes", "bytearray"])
def test_makes_bytes_of_bytes_and_of_lists_of_them(name: str) -> None:
    assert make("builtins", name) == b""
    assert make("builtins", name, b"a\0") == b"a\0"
    assert make("builtins", name, [0, 255]) == b"\0\xff"
    odds: list[Any] = [2**36, 5, -1, None, "a", [256], [-1], [2**100], ["a"], [[]], {"a": 1}, (1,)]
    for odd in odds:
        refuse("builtins", name, odd)


def test_a_size_is_its_tuple() -> None:
    shape = (1, 2)
    assert make("torch", "Size", shape) is shape
    refuse("torch", "Size", [1, 2])
    refuse("torch", "Size", 1)
    refuse("torch", "Size")


@pytest.mark.parametrize("module", ["copyreg", "copy_reg"])
def test_an_object_of_the_first_protocols_is_a_record(module: str) -> None:
    cls, base = Global("m", "C", 11), Global("__builtin__", "object", 20)
    made = make(module, "_reconstructor", cls, base, None)
    assert type(made) is Record
    assert made.cls is cls
    assert made.arguments == ()
    assert cls.is_class
    assert not cls.is_called


@pytest.mark.parametrize(
    "arguments",
    [
        (Global("m", "C", 0), Global("builtins", "dict", 0), {"a": 1}),
        (Global("m", "C", 0), Global("builtins", "int", 0), 5),
        (Global("m", "C", 0), Global("builtins", "dict", 0), {}),
        (Global("m", "C", 0), Global("builtins", "object", 0), [1]),
        (Global("m", "C", 0), "object", None),
        ("m.C", Global("builtins", "object", 0), None),
        (Global("m", "C", 0), Global("builtins", "object", 0)),
        (),
    ],
    ids=range(8),
)
def test_rejects_objects_with_a_value_of_their_base_class(arguments: tuple[Any, ...]) -> None:
    refuse("copyreg", "_reconstructor", *arguments)
