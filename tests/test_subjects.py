"""The check of commits' subjects, in a repository of its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[1] / ".ci" / "commit-subjects"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Make a repository with the check, after a commit whose subject is too long."""
    git(tmp_path, "init", "-q")
    commit(tmp_path, "o" * 73)
    (tmp_path / ".ci").mkdir()
    shutil.copy(CHECK, tmp_path / ".ci" / "commit-subjects")
    git(tmp_path, "add", ".")
    commit(tmp_path, "Add the check")
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True)


def commit(folder: Path, message: str) -> None:
    git(folder, "commit", "-q", "--allow-empty", "--message", message)


def check(folder: Path) -> str:
    done = subprocess.run(
        [folder / ".ci" / "commit-subjects"], check=False, capture_output=True, text=True
    )
    assert done.returncode == (1 if done.stderr else 0)
    return done.stderr


def test_subjects_of_72_characters_and_older_ones_pass(repository: Path) -> None:
    commit(repository, f"Say {'ä' * 66} x\n\n{'a body may have longer lines ' * 9}")

    assert check(repository) == ""


def test_a_longer_subject_is_refused(repository: Path) -> None:
    commit(repository, "x" * 73)
    commit(repository, "A later commit")

    assert f"a subject of 73 characters, and 72 are the most: {'x' * 73}" in check(repository)


@pytest.mark.parametrize(
    "subject", ["wip", "x", "Small fixes", "fixup! Read a shared store", "WIP"]
)
def test_a_subject_that_says_no_effect_is_refused(repository: Path, subject: str) -> None:
    commit(repository, subject)

    assert f"has the subject '{subject}'; say what it changes" in check(repository)


def test_a_source_distribution_has_no_commits(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(CHECK, tmp_path / ".ci" / "commit-subjects")

    assert check(tmp_path) == ""
