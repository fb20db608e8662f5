from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from blobstore.compression.spans import header_of
from blobstore.core.digest import Digest
from blobstore.core.tensor import DType
from blobstore.operations.archive.pack import pack_models
from blobstore.operations.archive.unpack import unpack_archive
from blobstore.operations.freeze.freeze import Frozen, freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store.local import LocalStore
from tests.support.frozen import layers
from tests.support.ladders import COLUMNS, ROWS, as_float32, source, weight_blob
from tests.support.models import add_blobs, blob
from tests.support.scaled import float8_blob, mlx_blob

LITTLE = 4096
NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store", lock_timeout=0.05)


def put(store: LocalStore, name: str, blobs: Mapping[str, bytes]) -> dict[str, Digest]:
    """Add a model; return the digests of its layers."""
    add_blobs(store, name, blobs)
    return {key: item.digest for key, item in layers(store, name).items()}


def bases_of(frozen: Frozen) -> dict[Digest, Digest | None]:
    return {item.digest: item.base for item in frozen.blobs}


def assert_whole(store: LocalStore, name: str, blobs: Mapping[str, bytes]) -> None:
    assert verify_models(store=store).faults == ()
    for key, item in layers(store, name).items():
        assert store.read_blob(item.digest, item.size) == blobs[key]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_weights_of_mlx_are_kept_as_rules_of_their_weights(store: LocalStore, bits: int) -> None:
    matrix = source(1)
    parent = put(store, "weights", {NAME: weight_blob(NAME, matrix)})[NAME]
    blobs = {NAME: mlx_blob(NAME, matrix, bits, 64, DType.BF16)}
    child = put(store, "mlx", blobs)[NAME]
    planned = freeze_models(["mlx"], store=store, dry_run=True)
    frozen = freeze_models(["mlx"], store=store)
    assert bases_of(frozen) == {child: parent}
    assert max(planned.stored, frozen.stored) < LITTLE
    assert [str(model.base) for model in frozen.models] == ["weights:latest"]
    assert_whole(store, "mlx", blobs)
    thaw_models(["mlx"], store=store)
    assert_whole(store, "mlx", blobs)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16], ids=lambda item: item.value)
def test_weights_that_were_cast_before_are_found(store: LocalStore, dtype: DType) -> None:
    matrix = source(1, DType.F32)
    parent = put(store, "weights", {NAME: weight_blob(NAME, matrix)})[NAME]
    blobs = {NAME: mlx_blob(NAME, matrix, 4, 32, dtype)}
    child = put(store, "mlx", blobs)[NAME]
    frozen = freeze_models(["mlx"], store=store)
    assert bases_of(frozen) == {child: parent}
    assert frozen.stored < LITTLE
    assert_whole(store, "mlx", blobs)


BLOCKS = [(1, COLUMNS), (ROWS, COLUMNS), (32, 128), (1, 128), (10, 100)]


