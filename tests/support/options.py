"""Arguments of ``create`` and ``push`` from the flat names of the command line, for tables of cases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from blobstore.core.arguments import one_or_more
from blobstore.operations.transfer.registry_target import RegistryOptions
from blobstore.planning.plan import QuantizeOptions
from blobstore.sources.base import SourceOptions

_GROUPS: dict[str, type[Any]] = {
    "source_options": SourceOptions,
    "quantize": QuantizeOptions,
    "registry": RegistryOptions,
}
_LISTS = ("keep", "exclude", "overrides", "mount_from")


def grouped(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments in which options that belong together are one value."""
    left = dict(flat)
    if isinstance(left.get("quantize"), str):
        left["quant_type"] = left.pop("quantize")
    for name in _LISTS:
        if name in left:
            left[name] = one_or_more(left[name])
    for argument, kind in _GROUPS.items():
        own = {one.name: left.pop(one.name) for one in fields(kind) if one.name in left}
        if own:
            left[argument] = kind(**own)
    return left
