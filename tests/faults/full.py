"""What runs out or is refused: space, files, descriptors, permission to write, and the right time.

Each command may fail, with one clear line, and leaves the store whole; and what gives space back must
work where there is none left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from tests.faults import disks
from tests.faults.invariants import Expected, check_store, forget
from tests.faults.operations import Scene
from tests.faults.outcomes import EVERY, Effort, Outcome
from tests.faults.processes import Ended, nursery, workspace

_DISK = 4 * 2**20
_PAGE = 4096
_LEAST = 1024
"""Bytes that a file may have under the smallest limit: the message has to be written too."""
_YEAR = 365 * 86400
_BUSY = "waiting for the lock of the store"


class _Case:
    """A scene and the processes for it."""

    def __init__(self, folder: Path, effort: Effort) -> None:
        self.scene = Scene(folder, effort.seed)
        self.effort = effort
        self.need = self.scene.guest.size * 3 // 2

    def forget_guest(self) -> None:
        """Remove the guest model, so that the next create starts from nothing."""
        forget(self.scene.store, self.scene.guest)
        self.scene.must("gc", "--force", "--older-than", "0s")

    def create(self, **how: object) -> Ended:
        """Create the guest in a child."""
        guest = self.scene.guest
        where = ("--store", self.scene.store)
        return nursery().run("blobstore", "create", guest.folder, guest.name, *where, **how)

    def judge(self, outcome: Outcome, ended: Ended, how: str) -> None:
        """Check the store after a create that may have failed."""
        scene = self.scene
        outcome.injected += 1
        if ended.complaint:
            outcome.violate(f"{how}: {ended.complaint}")
        present = [*scene.kept, *([scene.guest] if ended.code == 0 else [])]
        outcome.add(check_store(scene.store, Expected(present, [scene.guest]), scene.spare), how)


def run(effort: Effort, only: Container[str] = EVERY) -> list[Outcome]:
    """Inject each kind ``effort.count`` times, from nothing at all to nearly enough."""
    rows = []
    chosen = {fault: case for fault, case in CASES.items() if fault in only}
    for number, (fault, case) in enumerate(chosen.items()):
        outcome = Outcome(fault)
        rows.append(outcome)
        share = effort.share(len(chosen) - number)
        with workspace() as folder:
            case(folder, share, outcome)
    return rows


def _full_disk(folder: Path, effort: Effort, outcome: Outcome) -> None:
    with _small(folder, outcome) as disk:
        if disk is None:
            return
        case = _Case(disk, effort)
        for number in effort:
            free = case.need * number // effort.count // _PAGE * _PAGE
            case.forget_guest()
            with _filled(disk, free):
                ended = case.create()
                _free_space(case, outcome, f"with {free} bytes free")
            case.judge(outcome, ended, f"create with {free} bytes free")


def _free_space(case: _Case, outcome: Outcome, how: str) -> None:
    """Check that garbage is collected, and names are removed, where nothing can be written."""
    scene = case.scene
    where = ("--store", scene.store)
    commands: list[tuple[object, ...]] = [("gc", "--force", "--older-than", "0s")]
    if scene.store.joinpath("manifests", *scene.guest.reference.parts).exists():
        commands.insert(0, ("rm", scene.guest.name))
    for arguments in commands:
        ended = nursery().run("blobstore", *arguments, *where)
        if ended.code:
            outcome.violate(f"{arguments[0]} {how} exits with {ended.code}: {ended.stderr[-500:]}")
        elif arguments[0] == "rm":
            scene.must("create", scene.guest.folder, scene.guest.name)


def _no_inodes(folder: Path, effort: Effort, outcome: Outcome) -> None:
    with _small(folder, outcome) as disk:
        if disk is None:
            return
        case = _Case(disk, effort)
        for number in effort:
            case.forget_guest()
            state = os.statvfs(disk)
            free = number % 24
            disks.remount(disk, f"nr_inodes={state.f_files - state.f_ffree + free}")
            ended = case.create()
            disks.remount(disk, f"nr_inodes={state.f_files}")
            case.judge(outcome, ended, f"create with {free} inodes free")


def _file_size(folder: Path, effort: Effort, outcome: Outcome) -> None:
    case = _Case(folder, effort)
    most = max(map(len, case.scene.guest.tensors.values()))
    for number in effort:
        limit = _LEAST + most * number // effort.count
        case.forget_guest()
        ended = case.create(limits={"RLIMIT_FSIZE": limit})
        case.judge(outcome, ended, f"create with files of at most {limit} bytes")


def _descriptors(folder: Path, effort: Effort, outcome: Outcome) -> None:
    case = _Case(folder, effort)
    for number in effort:
        limit = 4 + number % 20
        case.forget_guest()
        ended = case.create(limits={"RLIMIT_NOFILE": limit})
        case.judge(outcome, ended, f"create with {limit} descriptors")


def _read_only(folder: Path, effort: Effort, outcome: Outcome) -> None:
    with _small(folder, outcome) as disk:
        if disk is None:
            return
        case = _Case(disk, effort)
        for _ in effort:
            case.forget_guest()
            disks.remount(disk, "ro")
            try:
                _refused(case, folder, outcome)
            finally:
                disks.remount(disk, "rw")
            case.judge(outcome, case.create(), "create after a read-only time")


def _readers(folder: Path, effort: Effort, outcome: Outcome) -> None:
    """Read hot and frozen models where nothing can be written or locked."""
    with _small(folder, outcome) as disk:
        if disk is None:
            return
        scene = Scene(disk, effort.seed)
        hot, frozen = scene.kept
        scene.must("freeze", frozen.name, "--no-base", "--older-than", "0s")
        (folder / "open").mkdir()
        (folder / "open").chmod(0o777)
        disks.remount(disk, "ro")
        for number in effort:
            target = folder / "open" / str(number)
            for call in (
                ("load", scene.store, hot.name, frozen.name),
                *(
                    ("blobstore", *read, "--store", scene.store)
                    for read in _reads(frozen.name, target)
                ),
            ):
                ended = nursery().run(*call, unprivileged=True, hooks={"no_locks": True})
                outcome.injected += 1
                if ended.code:
                    outcome.violate(f"{call} exits with {ended.code}: {ended.stderr[-500:]}")
        disks.remount(disk, "rw")
        outcome.add(check_store(scene.store, Expected(scene.kept), scene.spare), "afterwards")


def _unmounted(folder: Path, effort: Effort, outcome: Outcome) -> None:
    """Collect while the folder of manifests is unmounted, before gc begins or at any time."""
    if reason := disks.why_not():
        outcome.skipped = reason
        return
    scene = Scene(folder, effort.seed)
    place, names = scene.store / "manifests", folder / "names"
    arguments = ("blobstore", "gc", "--older-than", "0s", "--store", scene.store)
    duration = nursery().run(*arguments).seconds
    for number in effort:
        scene.must("create", scene.guest.folder, scene.guest.name)
        forget(scene.store, scene.guest)
        delay = scene.chance.uniform(0, duration) if number % 2 else 0.0
        place.rename(names)
        place.mkdir()
        with disks.mounted_folder(names, place):
            if not delay:
                disks.unmount(place)
            child = nursery().start(*arguments)
            time.sleep(delay)
            disks.unmount(place)
            ended = child.wait()
        place.rmdir()
        names.rename(place)
        how = f"gc, manifests unmounted after {delay:.4f} s"
        outcome.injected += 1
        if ended.complaint or (not delay and not ended.code):
            outcome.violate(f"{how}: exits with {ended.code}: {ended.stderr[-500:]}")
        outcome.add(check_store(scene.store, Expected(scene.kept), scene.spare), how)


def _no_permission(folder: Path, effort: Effort, outcome: Outcome) -> None:
    if os.geteuid():
        outcome.skipped = "giving up privileges takes root"
        return
    case = _Case(folder, effort)
    for path in (case.scene.folder / "sources").rglob("*.safetensors"):
        path.chmod(0o644)  # its writer closes it to others
    (folder / "open").mkdir(mode=0o777)
    (folder / "open").chmod(0o777)
    for _ in effort:
        case.forget_guest()
        _refused(case, folder / "open", outcome, unprivileged=True)
        case.judge(outcome, case.create(), "create after one without permission")


def _refused(case: _Case, folder: Path, outcome: Outcome, **how: bool) -> None:
    """Check that what writes is refused with one line, and what reads is not."""
    scene = case.scene
    first, guest = scene.kept[0].name, scene.guest
    target = folder / f"exported-{outcome.injected}"
    writes: list[tuple[object, ...]] = [
        ("create", guest.folder, guest.name),
        ("gc", "--force", "--older-than", "0s"),
        ("rm", first),
        ("cp", first, "copy"),
        ("mv", first, "moved"),
    ]
    reads = _reads(first, target)
    for arguments in (*writes, *reads):
        ended = nursery().run("blobstore", *arguments, "--store", scene.store, **how)
        outcome.injected += 1
        if ended.complaint or bool(ended.code) != (arguments in writes):
            outcome.violate(
                f"{arguments[0]} exits with {ended.code}: {ended.complaint or ended.stderr[-300:]}"
            )


def _clock(folder: Path, effort: Effort, outcome: Outcome) -> None:
    """Collect with a clock of another year, while a create is stopped anywhere."""
    case = _Case(folder, effort)
    scene = case.scene
    duration = case.create().seconds
    for number in effort:
        case.forget_guest()
        years, create_years = (-1, 1)[number % 2], (0, 1, -1)[number % 3]
        arguments = ("create", scene.guest.folder, scene.guest.name, "--store", scene.store)
        child = nursery().start("blobstore", *arguments, hooks={"clock": create_years * _YEAR})
        delay = scene.chance.uniform(0, duration)
        time.sleep(delay)
        child.send(signal.SIGSTOP)
        how = f"create, stopped after {delay:.4f} s, gc in {years} years"
        for age in ("0s", "1h"):
            ended = nursery().run(
                *("blobstore", "gc", "--force", "--older-than", age),
                *("--wait", "0.1", "--store", scene.store),
                hooks={"clock": years * _YEAR},
            )
            if ended.complaint or (ended.code and _BUSY not in ended.stderr):
                outcome.violate(f"{how}: gc exits with {ended.code}: {ended.stderr[-500:]}")
        child.send(signal.SIGCONT)
        created = child.wait()
        if created.code:
            outcome.violate(f"{how}: create exits with {created.code}: {created.stderr[-500:]}")
        case.judge(outcome, created, how)


def _short(folder: Path, effort: Effort, outcome: Outcome) -> None:
    """Let every read and write take only a part."""
    case = _Case(folder, effort)
    for number in effort:
        case.forget_guest()
        created = case.create(hooks={"short": number})
        if created.code:
            outcome.violate(f"seed {number}: exit code {created.code}: {created.stderr[-500:]}")
        case.judge(outcome, created, f"short reads and writes, seed {number}")


def _reads(first: str, target: Path) -> list[tuple[object, ...]]:
    """Return commands that only read the store."""
    return [
        ("list",),
        ("show", first),
        ("verify",),
        ("gc", "--dry-run"),
        ("export", first, target),
        ("du",),
    ]


@contextlib.contextmanager
def _small(folder: Path, outcome: Outcome) -> Iterator[Path | None]:
    if reason := disks.why_not():
        outcome.skipped = reason
        yield None
        return
    with disks.in_memory(folder / "disk", _DISK) as disk:
        yield disk


@contextlib.contextmanager
def _filled(disk: Path, free: int) -> Iterator[None]:
    """Leave ``free`` bytes of a disk."""
    filler = disk / "filler"
    state = os.statvfs(disk)
    with filler.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, max(1, state.f_bavail * state.f_frsize - free))
    try:
        yield
    finally:
        filler.unlink()


CASES: dict[str, Callable[[Path, Effort, Outcome], None]] = {
    "disk full during create, then gc": _full_disk,
    "no inodes left during create": _no_inodes,
    "limit of file size during create": _file_size,
    "limit of descriptors during create": _descriptors,
    "read-only file system": _read_only,
    "no permission to write": _no_permission,
    "readers on a read-only file system, without permission and without locks": _readers,
    "manifests unmounted during gc": _unmounted,
    "clock a year off in gc, create stopped": _clock,
    "every read and write short during create": _short,
}
