"""Commands that faults strike: what comes before each, and what may be afterwards."""

from __future__ import annotations

import atexit
import contextlib
import functools
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.numpy import load_file

from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.store.local import LocalStore
from tests.faults.invariants import (
    Expected,
    Findings,
    check_model,
    check_store,
    forget,
    layers,
)
from tests.faults.known import Known, command, write_models
from tests.faults.processes import Ended
from tests.readers.weight_versions import Receiver, Trainer
from tests.support.stub_registry import StubRegistry


class Scene:
    """A store with two models that stay, others that come and go, and one for the next create."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.target = folder / "target"
        self.chance = random.Random(seed)
        models = write_models(folder / "sources", 5)
        self.kept = models[:2]
        self.guest, self.gone, self.spare = models[2:]
        self.second = self.guest.called("second")
        self.hurt = Path()
        """The blob that was damaged last."""
        self.damages: dict[bytes | None, str] = {}
        """What it may be, None for nothing at all."""
        self.remote: str | None = None
        """Where the last push went."""
        self.number = 0
        """How many repositories were pushed to."""
        for model in self.kept:
            self.must("create", model.folder, model.name)

    def must(self, *arguments: object) -> None:
        """Run a command that cannot fail."""
        code, output, errors = command(*arguments, "--store", self.store)
        assert code == 0, f"{arguments} exits with {code}: {output} {errors}"


@dataclass(frozen=True, slots=True)
class Operation:
    """A command: what comes before it, and what may be afterwards."""

    name: str
    prepare: Callable[[Scene], list[object]]
    """Makes everything ready; returns the arguments."""
    judge: Callable[[Scene, Ended], Findings]
    codes: tuple[int, ...] = (0,)
    """Its exit code if nothing strikes: ``diff`` has 1 if models differ."""


def _store_of(scene: Scene) -> list[object]:
    return ["--store", scene.store]


def _checked(scene: Scene, ended: Ended, *, made: Known | None = None) -> Findings:
    """Check the store; ``made`` is there if the command has said so."""
    present = [*scene.kept]
    possible: list[Known] = []
    if made is not None:
        (present if ended.code == 0 else possible).append(made)
    return check_store(scene.store, Expected(present, possible), scene.spare)


# create


def _before_create(scene: Scene) -> list[object]:
    # The blobs of the last attempt are there or not: it writes them, or finds them and holds them.
    forget(scene.store, scene.guest)
    if scene.chance.random() < 0.5:
        scene.must("gc", "--force", "--older-than", "0s")
    return ["create", scene.guest.folder, scene.guest.name, *_store_of(scene)]


def _after_create(scene: Scene, ended: Ended) -> Findings:
    return _checked(scene, ended, made=scene.guest)


def _before_first_create(scene: Scene) -> list[object]:
    """Let neither the store nor the folder that holds it exist."""
    scene.store = scene.folder / "new" / "store"
    shutil.rmtree(scene.store.parent, ignore_errors=True)
    scene.kept = []
    return ["create", scene.guest.folder, scene.guest.name, *_store_of(scene)]


# gc


def _before_gc(scene: Scene) -> list[object]:
    for model in (scene.guest, scene.gone):
        scene.must("create", model.folder, model.name)
    forget(scene.store, scene.guest, scene.gone)
    return ["gc", "--force", "--older-than", "0s", *_store_of(scene)]


# rm


def _before_rm(scene: Scene) -> list[object]:
    for model in (scene.guest, scene.gone):
        scene.must("create", model.folder, model.name)
    return ["rm", scene.guest.name, scene.gone.name, *_store_of(scene)]


def _after_rm(scene: Scene, ended: Ended) -> Findings:
    there = [] if ended.code == 0 else [scene.guest, scene.gone]
    found = check_store(scene.store, Expected(scene.kept, there), scene.spare)
    forget(scene.store, *there)
    return found


# cp and mv


def _before_cp(scene: Scene) -> list[object]:
    forget(scene.store, scene.second)
    scene.must("create", scene.guest.folder, scene.guest.name)
    return ["cp", scene.guest.name, scene.second.name, *_store_of(scene)]


def _after_cp(scene: Scene, ended: Ended) -> Findings:
    present = [*scene.kept, scene.guest, *([scene.second] if ended.code == 0 else [])]
    return check_store(scene.store, Expected(present, [scene.second]), scene.spare)


def _before_mv(scene: Scene) -> list[object]:
    return ["mv", *_before_cp(scene)[1:]]


def _after_mv(scene: Scene, ended: Ended) -> Findings:
    """Check that the model has one of its names, or both, but the old one only until it is done."""
    if ended.code == 0:
        return check_store(scene.store, Expected([*scene.kept, scene.second]), scene.spare)
    has_both = Expected(scene.kept, [scene.guest, scene.second])
    has_old = scene.store.joinpath("manifests", *scene.guest.reference.parts).exists()
    has_new = scene.store.joinpath("manifests", *scene.second.reference.parts).exists()
    found = check_store(scene.store, has_both, scene.spare)
    if not has_old and not has_new:
        found.lose(scene.guest, "it has neither its old name nor the new one")
    return found


# restore


def _before_restore(scene: Scene) -> list[object]:
    """Let a name have been the guest before it became the other one."""
    forget(scene.store, scene.second)
    for model in (scene.guest, scene.gone):
        scene.must("create", model.folder, model.name)
        scene.must("cp", "--force", model.name, scene.second.name)
    return ["restore", scene.second.name, *_store_of(scene)]


def _after_restore(scene: Scene, ended: Ended) -> Findings:
    """Check that the name is the model that it was, or the former one, and that the other can be restored."""
    manifests = [
        scene.store.joinpath("manifests", *model.reference.parts)
        for model in (scene.second, scene.guest, scene.gone)
    ]
    now, former, latest = (path.read_bytes() for path in manifests)
    model = scene.guest if now == former else scene.gone
    expected = Expected([*scene.kept, scene.guest, scene.gone, model.called(scene.second.name)])
    found = check_store(scene.store, expected, scene.spare)
    if ended.code == 0 and now != former:
        found.others.append("the name is not the former model")
    scene.must("restore", scene.second.name)
    if manifests[0].read_bytes() != (latest if now == former else former):
        found.others.append("the other model cannot be restored")
    forget(scene.store, scene.guest, scene.gone, scene.second)
    return found


# repair


def _before_repair(scene: Scene) -> list[object]:
    model = scene.kept[1]
    layer = scene.chance.choice(layers(scene.store, model))
    scene.hurt = scene.store / "blobs" / layer["digest"].replace(":", "-")
    data = scene.hurt.read_bytes()
    scene.damages = {data: "whole", **_damage(scene, data)}
    return ["repair", model.name, "--from", model.folder, *_store_of(scene)]


def _damage(scene: Scene, data: bytes) -> dict[bytes | None, str]:
    """Damage a blob in some way; return what it is then."""
    scene.hurt.unlink()
    way = scene.chance.choice(("flipped", "cut", "gone"))
    if way == "gone":
        return {None: way}
    damaged = data[:-1] + (bytes([data[-1] ^ 1]) if way == "flipped" else b"")
    scene.hurt.write_bytes(damaged)
    return {damaged: way}


def _after_repair(scene: Scene, ended: Ended) -> Findings:
    """Check that the blob is whole, or as damaged as it was before, and can be repaired again."""
    now = scene.hurt.read_bytes() if scene.hurt.exists() else None
    state = scene.damages.get(now)
    others = [] if state else [f"{scene.hurt.name} is neither whole nor as it was, but {now!r:.80}"]
    if ended.code == 0 and state != "whole":
        others.append(f"{scene.hurt.name} was repaired, but is {state}")
    scene.must("repair", scene.kept[1].name, "--from", scene.kept[1].folder)
    found = _checked(scene, ended)
    found.others.extend(others)
    return found


# verify


def _before_verify(scene: Scene) -> list[object]:
    return ["verify", *_store_of(scene)]


# freeze and thaw


def _before_freeze(scene: Scene) -> list[object]:
    """Let models be hot; those that stay are frozen too, or share blobs with what is, or are its bases."""
    scene.must("create", scene.guest.folder, scene.guest.name)
    everyone = [model.name for model in (scene.guest, *scene.kept)]
    scene.must("thaw", *everyone)
    if scene.chance.random() < 0.3:  # as a killed one leaves them
        scene.must("freeze", "--keep-hot", scene.guest.name)
    return ["freeze", *_some(scene, everyone), *_store_of(scene)]


def _before_thaw(scene: Scene) -> list[object]:
    scene.must("create", scene.guest.folder, scene.guest.name)
    everyone = [model.name for model in (scene.guest, *scene.kept)]
    scene.must("freeze", *everyone)
    keep = ["--keep-cold"] if scene.chance.random() < 0.3 else []
    return ["thaw", *keep, *_some(scene, everyone), *_store_of(scene)]


def _some(scene: Scene, everyone: list[str]) -> list[str]:
    """Return all names, or one: then a base stays or becomes hot while its deltas are cold."""
    return everyone if scene.chance.random() < 0.4 else [scene.chance.choice(everyone)]


def _after_moving(scene: Scene, ended: Ended) -> Findings:
    del ended  # the models are there whatever became of it
    expected = Expected([*scene.kept, scene.guest])
    return check_store(scene.store, expected, scene.spare)


# export and link


def _before_export(scene: Scene) -> list[object]:
    shutil.rmtree(scene.target, ignore_errors=True)
    return ["export", scene.kept[0].name, scene.target, *_store_of(scene)]


def _after_export(scene: Scene, ended: Ended) -> Findings:
    found = _checked(scene, ended)
    if scene.target.exists():
        found.others.extend(check_folder(scene.target, scene.kept[0]))
    elif ended.code == 0:
        found.others.append("the exported folder is not there")
    for left in scene.folder.glob(".*.tmp"):  # of a folder that was being built; nobody's now
        shutil.rmtree(left)
    return found


def _before_link(scene: Scene) -> list[object]:
    return ["link", *_before_export(scene)[1:]]


def check_folder(folder: Path, model: Known) -> list[str]:
    """Return what is wrong with an exported folder: it is whole or not there."""
    names = {path.name for path in folder.iterdir() if not path.name.startswith("model")}
    expected = {path.name for path in model.folder.iterdir()} - {"model.safetensors"}
    if names != expected:
        return [f"the exported folder holds {sorted(names)}, not {sorted(expected)}"]
    tensors: dict[str, bytes] = {}
    try:
        for path in folder.glob("*.safetensors"):  # a folder of links has one for each blob
            tensors |= {name: array.tobytes() for name, array in load_file(path).items()}
    except Exception as error:  # noqa: BLE001 - whatever it is, the file is not whole
        return [f"the exported weights cannot be read: {error}"]
    if tensors != model.tensors:
        return ["the exported weights have other bytes"]
    return []


# pack and unpack


def _archive(scene: Scene) -> Path:
    return scene.folder / "models.bsar"


def _before_pack(scene: Scene) -> list[object]:
    """Let models be hot, or one of them frozen."""
    _archive(scene).unlink(missing_ok=True)
    everyone = [model.name for model in scene.kept]
    scene.must("thaw", *everyone)
    if scene.chance.random() < 0.3:
        scene.must("freeze", scene.chance.choice(everyone))
    return ["pack", *everyone, _archive(scene), *_store_of(scene)]


def _after_pack(scene: Scene, ended: Ended) -> Findings:
    found = _checked(scene, ended)
    if _archive(scene).exists():
        code, _, errors = command("unpack", _archive(scene), "--verify-only")
        if code:
            found.others.append(f"the archive is not whole: {errors}")
    elif ended.code == 0:
        found.others.append("the archive is not there")
    for left in scene.folder.glob(".*.tmp"):  # of a file that was being written; nobody's now
        left.unlink()
    return found


def _before_unpack(scene: Scene) -> list[object]:
    """Let an archive have a model that the store has not, and one that it has."""
    scene.must("create", scene.guest.folder, scene.guest.name)
    names = [scene.guest.name, scene.kept[0].name]
    scene.must("pack", "--force", *names, _archive(scene))
    return ["unpack", _archive(scene), *_before_create(scene)[3:]]


# pull


@functools.cache
def registry() -> StubRegistry:
    """Return a registry that stays for the life of this process."""
    return _at_exit.enter_context(StubRegistry())


def offered(scene: Scene) -> str:
    """Return the address of the guest in the registry."""
    origin = LocalStore(scene.folder / "origin")
    code, _, errors = command("create", scene.guest.folder, "guest", "--store", origin.root)
    assert code == 0, errors
    plan = plan_ollama(origin.read_manifest("guest"))
    return registry().put(origin, plan, "team/guest", "latest")


def _before_pull(scene: Scene) -> list[object]:
    """Let unfinished downloads of the last attempt be there or not."""
    options = _before_create(scene)[3:]
    return ["pull", offered(scene), scene.guest.name, "--streams", "1", *options]


# follow, and what trainers write


def _versions(scene: Scene) -> Path:
    return scene.folder / "versions"


def _before_follow(scene: Scene) -> list[object]:
    """Let a name be the guest, and a trainer have made the other model of it."""
    for name in (scene.guest.name, scene.second.name):
        scene.must("create", scene.guest.folder, name)
    weights = [load_file(model.folder / "model.safetensors") for model in (scene.guest, scene.gone)]
    Trainer(_versions(scene), weights[0]).publish(weights[1])
    return [
        *("follow", scene.second.name, f"slime:{_versions(scene)}", "--once"),
        *_store_of(scene),
    ]


def _after_follow(scene: Scene, ended: Ended) -> Findings:
    """Check that the name is the version that it was or the new one, and that the next follow gets that."""
    manifests = [
        scene.store.joinpath("manifests", *model.reference.parts).read_bytes()
        for model in (scene.second, scene.guest)
    ]
    is_new = manifests[0] != manifests[1]
    model = (scene.gone if is_new else scene.guest).called(scene.second.name)
    found = check_store(scene.store, Expected([*scene.kept, scene.guest, model]), scene.spare)
    if ended.code == 0 and not is_new:
        found.others.append("the name is not the new version")
    scene.must("follow", scene.second.name, f"slime:{_versions(scene)}", "--once")
    new = scene.gone.called(scene.second.name)
    found.others.extend(check_model(LocalStore(scene.store), new))
    forget(scene.store, scene.guest, scene.second)
    return found


def _before_push_version(scene: Scene) -> list[object]:
    shutil.rmtree(_versions(scene), ignore_errors=True)
    scene.must("create", scene.guest.folder, scene.guest.name)
    base = scene.kept[0].name
    folder = _versions(scene)
    return ["push", scene.guest.name, folder, "--as=slime", "--base", base, *_store_of(scene)]


def _after_push_version(scene: Scene, ended: Ended) -> Findings:
    """Check that a receiver gets the model, or that there is no version."""
    found = _checked(scene, ended, made=scene.guest)
    if (_versions(scene) / "weight_v000001").exists():
        receiver = Receiver(scene.target, scene.kept[0].folder)
        receiver.pull(_versions(scene), 1)
        weights = {name: array.tobytes() for name, array in receiver.weights().items()}
        shutil.rmtree(scene.target)
        if weights != scene.guest.tensors:
            found.others.append("the receiver has other weights")
    elif ended.code == 0:
        found.others.append("the version is not there")
    return found


_at_exit = contextlib.ExitStack()
atexit.register(_at_exit.close)

OPERATIONS = (
    Operation("create", _before_create, _after_create),
    Operation("create in a new store", _before_first_create, _after_create),
    Operation("gc", _before_gc, _checked),
    Operation("rm", _before_rm, _after_rm),
    Operation("cp", _before_cp, _after_cp),
    Operation("mv", _before_mv, _after_mv),
    Operation("restore", _before_restore, _after_restore),
    Operation("repair", _before_repair, _after_repair),
    Operation("verify", _before_verify, _checked),
    Operation("freeze", _before_freeze, _after_moving),
    Operation("thaw", _before_thaw, _after_moving),
    Operation("export", _before_export, _after_export),
    Operation("link", _before_link, _after_export),
    Operation("pack", _before_pack, _after_pack),
    Operation("unpack", _before_unpack, _after_create),
    Operation("pull", _before_pull, _after_create),
    Operation("follow", _before_follow, _after_follow),
    Operation("push --as slime", _before_push_version, _after_push_version),
)
