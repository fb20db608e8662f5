"""A folder mounted again through FUSE, as a slow network file system is: read-only, and each request counted.

A process of its own answers the kernel by FUSE's protocol: a thread that waits for a file would keep the
interpreter's lock, which the threads that answer need. See <linux/fuse.h> for the structures.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MNT_DETACH = 1, 2, 4, 2
_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<6Q10I")
_COUNTS = struct.Struct("<QQ")
_KEEP_CACHE = 2
_LARGEST = 1 << 20
"""Bytes per request, the most that Linux sends."""
_FORGET, _BATCH_FORGET = 2, 42


class Mounted:
    """A mounted folder, and what was read through it."""

    def __init__(self, path: Path, counts: Path) -> None:
        self.path = path
        self._counts = counts

    @property
    def requests(self) -> int:
        """The reads that the server answered."""
        return self._read()[0]

    @property
    def bytes_read(self) -> int:
        """The bytes of these reads."""
        return self._read()[1]

    def _read(self) -> tuple[int, int]:
        requests, count = _COUNTS.unpack(self._counts.read_bytes())
        return requests, count


def why_not() -> str:
    """Return why nothing can be mounted here; empty if it can."""
    if sys.platform != "linux":
        return "FUSE is mounted as Linux does"
    if os.geteuid() != 0:
        return "mounting takes root"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse cannot be opened: {error.strerror}"
    try:
        with tempfile.TemporaryDirectory(prefix="blobstore-fuse-") as folder:
            (place := Path(folder, "mount")).mkdir()
            with mounted(Path(folder), place):
                return ""
    except OSError as error:
        return f"FUSE cannot be mounted: {error}"


@contextlib.contextmanager
def mounted(
    folder: Path, place: Path, *, kind: str = "fuse.test", delay: float = 0, rate: float = 0
) -> Iterator[Mounted]:
    """Mount ``folder`` at ``place``, and unmount it whatever happens.

    Args:
        folder: what is shown there.
        place: a folder.
        kind: the type that the table of mounts has.
        delay: seconds that each read takes at least.
        rate: bytes per second of all reads together; 0 for no limit.

    Raises:
        OSError: it cannot be mounted.
    """
    with tempfile.NamedTemporaryFile(prefix="blobstore-fuse-") as counts:
        counts.write(bytes(_COUNTS.size))
        counts.flush()
        values = [folder, place, kind, delay, rate, counts.name]
        command = [sys.executable, "-S", __file__, *map(str, values)]
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert server.stdin
        assert server.stdout
        try:
            if (said := server.stdout.readline()) != "mounted\n":
                raise OSError(said + server.stdout.read())
            yield Mounted(place, Path(counts.name))
        finally:
            _libc().umount2(os.fsencode(place), _MNT_DETACH)
            server.stdin.close()  # which ends it, also if it waits
            server.stdout.close()
            server.wait()


class _Server:
    """Answers requests; nodes are paths, numbered as they are found."""

    def __init__(self, folder: Path, delay: float, rate: float, counts: int) -> None:
        self._paths = {1: folder}
        self._nodes = {folder: 1}
        self._files: dict[int, int] = {}
        self._delay = delay
        self._rate = rate
        self._counts = counts
        self._requests = self._bytes = 0
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._handlers: dict[int, Callable[[int, memoryview], bytes]] = {
            1: self._look_up,
            3: lambda node, _: struct.pack("<QII", 1 << 20, 0, 0) + self._attributes(node),
            14: self._open,
            15: self._read,
            17: lambda *_: struct.pack("<5Q10I", *[1 << 20] * 5, 4096, 255, 4096, *[0] * 7),
            18: self._release,
            25: lambda *_: b"",  # FLUSH
            26: self._begin,
            27: lambda *_: struct.pack("<QII", 0, 0, 0),  # OPENDIR
            28: self._list,
            29: lambda *_: b"",  # RELEASEDIR
        }

    def run(self, fuse: int) -> None:
        """Answer until it is unmounted."""
        while True:
            try:
                request = memoryview(os.read(fuse, _LARGEST + 4096))
            except InterruptedError:
                continue
            except OSError:
                return
            _, code, unique, node, *_ = _IN.unpack_from(request)
            if code in (_FORGET, _BATCH_FORGET):
                continue
            number, answer = 0, b""
            try:
                answer = self._handlers[code](node, request[_IN.size :])
            except KeyError:
                number = errno.ENOSYS
            except OSError as error:
                number = error.errno or errno.EIO
            with contextlib.suppress(OSError):  # the process that asked was killed
                os.write(fuse, _OUT.pack(_OUT.size + len(answer), -number, unique) + answer)

    def _begin(self, _: int, data: memoryview) -> bytes:
        major, minor, ahead, flags = struct.unpack_from("<IIII", data)
        asynchronous, parallel, large = 1, 1 << 18, 1 << 22
        flags &= asynchronous | parallel | large
        sizes = struct.pack("<HHIIHH", 64, 48, _LARGEST, 1, _LARGEST >> 12, 0)
        return struct.pack("<IIII", major, min(minor, 31), ahead, flags) + sizes + bytes(32)

    def _look_up(self, node: int, data: memoryview) -> bytes:
        path = self._paths[node] / os.fsdecode(bytes(data).rstrip(b"\0"))
        path.lstat()
        with self._lock:
            child = self._nodes.setdefault(path, len(self._nodes) + 1)
            self._paths[child] = path
        return struct.pack("<QQQQII", child, 0, 1 << 20, 1 << 20, 0, 0) + self._attributes(child)

    def _attributes(self, node: int) -> bytes:
        found = self._paths[node].lstat()
        seconds, parts = zip(
            *(divmod(t, 10**9) for t in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)),
            strict=True,
        )
        numbers = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0)
        return _ATTRIBUTES.pack(node, found.st_size, found.st_blocks, *seconds, *parts, *numbers)

    def _open(self, node: int, _: memoryview) -> bytes:
        descriptor = os.open(self._paths[node], os.O_RDONLY)
        return struct.pack("<QII", descriptor, _KEEP_CACHE, 0)

    def _release(self, _: int, data: memoryview) -> bytes:
        os.close(struct.unpack_from("<Q", data)[0])
        return b""

    def _read(self, _: int, data: memoryview) -> bytes:
        descriptor, offset, size = struct.unpack_from("<QQI", data)
        found = os.pread(descriptor, size, offset)
        with self._lock:
            self._requests += 1
            self._bytes += len(found)
            os.pwrite(self._counts, _COUNTS.pack(self._requests, self._bytes), 0)
            now = time.monotonic()
            if self._rate:
                self._free_at = max(self._free_at, now) + len(found) / self._rate
            wait = max(self._free_at - now, 0) + self._delay
        time.sleep(wait)
        return found

    def _list(self, node: int, data: memoryview) -> bytes:
        _, begin, size = struct.unpack_from("<QQI", data)
        answer = b""
        for number, name in enumerate(sorted(os.listdir(self._paths[node])), 1):
            text = os.fsencode(name)
            entry = struct.pack("<QQII", number + 1, number, len(text), 0) + text
            entry += bytes(-len(entry) % 8)
            if number > begin:
                if len(answer) + len(entry) > size:
                    break
                answer += entry
        return answer


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _serve(folder: str, place: str, kind: str, delay: str, rate: str, counts: str) -> None:
    fuse = os.open("/dev/fuse", os.O_RDWR)
    mode = stat.S_IFMT(os.stat(folder).st_mode)
    options = f"fd={fuse},rootmode={mode:o},user_id=0,group_id=0,allow_other,max_read={_LARGEST}"
    flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV
    if _libc().mount(b"test", place.encode(), kind.encode(), flags, options.encode()):
        sys.exit(os.strerror(ctypes.get_errno()))
    server = _Server(Path(folder), float(delay), float(rate), os.open(counts, os.O_WRONLY))
    for _ in range(16):
        threading.Thread(target=server.run, args=(fuse,), daemon=True).start()
    sys.stdout.write("mounted\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
