"""What a client asks for."""

from __future__ import annotations

import pytest

from blobstore.manifests.reference import Reference
from blobstore.serve.asked import Asked

REPOSITORY = Reference.parse("org/model")
COMMIT = "a" * 40


@pytest.mark.parametrize(
    ("revision", "name", "asked"),
    [
        ("main", "org/model:latest", "main"),
        ("HEAD", "org/model:latest", "main"),
        ("refs/heads/main", "org/model:latest", "main"),
        ("refs/tags/v1", "org/model:v1", "v1"),
        ("v1", "org/model:v1", "v1"),
        ("0a1b2c3", "org/model:0a1b2c3", "0a1b2c3"),
        (COMMIT, f"org/model:{COMMIT}", COMMIT),
    ],
)
def test_a_revision_is_a_tag(revision: str, name: str, asked: str) -> None:
    found = Asked.of(REPOSITORY, revision)
    assert found is not None
    assert (found.reference, found.revision) == (Reference.parse(name), asked)
    assert found.has_name
    assert found.is_commit == (revision == COMMIT)


@pytest.mark.parametrize(
    "revision",
    [
        *("refs/pr/1", "feature/x", "refs/convert/onnx", "v1+cpu"),
        *("latest", "refs/heads/latest", "refs/tags/main", "refs/tags/HEAD"),  # names of others
    ],
)
def test_a_revision_that_no_tag_can_be_stands_for_itself(revision: str) -> None:
    found = Asked.of(REPOSITORY, revision)
    assert found is not None
    assert found.revision == revision
    assert not found.has_name
    assert not found.is_commit
    other = Asked.of(REPOSITORY, "other/x")
    assert other is not None
    assert found.reference != other.reference
    assert found.at(COMMIT) == Asked.of(REPOSITORY, COMMIT)


@pytest.mark.parametrize(
    "revision", ["..", "a/../b", "", "/", "a b", "a\nb", "\x1b", "a?b", "-x", "x/" * 200]
)
def test_what_git_does_not_allow_is_no_revision(revision: str) -> None:
    assert Asked.of(REPOSITORY, revision) is None
