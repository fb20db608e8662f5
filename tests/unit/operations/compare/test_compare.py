from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from blobstore.core.workers import Cancelled, WorkerPool
from blobstore.errors import BlobDamaged, BlobMissing, UnsupportedDType
from blobstore.manifests.reference import Reference
from blobstore.operations.compare.compare import Comparison, TensorError, _measure, compare_models
from blobstore.operations.compare.pairs import pair_tensors
from blobstore.operations.create.create import create
from blobstore.operations.open import open_model
from blobstore.planning.grouping import ExpertForm
from blobstore.quantization.error_metrics import WorstGroup
from blobstore.store.local import LocalStore
from tests.support.models import Arrays, add_blobs, blob, dense_tensors, write_folder
from tests.support.options import grouped

LAYER = "model.layers.0.mlp"
MATRIX = f"{LAYER}.up_proj.weight"


def make(
    store: LocalStore, name: str, tensors: Arrays, experts: ExpertForm = "packed", **options: Any
) -> None:
    folder = write_folder(store.root.parent / name, tensors)
    if options:
        options["policy"] = "uniform"
    create(folder, name, store=store, experts=experts, **grouped(options))


def numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def experts(count: int = 3) -> Arrays:
    return {
        f"{LAYER}.experts.{number}.{projection}.weight": numbers(32, 64, seed=number * 2 + place)
        for number in range(count)
        for place, projection in enumerate(("up_proj", "down_proj"))
    }


