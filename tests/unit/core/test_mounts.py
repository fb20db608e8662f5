from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from blobstore.core import mounts, system
from blobstore.core.mounts import FileSystem, Mount, file_system_of, mount_of, parse_mounts
from tests.faults import disks
from tests.support import fuse_mount

TABLE = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
25 24 0:23 / /dev/shm rw shared:3 - tmpfs tmpfs rw
27 1 254:0 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw,discard
40 27 0:50 / /models\040of\134us rw - nfs4 server:/export rw,vers=4.2
41 27 0:51 / /mnt ro - fuse.juicefs JuiceFS:x ro,user_id=0
42 41 7:3 /sub /mnt/disk rw - xfs /dev/loop3 rw
"""
MOUNTS = list(parse_mounts(TABLE))

needs_fuse = pytest.mark.skipif(
    bool(fuse_mount.why_not()), reason=fuse_mount.why_not() or "FUSE is there"
)
needs_root = pytest.mark.skipif(bool(disks.why_not()), reason=disks.why_not() or "disks are there")


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> None:
    mounts._of_device.cache_clear()


def test_parses_the_table_of_mounts() -> None:
    assert MOUNTS[3] == Mount("0:50", "/models of\\us", "nfs4", "rw,vers=4.2")
    assert [mount.kind for mount in MOUNTS] == [
        "proc",
        "tmpfs",
        "ext4",
        "nfs4",
        "fuse.juicefs",
        "xfs",
    ]


@pytest.mark.parametrize(
    ("path", "device", "kind"),
    [
        ("/srv/a", "254:0", "ext4"),
        ("/", "254:0", "ext4"),
        ("/dev/shm", "0:23", "tmpfs"),
        ("/dev/shm2/a", "254:0", "ext4"),
        ("/models of\\us/blobs", "0:50", "nfs4"),
        ("/mnt/disk/a", "7:3", "xfs"),
        ("/mnt/disk/a", "0:51", "fuse.juicefs"),
        ("/mnt/disk/a", "9:9", "xfs"),
    ],
)
def test_finds_the_mount_of_a_path(path: str, device: str, kind: str) -> None:
    found = mount_of(path, device, MOUNTS)
    assert found
    assert found.kind == kind


def test_the_last_mount_at_a_place_is_on_top() -> None:
    both = [Mount("0:1", "/a", "ext4", ""), Mount("0:2", "/a", "nfs4", "")]
    assert mount_of("/a/b", "?", both) == both[1]
    assert mount_of("/c", "?", both) is None


def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, options: str = "rw") -> None:
    """Say that everything is on a mount of this kind."""
    table = tmp_path / "mountinfo"
    table.write_text(f"1 1 9:9 / / rw - {kind} x {options}\n")
    monkeypatch.setattr(system, "_MOUNTS", table)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        *((kind, (True, False)) for kind in ("nfs", "lustre", "gpfs", "ceph", "9p", "virtiofs")),
        *((kind, (True, False)) for kind in ("fuse", "fuse.sshfs", "cifs", "beegfs")),
        *((kind, (False, False)) for kind in ("ext4", "xfs", "btrfs", "zfs", "fuseblk", "overlay")),
        ("tmpfs", (False, True)),
    ],
)
def test_knows_which_file_systems_are_remote(
    kind: str, found: tuple[bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, tmp_path, kind)
    assert file_system_of(tmp_path / "not" / "there") == FileSystem(kind, *found)


def test_a_system_without_a_table_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "_MOUNTS", tmp_path / "none")
    assert file_system_of(tmp_path) == FileSystem("")


def test_layers_of_an_overlay_that_cannot_be_seen_are_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, tmp_path, "overlay", "rw,lowerdir=/no/such:/nor/this,upperdir=/none")
    assert file_system_of(tmp_path) == FileSystem("overlay")


@needs_root
def test_memory_is_memory(tmp_path: Path) -> None:
    with disks.in_memory(tmp_path / "disk", 1 << 20) as disk:
        assert file_system_of(disk / "blobs") == FileSystem("tmpfs", is_memory=True)


@needs_fuse
@needs_root
def test_follows_an_overlay_to_a_remote_mount(tmp_path: Path) -> None:
    for name in ("shown", "remote:x", "upper", "work", "over"):
        (tmp_path / name).mkdir()
    remote, over = tmp_path / "remote:x", tmp_path / "over"
    options = {"lowerdir": str(remote).replace(":", r"\:")}
    options |= {"upperdir": str(tmp_path / "upper"), "workdir": str(tmp_path / "work")}
    text = ",".join(f"{key}={value}" for key, value in options.items())
    with fuse_mount.mounted(tmp_path / "shown", remote, kind="fuse.sshfs"):
        assert file_system_of(remote / "blobs") == FileSystem("fuse.sshfs", is_remote=True)
        subprocess.run(["mount", "-t", "overlay", "-o", text, "overlay", over], check=True)
        try:
            assert file_system_of(over) == FileSystem("overlay on fuse.sshfs", is_remote=True)
        finally:
            subprocess.run(["umount", over], check=True)


@needs_fuse
@needs_root
@pytest.mark.skipif(
    not (Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4")),
    reason="files cannot be mounted as disks",
)
def test_follows_a_file_that_is_a_disk_to_a_remote_mount(tmp_path: Path) -> None:
    for name in ("shown", "remote", "disk"):
        (tmp_path / name).mkdir()
    (image := tmp_path / "shown" / "image").write_bytes(bytes(1 << 20))
    subprocess.run(["mkfs.ext4", "-q", image], check=True, stderr=subprocess.DEVNULL)
    disk = tmp_path / "disk"
    with fuse_mount.mounted(tmp_path / "shown", tmp_path / "remote", kind="fuse.sshfs"):
        image = tmp_path / "remote" / "image"
        subprocess.run(["mount", "-o", "loop,ro", image, disk], check=True)
        try:
            assert file_system_of(disk) == FileSystem("ext4 on fuse.sshfs", is_remote=True)
        finally:
            subprocess.run(["umount", disk], check=True)
