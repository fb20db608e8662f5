from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from blobstore.core.tensor import DTYPES, DTYPES_BY_LIBRARY_NAME, DType, TensorSpec
from blobstore.errors import CheckpointRefused
from blobstore.sources.pytorch.tensors import (
    MAX_RANK,
    Extent,
    Storage,
    StridedTensor,
    TensorReader,
    UnreadableTensor,
    extent_of,
)
from blobstore.sources.pytorch.zip_entries import ZipEntry
from blobstore.unpickler import globals as known
from blobstore.unpickler.machine import run
from tests.support.checkpoints import (
    HOOKS,
    call,
    entries,
    listed,
    mapping,
    named,
    number,
    numbers,
    pickled,
    several,
    storage,
    tensor,
    text,
)

UTILS = "torch._utils"
LARGEST = 2**63 - 1
START = 1000
"""Where the storages are said to begin."""


def located(storages: Mapping[str, Storage]) -> dict[str, ZipEntry]:
    return {
        key: ZipEntry(key, START, item.nbytes, item.nbytes, 0, is_deflated=False)
        for key, item in storages.items()
    }


def reader_of(value: bytes) -> tuple[TensorReader, Any]:
    result = run(pickled(value))
    return TensorReader(result.persistents, located), result.value


def read(value: bytes) -> StridedTensor:
    reader, found = reader_of(value)
    return reader.read("name", found)


def refusal(value: bytes) -> str:
    with pytest.raises(CheckpointRefused) as caught:
        read(value)
    assert not isinstance(caught.value, UnreadableTensor)
    assert str(caught.value).startswith("pickle byte ")
    return str(caught.value).partition(": ")[2]


def unreadable(value: bytes) -> str:
    with pytest.raises(UnreadableTensor) as caught:
        read(value)
    return str(caught.value).partition(": ")[2]


def tensor_v3(
    dtype: bytes,
    size: Sequence[int] = (2,),
    *,
    of: bytes | None = None,
    offset: int = 0,
    more: Sequence[bytes] = (),
) -> bytes:
    return call(
        named(UTILS, "_rebuild_tensor_v3"),
        storage(kind="UntypedStorage", count=16) if of is None else of,
        number(offset),
        numbers(*size),
        numbers(*(math.prod(size[place + 1 :]) for place in range(len(size)))),
        b"\x89",
        HOOKS,
        dtype,
        *more,
    )


# Where elements are


def test_reads_a_tensor() -> None:
    found = read(tensor())
    assert found.spec == ("name", DType.F32, (2, 2))
    assert found.storage == ("0", "FloatStorage", DType.F32, 4, 4)
    assert (found.begin, found.offset, found.nbytes) == (0, START, 16)
    assert found.extent == (4, 4, True)
    assert found.stride == (2, 1)
    assert found.itemsize == 4
    assert found.is_direct
    assert not found.is_conjugated
    assert not found.is_negated


@pytest.mark.parametrize(
    ("size", "stride", "offset", "begin", "nbytes"), [((3,), (1,), 1, 4, 12), ((), (), 3, 12, 4)]
)
def test_offsets_count_elements(
    size: tuple[int, ...], stride: tuple[int, ...], offset: int, begin: int, nbytes: int
) -> None:
    found = read(tensor(size, stride, offset=offset))
    assert (found.spec.shape, found.begin, found.nbytes) == (size, begin, nbytes)
    assert found.offset == START + begin
    assert found.is_direct


def test_a_tensor_without_elements_needs_no_bytes() -> None:
    found = read(tensor((0, 5), (5, 1), of=storage(count=0), offset=0))
    assert (found.begin, found.nbytes, found.extent) == (0, 0, (0, 0, True))
    assert found.spec.shape == (0, 5)
    # Torch writes slices that begin where their storage ends.
    assert read(tensor((0, 5), (5, 1), offset=4)).begin == 0
    assert read(tensor((2**40, 0), (0, 1), offset=100)).begin == 0


