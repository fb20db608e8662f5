"""The place of a tensor in a picture of a model: its stack of layers, its layer, and its module."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

_NUMBER = re.compile(r"[0-9]{1,6}")
_EXPERTS = "experts"


class TensorPlace(NamedTuple):
    """A tensor's name in parts."""

    stack: str
    """The text before the number of the layer, such as ``model.layers``."""
    layer: int | None
    """None if the name has no number: the tensor is outside of layers."""
    module: str
    """The rest, in which ``*`` stands for the number of an expert."""


@lru_cache(1 << 15)  # the models of a store have the same names
def tensor_place(name: str) -> TensorPlace:
    """Return where a tensor belongs, by the first number in its name that is not an expert's."""
    parts = name.split(".")
    folded = [
        "*" if last == _EXPERTS and _NUMBER.fullmatch(part) else part
        for last, part in zip(["", *parts], parts, strict=False)
    ]
    for index, part in enumerate(folded):
        if _NUMBER.fullmatch(part):
            return TensorPlace(".".join(parts[:index]), int(part), ".".join(folded[index + 1 :]))
    return TensorPlace("", None, ".".join(folded))
