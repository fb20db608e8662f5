"""Opening a model of as many tensors as Qwen3-30B-A3B has, in torch, compared with safetensors' own loader.

18,867 tensors of 48 layers with 128 experts, which ``create`` packs into 48 groups. The tensors are
small: only their number matters, and neither loader reads their bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from blobstore.core.tensor import DTYPES, TensorSpec
from tests.benchmarks.common import arguments, workspace, write_model
from tests.benchmarks.open import compare

_LAYERS = 48
_EXPERTS = 128
_COUNT = 18_867
_HIDDEN = 64
_ATTENTION = {"q": (128, _HIDDEN), "k": (32, _HIDDEN), "v": (32, _HIDDEN), "o": (_HIDDEN, 128)}
_EXPERT = {"gate": (24, _HIDDEN), "up": (24, _HIDDEN), "down": (_HIDDEN, 24)}


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes, the latter smaller than Qwen's."""
    yield "model.embed_tokens.weight", (1024, _HIDDEN)
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", (_HIDDEN,)
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}.self_attn.{name}.weight", (16,)
        for name, shape in _ATTENTION.items():
            yield f"{prefix}.self_attn.{name}_proj.weight", shape
        yield f"{prefix}.mlp.gate.weight", (_EXPERTS, _HIDDEN)
        for expert in range(_EXPERTS):
            for name, shape in _EXPERT.items():
                yield f"{prefix}.mlp.experts.{expert}.{name}_proj.weight", shape
    yield "model.norm.weight", (_HIDDEN,)
    yield "lm_head.weight", (1024, _HIDDEN)


def make_model(folder: Path) -> Path:
    """Write the model's folder."""
    specs = {name: TensorSpec(name, DTYPES["BF16"], shape) for name, shape in shapes()}
    assert len(specs) == _COUNT
    return write_model(
        folder,
        specs.values(),
        lambda name: [os.urandom(specs[name].nbytes)],
        {"architectures": ["Qwen3MoeForCausalLM"]},
    )


def main() -> None:
    """Print the table."""
    options = arguments(__doc__)
    with workspace(options.folder) as folder:
        print(f"{_COUNT:,} tensors, {_LAYERS} packed groups\n")
        compare(folder, make_model(folder / "model"), options.rounds * 3)


if __name__ == "__main__":
    main()