@pytest.mark.parametrize(
    ("size", "stride", "span", "is_ordered"),
    [
        *[((), (), 1, True), ((0,), (1,), 0, True), ((5, 0), (7, 7), 0, True)],
        *[((3,), (1,), 3, True), ((3,), (2,), 5, False), ((3,), (0,), 1, False)],
        *[((2, 3), (3, 1), 6, True), ((2, 3), (1, 2), 6, False), ((2, 3), (4, 1), 7, False)],
        *[((2, 3), (1, 1), 4, False), ((1, 3), (99, 1), 3, True), ((3, 1), (1, 99), 3, True)],
        ((2, 1, 3), (3, 0, 1), 6, True),
        ((1, 1), (LARGEST, LARGEST), 1, True),
        ((LARGEST, LARGEST, 0), (1, 1, 1), 0, True),
        ((LARGEST, 2), (LARGEST, LARGEST), LARGEST**2 + 1, False),
    ],
)
def test_measures_sizes_and_strides(
    size: tuple[int, ...], stride: tuple[int, ...], span: int, is_ordered: bool
) -> None:
    assert extent_of(size, stride) == Extent(math.prod(size), span, is_ordered)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=4))
def test_measures_the_elements_that_a_tensor_uses(dims: list[tuple[int, int]]) -> None:
    size, stride = tuple(dim[0] for dim in dims), tuple(dim[1] for dim in dims)
    places = [
        sum(index * step for index, step in zip(at, stride, strict=True))
        for at in product(*map(range, size))
    ]
    found = extent_of(size, stride)
    assert found.elements == len(places)
    assert found.span == max(places, default=-1) + 1
    assert found.is_ordered == (places == list(range(len(places))))
    assert (
        found.is_ordered
        == torch.empty(0).set_(torch.empty(100).untyped_storage(), 0, size, stride).is_contiguous()
    )


@pytest.mark.parametrize(
    ("size", "stride", "offset", "needed"),
    [
        *[((5,), (1,), 0, 5), ((4,), (1,), 1, 5), ((1,), (1,), 4, 5), ((), (), 4, 5)],
        *[((2, 2), (3, 1), 0, 5), ((2,), (4,), 0, 5)],
        ((1,), (1,), LARGEST, LARGEST + 1),
        ((2, 2), (LARGEST, LARGEST), 0, 2 * LARGEST + 1),
        ((2**32, 2**32), (2**32, 1), 0, 2**64),
        ((2**62,), (4,), 0, 4 * (2**62 - 1) + 1),
    ],
)
def test_rejects_elements_beyond_their_storage(
    size: tuple[int, ...], stride: tuple[int, ...], offset: int, needed: int
) -> None:
    assert refusal(tensor(size, stride, offset=offset)) == (
        f"a tensor needs {needed} elements of storage '0', which has 4"
    )


@pytest.mark.parametrize(
    ("stride", "kind", "is_swapped", "is_deflated", "is_direct", "is_mapped"),
    [
        ((2, 1), "FloatStorage", False, False, True, True),
        ((1, 2), "FloatStorage", False, False, False, False),
        ((2, 1), "FloatStorage", False, True, True, False),
        ((1, 2), "FloatStorage", False, True, False, False),
        ((2, 1), "FloatStorage", True, False, False, False),
        ((2, 1), "ByteStorage", True, False, True, True),
        ((2, 1), "UntypedStorage", True, True, True, False),
    ],
)
def test_recognises_tensors_that_are_contiguous_in_storage_and_file(
    stride: tuple[int, int],
    kind: str,
    is_swapped: bool,
    is_deflated: bool,
    is_direct: bool,
    is_mapped: bool,
) -> None:
    def locate(storages: Mapping[str, Storage]) -> dict[str, ZipEntry]:
        found = located(storages).items()
        return {key: entry._replace(is_deflated=is_deflated) for key, entry in found}

    result = run(pickled(tensor(stride=stride, of=storage(kind=kind))))
    reader = TensorReader(result.persistents, locate, is_swapped=is_swapped)
    found = reader.read("a", result.value)
    assert (found.is_direct, found.is_mapped) == (is_direct, is_mapped)


