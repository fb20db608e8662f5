"""Prepare a release in the checkout: the version where it stands, and the notes from the fragments.

    python .ci/release/prepare.py 0.2.0

changes files and publishes nothing. ``nox -s release -- 0.2.0`` then also builds the packages and tries the wheel
on each Python. What remains is printed: the commit and the tag, whose push starts the workflow that publishes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[2]
PLACES = {
    "pyproject.toml": '\nversion = "{}"\n',
    ".ci/release/blobstore.rb": "tensor_blobstore-{}.tar.gz",
    ".ci/release/recipe.yaml": 'version: "{}"',
    ".ci/release/sbom.cdx.json": '"version": "{}",\n      "purl": "pkg:pypi/tensor-blobstore@{}"',
}
"""Where the version stands, and how."""


def current_version() -> str:
    """Return the version of the checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def changed(text: str, pattern: str, old: str, new: str) -> str:
    """Return a text with a new version in the one place that has the old one.

    Raises:
        ValueError: there is not exactly one such place.
    """
    before, after = pattern.replace("{}", old), pattern.replace("{}", new)
    if text.count(before) != 1:
        raise ValueError(f"expected {before!r} once")
    return text.replace(before, after)


def main(new: str) -> None:
    """Change the files, or fail before the first change."""
    old = current_version()
    try:
        is_next = Version(new) >= Version(old) and str(Version(new)) == new
    except InvalidVersion:
        is_next = False
    if not is_next:
        sys.exit(f"{new!r} is no version that may follow {old}")
    notes, heading = ROOT / "CHANGELOG.md", re.compile(rf"^## {re.escape(new)} - .*", re.MULTILINE)
    is_written = heading.search(notes.read_text("utf-8")) is not None
    if is_written and any((ROOT / "changelog.d").glob("+*")):
        sys.exit(f"CHANGELOG.md has {new} already; join the fragments to it, and remove them")
    status = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    if status:
        sys.exit(f"commit or remove these first:\n{status}")
    for name, pattern in PLACES.items():
        path = ROOT / name
        text = changed(path.read_text(encoding="utf-8"), pattern, old, new)
        path.write_text(text, encoding="utf-8")
    if is_written:  # only the day of the release changes
        dated = heading.sub(f"## {new} - {datetime.now(UTC):%Y-%m-%d}", notes.read_text("utf-8"))
        notes.write_text(dated, encoding="utf-8")
    else:
        subprocess.run(["towncrier", "build", "--yes", "--version", new], cwd=ROOT, check=True)
    print(
        f"When the packages are built and tried:\n"
        f"  git commit -am 'Release {new}'\n"
        f"  git tag -s v{new} -m 'Release {new}'\n"
        f"  git push --atomic origin main v{new}"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("name the version, such as 0.2.0")
    main(sys.argv[1])
