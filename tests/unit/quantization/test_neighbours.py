from __future__ import annotations

import pytest

from blobstore.core.tensor import DType, TensorSpec
from blobstore.quantization.neighbours import owner, unclaimed_neighbour, without_neighbours

WEIGHTS = {"m.weight", "e.up", "weight", ".weight"}


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("m.weight_scale", "m.weight"),
        ("m.zeros", "m.weight"),
        ("m.weight.quant_state.bitsandbytes__nf4", "m.weight"),
        ("m.weight:scale", "m.weight"),
        ("e.up_scale_inv", "e.up"),
        ("e.up.scale", "e.up"),
        ("m.weight", ""),
        ("m.inner.scale", ""),
        ("m.inner.weight", "m.weight"),
        ("m.inner.more.weight", ""),
        ("e.upper_scale", ""),
        ("scale", ".weight"),
        ("", ".weight"),
    ],
)
def test_a_tensor_belongs_to_a_weight_by_its_name(name: str, weight: str) -> None:
    assert owner(name, WEIGHTS) == weight


def test_claimed_and_large_tensors_are_no_neighbours() -> None:
    weight = TensorSpec("m.weight", DType.U8, (128, 128))
    small = TensorSpec("m.zeros", DType.F32, (128,))
    specs = {spec.name: spec for spec in (weight, small)}
    weights = {weight.name: weight}
    assert unclaimed_neighbour(specs, (), weights) == ("m.zeros", "m.weight")
    assert unclaimed_neighbour(specs, {"m.zeros"}, weights) is None
    specs["m.zeros"] = small._replace(shape=(1, 64, 100))
    assert unclaimed_neighbour(specs, (), weights) is None
    tiny = {"m.weight": weight._replace(shape=(2, 2))}
    specs["m.zeros"] = small
    assert unclaimed_neighbour(specs, (), tiny) == ("m.zeros", "m.weight")


@pytest.mark.parametrize(
    ("dtype", "columns", "is_neighbour"),
    [
        (DType.F8_E4M3, 256, True),
        (DType.U8, 128, True),
        (DType.U8, 64, True),
        (DType.U32, 32, True),
        (DType.U32, 16, True),
        (DType.F8_E4M3, 128, False),
        (DType.F8_E4M3, 1, False),
    ],
)
def test_a_large_tensor_that_fits_the_shape_of_a_weight_is_a_neighbour(
    dtype: DType, columns: int, is_neighbour: bool
) -> None:
    weight = TensorSpec("m.weight", dtype, (64, columns))
    rotation = TensorSpec("m.rotation", DType.F32, (1, 256, 256))
    specs = {spec.name: spec for spec in (weight, rotation)}
    found = unclaimed_neighbour(specs, (), {weight.name: weight})
    assert found == (("m.rotation", "m.weight") if is_neighbour else None)


def test_finds_a_weight_without_neighbours() -> None:
    names = ["a.weight", "a.weight_scale", "b.weight", "b.bias", "c.weight", "c.zeros"]
    specs = {name: TensorSpec(name, DType.U8, (8, 8)) for name in names}
    assert without_neighbours(specs, ["a.weight", "b.weight"]) == "b.weight"
    assert without_neighbours(specs, ["a.weight", "c.weight"]) == ""