@pytest.mark.parametrize("view", [b"N", several(b"N", number(0), number(4))])
def test_a_view_can_cover_a_storage(view: bytes) -> None:
    assert read(tensor(of=storage(view=view))) == read(tensor())


def test_stays_within_a_view_of_a_storage() -> None:
    view = several(text("1"), number(1), number(2))
    found = read(tensor((2,), (1,), of=storage(view=view)))
    assert (found.begin, found.offset) == (4, START + 4)
    assert read(tensor((1,), (1,), of=storage(view=view), offset=1)).begin == 8
    assert refusal(tensor((2,), (1,), of=storage(view=view), offset=1)) == (
        "a tensor needs 3 elements of storage '0', which has 2"
    )


@pytest.mark.parametrize(
    ("view", "says"),
    [
        (several(text("1"), number(3), number(2)), "a view ends at element 5 of 4 of its storage"),
        (several(text("1"), number(-1), number(2)), "a view's offset is -1"),
        (several(text("1"), number(0), number(-1)), "a view's count is -1"),
        (several(text("1"), number(0), b"N"), "a view's count is not an integer"),
        (several(text("1"), number(0)), "a view of a storage does not have three parts"),
        (listed(text("1"), number(0), number(1)), "a view of a storage does not have three parts"),
    ],
)
def test_rejects_views_of_another_form(view: bytes, says: str) -> None:
    assert refusal(tensor(of=storage(view=view))) == says


# Numbers


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        *[(number(value), str(value)) for value in (-1, 2**63)],
        *[(number(value), "out of range") for value in (-(2**70), 2**70)],
        *[(value, "not an integer") for value in (b"\x88", b"\x89", b"N", b"G" + bytes(8))],
        *[(value, "not an integer") for value in (text("1"), listed(number(1)))],
    ],
)
def test_sizes_are_natural_numbers(wrong: bytes, shown: str) -> None:
    one = several(wrong)
    assert refusal(tensor(one, (1,))) == f"a tensor's size is {shown}"
    assert refusal(tensor((1,), one)) == f"a tensor's stride is {shown}"
    assert refusal(tensor((1,), (1,), offset=wrong)) == f"a tensor's offset is {shown}"
    assert refusal(tensor(of=storage(count=wrong))) == f"a storage's count is {shown}"
    assert refusal(tensor(several(number(0), wrong), (1, 1))) == f"a tensor's size is {shown}"


@pytest.mark.parametrize(
    ("size", "stride"),
    [
        *[(numbers(2), numbers(1, 1)), (numbers(2, 2), numbers(1)), (number(2), number(1))],
        *[(listed(number(2)), numbers(1)), (numbers(2), listed(number(1)))],
        *[(b"N", b"N"), (text("22"), text("11"))],
    ],
)
def test_sizes_and_strides_are_tuples_of_one_length(size: bytes, stride: bytes) -> None:
    assert refusal(tensor(size, stride)) == (
        "a tensor's sizes and strides are not two tuples of equal length"
    )


def test_a_size_can_be_a_torch_size() -> None:
    size = call(named("torch", "Size"), numbers(2, 2))
    assert read(tensor(size)).spec.shape == (2, 2)


def test_rejects_more_dimensions_than_numpy_has() -> None:
    most, more = (1,) * MAX_RANK, (1,) * (MAX_RANK + 1)
    assert np.ones(most).ndim == read(tensor(most, most)).spec.shape.count(1) == 64
    with pytest.raises(ValueError, match="maximum"):
        np.ones(more)
    assert refusal(tensor(more, more)) == "a tensor has 65 dimensions, over 64"


# Storages


