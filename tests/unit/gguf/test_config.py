from __future__ import annotations

from typing import Any

import pytest

from blobstore.gguf.config import config_of
from blobstore.gguf.header import GgufHeader


def config(**metadata: Any) -> dict[str, Any]:
    """Return what values say; two lines in a name stand for a dot."""
    values = {key.replace("__", "."): value for key, value in metadata.items()}
    return config_of(GgufHeader(3, {"general.architecture": "llama"} | values, {}, 32, 0))


def test_sizes_have_the_keys_of_a_config() -> None:
    found = config(
        llama__context_length=4096,
        llama__block_count=2,
        llama__attention__head_count_kv=8,
        other__block_count=7,
    )
    assert found == {
        "architectures": ["llama"],
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
    }


@pytest.mark.parametrize("value", [True, 2.0, "2"])
def test_a_size_of_another_type_is_left_out(value: Any) -> None:
    assert "num_hidden_layers" not in config(llama__block_count=value)


@pytest.mark.parametrize("value", ["", 7])
def test_a_license_is_a_text(value: Any) -> None:
    assert "license" not in config(general__license=value)
    assert config(general__license="mit")["license"] == "mit"


def test_base_models_are_named_by_repository_or_else_by_name() -> None:
    found = config(
        general__base_model__count=3,
        general__base_model__0__repo_url="https://huggingface.co/org/base",
        general__base_model__0__name="Base",
        general__base_model__1__repo_url="",
        general__base_model__1__name="Other",
    )
    assert found["base_model"] == ["org/base", "Other"]


@pytest.mark.parametrize("count", [2**64 - 1, True, -1, "2"])
def test_a_count_of_base_models_is_not_believed(count: Any) -> None:
    names = {f"general__base_model__{number}__name": str(number) for number in range(150)}
    found = config(general__base_model__count=count, **names)
    expected = [str(number) for number in range(100)] if count == 2**64 - 1 else None
    assert found.get("base_model") == expected
