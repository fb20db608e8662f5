from __future__ import annotations

from typing import Any

import pytest

from blobstore.errors import UnsupportedSource
from blobstore.quantization.formats import FORMATS
from blobstore.quantization.source_config import SourceQuantConfig, modelopt_section


def mlx_type(section: Any, module: str = "m") -> tuple[str, int] | None:
    found = SourceQuantConfig({"quantization": section}).mlx_type(f"{module}.weight", module)
    return (found[0].name, found[1]) if found else None


@pytest.mark.parametrize("item", FORMATS.values(), ids=FORMATS.keys())
def test_reads_every_type_and_group_size(item: Any) -> None:
    for size in item.group_sizes:
        section = {"bits": item.bits, "group_size": size, "mode": item.mode}
        assert mlx_type(section) == (item.name, size)


@pytest.mark.parametrize(
    ("section", "typed"),
    [
        ({"bits": 4, "group_size": 64}, ("int4", 64)),
        ({"bits": 3, "group_size": 128, "mode": None}, ("int3", 128)),
        ({"bits": 8}, ("int8", 64)),
        ({"bits": 4, "mode": "nvfp4"}, ("nvfp4", 16)),
        ({"bits": 8, "mode": "mxfp8"}, ("mxfp8", 32)),
        ({"bits": 4.0, "group_size": 32.0}, ("int4", 32)),
    ],
)
def test_omitted_values_are_the_defaults_of_mlx(section: Any, typed: tuple[str, int]) -> None:
    assert mlx_type(section) == typed
    assert isinstance(typed[1], int)


GPTQ = {"bits": 4, "group_size": 128, "quant_method": "gptq"}


@pytest.mark.parametrize(
    "section", [None, "4", {}, {"bits": 0, "mode": "affine"}, {"group_size": 64}, GPTQ]
)
def test_sections_of_other_tools_have_no_mlx_type(section: Any) -> None:
    assert mlx_type(section) is None
    assert not SourceQuantConfig({"quantization": section}).is_mlx


@pytest.mark.parametrize(
    "config",
    [
        {"quantization": {"bits": 8}, "quantization_config": {"bits": 4}},
        {"quantization": {"bits": 0}, "quantization_config": {"bits": 8}},
        {"compression_config": {"bits": 8}},
        {"text_config": {"quantization": {"bits": 8}}},
        {"quantization_config": {"bits": 8}, "text_config": {"quantization": {"bits": 4}}},
        {"quantization": [], "text_config": {"quantization_config": {"bits": 8}}},
    ],
)
def test_the_first_section_with_bits_counts(config: Any) -> None:
    found = SourceQuantConfig(config).mlx_type("m.weight", "m")
    assert found == (FORMATS["int8"], 64)


@pytest.mark.parametrize(
    ("own", "typed"),
    [
        ({"bits": 8, "group_size": 64}, ("int8", 64)),
        ({"bits": 6, "group_size": 32, "mode": "affine"}, ("int6", 32)),
        ({"bits": 8, "group_size": 32, "mode": "mxfp8"}, ("mxfp8", 32)),
        ({"mode": "nvfp4"}, ("nvfp4", 16)),
        ({"group_size": 128}, ("int4", 128)),
        (True, ("mxfp4", 32)),
        (None, ("mxfp4", 32)),
    ],
)
def test_a_module_can_have_its_own_type(own: Any, typed: tuple[str, int]) -> None:
    section = {"bits": 4, "group_size": 32, "mode": "mxfp4", "layers.0.q_proj": own}
    assert mlx_type(section, "layers.0.q_proj") == typed
    assert mlx_type(section, "layers.1.q_proj") == ("mxfp4", 32)


@pytest.mark.parametrize("own", [False, "int4", 4, []])
def test_rejects_scales_of_a_module_that_the_config_calls_plain(own: Any) -> None:
    with pytest.raises(UnsupportedSource, match="^tensor 'm.weight' has scales, and is not quant"):
        mlx_type({"bits": 4, "m": own})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"bits": 1, "group_size": 64}, "'1' bits in groups of '64'"),
        ({"bits": 7}, "'7' bits"),
        ({"bits": "4"}, "'4' bits in groups of '64' by config.json, which affine cannot have"),
        ({"bits": -4}, "'-4' bits"),
        ({"bits": True}, "'True' bits"),
        ({"bits": 10**400}, "bits"),
        ({"bits": [4]}, "bits"),
        ({"bits": 4, "group_size": 16}, "groups of '16'"),
        ({"bits": 4, "group_size": -64}, "groups of '-64'"),
        ({"bits": 4, "group_size": 1e9}, "groups of '1000000000.0'"),
        ({"bits": 4, "group_size": "64"}, "groups of '64'"),
        ({"bits": 8, "mode": "nvfp4"}, "which nvfp4 cannot have"),
        ({"bits": 4, "group_size": 64, "mode": "mxfp4"}, "which mxfp4 cannot have"),
        ({"bits": 4, "mode": "q4_k"}, "the mode 'q4_k' by config.json, which is unknown"),
        ({"bits": 4, "mode": ["affine"]}, "the mode .* is unknown"),
        ({"bits": 4, "mode": "\x1b[31m"}, r"'\\x1b\[31m'"),
    ],
)
def test_rejects_unknown_types(section: Any, message: str) -> None:
    with pytest.raises(UnsupportedSource, match=f"tensor 'm.weight' has .*{message}"):
        mlx_type(section)


