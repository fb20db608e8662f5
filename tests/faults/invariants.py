"""What must hold of a store after any fault; looked at with as little of the store's own code as can be.

Which blobs a manifest reaches is read from its JSON here, and digests are computed by hashlib: a store
that is wrong about itself would be right about it in its own words.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import blobstore
from blobstore.compression.base import BaseBlob
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.errors import ColdDamaged
from blobstore.store.local import LocalStore
from tests.faults.known import Known, command

_BLOB = re.compile(r"sha256-[0-9a-f]{64}")
_OURS = {
    "lock",
    "tmp",
    "leases",
    "headers",
    "quarantine",
    "cold",
    "cold-index",
    "bases",
    "claims",
    "history",
    "published",
    "partial",
    "remotes",
    "signatures",
    "pulled",
    "arrivals",
}
_COLD = Path(".blobstore", "cold")
_DEPTH = 4
"""Parts of a name: host, namespace, model and tag."""


@dataclass(slots=True)
class Findings:
    """What was found; empty if all is well."""

    names_lost: dict[str, str] = field(default_factory=dict)
    """What has become of them."""
    bytes_lost: int = 0
    others: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.names_lost or self.others)

    def lose(self, known: Known, how: str) -> None:
        """Note that a name is gone or not whole, the first time."""
        if known.name not in self.names_lost:
            self.names_lost[known.name] = how
            self.bytes_lost += known.size


@dataclass(frozen=True, slots=True)
class Expected:
    """What a store may hold."""

    present: Sequence[Known] = ()
    """Models that must be there, whole."""
    possible: Sequence[Known] = ()
    """Models that may be there, but if so, whole."""


def check_store(root: Path, expected: Expected, spare: Known | None = None) -> Findings:
    """Check a store that no process uses; collect its garbage; see that a model can be created.

    ``spare`` is that model. It is removed again, but not its blobs.
    """
    found = Findings()
    found.others.extend(_foreign_files(root))
    found.others.extend(_false_blobs(root))
    _check_names(root, expected, found)
    _verify(root, found, "before gc")
    _check_collection(root, found)
    _check_names(root, expected, found, again=True)
    if spare is not None:
        _check_creation(root, spare, found)
    return found


def _foreign_files(root: Path) -> Iterator[str]:
    """Yield what has no business in a store, dead or alive."""
    for entry in _entries(root):
        if entry.name not in {"blobs", "manifests", ".blobstore"}:
            yield f"a foreign file {entry.path}"
    for entry in (*_entries(root / "blobs"), *_entries(root / _COLD)):
        if not _BLOB.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
            yield f"a foreign file {entry.path}"
    manifests = root / "manifests"
    for path in manifests.rglob("*"):
        is_deep = len(path.relative_to(manifests).parts) == _DEPTH
        if path.is_dir() == is_deep:
            yield f"a foreign file {path}"


def _false_blobs(root: Path) -> Iterator[str]:
    """Yield blobs that are not what their names say: a blob is whole or has no name."""
    for entry in _entries(root / "blobs"):
        data = Path(entry.path).read_bytes()
        if f"sha256-{hashlib.sha256(data).hexdigest()}" != entry.name:
            yield f"blob {entry.name} has {len(data)} bytes of another digest"
    for entry in _entries(root / _COLD):
        try:
            data = _decoded(root, entry.name)
        except Exception as error:  # noqa: BLE001 - whatever it is, the blob is lost
            yield f"cold blob {entry.name} cannot be decoded: {type(error).__name__}: {error}"
            continue
        if f"sha256-{hashlib.sha256(data).hexdigest()}" != entry.name:
            yield f"cold blob {entry.name} decodes to {len(data)} bytes of another digest"


def _decoded(root: Path, name: str) -> bytes:
    """Return what a cold blob stands for."""
    blob = ColdBlobDecoder((root / _COLD / name).read_bytes())
    if blob.table.base is not None:
        base = blob.table.base.digest.file_name
        hot = root / "blobs" / base
        pinned = root / ".blobstore" / "bases" / base
        whole = next((path for path in (hot, pinned) if path.exists()), None)
        data = whole.read_bytes() if whole is not None else _decoded(root, base)
        blob.give_base(BaseBlob.hot(data))
    out = bytearray(blob.size)
    blob.read_into(out)
    return bytes(out)


def bases_of(root: Path, reached: Iterable[str]) -> set[str]:
    """Return the blobs by which others are coded that are reached."""
    bases = set()
    for name in reached:
        path = root / _COLD / name
        if path.exists():
            with contextlib.suppress(ColdDamaged):  # told elsewhere
                base = ColdBlobDecoder(path.read_bytes()).table.base
                bases |= {base.digest.file_name} if base is not None else set()
    return bases


def _check_names(root: Path, expected: Expected, found: Findings, *, again: bool = False) -> None:
    when = ", after gc" if again else ""
    store = LocalStore(root, lock_timeout=5)
    names = _names(root)
    known = by_parts([*expected.present, *expected.possible])
    for parts in names - known.keys():
        found.others.append(f"there is a name {'/'.join(parts)}{when}")
    for model in expected.present:
        if model.reference.parts not in names:
            found.lose(model, f"the name is gone{when}")
    for parts in names & known.keys():
        if problems := check_model(store, known[parts]):
            found.lose(known[parts], f"{problems[0]}{when}")


def check_model(store: LocalStore, model: Known, name: str | None = None) -> list[str]:
    """Return what is wrong with a model as a loader sees it: without and with what is cached."""
    problems = []
    for level in ("size", "rehash"):
        try:
            with blobstore.open(name or model.name, store=store, verify=level) as opened:  # type: ignore[arg-type]
                problems += model.differences(opened)
        except Exception as error:  # noqa: BLE001 - whatever it is, a loader would have met it
            problems.append(f"open(verify={level}): {type(error).__name__}: {error}")
    return problems


def _verify(root: Path, found: Findings, when: str) -> None:
    if not root.exists():
        return
    code, output, errors = command("verify", "--json", "--store", root)
    # Blobs of a first model whose import was interrupted at the end look as if their name was lost.
    if (code or errors) and _names(root):
        found.others.append(f"verify {when} exits with {code}: {output[-500:]} {errors[-500:]}")


def _check_collection(root: Path, found: Findings) -> None:
    """Collect all garbage, and check that it was all and nothing else."""
    if not root.exists():
        return
    before, names = _blobs(root), _names(root)
    reached = _reached(root, names)
    reached |= bases_of(root, reached)
    code, output, errors = command("gc", "--force", "--older-than", "0s", "--json", "--store", root)
    if code or errors:
        found.others.append(f"gc exits with {code}: {output[-500:]} {errors[-500:]}")
        return
    if _names(root) != names:
        found.others.append("gc has removed a name")
    after = _blobs(root)
    if missing := (reached & before) - after:
        found.others.append(f"gc has removed {sorted(missing)}, which are reached")
    if garbage := after - reached:
        found.others.append(f"gc has left {sorted(garbage)}, which nothing reaches")
    found.others.extend(_leftovers(root))


def _leftovers(root: Path) -> Iterator[str]:
    """Yield what a collection must not leave, where no process lives."""
    for folder in ("tmp", "leases", "partial"):
        if left := [entry.name for entry in _entries(root / ".blobstore" / folder)]:
            yield f"gc has left {left} in {folder}"
    for path in sorted((root / ".blobstore").rglob(".*")):
        yield f"gc has left {path.relative_to(root)}"
        path.unlink()  # told once
    for entry in _entries(root / ".blobstore"):
        if entry.name not in _OURS and not entry.name.startswith(("verified-", "references-")):
            yield f"a foreign file {entry.path}"
    for folder, inner, files in os.walk(root / "manifests", topdown=False):
        if not inner and not files and Path(folder) != root / "manifests":
            yield f"gc has left the empty folder {folder}"


def _check_creation(root: Path, spare: Known, found: Findings) -> None:
    code, _, errors = command("create", spare.folder, spare.name, "--store", root)
    if code:
        found.others.append(f"the next create exits with {code}: {errors[-500:]}")
        return
    found.others += [f"created next: {text}" for text in check_model(LocalStore(root), spare)]
    forget(root, spare)


def forget(root: Path, *models: Known) -> None:
    """Remove names as a killed ``rm`` does: only the files of their manifests, and the second links."""
    for model in models:
        for folder in ("manifests", ".blobstore/published"):
            root.joinpath(folder, *model.reference.parts).unlink(missing_ok=True)


def layers(root: Path, model: Known) -> list[dict[str, Any]]:
    """Return the layers of a model as its manifest's JSON tells them, the config first."""
    path = root.joinpath("manifests", *model.reference.parts)
    manifest = json.loads(path.read_bytes())
    return [manifest["config"], *manifest["layers"]]


def _reached(root: Path, names: Iterable[tuple[str, ...]]) -> set[str]:
    reached = set()
    for parts in names:
        try:
            manifest = json.loads(root.joinpath("manifests", *parts).read_bytes())
        except ValueError:  # told elsewhere
            continue
        for layer in (manifest["config"], *manifest["layers"]):
            reached.add(layer["digest"].replace(":", "-"))
    return reached


def _names(root: Path) -> set[tuple[str, ...]]:
    manifests = root / "manifests"
    return {
        path.relative_to(manifests).parts
        for path in manifests.rglob("*")
        if stat.S_ISREG(path.lstat().st_mode)
    }


def _blobs(root: Path) -> set[str]:
    return {entry.name for entry in (*_entries(root / "blobs"), *_entries(root / _COLD))}


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []


def by_parts(models: Iterable[Known]) -> dict[tuple[str, ...], Known]:
    """Return models by the parts of their names."""
    return {model.reference.parts: model for model in models}
