"""Files of torch tensors and of modules: the reference's bytes, checks and errors."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict, UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore.core.tensor import DTYPES as BY_NAME
from blobstore.safetensors import SafetensorError, safe_open
from blobstore.safetensors import torch as ours
from blobstore.safetensors.torch import (
    load,
    load_file,
    load_model,
    save,
    save_file,
    save_model,
    storage_ptr,
    storage_size,
)
from tests.support.dtypes import IN_REFERENCE
from tests.support.samples import samples

BACKENDS = ["mmap", "pread"]
DTYPES = [dtype for dtype, code in ours._NAMES.items() if code in IN_REFERENCE]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=9).filter(
    lambda name: name != "__metadata__"
)


def random_tensor(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    flat = tensor.reshape(-1).view(torch.uint8)
    flat.copy_(torch.randint(0, 2 if dtype is torch.bool else 256, flat.shape))
    return tensor


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


@pytest.mark.slow
@settings(max_examples=samples(500), deadline=None)
@given(
    st.dictionaries(
        NAMES,
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), min_size=1, max_size=3)),
        max_size=6,
    ),
    st.one_of(st.none(), st.dictionaries(NAMES, NAMES, max_size=1)),
)
def test_the_bytes_are_those_of_the_reference(
    found: dict[str, Any], metadata: dict[str, str] | None
) -> None:
    tensors = {name: random_tensor(*fields) for name, fields in found.items()}
    if metadata == {} and not tensors:
        metadata = None  # the reference writes a file that it cannot read

    data = save(tensors, metadata)

    assert data == reference.save(tensors, metadata)
    read = load(data)
    assert all(same_bits(read[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_has_the_tensors_that_were_saved(tmp_path: Path, backend: str) -> None:
    tensors = {str(dtype): random_tensor(dtype, [3, 4]) for dtype in DTYPES}
    save_file(tensors, tmp_path / "a", {"x": "y"})

    assert (tmp_path / "a").read_bytes() == reference.save(tensors, {"x": "y"})
    found = load_file(tmp_path / "a", backend=backend)
    assert found.keys() == tensors.keys()
    assert all(same_bits(found[name], tensors[name]) for name in tensors)
    with safe_open(tmp_path / "a", "pt", backend=backend) as file:
        for name, tensor in tensors.items():
            assert same_bits(file.get_tensor(name), tensor)
            assert same_bits(file.get_slice(name)[1:, :2], random_like(tensor)[1:, :2])


def random_like(tensor: torch.Tensor) -> torch.Tensor:
    # float4_e2m1fn_x2 holds two values, which a slice of a file counts
    if tensor.dtype is torch.float4_e2m1fn_x2:
        return tensor.view(torch.uint8)[:, :1].expand(3, 1).contiguous().view(tensor.dtype)
    return tensor


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "index", [np.s_[::-1], np.s_[-3:, 1], np.s_[1, ..., ::-2], 2, ...], ids=repr
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.uint16])
def test_slices_have_the_semantics_of_python(
    tmp_path: Path, backend: str, index: Any, dtype: torch.dtype
) -> None:
    tensor = random_tensor(dtype, [5, 4])
    save_file({"a": tensor}, tmp_path / "a")

    found = safe_open(tmp_path / "a", "pt", backend=backend).get_slice("a")[index]

    expected = tensor.view(torch.uint8).reshape(5, 4, -1).numpy()
    places = index if isinstance(index, tuple) else (index,)
    expected = expected[(*places, *([] if ... in places else [...]), slice(None))]
    assert (
        found.contiguous().reshape(-1).view(torch.uint8).tolist() == expected.reshape(-1).tolist()
    )


def test_a_slice_within_a_byte_is_refused(tmp_path: Path) -> None:
    save_file({"a": random_tensor(torch.float4_e2m1fn_x2, [2, 4])}, tmp_path / "a")
    part = safe_open(tmp_path / "a", "pt").get_slice("a")

    assert part.get_shape() == [2, 8]
    assert part[1, 2:6].shape == (2,)
    for index in np.s_[0, 1:3], np.s_[0, 2:5], np.s_[0, 2], np.s_[0, ::2]:
        with pytest.raises(SafetensorError, match="does not end up at a byte boundary"):
            _ = part[index]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_can_be_changed_and_the_file_does_not(tmp_path: Path, backend: str) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "a")
    before = (tmp_path / "a").read_bytes()

    load_file(tmp_path / "a", backend=backend)["a"].mul_(2)

    assert (tmp_path / "a").read_bytes() == before


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_tensors_of_a_buffer_can_be_changed(kind: Any) -> None:
    data = kind(save({"a": torch.ones(3)}))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = load(data)["a"]
        tensor += 1

    assert torch.equal(tensor, torch.full((3,), 2.0))
    assert (load(data)["a"][0] == 2) == (kind is bytearray)


def test_a_conjugated_tensor_is_saved_by_value() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j])

    assert torch.equal(load(save({"a": tensor.conj()}))["a"], tensor.conj().resolve_conj())
    negative = tensor.conj().imag  # lazily negative
    assert torch.equal(load(save({"a": negative.contiguous()}))["a"], negative)


def test_a_loaded_tensor_covers_its_storage(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "a")
    found = load_file(tmp_path / "a")

    assert storage_size(found["a"]) == 12
    assert storage_ptr(found["a"]) == found["a"].data_ptr()


def test_tensors_are_saved_over_the_file_that_they_view(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.arange(2.0)}, tmp_path / "a")
    before = (tmp_path / "a").read_bytes()

    save_file(load_file(tmp_path / "a"), tmp_path / "a")

    assert (tmp_path / "a").read_bytes() == before


# Checks


def both_fail(call: str, *args: Any) -> tuple[Exception, Exception]:
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - whatever it is
        getattr(reference, call)(*args)
    with pytest.raises(Exception) as found:  # noqa: PT011 - as above
        getattr(ours, call)(*args)
    return theirs.value, found.value


def text_of(error: BaseException) -> str:
    """Return the message of an error, with sets of names in one order."""
    return re.sub(r"\{.*?\}", lambda found: str(sorted(found[0])), str(error))


SQUARE = torch.arange(16.0).reshape(4, 4)


@pytest.mark.parametrize(
    "metadata",
    [{"a": 1}, {1: "a"}, {"a": None}, {"a": b"x"}, [("a", "b")], "abc", 3, {"a": "\ud800"}],
    ids=repr,
)
def test_metadata_that_cannot_be_saved_is_an_error_of_the_reference(metadata: Any) -> None:
    theirs, found = both_fail("save", {"a": SQUARE}, metadata)

    assert type(found) is type(theirs)
    assert str(found) == str(theirs)


@pytest.mark.parametrize("name", [None, 3, "", "a\0b", "x" * 300], ids=repr)
def test_a_name_that_no_file_has_is_an_error_of_the_reference(name: Any) -> None:
    theirs, found = both_fail("save_file", {"a": SQUARE}, name)

    assert isinstance(found, TypeError if isinstance(theirs, TypeError) else SafetensorError)
    assert str(found) == str(theirs)


@pytest.mark.parametrize(
    "tensors",
    [
        [1],
        {"a": 1},
        {"a": SQUARE.T},
        {"a": SQUARE[:, :2]},
        {"a": torch.ones(1).expand(3)},
        {"a": torch.zeros(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)},
        {"a": SQUARE.to_sparse(), "b": torch.ones(1), "c": SQUARE.to_sparse()},
        {"a": torch.zeros(2, device="meta")},
        {"a": torch.zeros(2, device="meta"), "b": torch.zeros(2, device="meta")},
        {"a": torch.zeros(2, dtype=torch.complex128)},
        {"a": torch.empty(2, dtype=vars(torch)["uint1"])},
        {"a": np.zeros(2)},
        {"a": None},
        {1: SQUARE},
        UserDict(a=SQUARE),
        None,
    ],
    ids=lambda tensors: str(type(tensors)),
)
def test_a_tensor_that_cannot_be_saved_is_an_error_of_the_reference(
    tmp_path: Path, tensors: Any
) -> None:
    for call, *more in ("save",), ("save_file", tmp_path / "a"):
        theirs, found = both_fail(call, tensors, *more)

        assert type(found) is type(theirs)
        assert str(found) == str(theirs)
    assert not list(tmp_path.iterdir())


def test_any_dict_of_tensors_is_saved() -> None:
    tensors = OrderedDict(b=torch.nn.Parameter(SQUARE), a=torch.zeros(0))

    assert save(tensors) == reference.save(tensors)


@pytest.mark.parametrize("part", [SQUARE, SQUARE[:2], SQUARE.t(), SQUARE.view(torch.uint8)])
def test_tensors_that_share_memory_are_refused(part: torch.Tensor) -> None:
    theirs, found = both_fail("save", {"a": SQUARE, "b": part})

    assert type(found) is type(theirs) is RuntimeError
    if part.is_contiguous():  # of others, the reference fails to find the end
        assert text_of(found) == text_of(theirs)
    assert "Some tensors share memory" in str(found)


def test_types_are_checked_first_then_sparse_then_shared() -> None:
    all_wrong: dict[str, Any] = {"a": SQUARE.T, "b": SQUARE, "c": SQUARE.to_sparse(), "d": 1}

    for message in ("Key `d` is invalid", "sparse tensors", "share memory", "non contiguous"):
        with pytest.raises((ValueError, RuntimeError), match=message):
            save(all_wrong)
        all_wrong.popitem()


def test_parts_of_one_storage_are_saved_if_they_do_not_overlap() -> None:
    parts = {"a": SQUARE[:2], "b": SQUARE[2:], "c": SQUARE[:0]}

    assert save(parts) == reference.save(parts)


MEMORY = torch.arange(24.0)
STATES: dict[str, dict[str, torch.Tensor]] = {
    "none": {"a": torch.zeros(2), "b": torch.zeros(2)},
    "same": {"b": MEMORY, "a": MEMORY, "c": torch.ones(3)},
    "part": {"a": MEMORY[3:9], "b": MEMORY, "c": MEMORY[:2]},
    "apart": {"a": MEMORY[:12], "b": MEMORY[12:]},
    "runs": {"a": MEMORY[:12], "b": MEMORY[6:14], "c": MEMORY[14:], "d": MEMORY[20:]},
    "strided": {"a": MEMORY.view(4, 6)[:, ::2], "b": MEMORY.view(4, 6)[:, 1::2]},
    "types": {"a": MEMORY, "b": MEMORY.view(torch.int32), "c": MEMORY.view(torch.uint8)},
    "empty": {"a": MEMORY[:0], "b": MEMORY[:0], "c": MEMORY, "d": torch.zeros(0)},
    "meta": dict.fromkeys("ab", torch.zeros(3, device="meta")),
}


def groups(found: list[set[str]]) -> list[list[str]]:
    return sorted(map(sorted, found))


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_shared_memory_is_what_the_reference_takes_for_it(state: dict[str, torch.Tensor]) -> None:
    assert groups(ours._find_shared_tensors(state)) == groups(reference._find_shared_tensors(state))
    for tensor in state.values():
        if tensor.device.type != "meta":
            for helper in "storage_ptr", "storage_size", "_end_ptr", "_is_complete":
                assert getattr(ours, helper)(tensor) == getattr(reference, helper)(tensor)


CHOICES: list[dict[str, Any]] = [
    {},
    {"preferred_names": None, "discard_names": None},
    {"preferred_names": ["b", "x"]},
    {"discard_names": ["a"]},
    {"preferred_names": ["a"], "discard_names": ["a"]},
    {"discard_names": ["a", "b", "c"]},
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_the_names_that_stay_are_those_of_the_reference(
    state: dict[str, torch.Tensor], choice: dict[str, Any]
) -> None:
    try:
        expected = reference._remove_duplicate_names(state, **choice)
    except RuntimeError as theirs:
        if any(len(names) > 1 for names in ours._find_shared_tensors(state)):
            with pytest.raises(RuntimeError) as found:
                ours._remove_duplicate_names(state, **choice)
            assert text_of(found.value) == text_of(theirs)
            return
        expected = {}  # nothing is shared
    assert ours._remove_duplicate_names(state, **choice) == expected


def test_metadata_is_a_map_of_texts() -> None:
    with pytest.raises(TypeError, match="argument 'metadata'"):
        save({"a": SQUARE}, {"a": 1})  # type: ignore[dict-item]


# Modules


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = torch.nn.Linear(3, 3)
        self.a = torch.nn.Linear(3, 3)
        self.a.weight = self.b.weight


def test_a_model_is_saved_without_the_names_that_others_contain(tmp_path: Path) -> None:
    model, facts, their_facts = Tied(), {"x": "y"}, {"x": "y"}

    save_model(model, str(tmp_path / "a"), facts)
    reference.save_model(model, str(tmp_path / "b"), their_facts)

    assert facts == their_facts == {"x": "y", "b.weight": "a.weight"}
    assert load_file(tmp_path / "a").keys() == reference.load_file(tmp_path / "b").keys()


def test_a_fact_of_the_caller_stays(tmp_path: Path) -> None:
    facts = {"b.weight": "mine"}

    save_model(Tied(), str(tmp_path / "a"), facts)

    assert facts == {"b.weight": "mine"}


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), Tied()], ids=["plain", "tied"])
def test_the_bytes_of_a_model_are_those_of_the_reference(
    tmp_path: Path, model: torch.nn.Module
) -> None:
    save_model(model, str(tmp_path / "a"))
    reference.save_model(model, str(tmp_path / "b"))

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_is_loaded_with_its_tied_weights(tmp_path: Path, backend: str) -> None:
    saved, loaded = Tied(), Tied()
    save_model(saved, str(tmp_path / "a"))

    assert load_model(loaded, tmp_path / "a", backend=backend) == (set(), [])
    assert torch.equal(loaded.b.weight, saved.b.weight)
    assert loaded.a.weight is loaded.b.weight


def test_strided_weights_are_made_contiguous_unless_that_is_unwanted(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    model.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).T)

    save_model(model, str(tmp_path / "a"))
    assert torch.equal(load_file(tmp_path / "a")["weight"], model.weight)
    theirs, found = both_fail("save_model", model, str(tmp_path / "a"), {"a": 1}, False)
    assert str(found) == str(theirs)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda memory: memory[:4], lambda memory: memory[4:]),
        (lambda memory: memory.view(4, 6), lambda memory: memory.view(4, 6).t()),
    ],
    ids=["apart", "transposed"],
)
def test_what_has_all_bytes_of_a_model_is_saved(tmp_path: Path, one: Any, other: Any) -> None:
    def model(memory: torch.Tensor) -> torch.nn.Module:
        found = torch.nn.Module()
        found.a = torch.nn.Parameter(one(memory))
        found.b = torch.nn.Parameter(other(memory))
        return found

    with pytest.raises(RuntimeError):
        reference.save_model(model(MEMORY), str(tmp_path / "b"))
    save_model(model(MEMORY), str(tmp_path / "a"))

    memory = torch.zeros(24)
    assert load_model(model(memory), tmp_path / "a") == (set(), [])
    assert torch.equal(memory, MEMORY)


def test_a_model_without_a_complete_tensor_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Module()
    memory = torch.zeros(10)
    model.a, model.b = torch.nn.Parameter(memory[:6]), torch.nn.Parameter(memory[4:])

    with pytest.raises(RuntimeError, match="None is covering the entire storage"):
        save_model(model, str(tmp_path / "a"))


@pytest.mark.parametrize(
    "names",
    [["a.weight"], ["b.weight"], ["a.weight", "b.weight"], [], ["b.weight", "more"]],
    ids=str,
)
@pytest.mark.parametrize("strict", [True, False])
def test_names_of_tied_weights_are_judged_as_in_the_reference(
    tmp_path: Path, names: list[str], strict: bool
) -> None:
    tensors = {name: torch.ones(3, 3) for name in names}
    save_file({**tensors, "a.bias": torch.ones(3), "b.bias": torch.ones(3)}, tmp_path / "a")
    results: list[Any] = []
    for library in reference, ours:
        torch.manual_seed(1)
        model = Tied()
        try:
            found: Any = library.load_model(model, str(tmp_path / "a"), strict=strict)
        except RuntimeError as error:
            results.append(str(error))
        else:
            results.append((set(found[0]), list(found[1]), model.a.weight.tolist()))

    assert results[0] == results[1]


def test_names_that_differ_are_errors_of_the_reference(tmp_path: Path) -> None:
    save_model(torch.nn.Linear(2, 2), str(tmp_path / "a"))
    other = torch.nn.Sequential(torch.nn.Linear(2, 2))

    theirs, found = both_fail("load_model", other, str(tmp_path / "a"))

    assert type(found) is type(theirs) is RuntimeError
    assert str(found) == str(theirs)
    assert load_model(other, tmp_path / "a", strict=False) == (
        {"0.weight", "0.bias"},
        ["bias", "weight"],
    )


def test_shapes_that_differ_are_errors_of_torch(tmp_path: Path) -> None:
    save_model(torch.nn.Linear(2, 2), str(tmp_path / "a"))

    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        load_model(torch.nn.Linear(3, 2), tmp_path / "a")


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")

    with pytest.raises(
        SafetensorError, match="^Error while deserializing header: header too small"
    ):
        load_file(tmp_path / "a")
    with pytest.raises(SafetensorError, match="^Error while deserializing: header too small"):
        load(b"123")


@pytest.mark.parametrize("device", ["meta", "CPU", -1])
def test_an_unknown_device_is_an_error_of_the_reference(tmp_path: Path, device: Any) -> None:
    save_file({"a": SQUARE}, tmp_path / "a")
    with pytest.raises(safetensors.SafetensorError) as theirs:
        reference.load_file(tmp_path / "a", device)

    with pytest.raises(SafetensorError) as found:
        load_file(tmp_path / "a", device)

    assert str(found.value) == str(theirs.value)


def test_what_other_libraries_take_from_the_module_is_there() -> None:
    assert ours._to_ndarray(SQUARE)[0].tobytes() == reference._to_ndarray(SQUARE)[0].tobytes()
    assert ours.safe_open is safe_open
    for code in reference._TYPES:
        assert ours._getdtype(code) is reference._getdtype(code)
    for code in "F4", "F6_E2M3", "F9":
        with pytest.raises(KeyError):
            ours._getdtype(code)


def test_tied_tensors_are_written_once_and_returned_twice(tmp_path: Path) -> None:
    weight, other = torch.arange(6.0).reshape(2, 3), torch.ones(2)
    tensors = {"embed": weight, "head": weight, "other": other}
    path = tmp_path / "a.safetensors"
    save_file(tensors, path, {"format": "pt"}, tied=True)
    assert save(tensors, {"format": "pt"}, tied=True) == path.read_bytes()
    with safe_open(path, "pt") as file:
        assert file.keys() == ["embed", "other"]
        assert file.metadata() == {"format": "pt", "head": "embed"}
    assert sorted(load_file(path)) == ["embed", "other"]
    found = load_file(path, tied=True)
    assert found.keys() == tensors.keys()
    assert found["head"].data_ptr() == found["embed"].data_ptr()
    assert torch.equal(found["head"], weight)


@pytest.mark.parametrize("part", [lambda whole: whole[:1], lambda whole: whole.t()])
def test_a_part_of_another_tensor_is_not_tied_to_it(part: Any) -> None:
    whole = torch.arange(9.0).reshape(3, 3)
    with pytest.raises(RuntimeError, match=r"copy it first, with .clone\(\)"):
        save({"whole": whole, "part": part(whole)}, tied=True)


def test_metadata_of_the_name_of_a_tied_tensor_are_refused() -> None:
    weight = torch.ones(3)
    with pytest.raises(RuntimeError, match="remove that name from the metadata"):
        save({"a": weight, "b": weight}, {"b": "x"}, tied=True)


def test_a_tensor_of_one_element_may_have_any_stride(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)[1:2, 2]
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors")["x"].tolist() == [5.0]


def test_tables_and_helpers_that_scripts_import_are_those_of_the_reference() -> None:
    assert {dtype: ours._SIZE[dtype] for dtype in DTYPES} == reference._SIZE
    newer = {code for code in ours._TYPES if BY_NAME[code] not in IN_REFERENCE}
    assert {code: ours._TYPES[code] for code in ours._TYPES.keys() - newer} == reference._TYPES
    state = {"a": torch.ones(2, 3), "b": torch.zeros(4)}
    state["c"] = state["a"][0]
    assert groups(ours._find_shared_tensors(state)) == groups(reference._find_shared_tensors(state))
    tensor = torch.arange(6).reshape(2, 3)
    assert ours._tobytes(tensor, "x") == tensor.numpy().tobytes()
    views = [("x", {"dtype": "I64", "shape": [2, 3], "data": bytearray(tensor.numpy().tobytes())})]
    views.append(("none", {"dtype": "F32", "shape": [0, 2], "data": b""}))
    for name, value in reference._view2torch(views).items():
        assert torch.equal(ours._view2torch(views)[name], value)


def test_the_message_for_a_tensor_that_is_not_contiguous_is_that_of_the_reference(
    tmp_path: Path,
) -> None:
    state = {"x": torch.ones(2, 3).T}
    with pytest.raises(ValueError, match="non contiguous") as expected:
        reference.save_file(state, tmp_path / "x")
    with pytest.raises(ValueError, match="non contiguous") as found:
        ours.save_file(state, tmp_path / "x")
    assert str(found.value) == str(expected.value)
    with pytest.raises(ValueError, match="non contiguous") as found:
        ours._tobytes(state["x"], "x")
    assert str(found.value) == str(expected.value)
