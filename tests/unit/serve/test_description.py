"""What clients decide by: the task, the library and the tags of a model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from blobstore.core import strict_json
from blobstore.serve.description import Description, _parameters
from blobstore.serve.messages import Content

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8}


def test_a_card_says_what_a_model_is_for() -> None:
    card: dict[str, str | list[str]] = {
        "pipeline_tag": "feature-extraction",
        "library_name": "sentence-transformers",
        "tags": ["tiny", "tiny"],
        "license": "mit",
        "language": ["en"],
        "base_model": "org/base",
        "datasets": ["some/data"],
    }
    found = Description.of(card, CONFIG, ["model.safetensors"], {"F32": 3, "I8": 4}).fields()
    assert found["pipeline_tag"] == "feature-extraction"
    assert found["library_name"] == "sentence-transformers"
    assert found["tags"] == [
        *("sentence-transformers", "safetensors", "llama", "feature-extraction", "tiny"),
        *("license:mit", "base_model:org/base", "dataset:some/data", "en"),
    ]
    assert found["config"] == {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert found["safetensors"] == {"parameters": {"F32": 3, "I8": 4}, "total": 7}
    assert found["cardData"] == card


@pytest.mark.parametrize(
    ("files", "config", "library", "task"),
    [
        ([], CONFIG, "transformers", "text-generation"),
        (
            [],
            {"architectures": ["BertForMaskedLM"], "model_type": "bert"},
            "transformers",
            "fill-mask",
        ),
        ([], {"architectures": ["T5Model"], "model_type": "t5"}, "transformers", None),
        (["model_index.json"], {}, "diffusers", None),
        (["modules.json"], {"model_type": "bert"}, "sentence-transformers", None),
        (["adapter_config.json"], {}, "peft", None),
        (["model.gguf"], {}, None, None),
        (
            [],
            {"architectures": "LlamaForCausalLM", "model_type": 7},
            "transformers",
            "text-generation",
        ),
        ([], {"architectures": [None, {}]}, None, None),
    ],
)
def test_without_a_card_files_and_the_config_say_it(
    files: list[str], config: dict[str, Any], library: str | None, task: str | None
) -> None:
    found = Description.of({}, config, files, {}).fields()
    assert (found.get("library_name"), found.get("pipeline_tag")) == (library, task)


def test_of_what_an_upstream_says_only_what_is_sound_is_kept() -> None:
    info = {
        "pipeline_tag": "text-generation",
        "library_name": ["transformers"],
        "tags": ["a", 1, "b\x1b", "c" * 501, None, *(str(number) for number in range(2000))],
        "config": {"model_type": "llama", "architectures": ["x" * 20_000], "other": 1},
        "safetensors": {"parameters": {"BF16": 5, "F32": -1, "I8": True, "I4": 2**60}, "total": 9},
    }
    found = Description.from_info(info).fields()
    assert found["tags"][:2] == ["a", "0"]
    assert 1000 < len(found["tags"]) < 2000
    assert "library_name" not in found
    assert found["config"] == {"model_type": "llama"}
    assert found["safetensors"] == {"parameters": {"BF16": 5}, "total": 5}
    odd_ones: list[dict[str, Any]] = [
        {},
        {"tags": "x", "config": [], "safetensors": 1},
        {"safetensors": {"parameters": []}},
    ]
    for odd in odd_ones:
        assert Description.from_info(odd).task == ""


def test_a_config_that_json_has_no_words_for_is_left_out() -> None:
    found = Description.of({}, {"model_type": "\ud800", "auto_map": {"a": float("nan")}}, [], {})
    assert "config" not in found.fields()


def test_values_are_not_counted_if_a_header_takes_too_much_memory() -> None:
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}

    def content(metadata: str) -> Content:
        header = json.dumps({"a": entry, "__metadata__": {"b": metadata}}).encode()
        return Content((len(header).to_bytes(8, "little") + header,))

    assert _parameters({"model.safetensors": content("")}) == {"F32": 6}
    assert not _parameters({"model.safetensors": content("{" * (strict_json.MAX_MEMORY // 250))})


def test_a_description_is_small_whatever_a_card_and_a_config_have() -> None:
    """A list has thousands of them."""
    card: dict[str, Any] = {f"field{number}": "x" * 480 for number in range(2000)} | {
        "license": "mit"
    }
    config = dict.fromkeys(("architectures", "model_type", "auto_map"), "x" * 9000)
    found = Description.of(card, config, (), {})
    assert len(json.dumps(found.fields())) < 3 * (20 << 10)
    assert found.card["field0"] == "x" * 480
    assert found.card["license"] == "mit"  # small ones fit after large ones
    assert [*found.config] == ["architectures"]


def test_of_the_types_that_an_upstream_states_few_are_kept() -> None:
    types = {f"T{number}": number for number in range(100_000)}
    found = Description.from_info({"safetensors": {"parameters": types}})
    assert len(json.dumps(found.fields())) < 20 << 10
