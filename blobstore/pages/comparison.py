"""The page of a comparison of two models: the view of a model, coloured by its errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from blobstore.pages.model_view import GridTensor, grid
from blobstore.pages.shell import render_page
from blobstore.pages.text import shown
from blobstore.pages.weight_statistics import error_of, plain
from blobstore.quantization.formats import type_name

if TYPE_CHECKING:
    from blobstore.operations.compare.compare import Comparison

_MAX_NAMES = 100
"""Tensors that only one of the models has and that are listed."""


def comparison_page(compared: Comparison) -> str:
    """Return the page of a comparison. It is the same for equal comparisons."""
    data = comparison_data(compared)
    return render_page(data["root"], data)


def comparison_data(compared: Comparison) -> dict[str, Any]:
    """Return what the page of a comparison shows: JSON values."""
    name, base = shown(compared.reference), shown(compared.base)
    tensors = [
        GridTensor(
            one.name,
            type_name(one.type, one.group_size),
            one.shape,
            one.nbytes,
            one.bits_per_weight,
        )
        for one in compared.tensors
    ]
    totals = {
        "differing": len(compared.differing),
        "relative_error": plain(compared.relative_error),
        "snr_db": plain(compared.snr_db),
        "max_abs_error": compared.max_abs_error,
        "nonfinite": compared.nonfinite,
        "bits_per_weight": compared.bits_per_weight,
        "base_bits_per_weight": compared.base_bits_per_weight,
        "only": [
            [owner, len(names), [shown(item) for item in names[:_MAX_NAMES]]]
            for owner, names in ((name, compared.only_in_model), (base, compared.only_in_base))
            if names
        ],
    }
    view = {
        "base": base,
        "compared": totals,
        "faults": [],
        **grid(tensors, {one.name: error_of(one) for one in compared.tensors}),
    }
    return {
        "root": f"{name} compared with {base}",
        "start": f"model/{quote(name, safe='')}/error",
        "model": {name: view},
    }
