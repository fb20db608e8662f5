"""Commands that signals stop, besides those that other faults strike too."""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.faults.invariants import Expected, Findings, check_store, forget
from tests.faults.known import Known, command
from tests.faults.operations import OPERATIONS, Operation, Scene
from tests.faults.processes import Ended
from tests.support.registry import PROGRAM, running_registry
from tests.support.signing import key_files

SERVER = "page --serve"
"""The command that ends only if it is asked to."""
OUT = ".out"
"""How the name of a file ends that a command writes, and that must not be there if it was stopped."""


def operations() -> list[Operation]:
    """Return all commands that can be stopped here."""
    return [*OPERATIONS, *(item for item in _OPERATIONS if item.name != _PUSH or _has_registry())]


def _checked(scene: Scene, ended: Ended) -> Findings:
    del ended
    return check_store(scene.store, Expected(scene.kept), scene.spare)


def _simple(name: str, *arguments: str, codes: tuple[int, ...] = (0,)) -> Operation:
    """Return a command that changes no model; FOLDER is that of the scene."""

    def prepare(scene: Scene) -> list[object]:
        for path in scene.folder.glob(f"*{OUT}*"):
            path.unlink()
        return [word.replace("FOLDER", str(scene.folder)) for word in arguments]

    return Operation(name, prepare, _checked, codes)


def _reading(name: str, *arguments: str, codes: tuple[int, ...] = (0,)) -> Operation:
    """Return a command that reads the store of the scene."""
    return _simple(
        name, name.split(maxsplit=1)[0], *arguments, "--store", "FOLDER/store", codes=codes
    )


# tag


def _tagged(scene: Scene) -> Known:
    return scene.guest.called(f"{scene.guest.name}:extra")


def _before_tag(scene: Scene) -> list[object]:
    forget(scene.store, _tagged(scene))
    scene.must("create", scene.guest.folder, scene.guest.name)
    return ["tag", scene.guest.name, "extra", "--store", scene.store]


def _after_tag(scene: Scene, ended: Ended) -> Findings:
    tagged = _tagged(scene)
    present = [*scene.kept, scene.guest, *([tagged] if ended.code == 0 else [])]
    return check_store(scene.store, Expected(present, [tagged]), scene.spare)


# sign


def _before_sign(scene: Scene) -> list[object]:
    key = scene.folder / "key.pem"
    if not key.exists():
        key_files(scene.folder)
    shutil.rmtree(scene.store / ".blobstore" / "signatures", ignore_errors=True)
    bundle = scene.folder / f"bundle{OUT}"
    bundle.unlink(missing_ok=True)
    return ["sign", scene.kept[0].name, "--key", key, "--out", bundle, "--store", scene.store]


def _after_sign(scene: Scene, ended: Ended) -> Findings:
    signed = any((scene.store / ".blobstore" / "signatures").glob("*"))
    found = _checked(scene, ended)
    if signed != (ended.code == 0):
        found.others.append(f"signatures in the store: {signed}, exit code {ended.code}")
    return found


# Several models in one command


def _before_all(scene: Scene) -> list[object]:
    forget(scene.store, *_others(scene))
    scene.must("gc", "--force", "--older-than", "0s")
    return ["create", "--all", scene.folder / "sources", "--store", scene.store]


def _before_ingest(scene: Scene, engine: str) -> list[object]:
    _before_all(scene)
    lines = [f"{model.folder} {model.name}\n" for model in _others(scene)]
    path = scene.folder / "models.txt"
    path.write_text("".join(lines), "utf-8")
    return ["ingest", path, "--executor", engine, "--store", scene.store]


def _others(scene: Scene) -> Sequence[Known]:
    return (scene.guest, scene.gone, scene.spare)


def _after_all(scene: Scene, ended: Ended) -> Findings:
    """Check that the models are there, or those that were complete before the command was stopped."""
    is_done = ended.code == 0
    expected = Expected([*scene.kept, *(_others(scene) if is_done else ())], _others(scene))
    found = check_store(scene.store, expected)
    forget(scene.store, *_others(scene))
    return found


# push


def _has_registry() -> bool:
    return shutil.which(PROGRAM) is not None


@functools.cache
def _registry() -> str:
    """Return the host of a registry that stays for the life of this process."""
    folder = _at_exit.enter_context(tempfile.TemporaryDirectory(prefix="blobstore-faults-"))
    return _at_exit.enter_context(running_registry(Path(folder))).host


def _before_push(scene: Scene) -> list[object]:
    """Push to a repository that has nothing, or what the last push left."""
    if scene.remote is None or scene.chance.random() < _NEW:
        scene.number += 1
        scene.remote = f"{_registry()}/team{scene.number}/model"
    return ["push", scene.kept[0].name, scene.remote, "--no-mount", "--store", scene.store]


def _before_push_to_objects(scene: Scene) -> list[object]:
    objects = scene.folder / "objects"
    if scene.chance.random() < _NEW:
        shutil.rmtree(objects, ignore_errors=True)
    scene.remote = f"file://{objects}"
    return ["push", scene.kept[0].name, scene.remote, "--store", scene.store]


def _after_push(scene: Scene, ended: Ended) -> Findings:
    """Check that the name is there, with all that it needs, if the push says so."""
    found = _checked(scene, ended)
    if ended.code == 0:
        remote = scene.remote
        if remote is not None and remote.startswith("file:"):
            remote = f"{remote}/{scene.kept[0].name}"
        code, output, errors = command("verify", "--remote", remote)
        if code:
            found.others.append(f"{remote} was pushed, but is not complete: {output} {errors}")
    return found


_NEW = 0.5
_PUSH = "push"
_at_exit = contextlib.ExitStack()
atexit.register(_at_exit.close)

_OPERATIONS = (
    _reading("list"),
    _reading("show", "m0"),
    _reading("du"),
    _reading("find", "layers.0.up.weight"),
    _reading("history", "m0"),
    _reading("diff", "m0", "m1", codes=(1,)),
    _reading("compare", "m0", "m1", "--html", f"FOLDER/compare{OUT}"),
    _reading("page", f"FOLDER/page{OUT}"),
    _reading(SERVER, "--serve", "--port", "0", codes=()),
    _simple("inspect", "inspect", "FOLDER/sources/m0"),
    _simple("convert", "convert", "FOLDER/sources/m0", f"FOLDER/converted{OUT}.safetensors"),
    Operation("tag", _before_tag, _after_tag),
    Operation("sign", _before_sign, _after_sign),
    Operation("create --all", _before_all, _after_all),
    *(
        Operation(
            f"ingest by {engine}", functools.partial(_before_ingest, engine=engine), _after_all
        )
        for engine in ("threads", "processes")
    ),
    Operation(_PUSH, _before_push, _after_push),
    Operation("push to object storage", _before_push_to_objects, _after_push),
)
