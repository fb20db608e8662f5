"""The types of GGUF tensors: blocks of weights, each of so many bytes.

The numbers are those of ``enum ggml_type`` in llama.cpp's ``ggml.h``, the sizes those of the structs in
``ggml-common.h``. Forks of llama.cpp use numbers above 39 for types of their own.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class GgufType(NamedTuple):
    """A type of tensors."""

    name: str
    weights: int
    """Per block; blocks never cross rows."""
    size: int
    """Bytes of a block."""

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return self.size * 8 / self.weights


TYPES: Final = {
    0: GgufType("F32", 1, 4),
    1: GgufType("F16", 1, 2),
    2: GgufType("Q4_0", 32, 18),
    3: GgufType("Q4_1", 32, 20),
    6: GgufType("Q5_0", 32, 22),
    7: GgufType("Q5_1", 32, 24),
    8: GgufType("Q8_0", 32, 34),
    9: GgufType("Q8_1", 32, 36),
    10: GgufType("Q2_K", 256, 84),
    11: GgufType("Q3_K", 256, 110),
    12: GgufType("Q4_K", 256, 144),
    13: GgufType("Q5_K", 256, 176),
    14: GgufType("Q6_K", 256, 210),
    15: GgufType("Q8_K", 256, 292),
    16: GgufType("IQ2_XXS", 256, 66),
    17: GgufType("IQ2_XS", 256, 74),
    18: GgufType("IQ3_XXS", 256, 98),
    19: GgufType("IQ1_S", 256, 50),
    20: GgufType("IQ4_NL", 32, 18),
    21: GgufType("IQ3_S", 256, 110),
    22: GgufType("IQ2_S", 256, 82),
    23: GgufType("IQ4_XS", 256, 136),
    24: GgufType("I8", 1, 1),
    25: GgufType("I16", 1, 2),
    26: GgufType("I32", 1, 4),
    27: GgufType("I64", 1, 8),
    28: GgufType("F64", 1, 8),
    29: GgufType("IQ1_M", 256, 56),
    30: GgufType("BF16", 1, 2),
    34: GgufType("TQ1_0", 256, 54),
    35: GgufType("TQ2_0", 256, 66),
    39: GgufType("MXFP4", 32, 17),
    40: GgufType("NVFP4", 64, 36),
    41: GgufType("Q1_0", 128, 18),
    42: GgufType("Q2_0", 64, 18),
}
"""By number."""
NUMBERS: Final = {kind.name: number for number, kind in TYPES.items()}
"""By name."""
