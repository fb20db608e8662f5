"""What a GGUF file is for: its role, from its header, and its quantization, from its name.

llama.cpp writes the kind of a file into ``general.type`` since 2024. Older files say it by their architecture
or by keys that only one kind has. Of a file that is listed and not here, only its name is known.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast, get_args

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from blobstore.gguf.header import Value

Role = Literal[
    "model",
    "projector",
    "adapter",
    "control vector",
    "draft model",
    "importance matrix",
    "vocabulary",
]
ROLES: Final = get_args(Role)
COMPANIONS: Final = ROLES[1:5]
"""The roles of files that a server loads with a model."""
USUAL: Final = "Q4_K_M"
"""The quantization that is meant if none is named, where there is one."""
_TYPES: Final = {"mmproj": "projector", "adapter": "adapter", "imatrix": "importance matrix"}
_ARCHITECTURES: Final = {
    "clip": "projector",
    "controlvector": "control vector",
    "eagle3": "draft model",
    "dflash": "draft model",
}
_NAMED: Final = (
    (re.compile(r"(.*[-_./])?mmproj([-_.].*)?"), "projector"),
    (re.compile(r"(.*/)?mtp[-_./].*"), "draft model"),
    (re.compile(r"(.*[-_./])?imatrix([-_.].*)?"), "importance matrix"),
    (re.compile(r"(.*[-_./])?(lora|adapter)([-_.](b?f16|f32|q8_0|\d+))?\.gguf"), "adapter"),
)
"""Names in lower case that say what a file is."""
_QUANTIZATION: Final = re.compile(
    r"(?:^|(?<=[-_. /]))(?:UD-|i1-)?"
    r"(?:(?:IQ|TQ|Q)\d+(?:_[A-Z0-9]+)*|B?F16|FP16|F32|FP32|(?:MX|NV)FP\d(?:_MOE)?)(?=[-_. /]|$)",
    re.IGNORECASE,
)
_PART: Final = re.compile(r"[-_.]\d+-of-\d+$")


class NamedFile(NamedTuple):
    """What the name of a GGUF file says."""

    stem: str
    """The name without folder, ending, quantization and number of the part, in lower case."""
    quantization: str
    """In capitals; empty if the name has none."""
    part: str
    """The number of the part and of all parts; mostly empty."""


def role_of(metadata: Mapping[str, Value], tensors: int, name: str) -> Role:
    """Return the role of a file.

    Args:
        metadata: its metadata up to the tokenizer, or all of it.
        tensors: the number of its tensors.
        name: its name. Of some heads that predict more tokens, only the name says that they are draft models.
    """
    architecture = str(metadata.get("general.architecture", ""))
    role = _TYPES.get(str(metadata.get("general.type", ""))) or _ARCHITECTURES.get(architecture)
    if role is None and architecture.endswith("-assistant"):
        role = "draft model"
    if role is None and any(key.startswith("imatrix.") for key in metadata):
        role = "importance matrix"
    if role is None and not tensors and not _is_part(metadata, name):
        role = "vocabulary"
    if role is None and role_of_name(name) == "draft model":
        role = "draft model"
    return cast("Role", role or "model")


def role_of_name(name: str) -> Role:
    """Return the role of a file of which only the name is known."""
    lower = name.lower()
    found = (role for pattern, role in _NAMED if pattern.fullmatch(lower))
    return cast("Role", next(found, "model"))


def _is_part(metadata: Mapping[str, Value], name: str) -> bool:
    """Return whether a file is part of a model. The first part of some models has no tensors."""
    return "split.count" in metadata or bool(named(name).part)


def named(name: str) -> NamedFile:
    """Return what the name of a file says. A folder that is named after a quantization counts, too."""
    folder, _, last = name.rpartition("/")
    stem = re.sub(r"\.gguf$", "", last, flags=re.IGNORECASE)
    part = _PART.search(stem)
    stem = stem[: part.start()] if part else stem
    found = [*_QUANTIZATION.finditer(stem)]
    quantization = found[-1][0] if found else ""
    if found:
        before, after = stem[: found[-1].start()], stem[found[-1].end() :]
        stem = before.rstrip("-_. ") + after
    elif is_quantization(folder.rpartition("/")[2]):
        quantization = folder.rpartition("/")[2]
    return NamedFile(stem.lower(), quantization.upper(), part[0][1:] if part else "")


def is_quantization(text: str) -> bool:
    """Return whether a text is the name of a quantization, such as ``Q4_K_M``."""
    return _QUANTIZATION.fullmatch(text) is not None


def has_quantization(name: str, quantization: str) -> bool:
    """Return whether a quantization, in letters of any case, is a part of the name of a file."""
    label = rf"(?<![A-Za-z0-9]){re.escape(quantization)}(?![A-Za-z0-9_])"
    return re.search(label, name, re.IGNORECASE) is not None


def belongs_to(companion: str, model: str) -> bool:
    """Return whether the stem of a companion is that of one model among several.

    The text before ``mmproj`` begins the name of the model, and the text behind it is in that name.
    """
    words = re.split(
        r"(?:^|(?<=[-_. ]))(?:mmproj|mtp|lora|adapter)(?:-model)?(?=[-_. ]|$)", companion
    )
    before, after = words[0], words[-1].strip("-_. ") if len(words) > 1 else ""
    return model.startswith(before.rstrip("-_. ")) and after in model


def best(names: Iterable[str], quantization: str) -> str:
    """Return which of the files that differ only in type to take: that of a type, else one of floats, 16 bits first."""
    order = (quantization, "F16", "BF16", "FP16", "F32")
    return min(names, key=lambda name: (_rank(named(name).quantization, order), name))


def _rank(quantization: str, order: tuple[str, ...]) -> int:
    return order.index(quantization) if quantization in order else len(order)