@pytest.mark.parametrize("quotient", [DType.F32, DType.F16, DType.BF16])
@pytest.mark.parametrize("block", BLOCKS)
def test_of_8_bit_floats_only_scales_are_kept(
    store: LocalStore, block: tuple[int, int], quotient: DType
) -> None:
    matrix = source(1)
    parent = put(store, "weights", {NAME: weight_blob(NAME, matrix)})[NAME]
    blobs = {NAME: float8_blob(NAME, matrix, block, quotient)}
    child = put(store, "fp8", blobs)[NAME]
    planned = freeze_models(["fp8"], store=store, dry_run=True)
    frozen = freeze_models(["fp8"], store=store)
    scales = 4 * -(-ROWS // block[0]) * -(-COLUMNS // block[1])
    assert bases_of(frozen) == {child: parent}
    assert max(planned.stored, frozen.stored) < 2 * scales + LITTLE
    assert_whole(store, "fp8", blobs)


def test_scales_of_8_bit_floats_may_be_exponents(store: LocalStore) -> None:
    matrix = source(1)
    parent = put(store, "weights", {NAME: weight_blob(NAME, matrix)})[NAME]
    blobs = {NAME: float8_blob(NAME, matrix, (32, 128), scale="F8_E8M0")}
    child = put(store, "fp8", blobs)[NAME]
    frozen = freeze_models(["fp8"], store=store)
    assert bases_of(frozen) == {child: parent}
    assert frozen.stored < LITTLE
    assert_whole(store, "fp8", blobs)


@pytest.mark.parametrize("kind", ["mlx", "fp8"])
def test_other_weights_are_compressed_alone(store: LocalStore, kind: str) -> None:
    put(store, "weights", {NAME: weight_blob(NAME, source(1))})
    other = source(2)
    data = mlx_blob(NAME, other, 4, 64, DType.BF16)
    if kind == "fp8":
        data = float8_blob(NAME, other, (32, 128))
    child = put(store, kind, {NAME: data})[NAME]
    assert bases_of(freeze_models([kind], store=store)) == {child: None}
    assert_whole(store, kind, {NAME: data})


def test_the_weights_of_a_fine_tune_come_before_those_of_its_base(store: LocalStore) -> None:
    matrix = source(1)
    tuned = (as_float32(matrix) * 1.01).astype(ml_dtypes.bfloat16).view("<u2")
    put(store, "base", {NAME: weight_blob(NAME, matrix)})
    parent = put(store, "tuned", {"other": weight_blob("other", tuned)})["other"]
    blobs = {"fp8": {NAME: float8_blob(NAME, tuned, (32, 128))}}
    blobs["mlx"] = {NAME: mlx_blob(NAME, tuned, 8, 64, DType.BF16)}
    for name, model in blobs.items():
        child = put(store, name, model)[NAME]
        assert bases_of(freeze_models([name], store=store)) == {child: parent}
        assert_whole(store, name, model)


def test_codes_that_do_not_follow_are_listed(store: LocalStore) -> None:
    matrix = source(1)
    put(store, "weights", {NAME: weight_blob(NAME, matrix)})
    for name, data in (
        ("mlx", mlx_blob(NAME, matrix, 4, 64, DType.BF16)),
        ("fp8", float8_blob(NAME, matrix, (32, 128))),
    ):
        changed = bytearray(data)
        for place in range(len(data) // 3, len(data), 999):
            changed[place] ^= 1
        put(store, name, {NAME: bytes(changed)})
        frozen = freeze_models([name], store=store)
        assert frozen.stored < 2 * LITTLE
        assert_whole(store, name, {NAME: bytes(changed)})


def test_a_stack_of_experts_follows_from_their_weights(store: LocalStore) -> None:
    """MLX stacks the experts of a layer, which are tensors of their own in most other files."""
    experts = [source(number) for number in range(8)]
    items = [
        (f"mlp.experts.{at}.weight", "BF16", item.shape, item.tobytes())
        for at, item in enumerate(experts)
    ]
    parent = put(store, "weights", {"mlp.experts": blob(*items)})["mlp.experts"]
    experts[5] = source(99)  # which the store does not have
    blobs = {"switch_mlp": mlx_blob("switch_mlp", np.stack(experts), 4, 64, DType.BF16)}
    child = put(store, "mlx", blobs)["switch_mlp"]
    frozen = freeze_models(["mlx"], store=store)
    assert bases_of(frozen) == {child: parent}
    assert frozen.stored < len(blobs["switch_mlp"]) / 8 + LITTLE
    assert_whole(store, "mlx", blobs)


def test_all_weights_of_a_blob_follow(store: LocalStore) -> None:
    """Experts of 8-bit floats share a blob, as their weights do."""
    experts = {f"mlp.experts.{number}.weight": source(number) for number in range(4)}
    items = [(name, "BF16", item.shape, item.tobytes()) for name, item in experts.items()]
    parent = put(store, "weights", {"mlp.experts": blob(*items)})["mlp.experts"]
    merged = _merged([float8_blob(name, item, (32, 128)) for name, item in experts.items()])
    child = put(store, "fp8", {"mlp.experts": merged})["mlp.experts"]
    frozen = freeze_models(["fp8"], store=store)
    assert bases_of(frozen) == {child: parent}
    assert frozen.stored < LITTLE
    assert_whole(store, "fp8", {"mlp.experts": merged})


def _merged(blobs: list[bytes]) -> bytes:
    items = []
    metadata: Mapping[str, str] = {}
    for data in blobs:
        header = header_of(data, len(data))
        assert header is not None
        for name, entry in header.tensors.items():
            begin, end = header.data_start + entry.begin, header.data_start + entry.end
            metadata = header.metadata
            items.append((name, entry.spec.dtype.value, entry.spec.shape, data[begin:end]))
    return blob(*items, **metadata)


def test_an_archive_has_them_as_rules_and_the_weights_stay(
    store: LocalStore, tmp_path: Path
) -> None:
    matrix = source(1)
    models = {"weights": {NAME: weight_blob(NAME, matrix)}}
    models["mlx"] = {NAME: mlx_blob(NAME, matrix, 4, 64, DType.BF16)}
    models["fp8"] = {NAME: float8_blob(NAME, matrix, (32, 128))}
    for name, blobs in models.items():
        put(store, name, blobs)
    packed = pack_models(list(models), tmp_path / "all.bsar", store=store)
    assert packed.deltas == 2
    other = LocalStore(tmp_path / "other")
    unpack_archive(tmp_path / "all.bsar", store=other)
    for name, blobs in models.items():
        assert_whole(other, name, blobs)
    freeze_models(["mlx", "fp8"], store=store)
    remove_models(["weights"], store=store)
    collect_garbage(store=store, older_than=0)
    for name in ("mlx", "fp8"):
        assert_whole(store, name, models[name])