@pytest.mark.parametrize("kind", known.STORAGES)
@pytest.mark.parametrize("module", ["torch", "torch.cuda"])
def test_knows_the_types_of_storages(kind: str, module: str) -> None:
    of = storage(kind=kind).replace(b"ctorch\n", f"c{module}\n".encode())
    found = read(tensor((4,), (1,), of=of))
    assert found.spec.dtype is DTYPES[known.STORAGES[kind]]
    assert found.storage.itemsize * 8 == found.spec.dtype.bits
    assert found.nbytes == found.storage.nbytes == found.place.size


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *[("ComplexDoubleStorage", 16), ("QInt8Storage", 1), ("QUInt8Storage", 1)],
        *[("QInt32Storage", 4), ("QUInt4x2Storage", 0), ("QUInt2x4Storage", 0)],
    ],
)
def test_storages_of_other_types_are_measured_but_not_read(kind: str, size: int) -> None:
    reader, value = reader_of(tensor(of=storage(kind=kind)))
    assert reader.storages["0"] == Storage("0", kind, None, size, 4)
    assert reader.storages["0"].nbytes == 4 * size
    with pytest.raises(UnreadableTensor, match=f"tensors of torch.{kind} have no type in the saf"):
        reader.read("a", value)


IDENTIFIERS = {
    "no tuple": text("storage"),
    "a number": number(0),
    "no parts": several(),
    "a list": listed(*map(text, "abcde")),
    "four parts": several(text("storage"), named("torch", "FloatStorage"), text("0"), text("cpu")),
    "seven parts": several(text("storage"), *[b"N"] * 6),
    "nothing": b"N",
}


@pytest.mark.parametrize("name", IDENTIFIERS)
def test_rejects_references_of_another_form(name: str) -> None:
    assert refusal(tensor(of=IDENTIFIERS[name] + b"Q")) == (
        "a reference to outside data is not of the form that torch writes"
    )


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        (0, text("module"), "a reference to outside data of kind 'module' is not a storage"),
        *[
            (0, kind, "a reference to outside data of kind unknown is not a storage")
            for kind in (number(1), listed(b"N"))
        ],
        *[
            (1, kind, "the type of a storage is unknown")
            for kind in (
                *(named("torch", "float32"), named("evil", "FloatStorage"), HOOKS),
                *(named("builtins", "dict"), text("FloatStorage")),
            )
        ],
        *[
            (2, key, "a storage's key is not a string")
            for key in (number(0), text(""), b"N", b"C\x010", numbers(0))
        ],
    ],
)
def test_rejects_references_with_other_parts(part: int, value: bytes, says: str) -> None:
    parts = [text("storage"), named("torch", "FloatStorage"), text("0"), text("cpu"), number(4)]
    parts[part] = value
    assert refusal(tensor(of=several(*parts) + b"Q")) == says


@pytest.mark.parametrize("location", [text("cuda:7"), text("\x1b[31m"), b"N", b"}", number(3)])
def test_the_location_of_a_storage_is_ignored(location: bytes) -> None:
    parts = [text("storage"), named("torch", "FloatStorage"), text("0"), location, number(4)]
    assert read(tensor(of=several(*parts) + b"Q")).nbytes == 16


@pytest.mark.parametrize(
    "other", [storage(count=5), storage(kind="IntStorage"), storage(kind="UntypedStorage")]
)
def test_one_key_has_one_type_and_one_count(other: bytes) -> None:
    with pytest.raises(CheckpointRefused, match="storage '0' has two types or counts$"):
        reader_of(mapping(a=tensor(), b=tensor((1,), (1,), of=other)))


def test_reads_references_that_no_tensor_uses() -> None:
    reader, _ = reader_of(listed(tensor(), storage("1", count=7)))
    assert list(reader.storages) == ["0", "1"]
    with pytest.raises(CheckpointRefused, match="^pickle byte .* is not of the form"):
        reader_of(listed(tensor(), text("x") + b"Q0"))


