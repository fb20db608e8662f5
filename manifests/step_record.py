"""The file of a training step that says what its tensors are called in the program, and has its other values.

It is JSON, described in docs/reference/format.md. Values are those of :mod:`blobstore.manifests.plain_values`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from blobstore.core import strict_json
from blobstore.core.escape import quote
from blobstore.errors import BlobDamaged

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blobstore.manifests.reference import Reference

RECORD_FILE: Final = "training_state.json"
METRICS_FILE: Final = "metrics.json"
STATE: Final = ".state"
"""What the tag of the name ends with that has all of a step."""
_VERSION: Final = 1

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The state of a training program: its tensors by key, and its other values."""

    model: str
    """The part of the state whose tensors are stored under their own names; may be empty."""
    tensors: Mapping[str, Path]
    """The keys of tensors, and the keys of the nested dicts and lists which lead there."""
    values: Mapping[str, tuple[Path, Any]]
    """The same of values, and these as JSON."""
    containers: Mapping[Path, Any] = field(default_factory=dict)
    """Containers that are not lists or dicts with texts as keys, or are empty: by their paths, with None for each value."""

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        value = {
            "version": _VERSION,
            "model": self.model,
            "tensors": {key: list(path) for key, path in sorted(self.tensors.items())},
            "values": {
                key: {"path": list(path), "value": value}
                for key, (path, value) in sorted(self.values.items())
            },
        }
        if self.containers:
            value["containers"] = [
                {"path": list(path), "value": value}
                for path, value in sorted(self.containers.items(), key=str)
            ]
        return strict_json.dumps(value).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> StepRecord:
        """Return the record in the content of a file, which is not trusted.

        Raises:
            BlobDamaged: it is malformed.
        """
        try:
            value = strict_json.loads(data)
        except ValueError as error:
            raise BlobDamaged(f"{RECORD_FILE}: {error}") from None
        match value:
            case {
                "version": 1,
                "model": str(model),
                "tensors": dict(tensors),
                "values": dict(values),
            }:
                try:
                    return cls(
                        model=model,
                        tensors={key: _path(path) for key, path in tensors.items()},
                        values={
                            key: (_path(item["path"]), item["value"])
                            for key, item in values.items()
                        },
                        containers={
                            _path(item["path"], at_root=True): item["value"]
                            for item in value.get("containers", ())
                        },
                    )
                except (KeyError, TypeError, ValueError):
                    pass
            case {"version": int(version)} if version > _VERSION:
                raise BlobDamaged(
                    f"{RECORD_FILE} has version {version}, which is newer than this program"
                )
        raise BlobDamaged(f"{RECORD_FILE} is not the record of a step: {quote(str(value)[:80])}")


def state_of(reference: Reference) -> Reference:
    """Return the name that has all of a step."""
    return replace(reference, tag=f"{reference.tag}{STATE}")


def is_state(reference: Reference) -> bool:
    """Return whether a name is that of all of a step."""
    return reference.tag.endswith(STATE)  # no tag begins with a dot


def step_of(reference: Reference) -> Reference:
    """Return the name of the step that a name belongs to."""
    return replace(reference, tag=reference.tag.removesuffix(STATE))


def stored_name(key: str, model: str) -> str:
    """Return the name that a tensor has in the store: those of the model are called as in the model."""
    return key.removeprefix(f"{model}.") if model else key


def is_of_model(key: str, model: str) -> bool:
    """Return whether a tensor belongs to the model."""
    return bool(model) and key.startswith(f"{model}.")


def _path(value: Any, *, at_root: bool = False) -> Path:
    is_path = isinstance(value, list) and all(type(key) in (str, int) for key in value)
    if not (is_path and (value or at_root)):
        raise ValueError("not a path")
    return tuple(value)
