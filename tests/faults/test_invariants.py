"""The judge of the faults is judged: whatever is wrong with a store, it sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.invariants import Expected, check_store, forget, layers
from tests.faults.known import Known, command, write_models


class Scene:
    """A store of two models, and one more that is created next."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        *self.models, self.spare = write_models(folder / "sources", 3, size=1000)
        for model in self.models:
            assert command("create", model.folder, model.name, "--store", self.store)[0] == 0

    def blob(self, model: Known, layer: int = -1) -> Path:
        digest: str = layers(self.store, model)[layer]["digest"]
        return self.store / "blobs" / digest.replace(":", "-")

    def look(self) -> list[str]:
        found = check_store(self.store, Expected(self.models), self.spare)
        assert found.bytes_lost == sum(
            model.size for model in self.models if model.name in found.names_lost
        )
        return [*found.names_lost.values(), *found.others]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_healthy_store_is_well(scene: Scene) -> None:
    assert scene.look() == []


def test_sees_a_name_that_is_gone(scene: Scene) -> None:
    forget(scene.store, scene.models[1])
    assert scene.look() == ["the name is gone"]


def test_sees_a_name_that_should_not_be(scene: Scene) -> None:
    assert command("create", scene.spare.folder, "other", "--store", scene.store)[0] == 0
    assert "there is a name registry.ollama.ai/library/other/latest" in scene.look()


def test_sees_a_blob_that_is_gone(scene: Scene) -> None:
    scene.blob(scene.models[0]).unlink()
    found = "\n".join(scene.look())
    assert "BlobMissing" in found
    assert "verify before gc exits with 4" in found


def test_sees_a_blob_of_other_bytes(scene: Scene) -> None:
    path = scene.blob(scene.models[0], 1)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert "of another digest" in "\n".join(scene.look())


def test_sees_a_name_that_stands_for_another_model(scene: Scene) -> None:
    first, second = scene.models
    assert command("create", second.folder, first.name, "--store", scene.store)[0] == 0
    assert any("has other bytes" in text for text in scene.look())


@pytest.mark.parametrize(
    "path",
    [
        "foreign",
        "blobs/foreign",
        "manifests/foreign",
        "manifests/a/b/c/d/foreign",
        ".blobstore/foreign",
        ".blobstore/quarantine/.1-2.tmp",
    ],
)
def test_sees_foreign_files(scene: Scene, path: str) -> None:
    (scene.store / path).parent.mkdir(parents=True, exist_ok=True)
    (scene.store / path).write_bytes(b"foreign")
    assert any("foreign" in text or "gc has left" in text for text in scene.look())