def test_lists_modules_that_do_not_exist() -> None:
    own = {"bits": 8, "group_size": 64}
    section = {"bits": 4, "a": own, "b": own, "c": False, "d": {"skip": True}}
    assert SourceQuantConfig({"quantization": section}).unmatched({"a"}) == ["b"]
    assert SourceQuantConfig({}).unmatched({"a"}) == []


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({}, None),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": ["fp8"]}}, None),
        ({"quantization_config": {"quant_method": ""}}, None),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
    ],
)
def test_reads_the_method(config: Any, method: str | None) -> None:
    assert SourceQuantConfig(config).method == method


def groups(*weights: Any) -> dict[str, Any]:
    named = {f"group_{number}": {"weights": each} for number, each in enumerate(weights)}
    return {"quantization_config": {"config_groups": named}}


def quark(weight: object, *blocks: object) -> dict[str, Any]:
    """Return a config of AMD's Quark, with layers that have blocks of their own."""
    layers = {
        f"layer{number}": {"weight": {"qscheme": "per_block", "block_size": block}}
        for number, block in enumerate(blocks)
    }
    section = {"global_quant_config": {"weight": weight}, "layer_quant_config": layers}
    return {"quantization_config": {"quant_method": "quark", **section}}


FLOAT8 = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("config", "sharings"),
    [
        ({}, []),
        ({"quantization_config": {"weight_block_size": None}}, []),
        ({"quantization_config": {"weight_block_size": [128, 64]}}, [(128, 64)]),
        (groups({**FLOAT8, "strategy": "tensor"}), ["tensor"]),
        (groups({**FLOAT8, "strategy": "channel"}), ["channel"]),
        (groups({**FLOAT8, "strategy": "block", "block_structure": [128, 128]}), [(128, 128)]),
        (groups({**FLOAT8, "strategy": "group", "group_size": 32}), [(1, 32)]),
        (
            groups({**FLOAT8, "strategy": "tensor"}, {**FLOAT8, "strategy": "channel"}),
            ["tensor", "channel"],
        ),
        (groups({**FLOAT8, "strategy": "token"}), []),
        (groups({"num_bits": 4, "type": "float", "strategy": "tensor"}), []),
        (groups({"num_bits": 8, "type": "int", "strategy": "channel"}), []),
        (groups(None, "x", []), []),
        ({"quantization_config": {"config_groups": [1, 2]}}, []),
        (
            quark({"qscheme": "per_block", "block_size": [32, 32]}, [128, 128]),
            [(32, 32), (128, 128)],
        ),
        (quark({"qscheme": "per_tensor", "block_size": None}), []),
        (quark([]), []),
        ({"quantization_config": {"global_quant_config": 7, "layer_quant_config": [1]}}, []),
        ({"quantization_config": {"config_groups": {"group_0": 7}}}, []),
    ],
)
def test_reads_how_scales_are_shared(config: Any, sharings: list[Any]) -> None:
    assert SourceQuantConfig(config).sharings() == sharings


@pytest.mark.parametrize(
    "value",
    [128, [128], [128, 0], [0, 128], [-1, 128], [128, 128, 1], ["128", 128], [1_000_000, 1]],
)
def test_rejects_blocks_that_are_not_two_numbers(value: Any) -> None:
    config = {"quantization_config": {"weight_block_size": value}}
    with pytest.raises(
        UnsupportedSource, match="weight_block_size cannot be .*two numbers from 1 to 999999"
    ):
        SourceQuantConfig(config).sharings()
    with pytest.raises(UnsupportedSource, match="block_structure cannot be"):
        structure = {**FLOAT8, "strategy": "block", "block_structure": value}
        SourceQuantConfig(groups(structure)).sharings()


def test_rejects_groups_without_a_size() -> None:
    with pytest.raises(UnsupportedSource, match="group_size cannot be"):
        SourceQuantConfig(groups({**FLOAT8, "strategy": "group"})).sharings()


def test_reads_the_group_sizes_of_4_bit_floats() -> None:
    small = {"num_bits": 4, "type": "float"}
    config = groups(*({**small, "group_size": size} for size in (16, None, "32")), FLOAT8)
    assert SourceQuantConfig(config).group_sizes(4) == {16}
    assert SourceQuantConfig({}).group_sizes(4) == set()


