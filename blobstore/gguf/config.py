"""The facts about a model in the header of a GGUF file, under the keys of a ``config.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from blobstore.gguf.header import GgufHeader

_SIZES: Final = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "expert_count": "num_experts",
}
"""Keys without the architecture that they begin with, as ``docs/gguf.md`` of ggml lists them."""
_MAX_BASES: Final = 100


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Return architecture, sizes, license and base models; what the header does not say is left out."""
    metadata = header.metadata
    architecture = header.architecture
    found: dict[str, Any] = {}
    if architecture:
        found["architectures"] = [architecture]
        found["model_type"] = architecture
    for key, name in _SIZES.items():
        value = metadata.get(f"{architecture}.{key}")
        if type(value) is int:
            found[name] = value
    license_name = metadata.get("general.license")
    if isinstance(license_name, str) and license_name:
        found["license"] = license_name
    count = metadata.get("general.base_model.count", 0)
    bases = []
    for number in range(min(count, _MAX_BASES) if type(count) is int else 0):
        start = f"general.base_model.{number}"
        for key in ("repo_url", "name"):
            value = metadata.get(f"{start}.{key}")
            if isinstance(value, str) and value:
                bases.append(value.removeprefix("https://huggingface.co/"))
                break
    if bases:
        found["base_model"] = bases
    return found