def test_locates_all_storages_at_once() -> None:
    asked = []

    def locate(storages: Mapping[str, Storage]) -> dict[str, ZipEntry]:
        asked.append(list(storages))
        return located(storages)

    result = run(pickled(listed(tensor(of=storage("7")), tensor(of=storage("2")), storage("7"))))
    TensorReader(result.persistents, locate)
    assert asked == [["7", "2"]]


# Functions


def test_reads_the_oldest_form() -> None:
    value = call(named(UTILS, "_rebuild_tensor"), storage(), number(1), numbers(3), numbers(1))
    found = read(value)
    assert (found.spec, found.begin) == (("name", DType.F32, (3,)), 4)


@pytest.mark.parametrize(
    ("function", "count"),
    [
        *[("_rebuild_tensor", count) for count in (3, 5)],
        *[("_rebuild_tensor_v2", count) for count in (0, 5, 8)],
        *[("_rebuild_tensor_v3", count) for count in (6, 9)],
    ],
)
def test_rejects_another_number_of_arguments(function: str, count: int) -> None:
    least = [storage(), number(0), numbers(4), numbers(1), b"\x89", HOOKS, *[b"N"] * 3]
    assert refusal(call(named(UTILS, function), *least[:count])) == (
        f"torch._utils.{function} has {count} arguments, which torch does not write"
    )


@pytest.mark.parametrize(
    "first", [b"N", text("0"), number(0), tensor(), HOOKS, several(text("storage"))]
)
def test_a_tensor_is_of_a_storage(first: bytes) -> None:
    assert refusal(tensor(of=first)) == "a tensor's first argument is not a storage"


@pytest.mark.parametrize("hooks", [b"N", b"}", HOOKS, listed(number(1))])
def test_ignores_gradients_and_hooks(hooks: bytes) -> None:
    function = named(UTILS, "_rebuild_tensor_v2")
    value = call(function, storage(), number(0), numbers(4), numbers(1), b"\x88", hooks)
    assert read(value).nbytes == 16


@pytest.mark.parametrize("name", known._UNREADABLE_TENSORS.split())
def test_names_functions_whose_tensors_are_not_read(name: str) -> None:
    value = call(named(UTILS, name), storage())
    assert unreadable(value) == f"tensors made by 'torch._utils.{name}' are not supported"


# The third form, with a type of its own


@pytest.mark.parametrize("name", [it for it in DTYPES_BY_LIBRARY_NAME if hasattr(torch, it)])
def test_knows_the_types_of_elements(name: str) -> None:
    found = read(tensor_v3(named("torch", name)))
    dtype = DTYPES_BY_LIBRARY_NAME[name]
    is_pair = dtype is DType.F4
    assert found.spec == TensorSpec("name", dtype, (4 if is_pair else 2,))
    assert found.itemsize == getattr(torch, name).itemsize
    assert found.nbytes == 2 * found.itemsize == found.spec.nbytes


def test_offsets_count_elements_of_the_tensor_and_not_of_the_storage() -> None:
    found = read(tensor_v3(named("torch", "uint32"), offset=2))
    assert (found.begin, found.nbytes) == (8, 8)
    assert refusal(tensor_v3(named("torch", "uint32"), offset=3)) == (
        "a tensor needs 5 elements of storage '0', which has 4"
    )
    assert refusal(
        tensor_v3(named("torch", "uint64"), of=storage(kind="UntypedStorage", count=15))
    ) == ("a tensor needs 2 elements of storage '0', which has 1")


@pytest.mark.parametrize("shape", [(3, 4), (2, 1), (1, 0)])
def test_pairs_of_four_bits_are_two_elements(shape: tuple[int, int]) -> None:
    found = read(tensor_v3(named("torch", "float4_e2m1fn_x2"), shape))
    assert found.spec.shape == (shape[0], shape[1] * 2)
    assert found.spec.nbytes == found.nbytes == math.prod(shape)
    assert found.is_direct


def test_rejects_pairs_without_a_dimension() -> None:
    assert refusal(tensor_v3(named("torch", "float4_e2m1fn_x2"), ())) == (
        "an F4 tensor has no dimensions"
    )


