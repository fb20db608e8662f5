"""Models of 8-bit floats with scales, from import to export."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import blobstore
from blobstore.errors import BlobDamaged, UsageError
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.manifests.source_record import SourceRecord
from blobstore.models.frameworks import Framework
from blobstore.models.source_layers import left_out_tensors, read_source_record
from blobstore.operations.compare.compare import compare_models
from blobstore.operations.compare.diff import diff_models
from blobstore.operations.create.create import create
from blobstore.operations.describe.show import describe_model
from blobstore.operations.export.export import export_model
from blobstore.operations.export.link import link_model
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.maintenance.repair import repair_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support.damage import blob_path, flip
from tests.support.models import add_blob, add_blobs, blob, with_layers, write_folder
from tests.support.samples import samples
from tests.unit.operations.export.folders import raw_tensors

Array = np.ndarray[Any, Any]

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
NAME = Reference.parse("m")
LAYER = "model.layers.0"
EXPERTS = f"{LAYER}.mlp.experts"
CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
FRAMEWORKS: list[Framework] = ["numpy", "torch", "mlx"]


def floats(random: Any, shape: tuple[int, ...], dtype: Any = E4M3) -> Array:
    values: Array = random.normal(size=shape).astype(dtype)
    return values


def deepseek() -> dict[str, Array]:
    """Return tensors in the form of DeepSeek: blocks of 128 x 128, and experts."""
    random = np.random.default_rng(0)
    shapes = {f"{LAYER}.self_attn.q_proj.weight": (300, 200)}
    for expert in range(3):
        shapes[f"{EXPERTS}.{expert}.up_proj.weight"] = (256, 128)
        shapes[f"{EXPERTS}.{expert}.down_proj.weight"] = (128, 256)
    tensors: dict[str, Array] = {f"{LAYER}.norm.weight": np.ones(8, ml_dtypes.bfloat16)}
    for name, shape in shapes.items():
        blocks = [-(-size // 128) for size in shape]
        tensors[name] = floats(random, shape)
        tensors[f"{name}_scale_inv"] = random.uniform(1e-3, 1, blocks).astype(np.float32)
    return tensors


def others() -> dict[str, Array]:
    """Return weights with other scales, and stacks of matrices."""
    random = np.random.default_rng(1)
    forms: list[tuple[str, tuple[int, ...], tuple[int, ...], Any, Any]] = [
        ("row", (40, 64), (40, 1), E4M3, np.float32),
        ("flat_row", (40, 64), (40,), E5M2, ml_dtypes.bfloat16),
        ("tensor", (40, 64), (), E5M2, np.float32),
        ("one", (40, 64), (1,), E4M3, np.float16),
        ("stack_blocks", (3, 256, 200), (3, 2, 2), E4M3, ml_dtypes.bfloat16),
        ("stack_exponents", (3, 256, 200), (3, 2, 2), E4M3, ml_dtypes.float8_e8m0fnu),
        ("stack_rows", (3, 40, 64), (3, 40, 1), E4M3, np.float32),
        ("stack_matrices", (3, 40, 64), (3, 1, 1), E4M3, np.float32),
        ("stack_one", (3, 40, 64), (1,), E4M3, np.float32),
    ]
    tensors: dict[str, Array] = {}
    for name, shape, scale_shape, dtype, scale_dtype in forms:
        tensors[f"{name}.weight"] = floats(random, shape, dtype)
        scale = np.exp2(random.uniform(-8, 0, scale_shape)).astype(scale_dtype)
        tensors[f"{name}.weight_scale"] = np.asarray(scale)
    return tensors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(
        tmp_path / "deepseek", deepseek(), files={"config.json": json.dumps(CONFIG).encode()}
    )


@pytest.fixture
def other_source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "others", others())


def bits(array: Any) -> bytes:
    """Return the bytes of a bfloat16 array of any framework."""
    if isinstance(array, np.ndarray):
        return array.tobytes()
    if hasattr(array, "numpy"):
        import torch

        return bytes(array.view(torch.int16).numpy().tobytes())
    import mlx.core as mx

    return np.array(array.view(mx.uint16)).tobytes()


def test_weights_and_scales_share_a_blob_and_experts_one(store: LocalStore, source: Path) -> None:
    created = create(source, NAME, store=store)
    assert created.notices == ()
    manifest = store.resolve(NAME)
    layers = manifest.layers_of(media_types.TENSOR)
    assert [layer.name for layer in layers] == [
        f"{LAYER}.norm.weight",
        f"{LAYER}.self_attn.q_proj.weight",
        EXPERTS,
    ]
    found = raw_tensors(*(Path(store.blob_path(layer.digest)) for layer in layers))
    assert found == raw_tensors(source)
    config = json.loads(store.read_blob(manifest.config.digest, manifest.config.size))
    assert config["file_type"] == "fp8"


def test_a_model_takes_half_the_space_of_its_decoded_form(store: LocalStore, source: Path) -> None:
    kept = create(source, NAME, store=store)
    decoded = create(source, "decoded", store=store, decode=True)
    assert decoded.notices == ("7 weights of 8-bit floats decoded to BF16",)
    assert kept.bytes_written < 0.51 * decoded.bytes_written


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_dequantized_weights_have_the_bits_of_the_decoded_model(
    store: LocalStore, source: Path, other_source: Path, framework: Framework
) -> None:
    pytest.importorskip({"mlx": "mlx.core"}.get(framework, framework))
    for folder in (source, other_source):
        kept, plain_name = folder.name, f"{folder.name}-decoded"
        create(folder, kept, store=store)
        create(folder, plain_name, store=store, decode=True)
        with (
            blobstore.open(kept, store=store, framework=framework, dequantize=True) as model,
            blobstore.open(plain_name, store=store, framework=framework) as decoded,
        ):
            assert list(model) == list(decoded)
            assert model.specs == decoded.specs
            for name, plain in decoded.items():
                assert bits(model[name]) == bits(plain), name


def test_look_ups_give_weights_and_scales_under_the_names_of_the_source(
    store: LocalStore, source: Path, other_source: Path
) -> None:
    for name, folder, tensors in (("a", source, deepseek()), ("b", other_source, others())):
        create(folder, name, store=store)
        with blobstore.open(name, store=store) as model:
            assert set(model) == set(tensors)
            for tensor, array in tensors.items():
                np.testing.assert_array_equal(model[tensor], array, strict=True)
        with blobstore.open(name, store=store, verify="header") as model:  # not from the index
            assert set(model) == set(tensors)
    with blobstore.open("b", store=store) as model:
        assert set(model.quantized.values()) == {("fp8", 0), ("fp8", 128)}
        assert model.quantized["row.weight"] == ("fp8", 0)
        assert model.quantized["stack_blocks.weight"] == ("fp8", 128)


def test_only_weights_of_chosen_types_are_dequantized(store: LocalStore, source: Path) -> None:
    create(source, NAME, store=store)
    with blobstore.open(NAME, store=store, dequantize={"int4"}) as model:
        assert set(model) == set(deepseek())
    with pytest.raises(UsageError, match="no quantization type 'fp9'; expected one of int4, int8"):
        blobstore.open(NAME, store=store, dequantize="fp9")
    with blobstore.open(NAME, store=store, dequantize="fp8") as model:
        assert len(model) < len(deepseek())
    with blobstore.open(NAME, store=store, dequantize={"fp8", "int4"}) as model:
        assert set(model) == {name for name in deepseek() if not name.endswith("_scale_inv")}
        assert {spec.dtype.value for spec in model.specs.values()} == {"BF16"}


PARTS = st.tuples(
    *(st.integers(0, 255) | st.builds(slice, st.integers(0, 256), st.integers(0, 256)),) * 3
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("fp8")
    store = LocalStore(folder / "store")
    create(write_folder(folder / "source", others()), NAME, store=store)
    return (
        blobstore.open(NAME, store=store, read="pread"),
        blobstore.open(NAME, store=store, dequantize=True, read="pread"),
    )


@pytest.mark.slow
@settings(max_examples=samples(200), deadline=None)
@given(name=st.sampled_from(sorted(name for name in others() if "scale" not in name)), index=PARTS)
def test_a_slice_equals_the_slice_of_the_dequantized_weight(
    opened: tuple[Any, Any], name: str, index: tuple[Any, ...]
) -> None:
    packed, model = opened
    shape = others()[name].shape
    index = tuple(
        one % size if isinstance(one, int) else one for one, size in zip(index, shape, strict=False)
    )
    whole = model[name]
    np.testing.assert_array_equal(model.get_slice(name)[index], whole[index], strict=True)
    try:
        parts = packed.quantized_slice(name, index)
    except UsageError as error:
        assert "is quantized in blocks of " in str(error)
        return
    assert set(parts) == {name, f"{name}_scale"}
    from blobstore.quantization import quantize_numpy as reference

    item, group_size = packed._weights.format(name)
    weight, scale = parts[name], parts[f"{name}_scale"]
    found = reference.dequantize(weight, scale, None, item, group_size, "bfloat16")
    np.testing.assert_array_equal(found.reshape(whole[index].shape), whole[index])


def test_a_part_of_blocks_ends_where_blocks_do(store: LocalStore, source: Path) -> None:
    create(source, NAME, store=store)
    name, tensors = f"{LAYER}.self_attn.q_proj.weight", deepseek()
    with blobstore.open(NAME, store=store) as model:
        parts = model.quantized_slice(name, (slice(128, None), slice(128, None)))
        np.testing.assert_array_equal(parts[name], tensors[name][128:, 128:])
        scales = tensors[f"{name}_scale_inv"][1:, 1:]
        np.testing.assert_array_equal(parts[f"{name}_scale_inv"], scales)
        for index in ((slice(0, 64),), (slice(None), slice(1, None)), (5,)):
            with pytest.raises(UsageError, match="is quantized in blocks of 128 x 128; rows "):
                model.quantized_slice(name, index)


@pytest.mark.parametrize("write", [export_model, link_model])
def test_folders_have_the_tensors_and_the_config_of_the_source(
    store: LocalStore, source: Path, other_source: Path, tmp_path: Path, write: Any
) -> None:
    for folder in (source, other_source):
        out = tmp_path / f"out-{folder.name}"
        create(folder, folder.name, store=store)
        write(folder.name, out, store=store)
        assert raw_tensors(out) == raw_tensors(folder)
        assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_all_weight_files_of_a_linked_folder_are_links(
    store: LocalStore, source: Path, tmp_path: Path
) -> None:
    create(source, NAME, store=store)
    linked = link_model(NAME, tmp_path / "out", store=store)
    assert (linked.links, linked.copied, linked.shared) == (3, 0, 0)


@pytest.mark.slow
def test_a_dequantized_export_is_that_of_the_decoded_model(
    store: LocalStore, source: Path, other_source: Path, tmp_path: Path
) -> None:
    for folder in (source, other_source):
        name = folder.name
        create(folder, name, store=store)
        create(folder, f"{name}-decoded", store=store, decode=True)
        export_model(name, tmp_path / f"{name}-a", store=store, dequantize=True)
        export_model(f"{name}-decoded", tmp_path / f"{name}-b", store=store)
        for file in ("model.safetensors", "config.json"):
            found, expected = (tmp_path / f"{name}-{end}" / file for end in "ab")
            assert found.read_bytes() == expected.read_bytes()


@pytest.mark.slow
def test_models_are_described_compared_frozen_and_verified(store: LocalStore, source: Path) -> None:
    create(source, NAME, store=store)
    create(source, "decoded", store=store, decode=True)
    name = f"{LAYER}.self_attn.q_proj.weight"
    described = {tensor.name: tensor for tensor in describe_model(NAME, store=store).tensors}
    assert len(described) == 8
    one = described[name]
    assert (one.type, one.dtype, one.shape, one.group_size) == ("fp8", "F8_E4M3", (300, 200), 128)
    assert one.size == 300 * 200 + 3 * 2 * 4
    compared = compare_models(NAME, "decoded", store=store)
    # The decoded values are rounded to BF16.
    assert all((tensor.relative_error or 0) < 2**-8 for tensor in compared.tensors)
    assert len(diff_models(NAME, "decoded", store=store).tensors) == 8
    before = {path.name: path.read_bytes() for path in store.folder("blobs").iterdir()}
    freeze_models([NAME, "decoded"], store=store)
    with blobstore.open(NAME, store=store, dequantize=True) as model:
        frozen = bits(model[name])
    assert not verify_models([NAME], store=store).faults
    thaw_models([NAME, "decoded"], store=store)
    assert {path.name: path.read_bytes() for path in store.folder("blobs").iterdir()} == before
    with blobstore.open("decoded", store=store) as model:
        assert bits(model[name]) == frozen


@pytest.mark.parametrize("decode", [False, True])
def test_damaged_blobs_are_rebuilt_from_the_source(
    store: LocalStore, source: Path, decode: bool
) -> None:
    create(source, NAME, store=store, decode=decode)
    path = blob_path(store, EXPERTS)
    intact = path.read_bytes()
    flip(path)
    assert verify_models([NAME], store=store).faults
    repair_models([NAME], source, store=store)
    assert path.read_bytes() == intact


def test_quantizing_decodes_first(store: LocalStore, source: Path, tmp_path: Path) -> None:
    create(source, "decoded", store=store, decode=True)
    plain = tmp_path / "plain"
    export_model("decoded", plain, store=store)
    create(source, "a", store=store, quantize=QuantizeOptions("int4"))
    create(plain, "b", store=store, quantize=QuantizeOptions("int4"))
    found, expected = (
        [
            layer.digest
            for layer in store.resolve(Reference.parse(name)).layers_of(media_types.TENSOR)
        ]
        for name in "ab"
    )
    assert found == expected


def test_kept_experts_are_not_stacked(store: LocalStore, source: Path) -> None:
    create(source, NAME, store=store, experts="stacked")
    manifest = store.resolve(NAME)
    assert not manifest.layers_of(media_types.STACKS)
    assert len(manifest.layers_of(media_types.TENSOR)) == 8
    create(source, "decoded", store=store, experts="stacked", decode=True)
    assert store.resolve(Reference.parse("decoded")).layers_of(media_types.STACKS)


def test_casts_without_scales_are_plain_tensors(store: LocalStore, tmp_path: Path) -> None:
    tensors = {"a.weight": floats(np.random.default_rng(0), (8, 8)), "b": np.ones(3, np.float32)}
    folder = write_folder(tmp_path / "model", tensors)
    created = create(folder, NAME, store=store)
    notice = "1 weight of 8-bit floats without scales kept as plain tensors"
    assert created.notices == (notice,)
    with blobstore.open(NAME, store=store) as model:
        assert model.quantized == {}
        np.testing.assert_array_equal(model["a.weight"], tensors["a.weight"], strict=True)
    export_model(NAME, tmp_path / "out", store=store)
    assert raw_tensors(tmp_path / "out") == raw_tensors(folder)


WEIGHT = ("w", "F8_E4M3", (2, 4), bytes(8))
SCALE = ("w_scale", "F32", (2, 1), bytes(8))


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ((WEIGHT, SCALE), {"block_size": "tensor"}, "is not fp8"),
        ((WEIGHT, SCALE), {}, "block_size '' is not tensor"),
        ((WEIGHT, ("w_scale", "U8", (2, 1), b"..")), {"block_size": "channel"}, "is not fp8"),
        (
            (
                WEIGHT,
                SCALE,
                ("w_scale_inv", "F32", (), b"...."),
            ),
            {"block_size": "channel"},
            "two te",
        ),
        ((("w", "U32", (2, 1), bytes(8)), ("w.scale", "F32", (2, 1), bytes(8))), {}, "block_size"),
    ],
)
def test_metadata_that_contradicts_the_tensors_is_damage(
    store: LocalStore, tensors: Any, metadata: dict[str, str], message: str
) -> None:
    add_blobs(store, "m", {"w": blob(*tensors, quant_type="fp8", **metadata)})
    with pytest.raises(BlobDamaged, match=message):
        blobstore.open(NAME, store=store)
    assert verify_models([NAME], store=store).faults


def test_scales_without_metadata_are_plain_tensors(store: LocalStore) -> None:
    add_blobs(store, "m", {"w": blob(WEIGHT, ("w.scale", "F32", (2, 1), bytes(8)))})
    with blobstore.open(NAME, store=store, dequantize=True) as model:
        assert list(model) == ["w", "w.scale"]
        assert model.quantized == {}


def with_record(store: LocalStore, change: Callable[[SourceRecord], SourceRecord]) -> None:
    """Replace the source layer of a model by a forged one."""
    manifest = store.resolve(NAME)
    record = read_source_record(store, manifest)
    assert record is not None
    added = add_blob(store, change(record).to_bytes())
    layers = [
        layer._replace(digest=added.digest, size=added.size)
        if layer.media_type == media_types.SOURCE
        else layer
        for layer in manifest.layers
    ]
    store.names.publish(replace_any(NAME), with_layers(store, manifest, layers))


def with_start(record: SourceRecord, start: bytes) -> SourceRecord:
    return replace(record, files=(record.files[0]._replace(start=start),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: with_start(record, b""), "the source layer: file 'model.safetensors': "),
        (
            lambda record: with_start(record, bytes(64)),
            "the source layer: file 'model.safetensors'",
        ),
        (
            lambda record: replace(record, left_out={"w.weight_scale": bytes(4)}),
            "it holds tensor 'w.weight_scale', which imports store",
        ),
    ],
)
def test_a_forged_source_layer_is_damage(
    store: LocalStore, tmp_path: Path, change: Any, message: str
) -> None:
    tensors: dict[str, Array] = {
        "w.weight": floats(np.random.default_rng(0), (8, 8)),
        "w.weight_scale": np.array(2, np.float32),
        "w.input_scale": np.array(0.5, np.float32),
    }
    create(write_folder(tmp_path / "model", tensors), NAME, store=store)
    link_model(NAME, tmp_path / "intact", store=store)
    assert raw_tensors(tmp_path / "intact") == raw_tensors(tmp_path / "model")
    with_record(store, change)
    with pytest.raises(BlobDamaged, match=message):
        link_model(NAME, tmp_path / "out", store=store)
    assert not (tmp_path / "out").exists()


def test_scales_of_another_size_than_their_header_says_are_ignored(
    store: LocalStore, tmp_path: Path
) -> None:
    tensors: dict[str, Array] = {
        "w.weight": floats(np.random.default_rng(0), (8, 8)),
        "w.weight_scale": np.array(2, np.float32),
        "w.input_scale": np.array(0.5, np.float32),
    }
    create(write_folder(tmp_path / "model", tensors), NAME, store=store)
    with_record(store, lambda record: replace(record, left_out={"w.input_scale": bytes(5)}))
    assert left_out_tensors(read_source_record(store, store.resolve(NAME))) == {}
