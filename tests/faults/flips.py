"""Single bits that flip in blobs, hot and cold, and manifests: ``verify`` finds each, and says where."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobstore.core.digest import Digest
from blobstore.manifests import media_types
from blobstore.store.local import LocalStore
from tests.faults.invariants import Findings, layers
from tests.faults.known import Known, command, write_models
from tests.faults.outcomes import Effort, Outcome
from tests.faults.processes import workspace
from tests.support.models import moe_tensors, write_folder

_MANIFESTS = 0.25
"""How many bits flip in a manifest: by their bytes there would be few."""
_LENGTH = 8
"""Bytes of the length that a tensor blob begins with."""


_FROZEN = 0.25
"""How many of the other bits flip in what is frozen."""


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    offset: int
    bit: int

    def flip(self) -> None:
        """Flip the bit, or flip it back."""
        mode = self.path.stat().st_mode
        self.path.chmod(0o600)
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            (byte,) = os.pread(descriptor, 1, self.offset)
            os.pwrite(descriptor, bytes([byte ^ 1 << self.bit]), self.offset)
        finally:
            os.close(descriptor)
        self.path.chmod(mode & 0o777)

    def __str__(self) -> str:
        return f"bit {self.bit} of byte {self.offset} of {self.path.name}"


def run(effort: Effort) -> list[Outcome]:
    """Flip ``effort.count`` bits, one at a time."""
    blobs, manifests = Outcome("bit flipped in a blob"), Outcome("bit flipped in a manifest")
    frozen = Outcome("bit flipped in a cold blob, or in its base")
    chance = random.Random(effort.seed)
    with workspace() as folder:
        store = folder / "store"
        models = write_models(folder / "sources", 2)
        experts = Known("moe", write_folder(folder / "moe", moe_tensors()), {})
        for model in (*models, experts):
            code, _, errors = command("create", model.folder, model.name, "--store", store)
            assert code == 0, errors
        stored = [
            (model, layer, store / "blobs" / layer["digest"].replace(":", "-"))
            for model in (*models, experts)
            for layer in layers(store, model)
        ]
        files = sorted({path for *_, path in stored})
        sizes = [path.stat().st_size for path in files]
        cold_store, cold_files = folder / "frozen", _freeze(folder / "frozen", models)
        for _ in effort:
            if chance.random() < _MANIFESTS:
                model = chance.choice(models)
                path = store.joinpath("manifests", *model.reference.parts)
                place = _choose(path, chance)
                manifests.injected += 1
                manifests.add(_miss_in_manifest(store, model, place), str(place))
            elif chance.random() < _FROZEN:
                path = chance.choice(sorted(cold_files))
                place = _choose(path, chance)
                frozen.injected += 1
                frozen.add(
                    _miss_in_frozen(cold_store, models[1], cold_files[path], place), str(place)
                )
            else:
                (path,) = chance.choices(files, sizes)
                place = _choose(path, chance)
                owners = [(model, layer) for model, layer, blob in stored if blob == path]
                blobs.injected += 1
                blobs.add(_miss_in_blob(store, owners, place), str(place))
        code, output, _ = command("verify", "--json", "--store", store)
        if code:
            blobs.violate(f"verify of what was flipped back exits with {code}: {output}")
    return [blobs, manifests, frozen]


def _freeze(store: Path, models: Sequence[Known]) -> dict[Path, str]:
    """Freeze a model by another that loses its name; return the files, and the layers they are for."""
    base, model = models
    for arguments in (
        ("create", base.folder, base.name),
        ("create", model.folder, model.name),
        ("freeze", model.name, "--base", base.name),
        ("rm", base.name),
    ):
        code, _, errors = command(*arguments, "--store", store)
        assert code == 0, errors
    shelf = LocalStore(store)
    files = {}
    for layer in layers(store, model):
        digest = Digest.parse(layer["digest"])
        if shelf.has_cold(digest):
            files[Path(shelf.cold_path(digest))] = layer["name"]
            base_digest = shelf.open_cold(digest).base
            if base_digest is not None:
                files[Path(shelf.base_path(base_digest))] = layer["name"]
    assert any(path.parent.name == "bases" for path in files)
    return files


def _choose(path: Path, chance: random.Random) -> _Place:
    return _Place(path, chance.randrange(path.stat().st_size), chance.randrange(8))


def _faults(store: Path, place: _Place) -> list[dict[str, Any]] | str:
    """Return what ``verify`` finds while a bit is flipped, or what is wrong with it."""
    place.flip()
    try:
        code, output, errors = command("verify", "--json", "--store", store)
    finally:
        place.flip()
    if not code:
        return "verify has found nothing"
    try:
        faults: list[dict[str, Any]] = json.loads(output)["faults"]
    except (ValueError, KeyError):
        return f"verify exits with {code}: {output[-300:]} {errors[-300:]}"
    return faults


def _miss_in_blob(
    store: Path, owners: list[tuple[Known, dict[str, Any]]], place: _Place
) -> Findings:
    """Return what ``verify`` has not said: every layer that the blob is, and its tensor."""
    data = place.path.read_bytes()
    faults = _faults(store, place)
    if isinstance(faults, str):
        return Findings(others=[faults])
    told = {(fault["reference"], fault["layer"], fault["tensor"]) for fault in faults}
    found = Findings()
    for model, layer in owners:
        name = layer.get("name") or layer["mediaType"]
        tensors = {
            tensor
            for reference, at, tensor in told
            if (reference, at) == (str(model.reference), name)
        }
        if not tensors:
            found.others.append(f"layer {name} of {model.name} is not named: {faults}")
        elif layer["mediaType"] == media_types.TENSOR and _is_data(data, place.offset):
            names = _tensors(data)
            if len(names) == 1 and tensors != names:
                found.others.append(f"tensor {names} is not named: {faults}")
    reported = {(reference, at) for reference, at, _ in told}
    owned = {
        (str(model.reference), layer.get("name") or layer["mediaType"]) for model, layer in owners
    }
    if reported - owned:
        found.others.append(f"{sorted(reported - owned)} are named, but whole")
    return found


def _miss_in_frozen(store: Path, model: Known, layer: str, place: _Place) -> Findings:
    faults = _faults(store, place)
    if isinstance(faults, str):
        return Findings(others=[faults])
    told = {(fault["reference"], fault["layer"]) for fault in faults}
    others = [f"layer {layer} is not named, or others are: {faults}"]
    if told != {(str(model.reference), layer)}:
        return Findings(others=others)
    # What is damaged is named by its file, though it is a base of no model.
    if not any(place.path.name in fault["message"] for fault in faults):
        return Findings(others=[f"the file is not named: {faults}"])
    return Findings()


def _miss_in_manifest(store: Path, model: Known, place: _Place) -> Findings:
    text = place.path.read_bytes()
    around = text[max(0, place.offset - 30) : place.offset + 20]
    faults = _faults(store, place)
    if isinstance(faults, str):
        return Findings(others=[f"{faults}; around {around!r}"])
    if any(fault["reference"] == str(model.reference) for fault in faults):
        return Findings()
    return Findings(others=[f"model {model.name} is not named: {faults}"])


def _is_data(data: bytes, offset: int) -> bool:
    return offset >= _LENGTH + int.from_bytes(data[:_LENGTH], "little")


def _tensors(data: bytes) -> set[str]:
    header = json.loads(data[_LENGTH : _LENGTH + int.from_bytes(data[:_LENGTH], "little")])
    return {name for name in header if name != "__metadata__"}