@pytest.mark.parametrize("name", ["complex128", "complex32", "qint8", "bits8", "int4", "uint1"])
def test_types_without_a_name_in_the_format_are_not_read(name: str) -> None:
    assert unreadable(tensor_v3(named("torch", name))) == (
        f"tensors of 'torch.{name}' have no type in the safetensors format"
    )


@pytest.mark.parametrize("dtype", [b"N", text("float32"), number(6), HOOKS, numbers(1, 2)])
def test_rejects_values_that_are_not_types(dtype: bytes) -> None:
    assert unreadable(tensor_v3(dtype)) == (
        "tensors of something that is not a type have no type in the safetensors format"
    )


@pytest.mark.parametrize("dtype", [named("torch", "FloatStorage"), named("evil", "float32")])
def test_rejects_other_globals_as_types(dtype: bytes) -> None:
    assert "have no type in the safetensors format" in unreadable(tensor_v3(dtype))


# Flags


@pytest.mark.parametrize(
    ("flags", "is_conjugated", "is_negated"),
    [
        (b"}", False, False),
        (b"N", False, False),
        (mapping(conj=b"\x88"), True, False),
        (mapping(neg=b"\x88"), False, True),
        (mapping(conj=b"\x88", neg=b"\x88"), True, True),
        (mapping(conj=b"\x89", neg=b"\x89"), False, False),
    ],
)
def test_reads_flags(flags: bytes, is_conjugated: bool, is_negated: bool) -> None:
    of = storage(kind="ComplexFloatStorage")
    for value in (
        tensor((4,), (1,), of=of, more=[flags]),
        tensor_v3(named("torch", "complex64"), more=[flags]),
    ):
        found = read(value)
        assert (found.is_conjugated, found.is_negated) == (is_conjugated, is_negated)
        assert found.is_direct is not (is_conjugated or is_negated)


@pytest.mark.parametrize(
    "flags",
    [
        *[mapping(other=b"\x88"), mapping(conj=b"\x88", x=b"N"), listed(text("conj"))],
        *[text("conj"), b"\x88", entries((number(1), b"\x88")), entries((b"N", b"\x88"))],
    ],
)
def test_rejects_other_flags(flags: bytes) -> None:
    assert refusal(tensor(more=[flags])) == "a tensor has flags other than conj and neg"


@pytest.mark.parametrize(
    "flags", [mapping(neg=number(1)), mapping(neg=b"N"), mapping(conj=b"\x88"), mapping(conj=HOOKS)]
)
def test_rejects_flags_of_other_values(flags: bytes) -> None:
    assert refusal(tensor(more=[flags])) == "a tensor's conj or neg flag is invalid"


@pytest.mark.parametrize("kind", known.STORAGES)
def test_negates_the_types_that_torch_negates(kind: str) -> None:
    value = tensor((4,), (1,), of=storage(kind=kind), more=[mapping(neg=b"\x88")])
    if kind == "BoolStorage":
        assert "conj or neg flag is invalid" in refusal(value)
    else:
        assert read(value).is_negated


# Wrappers


def wrapped(inner: bytes, function: str = "_rebuild_parameter") -> bytes:
    return call(named(UTILS, function), inner, b"\x88", HOOKS)


def from_type(function: bytes, arguments: bytes, *, version: str = "_v2") -> bytes:
    return call(
        named("torch._tensor", f"_rebuild_from_type{version}"),
        function,
        named("torch.nn.parameter", "Buffer"),
        arguments,
        b"}",
    )


ARGUMENTS = several(storage(), number(0), numbers(2, 2), numbers(2, 1), b"\x89", HOOKS)