@pytest.mark.parametrize(
    ("section", "is_static"),
    [
        ({}, False),
        ({"quant_method": "fp8"}, False),
        ({"activation_scheme": "dynamic"}, False),
        ({"activation_scheme": "static"}, True),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, False),
        ({"quant_method": "modelopt", "config_groups": {"group_0": {"weights": {}}}}, False),
        (
            {"quant_method": "modelopt", "config_groups": {"group_0": {"input_activations": {}}}},
            True,
        ),
        ({"quant_method": "modelopt"}, True),
        ({"config_groups": 7}, False),
        ({"config_groups": {"group_0": 7}}, False),
        ({"config_groups": {"group_0": {"input_activations": None}}}, False),
        ({"config_groups": {"group_0": {"input_activations": {"dynamic": True}}}}, False),
        ({"config_groups": {"group_0": {"input_activations": {"dynamic": "local"}}}}, True),
        ({"config_groups": {"group_0": {"input_activations": {"dynamic": False}}}}, True),
    ],
)
def test_finds_whether_the_scales_of_activations_are_stored(section: Any, is_static: bool) -> None:
    found = SourceQuantConfig({"quantization_config": section})
    assert found.has_static_activations is is_static


@pytest.mark.parametrize(
    ("described", "section"),
    [
        (
            {"producer": {}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}},
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        ),
        ({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, {}),
        ({"quantization": "NVFP4"}, {}),
        ({}, {}),
        (["quantization"], {}),
        (None, {}),
    ],
)
def test_reads_the_file_in_which_modelopt_describes_weights(
    described: Any, section: dict[str, Any]
) -> None:
    assert modelopt_section(described) == section


INTEGERS = {"num_bits": 4, "type": "int", "symmetric": True}
GROUPED = INTEGERS | {"strategy": "group", "group_size": 32}


def packed(*weights: Any, **section: Any) -> SourceQuantConfig:
    found = [{"weights": own} for own in weights]
    numbered = {f"group_{number}": group for number, group in enumerate(found)}
    section = {"format": "pack-quantized", "config_groups": numbered} | section
    return SourceQuantConfig({"quantization_config": section})


@pytest.mark.parametrize(
    ("weights", "known"),
    [
        (GROUPED, (4, 32)),
        (GROUPED | {"num_bits": 8, "group_size": 128}, (8, 128)),
        (GROUPED | {"actorder": "weight"}, (4, 32)),
        (GROUPED | {"actorder": None, "dynamic": False, "observer": "mse"}, (4, 32)),
        (INTEGERS | {"strategy": "channel", "group_size": -1}, (4, None)),
        (INTEGERS | {"group_size": -1}, (4, None)),
        (INTEGERS | {"group_size": 64}, (4, 64)),
        ({"group_size": 64}, (8, 64)),
    ],
)
def test_reads_how_integers_are_packed(weights: Any, known: Any) -> None:
    assert packed(weights).packed_integers() == {known}


@pytest.mark.parametrize(
    "weights",
    [
        GROUPED | {"symmetric": False},
        GROUPED | {"symmetric": None},
        GROUPED | {"actorder": "group"},
        GROUPED | {"actorder": True},
        GROUPED | {"actorder": ["group"]},
        GROUPED | {"num_bits": 7},
        GROUPED | {"num_bits": 3},
        GROUPED | {"num_bits": 4.0},
        GROUPED | {"num_bits": [4]},
        GROUPED | {"type": "float"},
        GROUPED | {"group_size": [32]},
        GROUPED | {"group_size": True},
        INTEGERS | {"strategy": "tensor"},
        INTEGERS | {"strategy": "block", "block_structure": [32, 32]},
        INTEGERS,
        INTEGERS | {"group_size": {}},
        "int4",
        7,
    ],
)
def test_integers_that_may_be_packed_in_another_way_make_all_unknown(weights: Any) -> None:
    assert packed(weights).packed_integers() == set()
    assert packed(GROUPED, weights).packed_integers() == set()


def test_only_groups_of_the_format_are_packed() -> None:
    assert packed(GROUPED, format="int-quantized").packed_integers() == set()
    assert packed(GROUPED, format=None).packed_integers() == set()
    assert packed(GROUPED, sparsity_config={"format": "dense"}).packed_integers() == {(4, 32)}
    for sparsity in ({"format": "sparse-24-bitmask"}, {"sparsity": 0.5}, 7):
        assert packed(GROUPED, sparsity_config=sparsity).packed_integers() == set()
    mixed = {
        "a": {"weights": GROUPED, "format": "pack-quantized"},
        "b": {"weights": FLOAT8, "format": "float-quantized"},
        "c": {"format": "pack-quantized"},
    }
    section = {"quantization_config": {"format": "mixed-precision", "config_groups": mixed}}
    assert SourceQuantConfig(section).packed_integers() == {(4, 32)}
