from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.manifests.reference import Reference
from blobstore.store.layout import Layout

LAYOUT = Layout(Path("/s"))
DIGEST = Digest.of(b"")


def test_blobs_and_manifests_are_where_ollama_has_them() -> None:
    assert LAYOUT.blob(DIGEST) == f"/s/blobs/sha256-{DIGEST.hex}"
    assert LAYOUT.manifest(Reference.parse("n/m:t")) == Path(
        "/s/manifests/registry.ollama.ai/n/m/t"
    )


def test_private_folders_are_separate_from_ollama_s() -> None:
    for path in (LAYOUT.temporary, LAYOUT.headers):
        assert path.is_relative_to("/s/.blobstore")
        assert not path.is_relative_to(LAYOUT.blobs)
        assert not path.is_relative_to(LAYOUT.manifests)


@pytest.mark.parametrize("name", ["m", "n/m:t", "h:5/n/m.x:8b"])
def test_a_reference_is_recovered_from_the_path_of_its_manifest(name: str) -> None:
    reference = Reference.parse(name)
    assert LAYOUT.reference(LAYOUT.manifest(reference)) == reference


@pytest.mark.parametrize(
    "path",
    [
        *("/s/manifests/h/n/m", "/s/manifests/h/n/m/t/x", "/s/manifests", "/s/blobs/h/n/m/t"),
        *("/s/manifests/h/n/m/.DS_Store", "/s/manifests/h/n/.m/t", "/s/manifests/h/n.x/m/t"),
        *("/s/manifests/h/n/m/t~", "/s/manifests/h/n/m/a b", "/elsewhere/h/n/m/t"),
    ],
)
def test_other_paths_have_no_reference(path: str) -> None:
    assert LAYOUT.reference(Path(path)) is None