@pytest.mark.parametrize(
    "value",
    [
        wrapped(tensor()),
        call(named(UTILS, "_rebuild_parameter_with_state"), tensor(), b"\x88", HOOKS, b"}"),
        wrapped(wrapped(tensor())),
        from_type(named(UTILS, "_rebuild_tensor_v2"), ARGUMENTS),
        from_type(named(UTILS, "_rebuild_tensor_v2"), ARGUMENTS, version=""),
        from_type(named(UTILS, "_rebuild_parameter"), several(tensor(), b"\x88", HOOKS)),
        wrapped(from_type(named(UTILS, "_rebuild_tensor_v2"), ARGUMENTS)),
    ],
)
def test_looks_into_wrappers(value: bytes) -> None:
    assert read(value)[:6] == read(tensor())[:6]


def test_old_versions_of_torch_had_the_wrapper_elsewhere() -> None:
    value = from_type(named(UTILS, "_rebuild_tensor_v2"), ARGUMENTS, version="")
    assert read(value.replace(b"ctorch._tensor\n", b"ctorch.tensor\n")).nbytes == 16


def test_wrapped_tensors_must_be_readable() -> None:
    sparse = call(named(UTILS, "_rebuild_sparse_tensor"), b"N")
    assert "'torch._utils._rebuild_sparse_tensor' are not supported" in unreadable(wrapped(sparse))
    assert "_rebuild_qtensor' are not supported" in unreadable(
        from_type(named(UTILS, "_rebuild_qtensor"), ARGUMENTS)
    )
    assert "'posix.system' are not supported" in unreadable(
        from_type(named("posix", "system"), several(text("id")))
    )


def nested(depth: int) -> bytes:
    value = tensor()
    for _ in range(depth):
        value = wrapped(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        call(named(UTILS, "_rebuild_parameter")),
        *[wrapped(inner) for inner in (b"N", text("x"), storage(), HOOKS)],
        *[from_type(function, ARGUMENTS) for function in (b"N", text("system"), tensor())],
        from_type(named(UTILS, "_rebuild_tensor_v2"), listed(storage())),
        from_type(named(UTILS, "_rebuild_parameter"), several()),
        call(named("torch._tensor", "_rebuild_from_type_v2"), named(UTILS, "_rebuild_tensor_v2")),
        nested(50),
    ],
)
def test_rejects_other_wrappers(value: bytes) -> None:
    assert refusal(value) == "a tensor is wrapped as torch does not write it"


@pytest.mark.parametrize("cls", [named("mine", "Quantized"), call(named("mine", "make"))])
def test_rejects_tensors_of_unknown_classes(cls: bytes) -> None:
    function = named("torch._tensor", "_rebuild_from_type_v2")
    value = call(function, named(UTILS, "_rebuild_tensor_v2"), cls, ARGUMENTS, b"}")
    assert re.fullmatch("tensors of the class .* are not supported", unreadable(value))


def test_rejects_deeply_nested_wrappers() -> None:
    function, arguments = named("torch._tensor", "_rebuild_from_type_v2"), ARGUMENTS
    for _ in range(12):
        arguments = several(function, b"N", arguments, b"}")
    assert "wrapped as torch does not" in refusal(from_type(function, arguments))


def test_reports_the_offset_of_a_tensor() -> None:
    wrong = tensor((5,), (1,))
    reader, value = reader_of(listed(tensor(), wrong))
    at = pickled(listed(tensor(), wrong)).rindex(b"R")
    with pytest.raises(CheckpointRefused, match=f"^pickle byte {at}: a tensor needs 5 elements"):
        reader.read("a", value[1])


def test_reports_the_offset_of_a_storage() -> None:
    data = pickled(storage(count=-1))
    at = data.index(b"Q")
    with pytest.raises(CheckpointRefused, match=f"^pickle byte {at}: a storage's count is -1"):
        TensorReader(run(data).persistents, located)


@pytest.mark.parametrize("state", [b"}", mapping(x=tensor()), b"N"])
def test_ignores_the_attributes_of_a_parameter(state: bytes) -> None:
    function = named(UTILS, "_rebuild_parameter_with_state")
    assert read(call(function, tensor(), b"\x88", HOOKS, state)).nbytes == 16
