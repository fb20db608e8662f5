"""No inode in ``blobs/`` is open for writing: strace watches all commands that write."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from tests.faults import tracing
from tests.faults.processes import ROOT

if TYPE_CHECKING:
    from blobstore.store.local import LocalStore

pytestmark = pytest.mark.skipif(bool(tracing.why_not()), reason=tracing.why_not() or "strace works")

_PROGRAM = "import sys; from tests.attacks.test_published_blobs import run; run(sys.argv[1])"
_CALLS = (
    "open,openat,creat,close,dup,dup2,dup3,fcntl,write,pwrite64,writev,pwritev,ftruncate,fallocate,"
    "copy_file_range,sendfile,ioctl,mmap,rename,renameat,renameat2,link,linkat,"
    "clone,clone3,fork,vfork,execve"
)
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>")
_CALL = re.compile(r"(\w+)\((.*)\) += (\d+)(?:<(.*?)>)?")
_FILE = re.compile(r"(\d+)<(.*?)>")
_WRITING = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC")
_CHANGES = {"write", "pwrite64", "writev", "pwritev", "ftruncate", "fallocate", "sendfile"}
_FORKS = {"clone", "clone3", "fork", "vfork"}
_OPENS = {"open", "openat", "creat"}
_BLOB = re.compile(r"/blobs/sha256-[0-9a-f]{64}(?!#)")


def calls(log: str) -> Iterator[tuple[int, str, str, int, str]]:
    """Yield the calls that succeeded: thread, name, arguments, result, and the file that the result is.

    The end of a thread is a call too.
    """
    begun: dict[str, str] = {}
    for line in log.splitlines():
        thread, _, call = line.partition(" ")
        call = call.strip()
        if call.startswith("+++"):
            yield int(thread), "exit", "", 0, ""
        if call.endswith("<unfinished ...>"):
            begun[thread] = call.removesuffix("<unfinished ...>")
            continue
        if resumed := _RESUMED.match(call):
            call = begun.pop(thread, "") + call[resumed.end() :]
        if match := _CALL.match(call):
            yield int(thread), match[1], match[2], int(match[3]), match[4] or ""


class Watch:
    """Which files each process can write to, by descriptor; a writable map counts as one that is never closed."""

    def __init__(self) -> None:
        self.processes: dict[int, int] = {}
        """The process of each thread: its first thread."""
        self.writers: dict[int, dict[int, str]] = {}
        self.found: list[str] = []

    def see(self, thread: int, name: str, arguments: str, result: int, file: str) -> None:
        """Note a call, and whether it writes to a blob or renames to a blob what can be written."""
        if self._is_wrong(name, arguments, file):
            self.found.append(f"{name}({arguments}) = {result}<{file}>")
        process = self.processes.setdefault(thread, thread)
        writers = self.writers.setdefault(process, {})
        files = _FILE.findall(arguments)
        if name in _FORKS:
            is_thread = "CLONE_THREAD" in arguments
            self.processes[result] = process if is_thread else result
            if not is_thread:  # it may have opened files before its parent goes on
                self.writers[result] = writers | self.writers.get(result, {})
        elif name == "execve" or (name == "exit" and thread == process):
            writers.clear()
        elif name in _OPENS:
            if name == "creat" or _WRITING.search(arguments):
                writers[result] = file
        elif name == "close":
            writers.pop(int(files[0][0]) if files else -1, None)
        elif (name.startswith("dup") or "F_DUPFD" in arguments) and int(files[0][0]) in writers:
            writers[result] = file
        elif _is_writable_map(name, arguments):
            writers[-len(writers) - 1] = files[0][1]

    def _is_wrong(self, name: str, arguments: str, file: str) -> bool:
        files = _FILE.findall(arguments)
        is_blob = bool(files) and _BLOB.search(files[0][1]) is not None
        if name in _OPENS:
            is_writing = name == "creat" or _WRITING.search(arguments) is not None
            return is_writing and _BLOB.search(file) is not None
        if name.startswith(("rename", "link")):
            old, *_, new = re.findall(r'"(.*?)"', arguments)
            can_write = any(old in held.values() for held in self.writers.values())
            return can_write and _BLOB.search(new) is not None
        if name == "copy_file_range":
            return len(files) > 1 and _BLOB.search(files[1][1]) is not None
        is_writing = name in _CHANGES or "FICLONE" in arguments or _is_writable_map(name, arguments)
        return is_writing and is_blob


def _is_writable_map(name: str, arguments: str) -> bool:
    is_shared = "PROT_WRITE" in arguments and "MAP_SHARED" in arguments
    return name == "mmap" and is_shared and _FILE.search(arguments) is not None


def violations(log: str) -> list[str]:
    """Return the calls that write to a blob, or that rename to a blob what can be written."""
    watch = Watch()
    for call in calls(log):
        watch.see(*call)
    return watch.found


def run(where: str) -> None:
    """Run what writes to a store, or through the names that its files have elsewhere."""
    from blobstore.store.local import LocalStore
    from tests.faults import workloads
    from tests.faults.known import write_models

    folder = Path(where)
    workloads.try_all(folder / "all")
    (model,) = write_models(folder / "sources", 1)
    origin = LocalStore(folder / "origin")
    _must(origin, "create", model.folder, "a")
    _must(origin, "create", model.folder, "q", "--quantize", "int8")
    _must(origin, "cp", "a", "--to", folder / "copied")
    _edit_links(origin, folder)
    _pull(origin, folder)
    _open_elsewhere(origin, folder)
    for name in ("origin", "copied", "fetched", "resumed", "slower", "cache"):
        _must(LocalStore(folder / name), "verify")


def _must(store: LocalStore, *arguments: object) -> None:
    from tests.faults.known import command

    code, output, errors = command(*arguments, "--store", store.root)
    assert code == 0, f"{arguments}: {output} {errors}"


def _edit_links(store: LocalStore, folder: Path) -> None:
    import numpy as np

    from blobstore.safetensors import edit_file
    from blobstore.safetensors.numpy import save_file

    for how in ("--hard", "--jobs=1"):
        linked = folder / f"linked{how}"
        _must(store, "link", "a", linked, how)
        first, second, *_ = sorted(linked.glob("*.safetensors"))
        edit_file(first, metadata={"x": "y"}, in_place=True)
        save_file({"x": np.ones(3)}, second)


def _pull(origin: LocalStore, folder: Path) -> None:
    """Pull, continue a pull, and be slower than another pull where locks do nothing."""
    from blobstore.core.digest import BlobId
    from blobstore.registry.layouts.ollama import plan_ollama
    from blobstore.store.local import LocalStore
    from tests.support.stub_registry import StubRegistry

    blobs = [BlobId(layer.digest, layer.size) for layer in origin.resolve("a").layers]
    blob = max(blobs, key=lambda item: item.size)
    content = Path(origin.blob_path(blob.digest)).read_bytes()
    with StubRegistry() as registry:
        address = registry.put(origin, plan_ollama(origin.read_manifest("a")), "t/a", "latest")
        _must(LocalStore(folder / "fetched"), "pull", address, "a")
        store = LocalStore(folder / "resumed")
        with store.ingest() as ingest:
            file = ingest.open_partial(blob)
            assert file is not None
            with file:
                file.write(0, content[: blob.size // 2])
        _must(store, "pull", address, "a")
        store = LocalStore(folder / "slower")
        with mock.patch.object(fcntl, "flock"), store.ingest() as ingest:
            file = ingest.open_partial(blob)
            assert file is not None
            with file:
                file.write(0, content[:1])
                _must(store, "pull", address, "a")
                file.write(0, content[1:])
                assert file.has_right_digest()
                ingest.adopt_partial(file)
            ingest.publish()


def _open_elsewhere(origin: LocalStore, folder: Path) -> None:
    import blobstore

    address = f"file://{folder}/objects"
    _must(origin, "push", "a", address)
    with blobstore.open(f"{address}/a", store=folder / "cache") as opened:
        opened.state_dict()


def test_no_blob_is_open_for_writing_once_it_has_its_name(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tracer = ["strace", "-f", "--seccomp-bpf", "-y", "-q", "-s", "300", "-o", str(log)]
    ended = subprocess.run(
        [*tracer, "-e", f"trace={_CALLS}", sys.executable, "-c", _PROGRAM, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "BLOBSTORE_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    text = log.read_text("utf-8", "replace")
    assert len(re.findall(r"rename.*/blobs/sha256-", text)) > 20
    assert violations(text) == []


BLOB = "/store/blobs/sha256-" + "0" * 64


@pytest.mark.parametrize(
    "log",
    [
        f'1 openat(AT_FDCWD, "{BLOB}", O_RDWR) = 3<{BLOB}>',
        f"1 pwrite64(3<{BLOB}>, ...) = 8",
        f"1 ftruncate(3<{BLOB}>, 0) = 0",
        f"1 mmap(NULL, 9, PROT_READ|PROT_WRITE, MAP_SHARED, 3<{BLOB}>, 0) = 1",
        f"1 copy_file_range(3</a>, [0], 4<{BLOB}>, [0], 9, 0) = 9",
        f"1 ioctl(3<{BLOB}>, BTRFS_IOC_CLONE or FICLONE, 4) = 0",
        f'1 openat(AT_FDCWD, "/a", O_WRONLY|O_CREAT) = 3</a>\n2 rename("/a", "{BLOB}") = 0',
        (
            '1 openat(AT_FDCWD, "/a", O_RDWR) = 3</a>\n1 dup(3</a>) = 4</a>\n1 close(3</a>) = 0\n'
            f'2 rename("/a", "{BLOB}" <unfinished ...>\n1 close(9</b>) = 0\n2 <... rename resumed>) = 0'
        ),
        (
            '1 openat(AT_FDCWD, "/a", O_RDWR) = 3</a>\n1 clone3({flags=CLONE_VM}) = 2\n'
            f'1 close(3</a>) = 0\n1 rename("/a", "{BLOB}") = 0'
        ),
        (
            '1 openat(AT_FDCWD, "/a", O_RDWR) = 3</a>\n'
            "1 mmap(NULL, 9, PROT_READ|PROT_WRITE, MAP_SHARED, 3</a>, 0) = 1\n"
            f'1 close(3</a>) = 0\n1 rename("/a", "{BLOB}") = 0'
        ),
    ],
)
def test_the_watch_sees_each_way_to_write(log: str) -> None:
    assert len(violations(log)) == 1


@pytest.mark.parametrize(
    "log",
    [
        '1 openat(AT_FDCWD, "/a", O_RDWR) = 3</a>\n1 close(3</a>) = 0\n',
        (
            '1 clone3({flags=CLONE_VM}) = 2\n2 openat(AT_FDCWD, "/a", O_RDWR) = 3</a>\n'
            "2 +++ killed by SIGKILL +++\n"
        ),
        (
            '1 clone3({flags=CLONE_VM|CLONE_THREAD}) = 2\n1 openat(AT_FDCWD, "/a", O_RDWR) = 3</a>\n'
            "2 close(3</a>) = 0\n"
        ),
        '1 openat(AT_FDCWD, "/a", O_RDWR) = 3</a>\n1 execve("/bin/true", ...) = 0\n',
    ],
)
def test_a_file_that_nobody_can_write_to_may_become_a_blob(log: str) -> None:
    assert violations(f'{log}1 rename("/a", "{BLOB}") = 0') == []
