"""Build the sdist and the wheel, and check what is in them.

    python .ci/release/build.py dist

needs the group ``dev``. Both are built twice from the files that git has, in folders, with file times and under
a umask that differ, and have to be equal byte by byte: a build from the same sources shows what was published.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from share import COMPLETIONS

ROOT = Path(__file__).parents[2]
LINKS = {"blobstore/manifests", "blobstore/cli"}
"""Links of the checkout, which are folders in the sdist."""
LARGEST = {".whl": 2_500_000, ".gz": 9_000_000}
"""Bytes that a package may have, by the end of its name: the sdist has the tests and their files."""
YEARS = 10 * 365 * 24 * 3600


def tracked_files() -> set[str]:
    """Return the paths of the files that git has or would add, without links to folders."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {name for name in listed.strip("\0").split("\0") if (ROOT / name).exists()}


def build(sources: Path, out: Path, *formats: str, umask: int = 0o022) -> list[Path]:
    """Build distributions of the sources with the installed backend; return their paths."""
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", *formats, "--outdir", out, sources],
        check=True,
        stdout=subprocess.DEVNULL,
        umask=umask,
    )
    return sorted(out.iterdir())


def digests(paths: list[Path]) -> dict[str, str]:
    """Return the sha256 of files by their names, in hexadecimal digits."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def copy_sources(names: set[str], folder: Path) -> Path:
    """Copy files of the checkout to a new folder, as new files; return the folder."""
    for name in sorted(names, reverse=True):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target, follow_symlinks=False)
        if not target.is_symlink():
            shutil.copymode(ROOT / name, target)
            os.utime(target, (YEARS, YEARS))
    return folder


def check(sdist: Path, wheel: Path, names: set[str]) -> None:
    """Fail unless the distributions have the files that they should have, and no others."""
    for path in (sdist, wheel):
        if (size := path.stat().st_size) > LARGEST[path.suffix]:
            sys.exit(f"{path.name} has {size:,} bytes, more than {LARGEST[path.suffix]:,}")
    with tarfile.open(sdist) as archive:
        inside = {item.name.partition("/")[2] for item in archive if item.isfile()}
    followed = {name for name in inside if name.startswith(tuple(f"{link}/" for link in LINKS))}
    expected = names - LINKS | {"PKG-INFO"}
    if differing := expected ^ (inside - followed):
        sys.exit(f"the sdist lacks files of the checkout, or has others: {sorted(differing)}")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".data/" not in name}
        shared = {name.partition("/share/")[2] for name in archive.namelist()} - {""}
    if "man/man1/blobstore-create.1" not in shared or not set(COMPLETIONS.values()) <= shared:
        sys.exit(f"the wheel lacks man pages or completion files: {sorted(shared)}")
    package = {name for name in inside if ".dist-info/" not in name}
    expected = {name for name in names - LINKS if name.startswith("blobstore/")} | {
        f"blobstore/{name}" for name in names if name.startswith(("cli/", "manifests/"))
    }
    if differing := expected ^ package:
        sys.exit(f"the wheel lacks files of the package, or has others: {sorted(differing)}")
    described = {name.partition(".dist-info/")[2] for name in inside - package}
    if missing := {"licenses/LICENSE", "licenses/LICENSE.ggml", "sboms/sbom.cdx.json"} - described:
        sys.exit(f"the wheel lacks {sorted(missing)}")


def main(out: Path) -> None:
    """Build into a folder, which is emptied first."""
    names = tracked_files()
    with tempfile.TemporaryDirectory() as scratch:
        first = copy_sources(names, Path(scratch, "first"))
        second = copy_sources(names, Path(scratch, "second", "deeper"))
        for path in second.rglob("*.py"):
            path.touch()
        shutil.rmtree(out, ignore_errors=True)
        built = build(first, out)  # the wheel from the sdist
        again = build(second, Path(scratch, "again"), "--sdist", "--wheel", umask=0o077)
        if digests(built) != digests(again):
            sys.exit(f"two builds differ: {digests(built)} and {digests(again)}")
    wheel, sdist = sorted(built, key=lambda path: path.suffix == ".gz")
    check(sdist, wheel, names)
    subprocess.run([sys.executable, "-m", "check_wheel_contents", wheel], check=True)
    for name, digest in digests(built).items():
        print(f"{digest}  {name}, {(out / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
