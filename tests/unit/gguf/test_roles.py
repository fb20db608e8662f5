"""What a GGUF file is for, by its header, and its quantization, by its name."""

from __future__ import annotations

import pytest

from blobstore.gguf.header import parse_header, parse_start
from blobstore.gguf.roles import (
    NamedFile,
    belongs_to,
    best,
    is_quantization,
    named,
    role_of,
    role_of_name,
)
from tests.support.gguf_files import TEXT, U32, gguf_file, text, texts

ARCHITECTURE = "general.architecture"


@pytest.mark.parametrize(
    ("values", "name", "role"),
    [
        ({ARCHITECTURE: "llama"}, "x.gguf", "model"),
        ({ARCHITECTURE: "llama", "general.type": "model"}, "mmproj-x.gguf", "model"),
        ({ARCHITECTURE: "clip", "general.type": "mmproj"}, "vision.gguf", "projector"),
        ({ARCHITECTURE: "clip"}, "x.gguf", "projector"),
        ({ARCHITECTURE: "llama", "general.type": "adapter"}, "x.gguf", "adapter"),
        ({ARCHITECTURE: "controlvector"}, "x.gguf", "control vector"),
        ({"general.type": "imatrix"}, "x.gguf", "importance matrix"),
        ({"imatrix.datasets": "wiki"}, "x.gguf", "importance matrix"),
        ({ARCHITECTURE: "gemma4-assistant"}, "x.gguf", "draft model"),
        ({ARCHITECTURE: "eagle3"}, "x.gguf", "draft model"),
        ({ARCHITECTURE: "qwen35"}, "mtp-x.gguf", "draft model"),
        ({}, "x.gguf", "model"),
    ],
)
def test_the_header_says_what_a_file_is_for(values: dict[str, str], name: str, role: str) -> None:
    listed = [(key, TEXT, text(value)) for key, value in values.items()]
    content = gguf_file(listed, [("a", 0, (1,), bytes(4))])
    header = parse_header(content, len(content))
    assert role_of(header.metadata, 1, name) == role
    assert role_of(*parse_start(content), name) == role


def test_a_file_without_tensors_is_a_vocabulary_unless_it_is_a_part() -> None:
    metadata = {ARCHITECTURE: "llama"}
    assert role_of(metadata, 0, "ggml-vocab-llama.gguf") == "vocabulary"
    assert role_of(metadata, 0, "x-00001-of-00002.gguf") == "model"
    assert role_of({**metadata, "split.count": 2}, 0, "x.gguf") == "model"


def test_the_start_of_a_file_says_as_much_as_it_has() -> None:
    tokens = ("tokenizer.ggml.tokens", 9, texts(["x" * 100] * 1000))
    content = gguf_file(
        [(ARCHITECTURE, TEXT, text("clip")), tokens, ("last", U32, bytes(4))],
        [("a", 0, (1,), bytes(4))],
    )
    assert parse_start(content[:200]) == ({ARCHITECTURE: "clip"}, 1)
    assert parse_start(content[:10]) == ({}, 0)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("mmproj-F16.gguf", "projector"),
        ("Gemma-MMPROJ.gguf", "projector"),
        ("projectors/x.mmproj-f16.gguf", "projector"),
        ("MTP/gemma.gguf", "draft model"),
        ("mtp-gemma-Q8_0.gguf", "draft model"),
        ("Qwen-MTP-Q4_K_M.gguf", "model"),
        ("x-imatrix.gguf", "importance matrix"),
        ("adapter-2.gguf", "adapter"),
        ("my-lora-f16.gguf", "adapter"),
        ("x-lora-merged-Q4_K_M.gguf", "model"),
        ("x.gguf", "model"),
    ],
)
def test_a_file_that_is_only_listed_is_what_its_name_says(name: str, role: str) -> None:
    assert role_of_name(name) == role


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("gemma-3-4b-it-Q4_K_M.gguf", ("gemma-3-4b-it", "Q4_K_M", "")),
        ("Gemma-3.q8_0.GGUF", ("gemma-3", "Q8_0", "")),
        ("x-UD-Q4_K_XL.gguf", ("x", "UD-Q4_K_XL", "")),
        ("x.i1-IQ2_XXS.gguf", ("x", "I1-IQ2_XXS", "")),
        ("gpt-oss-20b-mxfp4.gguf", ("gpt-oss-20b", "MXFP4", "")),
        ("a/Q8_0/x-00001-of-00003.gguf", ("x", "Q8_0", "00001-of-00003")),
        ("x-BF16-00002-of-00002.gguf", ("x", "BF16", "00002-of-00002")),
        ("qwen2.5-q2.gguf", ("qwen2.5", "Q2", "")),
        ("llama.gguf", ("llama", "", "")),
    ],
)
def test_a_name_has_a_quantization_and_a_part(name: str, found: tuple[str, str, str]) -> None:
    assert named(name) == NamedFile(*found)


def test_quantizations_are_known_by_their_names() -> None:
    assert all(map(is_quantization, ("Q4_K_M", "iq3_xxs", "F16", "UD-Q2_K_XL", "TQ1_0")))
    assert not any(map(is_quantization, ("MTP", "original", "Q", "", "x-Q4_0")))


def test_a_companion_belongs_to_the_model_whose_name_it_has() -> None:
    assert belongs_to("mmproj-gemma", "gemma-3")
    assert belongs_to("gemma-mmproj", "gemma-3")
    assert belongs_to("org_repo_mmproj-model", "org_repo_gemma-3")
    assert belongs_to("mmproj", "anything")
    assert not belongs_to("mmproj-gemma", "llama-3")
    assert not belongs_to("gemma-mmproj", "llama-3")
    assert not belongs_to("vision", "llama-3")


def test_of_several_types_the_model_s_is_taken_or_else_16_bits() -> None:
    names = ["mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf", "mmproj-Q8_0.gguf"]
    assert best(names, "Q8_0") == "mmproj-Q8_0.gguf"
    assert best(names, "Q4_K_M") == "mmproj-F16.gguf"
    assert best(names[2:], "") == "mmproj-F32.gguf"
