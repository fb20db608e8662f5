"""GGUF models against the models that they were converted from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from blobstore.errors import BlobDamaged, BlobstoreError, NotFound, UsageError
from blobstore.gguf.header import InvalidGguf
from blobstore.operations.compare.compare import Comparison, compare_models
from blobstore.operations.create.create import create
from blobstore.store.local import LocalStore
from tests.support.converted import permuted, write_converted
from tests.support.gguf_files import TEXT, U32, gguf_file, text
from tests.support.models import Arrays, add_blobs, blob, write_folder
from tests.support.ollama_store import add_gguf_model

HIDDEN, HEADS, KV_HEADS, VOCABULARY = 64, 4, 2, 10
LAYER = "model.layers.0"
F32 = 0


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def tensors(architecture: str = "llama", *, biases: bool = False, head: bool = True) -> Arrays:
    """Return a model of one layer, under the names of transformers."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{LAYER}.input_layernorm.weight": (HIDDEN,),
        f"{LAYER}.post_attention_layernorm.weight": (HIDDEN,),
        f"{LAYER}.self_attn.q_proj.weight": (64, HIDDEN),
        f"{LAYER}.self_attn.k_proj.weight": (32, HIDDEN),
        f"{LAYER}.self_attn.v_proj.weight": (32, HIDDEN),
        f"{LAYER}.self_attn.o_proj.weight": (HIDDEN, 64),
    }
    if head:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    if biases:
        shapes |= {
            f"{LAYER}.self_attn.{part}_proj.bias": (rows,) for part, rows in (("q", 64), ("k", 32))
        }
    if architecture == "qwen3moe":
        shapes[f"{LAYER}.mlp.gate.weight"] = (3, HIDDEN)
        for expert in range(12):
            for part, shape in (
                ("gate", (32, HIDDEN)),
                ("up", (32, HIDDEN)),
                ("down", (HIDDEN, 32)),
            ):
                shapes[f"{LAYER}.mlp.experts.{expert}.{part}_proj.weight"] = shape
    else:
        shapes |= {f"{LAYER}.mlp.{part}_proj.weight": (96, HIDDEN) for part in ("gate", "up")}
        shapes[f"{LAYER}.mlp.down_proj.weight"] = (HIDDEN, 96)
    if architecture == "gemma3":
        shapes |= {
            f"{LAYER}.{part}_feedforward_layernorm.weight": (HIDDEN,) for part in ("pre", "post")
        }
    if architecture.startswith(("qwen3", "gemma3")):
        shapes |= {f"{LAYER}.self_attn.{part}_norm.weight": (16,) for part in "qk"}
    return {name: numbers(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


def add_plain(store: LocalStore, arrays: Arrays, name: str = "hf", **options: Any) -> None:
    create(write_folder(store.root.parent / name, arrays), name, store=store, **options)


def add_converted(
    store: LocalStore, arrays: Arrays, architecture: str = "llama", **options: Any
) -> None:
    path = store.root.parent / "m.gguf"
    options = {"heads": HEADS, "heads_kv": KV_HEADS} | options
    create(write_converted(path, arrays, architecture, **options), "gguf", store=store)


def differing(compared: Comparison) -> list[str]:
    return [tensor.name for tensor in compared.differing]


def assert_equal(compared: Comparison, names: Sequence[str]) -> None:
    assert differing(compared) == []
    assert sorted(tensor.name for tensor in compared.tensors) == sorted(names)
    assert (compared.only_in_model, compared.only_in_base) == ((), ())


@pytest.mark.parametrize(
    "architecture", ["llama", "mistral3", "qwen2", "qwen3", "qwen3moe", "gemma3"]
)
def test_a_converted_model_equals_its_source(store: LocalStore, architecture: str) -> None:
    arrays = tensors(architecture, biases=architecture in ("llama", "qwen2"))
    add_plain(store, arrays)
    add_converted(store, arrays, architecture)
    assert_equal(compare_models("gguf", "hf", store=store), list(arrays))
    assert_equal(compare_models("hf", "gguf", store=store), list(arrays))


def test_other_rows_of_queries_differ(store: LocalStore) -> None:
    arrays = tensors()
    add_plain(store, arrays)
    query = f"{LAYER}.self_attn.q_proj.weight"
    add_converted(store, arrays | {query: permuted(arrays[query], HEADS)})
    assert differing(compare_models("gguf", "hf", store=store)) == [query]


@pytest.mark.parametrize(("dtype", "kind"), [(ml_dtypes.bfloat16, "BF16"), (np.float16, "F16")])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_16_bits_are_equal_where_norms_are_float32(
    store: LocalStore, architecture: str, dtype: Any, kind: str
) -> None:
    arrays = {name: array.astype(dtype) for name, array in tensors(architecture).items()}
    # The sum with 1 rounds them.
    arrays["model.norm.weight"] = (numbers(HIDDEN) * 1e-4).astype(dtype)
    names = {np.float16: "F16", ml_dtypes.bfloat16: "BF16"}
    blobs = {
        name: blob((name, names[dtype], array.shape, array.tobytes()))
        for name, array in arrays.items()
    }
    add_blobs(store, "hf", blobs)
    add_converted(store, arrays, architecture, dtype=kind)
    assert_equal(compare_models("gguf", "hf", store=store), list(arrays))
    assert_equal(compare_models("hf", "gguf", store=store), list(arrays))


@pytest.mark.parametrize("form", ["packed", "stacked"])
def test_experts_are_compared_one_by_one(store: LocalStore, form: Any) -> None:
    arrays = tensors("qwen3moe")
    add_plain(store, arrays, experts=form)
    changed = f"{LAYER}.mlp.experts.10.up_proj.weight"
    add_converted(store, arrays | {changed: arrays[changed] + 1}, "qwen3moe")
    compared = compare_models("gguf", "hf", store=store)
    assert len(compared.tensors) == len(arrays)
    (found,) = compared.differing
    assert (found.name, found.shape, found.nbytes) == (changed, (32, HIDDEN), 32 * HIDDEN * 4)


def test_errors_of_blocks_are_those_of_their_values(store: LocalStore) -> None:
    arrays = tensors()
    add_plain(store, arrays)
    add_converted(store, arrays, dtype="Q8_0")
    compared = compare_models("gguf", "hf", store=store)
    query = f"{LAYER}.self_attn.q_proj.weight"
    assert len(compared.differing) == len([array for array in arrays.values() if array.ndim == 2])
    (found,) = [tensor for tensor in compared.tensors if tensor.name == query]
    base = arrays[query].reshape(-1, 32)
    scale = np.abs(base).max(axis=1, keepdims=True) / 127
    expected = np.rint(base / scale) * scale.astype(np.float16).astype(np.float32) - base
    assert found.max_abs_error == pytest.approx(np.abs(expected).max(), rel=1e-3)
    assert (found.type, found.group_size, found.bits_per_weight) == ("q8_0", 32, 8.5)
    assert found.snr_db is not None
    assert 35 < found.snr_db < 55


@pytest.mark.slow
def test_rows_of_many_pieces_are_put_in_order(store: LocalStore) -> None:
    query = f"{LAYER}.self_attn.q_proj.weight"
    for dtype in ("F32", "Q8_0"):
        arrays = {query: numbers(1100, 2048).astype(np.float32)}
        add_plain(store, arrays)
        add_converted(store, arrays, heads=22, heads_kv=2, dtype=dtype)
        (found,) = compare_models("gguf", "hf", store=store).tensors
        assert found.snr_db is not None
        assert found.snr_db > 35


@pytest.mark.parametrize("scales", [(), (1,), (2,)])
@pytest.mark.parametrize("names", ["experts.{expert}.up", "experts.up"])
def test_nvfp4_weights_have_scales_next_to_them(
    store: LocalStore, scales: tuple[int, ...], names: str
) -> None:
    # The scales of blocks are 1, and the weights 0, 0.5, 1 and so on.
    block = bytes([0x38] * 4) + bytes(range(16)) * 2
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6, *[0] * 16]
    factors = np.array([3, 5][: int(np.prod(scales))], np.float32)
    low_first = np.array([values[code & 15] for code in range(16)])
    weights = np.tile(np.concatenate([low_first[:8], [0] * 8, low_first[8:], [0] * 8]), 2)
    rows = np.broadcast_to(weights, (2, 3, 64)) * (factors.reshape(-1, 1, 1))
    file = gguf_file(
        [("general.architecture", TEXT, text("x"))],
        [
            ("blk.0.ffn_up_exps.weight", 40, (64, 3, 2), block * 6),
            ("blk.0.ffn_up_exps.scale", F32, scales, factors.tobytes()),
        ],
    )
    add_gguf_model(store, "gguf", file)
    arrays = {"experts.up.weight": rows.astype(np.float32)}
    if "{expert}" in names:
        arrays = {f"experts.{n}.up.weight": row.astype(np.float32) for n, row in enumerate(rows)}
    add_plain(store, arrays)
    compared = compare_models("gguf", "hf", store=store, names={"blk.{layer}.ffn_up_exps": names})
    assert_equal(compared, list(arrays))


def test_a_model_where_it_lies_is_compared(store: LocalStore) -> None:
    arrays = tensors()
    add_plain(store, arrays)
    path = write_converted(
        store.root.parent / "m.gguf", arrays, "llama", heads=HEADS, heads_kv=KV_HEADS
    )
    add_gguf_model(store, "ollama", path.read_bytes())
    assert_equal(compare_models("ollama", "hf", store=store), list(arrays))
    assert_equal(compare_models("hf", "ollama", store=store), list(arrays))


# Heads and vocabularies


def test_a_shared_embedding_is_the_head_of_either_side(store: LocalStore) -> None:
    tied = tensors(head=False)
    untied = tied | {"lm_head.weight": tied["model.embed_tokens.weight"]}
    for plain, converted in ((tied, untied), (untied, tied)):
        add_plain(store, plain)
        add_converted(store, converted)
        assert_equal(compare_models("gguf", "hf", store=store), list(untied))
        assert_equal(compare_models("hf", "gguf", store=store), list(untied))


@pytest.mark.parametrize("dtype", ["F32", "Q8_0"])
def test_rows_that_no_token_has_are_left_out(store: LocalStore, dtype: str) -> None:
    arrays = tensors("gemma3")
    add_plain(store, arrays)
    add_converted(store, arrays, "gemma3", rows=8, dtype=dtype)
    for pair in (("gguf", "hf"), ("hf", "gguf")):
        compared = compare_models(*pair, store=store)
        shapes = {tensor.name: tensor.shape for tensor in compared.tensors}
        assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (8, HIDDEN)
        assert len(compared.tensors) == len(arrays)
        (found,) = [tensor for tensor in compared.tensors if tensor.name == "lm_head.weight"]
        ours = found.nbytes if pair[0] == "gguf" else found.base_nbytes
        assert ours == 8 * HIDDEN * (4 if dtype == "F32" else 34 / 32)
        assert found.nbytes + found.base_nbytes - ours == 8 * HIDDEN * 4
        if dtype == "F32":
            assert differing(compared) == []


def test_other_shapes_are_refused(store: LocalStore) -> None:
    arrays = tensors()
    add_plain(store, arrays)
    for name in ("model.embed_tokens.weight", f"{LAYER}.mlp.up_proj.weight"):
        array = arrays[name]
        add_converted(store, arrays | {name: array[:, :32] if "embed" in name else array[:64]})
        with pytest.raises(BlobstoreError, match=f"tensor '{name}' has shape"):
            compare_models("gguf", "hf", store=store)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", ""])
def test_language_models_within_others_are_found(store: LocalStore, prefix: str) -> None:
    arrays = tensors("gemma3")
    moved = {
        prefix + name.removeprefix("model.")
        if name.startswith("model.")
        else f"language_model.{name}": array
        for name, array in arrays.items()
    }
    add_plain(store, moved | {"vision_tower.norm.weight": numbers(3)})
    add_converted(store, arrays, "gemma3")
    compared = compare_models("gguf", "hf", store=store)
    assert {tensor.name for tensor in compared.tensors} == set(moved)
    assert differing(compared) == []
    assert compared.only_in_base == ("vision_tower.norm.weight",)


# Names


def test_tensors_that_only_one_side_has_are_listed(store: LocalStore) -> None:
    arrays = tensors()
    add_plain(store, arrays | {"model.extra": numbers(3)})
    file = gguf_file(
        [
            ("general.architecture", TEXT, text("llama")),
            ("llama.attention.head_count", U32, HEADS.to_bytes(4, "little")),
        ],
        [
            ("output_norm.weight", F32, (64,), np.asarray(arrays["model.norm.weight"]).tobytes()),
            ("rope_freqs.weight", F32, (1,), bytes(4)),
        ],
    )
    add_gguf_model(store, "gguf", file)
    compared = compare_models("gguf", "hf", store=store)
    assert [tensor.name for tensor in compared.tensors] == ["model.norm.weight"]
    assert differing(compared) == []
    assert compared.only_in_model == ("rope_freqs.weight",)
    assert set(compared.only_in_base) == {*arrays, "model.extra"} - {"model.norm.weight"}


def test_patterns_match_names_of_either_model(store: LocalStore) -> None:
    arrays = tensors()
    add_plain(store, arrays)
    add_converted(store, arrays)
    for pattern in ("*q_proj*", "blk.0.attn_q.*"):
        compared = compare_models("gguf", "hf", store=store, patterns=pattern)
        assert_equal(compared, [f"{LAYER}.self_attn.q_proj.weight"])
    with pytest.raises(NotFound, match=r"matches 'blk\.1\.\*'"):
        compare_models("gguf", "hf", store=store, patterns=["*q_proj*", "blk.1.*"])


def test_two_models_of_gguf_files_keep_their_names(store: LocalStore) -> None:
    arrays = tensors()
    add_converted(store, arrays)
    path = write_converted(
        store.root.parent / "q.gguf", arrays, "llama", heads=HEADS, heads_kv=KV_HEADS, dtype="Q8_0"
    )
    create(path, "q8", store=store)
    compared = compare_models("q8", "gguf", store=store)
    assert {tensor.name for tensor in compared.tensors} >= {"blk.0.attn_q.weight", "output.weight"}
    assert len(compared.tensors) == len(arrays)


def test_other_architectures_need_names(store: LocalStore) -> None:
    arrays = tensors()
    add_plain(store, arrays)
    add_converted(store, arrays, "smollm3")
    message = r"model gguf:latest: the names that hf:latest has .* 'smollm3' are not known"
    with pytest.raises(BlobstoreError, match=message):
        compare_models("gguf", "hf", store=store)
    # Its rows are in the order of the file here, unlike those of llama.
    assert_equal(compare_models("gguf", "hf", store=store, names="qwen2"), list(arrays))
    assert len(differing(compare_models("gguf", "hf", store=store, names="llama"))) == 2
    with pytest.raises(BlobstoreError, match="no tensor of the same name"):
        compare_models("gguf", "hf", store=store, names={"x": "y"})


@pytest.mark.parametrize("pair", [("gguf", "gguf"), ("hf", "hf")])
def test_names_are_refused_where_they_mean_nothing(
    store: LocalStore, pair: tuple[str, str]
) -> None:
    add_plain(store, tensors())
    add_converted(store, tensors())
    with pytest.raises(UsageError, match="names are for a GGUF model and another one"):
        compare_models(*pair, store=store, names="llama")


def test_names_can_be_listed(store: LocalStore) -> None:
    arrays = tensors()
    renamed = {name.replace("self_attn.q_proj", "query"): array for name, array in arrays.items()}
    add_plain(store, renamed)
    add_converted(store, arrays)
    names = {"blk.{layer}.attn_q": "model.layers.{layer}.query"}
    assert_equal(compare_models("gguf", "hf", store=store, names=names), list(renamed))
    names = {"like": "llama", "blk.{layer}.attn_q.weight": "model.layers.{layer}.query.weight"}
    assert_equal(compare_models("gguf", "hf", store=store, names=names), list(renamed))


def test_two_tensors_of_one_name_are_refused(store: LocalStore) -> None:
    arrays = tensors()
    add_plain(store, arrays)
    add_converted(store, arrays)
    with pytest.raises(
        BlobDamaged, match=r"two tensors would both be called 'model\.norm\.weight'"
    ):
        compare_models("gguf", "hf", store=store, names={"output": "model.norm"})


# Hostile files


def hostile(store: LocalStore, count: int | None, *shape: int) -> None:
    values = [("general.architecture", TEXT, text("llama"))]
    if count is not None:
        values.append(("llama.attention.head_count", U32, count.to_bytes(4, "little")))
    data = bytes(4 * int(np.prod(shape, dtype=object)))
    add_gguf_model(
        store, "gguf", gguf_file(values, [("blk.0.attn_q.weight", F32, shape[::-1], data)])
    )
    add_plain(store, {f"{LAYER}.self_attn.q_proj.weight": numbers(4, 4)})


@pytest.mark.parametrize(
    ("count", "shape", "message"),
    [
        (None, (4, 4), "head_count is 'None', expected"),
        (0, (4, 4), "head_count is '0', expected"),
        (3, (4, 4), r"shape \[4, 4\], whose rows cannot be those of 3 attention heads"),
        (2**32 - 1, (4, 4), "attention heads"),
        (1, (), "attention heads"),
    ],
)
def test_heads_that_do_not_divide_the_rows_are_refused(
    store: LocalStore, count: int | None, shape: tuple[int, ...], message: str
) -> None:
    hostile(store, count, *shape)
    with pytest.raises((BlobDamaged, InvalidGguf), match=f"model gguf:latest: .*{message}"):
        compare_models("gguf", "hf", store=store)


@pytest.mark.parametrize("shape", [(2**40, 0, 32), (0, 4, 32), (5000, 1, 1)])
def test_no_number_of_experts_takes_memory(store: LocalStore, shape: tuple[int, ...]) -> None:
    data = bytes(4 * int(np.prod(shape, dtype=object)))
    values = [("general.architecture", TEXT, text("qwen3moe"))]
    add_gguf_model(
        store, "gguf", gguf_file(values, [("blk.0.ffn_up_exps.weight", F32, shape[::-1], data)])
    )
    add_plain(store, {"x": numbers(3)})
    with pytest.raises(BlobstoreError, match="no tensor of the same name"):
        compare_models("gguf", "hf", store=store)


def test_an_empty_vocabulary_is_compared(store: LocalStore) -> None:
    values = [("general.architecture", TEXT, text("llama"))]
    file = gguf_file(values, [("token_embd.weight", F32, (4, 0), b"")])
    add_gguf_model(store, "gguf", file)
    add_plain(store, {"model.embed_tokens.weight": numbers(3, 4)})
    (found,) = compare_models("gguf", "hf", store=store).tensors
    assert (found.shape, found.is_equal, found.bits_per_weight) == ((0, 4), True, None)
