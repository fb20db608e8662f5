"""The lock file: which models a machine should have, by the digests of their manifests, and where they come from.

It is TOML, sorted by name, so that a version control system shows what changed.
docs/reference/commands/lock-sync.md describes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from blobstore.core import strict_json, toml
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import UsageError
from blobstore.manifests.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

VERSION: Final = 1
_KEYS: Final = frozenset({"name", "manifest", "remote", "repository", "commit", "options"})


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LockedModel:
    """A model of a lock file. Without ``remote`` and ``repository``, nothing says where it comes from."""

    reference: Reference
    manifest: Digest
    """Of the manifest in the store."""
    remote: str = ""
    """Its address, which in a registry ends with the digest there."""
    repository: str = ""
    """Of the Hub, with ``commit`` and ``options``."""
    commit: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of the import."""

    @property
    def has_origin(self) -> bool:
        """Return whether another machine can fetch the model."""
        return bool(self.remote or self.repository)


def format_lock(models: Iterable[LockedModel]) -> str:
    """Return the text of a lock file.

    Raises:
        UsageError: an address has bytes that are not UTF-8, or the text would be too large to be read.
    """
    lines = [f"version = {VERSION}"]
    for model in sorted(models, key=lambda model: model.reference):
        values = {
            "name": str(model.reference),
            "manifest": str(model.manifest),
            "remote": model.remote,
            "repository": model.repository,
            "commit": model.commit,
            "options": json.dumps(dict(model.options), sort_keys=True) if model.options else "",
        }
        lines += ["", "[[models]]"]
        try:
            lines += [f"{key} = {toml.dumps_text(value)}" for key, value in values.items() if value]
        except UnicodeEncodeError:
            raise UsageError(
                f"no lock file can say where {quote(model.reference)} comes from: "
                f"{quote(model.remote)} is not UTF-8"
            ) from None
    text = "\n".join(lines) + "\n"
    if len(text) > toml.MAX_SIZE:
        raise UsageError(
            f"a lock file has {toml.MAX_SIZE} characters at most, and this one would have {len(text)}",
            advice="lock fewer models",
        )
    return text


def parse_lock(text: str, where: str) -> list[LockedModel]:
    """Return the models of a lock file, whose path ``where`` is for messages.

    Raises:
        UsageError: the text is not that of a lock file, or lists a name twice.
    """
    try:
        document = toml.loads(text)
    except ValueError as error:
        raise UsageError(f"{where}: not a lock file: {error}") from None
    if document.get("version") != VERSION:
        raise UsageError(
            f"{where}: the version is {quote(document.get('version'))}, expected {VERSION}"
        )
    listed = document.get("models", [])
    if not isinstance(listed, list):
        raise UsageError(f"{where}: models must be tables")
    found: dict[Reference, LockedModel] = {}
    for number, item in enumerate(listed, start=1):
        model = _model(item, f"{where}: model {number}")
        if model.reference in found:
            raise UsageError(f"{where}: model {number}: {quote(model.reference)} is listed twice")
        found[model.reference] = model
    return list(found.values())


def _model(item: object, where: str) -> LockedModel:
    if not isinstance(item, dict) or not all(isinstance(value, str) for value in item.values()):
        raise UsageError(f"{where}: expected a table of texts")
    if unknown := sorted(item.keys() - _KEYS):
        raise UsageError(f"{where}: unknown key {quote(unknown[0])}")
    if missing := sorted({"name", "manifest"} - item.keys()):
        raise UsageError(f"{where}: {missing[0]} is missing")
    try:
        options = strict_json.loads((item.get("options") or "{}").encode())
    except ValueError as error:
        raise UsageError(f"{where}: options: {error}") from None
    if not isinstance(options, dict):
        raise UsageError(f"{where}: options: expected an object of JSON")
    try:
        return LockedModel(
            reference=Reference.parse(item["name"]),
            manifest=Digest.parse(item["manifest"]),
            remote=item.get("remote", ""),
            repository=item.get("repository", ""),
            commit=item.get("commit", ""),
            options=options,
        )
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