def expected(
    packed: np.ndarray[Any, Any], base: np.ndarray[Any, Any], group: int
) -> dict[str, Any]:
    """Compute the expected errors independently."""
    error = packed.astype(np.float64) - base.astype(np.float64)
    rows = error.reshape(-1, error.shape[-1] // group, group)
    bases = base.astype(np.float64).reshape(rows.shape)
    ratios = np.linalg.norm(rows, axis=2) / np.linalg.norm(bases, axis=2)
    row, column = np.unravel_index(ratios.argmax(), ratios.shape)
    norm = np.linalg.norm(error) / np.linalg.norm(base.astype(np.float64))
    return {
        "relative_error": norm,
        "snr_db": -20 * math.log10(norm),
        "max_abs_error": np.abs(error).max(),
        "worst": (ratios.max(), row, column * group, group),
    }


def assert_measures(found: TensorError, facts: dict[str, Any]) -> None:
    assert found.relative_error == pytest.approx(facts["relative_error"], rel=1e-12)
    assert found.snr_db == pytest.approx(facts["snr_db"], rel=1e-12)
    assert found.max_abs_error == facts["max_abs_error"]
    assert found.worst is not None
    assert found.worst == pytest.approx(facts["worst"], rel=1e-12)


# Errors of a tensor


@pytest.mark.parametrize(
    ("quant_type", "options", "group", "bits"),
    [
        ("int4", {}, 32, 6),
        ("int4", {"group_size": 64}, 64, 5),
        ("int8", {}, 64, 9),
        ("nvfp4", {}, 16, 4.5),
        ("mxfp8", {}, 32, 8.25),
    ],
)
def test_measures_a_quantized_tensor(
    quant_type: str, options: dict[str, Any], group: int, bits: float, store: LocalStore
) -> None:
    base = numbers(300, 256)
    make(store, "plain", {MATRIX: base})
    make(store, "packed", {MATRIX: base}, quantize=quant_type, **options)
    (found,) = compare_models("packed", "plain", store=store).tensors
    with open_model("packed", store=store) as model:
        packed = model.dequantized(MATRIX, "float32")
    assert_measures(found, expected(packed, base, group))
    assert (found.type, found.group_size) == (quant_type, group)
    assert (found.base_type, found.base_group_size) == ("F32", 0)
    assert found.shape == (300, 256)
    assert (found.bits_per_weight, found.base_bits_per_weight) == (bits, 32)


def test_measures_two_quantized_tensors(store: LocalStore) -> None:
    base = numbers(64, 128)
    make(store, "a", {MATRIX: base}, quantize="int4", group_size=32)
    make(store, "b", {MATRIX: base}, quantize="int8")
    (found,) = compare_models("a", "b", store=store).tensors
    plain = []
    for name in "ab":
        with open_model(name, store=store) as model:
            plain.append(model.dequantized(MATRIX, "float32"))
    assert_measures(found, expected(plain[0], plain[1], 32))
    assert (found.base_type, found.base_group_size) == ("int8", 64)


def test_measures_known_errors_exactly(store: LocalStore) -> None:
    base = np.zeros((2, 3, 128), ml_dtypes.bfloat16)
    base[:, :, :64] = 2
    changed = base.copy()
    changed[1, 1, 3] = 5
    changed[0, 2, 100] = -4
    for name, array in (("a", changed), ("b", base)):
        words = array.view(np.uint16).tobytes()
        add_blobs(store, name, {"x": blob(("x", "BF16", array.shape, words))})
    compared = compare_models("a", "b", store=store)

    (found,) = compared.tensors
    assert (found.squared_error, found.squared_base) == (9 + 16, 4 * 64 * 6)
    assert found.relative_error == pytest.approx(5 / math.sqrt(4 * 64 * 6))
    assert found.max_abs_error == 4
    assert found.worst == WorstGroup(math.inf, 2, 64, 64)  # where the base has zeros
    assert found.nonfinite == 0
    assert compared.relative_error == found.relative_error


@pytest.mark.slow
def test_measures_a_tensor_the_same_in_several_pieces(store: LocalStore) -> None:
    base = numbers(1100, 1024)  # more than one piece of rows, and not a multiple of a block
    make(store, "plain", {MATRIX: base})
    make(store, "packed", {MATRIX: base}, quantize="mxfp8")
    (found,) = compare_models("packed", "plain", store=store).tensors
    with open_model("packed", store=store) as model:
        packed = model.dequantized(MATRIX, "float32")
    assert_measures(found, expected(packed, base, 32))
    changed = base.copy()
    changed[1095, 1000] += 50
    make(store, "changed", {MATRIX: changed})
    for name in ("packed", "plain"):
        (found,) = compare_models("changed", name, store=store).tensors
        assert found.worst is not None
        assert found.worst.row == 1095


def test_measures_a_row_longer_than_a_block(store: LocalStore) -> None:
    base = numbers(100_000)
    changed = base.copy()
    changed[70_000] += 100
    make(store, "a", {"x": changed})
    make(store, "b", {"x": base})
    (found,) = compare_models("a", "b", store=store).tensors
    assert found.max_abs_error == float(changed[70_000]) - float(base[70_000])
    assert found.worst is not None
    assert found.worst[1:] == (0, 70_000 // 64 * 64, 64)
    assert found.squared_base == pytest.approx(np.square(base, dtype=np.float64).sum(), rel=1e-12)


@pytest.mark.parametrize("forms", [("packed", "stacked"), ("stacked", "packed"), ("stacked",) * 2])
def test_measures_every_expert_in_either_form(
    forms: tuple[ExpertForm, ExpertForm], store: LocalStore
) -> None:
    make(store, "packed", experts(), forms[0], quantize="int4")
    make(store, "plain", experts(), forms[1])
    make(store, "reference", experts(), quantize="int4")
    found = {item.name: item for item in compare_models("packed", "plain", store=store).tensors}
    assert set(found) == set(experts())
    with open_model("reference", store=store) as model:
        for name, base in experts().items():
            packed = model.dequantized(name, "float32")
            assert_measures(found[name], expected(packed, base, 32))
            assert (found[name].type, found[name].shape) == ("int4", (32, 64))
            assert found[name].bits_per_weight == 6


def test_tensors_of_every_type_and_shape_equal_themselves_when_read(store: LocalStore) -> None:
    arrays = [*dense_tensors().values(), np.array([1 + 2j], np.complex64), np.ones((2, 3, 4, 5))]
    # A group is one blob: with one more tensor, it is another blob.
    group = {f"{LAYER}.shared_experts.{n}.weight": array for n, array in enumerate(arrays)}
    make(store, "a", group)
    make(store, "b", group | {f"{LAYER}.shared_experts.more.weight": np.zeros(1)})
    compared = compare_models("a", "b", store=store)
    assert [tensor.name for tensor in compared.tensors] == sorted(group)
    for found in compared.tensors:
        array = group[found.name]
        assert found.is_equal
        assert (found.relative_error, found.snr_db, found.worst) == (0, math.inf, None)
        assert found.squared_base == pytest.approx(np.square(np.abs(array.astype("c16"))).sum())
        assert (found.shape, found.elements) == (array.shape, array.size)


# Totals


def test_sums_over_all_tensors_that_differ(store: LocalStore) -> None:
    base: Arrays = {
        "same": np.full(10, 9, np.float32),
        "x": np.full(4, 3, np.float32),
        "y": np.full(1, 8, np.float32),
    }
    make(store, "a", base | {"x": np.full(4, 4, np.float32), "y": np.full(1, 5, np.float16)})
    make(store, "b", base)
    compared = compare_models("a", "b", store=store)

    assert [tensor.name for tensor in compared.differing] == ["x", "y"]
    assert compared.relative_error == pytest.approx(math.sqrt((4 + 9) / (36 + 64)))
    assert compared.snr_db == pytest.approx(10 * math.log10(100 / 13))
    assert compared.max_abs_error == 3
    assert compared.elements == 15
    assert compared.bits_per_weight == (14 * 32 + 16) / 15
    assert compared.base_bits_per_weight == 32


def test_equal_models_have_no_error(store: LocalStore) -> None:
    make(store, "a", dense_tensors())
    make(store, "b", dense_tensors())
    compared = compare_models("a", "b", store=store)
    assert compared.differing == ()
    assert (compared.relative_error, compared.snr_db) == (0, math.inf)
    assert compared.max_abs_error == compared.nonfinite == 0
    for tensor in compared.tensors:
        assert tensor.is_equal
        assert (tensor.relative_error, tensor.snr_db) == (0, math.inf)


def test_does_not_read_shared_bytes(store: LocalStore) -> None:
    make(store, "a", {"same": numbers(8), "x": numbers(4)})
    make(store, "b", {"same": numbers(8), "x": numbers(4, seed=1)})
    reports: list[tuple[int, int]] = []
    compare_models("a", "b", store=store, progress=lambda _, *sizes: reports.append(sizes))
    assert reports[-1] == (32, 32)


def test_reports_progress_up_to_the_total(store: LocalStore) -> None:
    make(store, "a", experts(), quantize="int4")
    make(store, "b", experts())
    reports: list[tuple[str, int, int]] = []
    compared = compare_models("a", "b", store=store, progress=lambda *item: reports.append(item))
    total = sum(tensor.nbytes + tensor.base_nbytes for tensor in compared.tensors)
    assert {of for _, _, of in reports} == {total}
    assert [done for _, done, _ in reports] == sorted(done for _, done, _ in reports)
    assert reports[-1][1] == total


def test_the_result_does_not_depend_on_the_number_of_threads(store: LocalStore) -> None:
    make(store, "a", experts(8), quantize="nvfp4")
    make(store, "b", experts(8))
    one, many = (compare_models("a", "b", store=store, jobs=jobs) for jobs in (1, 5))
    assert one == many


# Values that are not finite


def nonfinite(store: LocalStore) -> Comparison:
    base = np.ones((2, 64), np.float32)
    changed = base.copy()
    changed[0, :3] = np.nan, np.inf, 3
    base[1, 0] = changed[1, 0] = -np.inf  # the same on both sides
    make(store, "a", {"x": changed, "y": np.full(2, np.nan)})
    make(store, "b", {"x": base, "y": np.ones(2)})
    return compare_models("a", "b", store=store)


def test_counts_elements_that_are_not_finite_and_measures_the_rest(store: LocalStore) -> None:
    compared = nonfinite(store)
    found = compared.tensors[0]
    assert (found.nonfinite, found.squared_error, found.squared_base) == (2, 4, 125)
    assert found.worst == WorstGroup(math.sqrt(4 / 62), 0, 0, 64)
    assert compared.nonfinite == 4
    assert compared.relative_error == pytest.approx(math.sqrt(4 / 125))


def test_a_tensor_without_finite_elements_has_no_error(store: LocalStore) -> None:
    nonfinite(store)
    compared = compare_models("a", "b", store=store, patterns=["y"])
    assert len(compare_models("a", "b", store=store, patterns="y").tensors) == 1
    (found,) = compared.tensors
    assert not found.is_equal
    assert (found.relative_error, found.snr_db, found.worst) == (None, None, None)
    assert (compared.relative_error, compared.snr_db) == (None, None)


# Errors


def test_rejects_types_that_numpy_lacks(store: LocalStore) -> None:
    for name, data in (("a", b"\0"), ("b", b"\1")):
        add_blobs(store, name, {"x": blob(("x", "F4", (2,), data))})
    with pytest.raises(UnsupportedDType, match="tensor 'x': numpy has no packed F4"):
        compare_models("a", "b", store=store)
    assert compare_models("a", "a", store=store).differing == ()


def test_reports_a_missing_or_truncated_blob(store: LocalStore) -> None:
    make(store, "a", {"x": numbers(64)})
    make(store, "b", {"x": numbers(64, seed=1)})
    with open_model("b", store=store) as model:
        path = Path(store.blob_path(model.manifest.layers[0].digest))
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BlobDamaged, match="model b:latest: layer 'x': "):
        compare_models("a", "b", store=store)
    path.unlink()
    with pytest.raises(BlobMissing, match="model b:latest: layer 'x': "):
        compare_models("a", "b", store=store)


def test_an_interrupt_stops_its_threads(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = 32
    for name, value in (("a", 1), ("b", 2)):
        array = np.full(blocks << 15, value, np.uint8)
        make(store, name, {f"x{number}": array for number in range(5)})
    reports, pools = list[int](), list[WorkerPool]()

    class Pool(WorkerPool):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            pools.append(self)

    def interrupt(what: str, done: int, total: int) -> None:
        reports.append(done)
        if len(reports) == 1:
            raise KeyboardInterrupt
        pools[0].stopping.wait()

    monkeypatch.setattr("blobstore.operations.compare.compare.WorkerPool", Pool)
    with pytest.raises(KeyboardInterrupt):
        compare_models("a", "b", store=store, jobs=2, progress=interrupt)
    assert len(reports) < blocks  # no job was completed
    assert not [item for item in threading.enumerate() if item.name.startswith("blobstore")]


def test_a_running_job_stops_between_blocks(store: LocalStore) -> None:
    make(store, "a", {"x": numbers(1 << 17)})
    make(store, "b", {"x": numbers(1 << 17, seed=1)})
    (pair,) = pair_tensors(store, Reference.parse("a"), Reference.parse("b"), ()).pairs
    reports: list[int] = []

    def stop(what: str, done: int, total: int) -> None:
        reports.append(done)
        pool.stopping.set()

    pool = WorkerPool(1, stop, pair.ours.nbytes + pair.base.nbytes)
    with pytest.raises(Cancelled):
        _measure(store, pool, pair)
    assert len(reports) == 1
