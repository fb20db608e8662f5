from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.manifests import media_types

FORMAT = Path(__file__).parents[3] / "docs" / "reference" / "format.md"
OLLAMA = "application/vnd.ollama.image."
TYPES = {
    name: value
    for name, value in vars(media_types).items()
    if name.isupper() and isinstance(value, str) and value.startswith("application/")
}


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (media_types.CONFIG, "the config"),
        (media_types.TENSOR, "a tensor blob"),
        (
            media_types.JSON,
            (
                "a `*.json` file of the source, or `checkpoint_values.json` with the simple values of its "
                "PyTorch checkpoints"
            ),
        ),
        (media_types.FILE, "another file of the source, of any size"),
        (media_types.STACKS, "what stacking forgets (3.5)"),
        (media_types.SOURCE, "what the model was imported from (5)"),
    ],
)
def test_our_models_have_the_types_of_the_format(value: str, meaning: str) -> None:
    assert f"| `{value}` | {meaning} |" in FORMAT.read_text(encoding="utf-8")


def test_the_manifest_has_the_type_of_the_format() -> None:
    assert f"- **mediaType** text, REQUIRED, `{media_types.MANIFEST}`" in FORMAT.read_text("utf-8")


@pytest.mark.parametrize(
    "kind", ["template", "system", "license", "params", "model", "projector", "adapter"]
)
def test_ollama_s_own_layers_have_its_types(kind: str) -> None:
    assert TYPES[kind.upper()] == OLLAMA + kind


def test_no_two_types_are_the_same() -> None:
    assert len(set(TYPES.values())) == len(TYPES) == 15
