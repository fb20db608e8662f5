"""Versions that are written for receivers, which an independent receiver reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import (
    BlobDamaged,
    BlobstoreError,
    ModelNotFound,
    UnsupportedSource,
    UsageError,
)
from blobstore.operations.create.create import create
from blobstore.operations.follow import push_version as module
from blobstore.operations.follow.push_version import (
    RECEIVERS,
    PushedVersion,
    Receiver,
    push_version,
)
from blobstore.store.local import LocalStore
from tests.readers.weight_versions import INDEX, Trainer
from tests.readers.weight_versions import Receiver as Engine
from tests.support.damage import blob_path, flip
from tests.support.training import Weights, first_weights, steps, write_weights


class Publisher:
    """A store whose model is trained, and a folder that receivers read."""

    def __init__(self, folder: Path) -> None:
        self.store = LocalStore(folder / "store")
        self.base = write_weights(folder / "base", first_weights())
        self.weights = first_weights()
        self.folder = folder / "versions"
        self.engine = Engine(folder / "engine", self.base)
        create(self.base, "policy", store=self.store)
        create(self.base, "base", store=self.store)
        self._steps = steps(self.weights, 20)
        self._folder = folder

    def step(self) -> None:
        self.weights = next(self._steps)
        create(write_weights(self._folder / "step", self.weights), "policy", store=self.store)

    def push(self, receiver: Receiver = "slime", base: str | None = None) -> PushedVersion:
        return push_version("policy", self.folder, receiver=receiver, base=base, store=self.store)

    def check(self, number: int) -> None:
        """Check that the engine gets the weights of the last step."""
        self.engine.pull(self.folder, number)
        assert_equal(self.engine.weights(), self.weights)


def assert_equal(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes()


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path)


@pytest.mark.parametrize("receiver", RECEIVERS)
def test_a_receiver_gets_each_step(publisher: Publisher, receiver: Receiver) -> None:
    size = sum(array.nbytes for array in publisher.weights.values())
    for number in range(1, 4):
        publisher.step()
        pushed = publisher.push(receiver, base="base" if number == 1 else None)
        assert (pushed.version, pushed.is_full, pushed.tensors) == (number, False, 4)
        assert pushed.bytes_written < 0.05 * size
        publisher.check(number)


def test_without_a_base_the_first_version_is_the_whole_model(publisher: Publisher) -> None:
    publisher.step()
    pushed = publisher.push()
    assert (pushed.version, pushed.is_full) == (1, True)
    publisher.check(1)
    publisher.step()
    assert not publisher.push().is_full
    publisher.check(2)
    other = LocalStore(publisher.store.root.parent / "other")
    source = f"slime:{publisher.folder}"
    (followed,) = blobstore.follow("policy", source, store=other, once=True)
    assert followed.version == "000002"
    with blobstore.open("policy", store=other) as model:
        for name, array in publisher.weights.items():
            assert bytes(model.view(name).data) == array.tobytes()


def test_a_model_in_one_file_is_a_version_too(tmp_path: Path) -> None:
    from tests.support.models import write_folder

    store = LocalStore(tmp_path / "store")
    create(write_folder(tmp_path / "base", first_weights()), "policy", store=store)
    pushed = push_version("policy", tmp_path / "versions", store=store)
    assert json.loads((pushed.folder / INDEX).read_text())["metadata"] == {
        "blobstore_manifest": str(Digest.of(store.read_manifest("policy")))
    }
    engine = Engine(tmp_path / "engine", tmp_path / "base")
    engine.pull(tmp_path / "versions", 1)
    assert_equal(engine.weights(), first_weights())


def test_a_model_that_is_the_newest_version_is_not_written_again(publisher: Publisher) -> None:
    publisher.step()
    first = publisher.push(base="base")
    again = publisher.push()
    assert again.is_unchanged
    assert (again.version, again.folder, again.bytes_written) == (1, first.folder, 0)
    assert [path.name for path in publisher.folder.iterdir()] == ["weight_v000001"]


def test_the_base_is_found_in_the_history_and_named_when_it_is_gone(publisher: Publisher) -> None:
    publisher.step()
    publisher.push(base="base")
    publisher.step()
    blobstore.gc(store=publisher.store, older_than=0, force=True)
    with pytest.raises(ModelNotFound, match="keep each version under a tag"):
        publisher.push()
    assert [path.name for path in publisher.folder.iterdir()] == ["weight_v000001"]


def test_versions_of_a_trainer_go_on_if_the_newest_is_named(publisher: Publisher) -> None:
    trainer = Trainer(publisher.folder, first_weights())
    publisher.step()
    trainer.publish(publisher.weights)
    blobstore.copy("policy", "newest", store=publisher.store)
    publisher.step()
    with pytest.raises(ModelNotFound, match="--base"):
        publisher.push()
    with pytest.raises(UsageError, match="not version 1"):
        publisher.push(base="base")
    pushed = publisher.push(base="newest")
    assert (pushed.version, pushed.is_full) == (2, False)
    publisher.check(2)
    publisher.step()
    with pytest.raises(UsageError, match="not version 2"):
        publisher.push(base="base")


def test_another_architecture_needs_a_new_folder(publisher: Publisher) -> None:
    publisher.push(base="base")
    blobstore.save({"x": np.zeros(3, np.float32)}, "policy", store=publisher.store)
    with pytest.raises(UnsupportedSource, match="begin a new folder"):
        publisher.push()


def test_progress_ends_with_all_bytes(publisher: Publisher) -> None:
    publisher.push()
    publisher.step()
    done: list[tuple[int, int]] = []
    push_version(
        "policy",
        publisher.folder,
        store=publisher.store,
        progress=lambda _, *bytes_done: done.append(bytes_done),
    )
    assert 0 < done[0][0] <= done[-1][0] == done[-1][1]


def test_damage_is_not_published(publisher: Publisher) -> None:
    publisher.step()
    flip(blob_path(publisher.store, "model.layers.0.mlp.up_proj.weight", "policy"), -1)
    with pytest.raises(BlobDamaged):
        publisher.push(base="base")
    assert not publisher.folder.exists()


def test_a_folder_in_a_store_and_a_version_that_is_begun_are_refused(publisher: Publisher) -> None:
    with pytest.raises(BlobstoreError, match="inside a store"):
        push_version("policy", publisher.store.root / "blobs", store=publisher.store)
    begun = publisher.folder / "weight_v000001"
    begun.mkdir(parents=True)
    (begun / "model-00000-of-00002.safetensors").write_bytes(b"x")
    with pytest.raises(BlobstoreError, match="exists already"):
        publisher.push()
    with pytest.raises(UsageError, match="unknown receiver"):
        publisher.push("vllm")  # type: ignore[arg-type]


def test_changes_of_a_large_model_become_several_files(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FILE_SIZE", 1_200_000)
    publisher.step()
    pushed = publisher.push(base="base")
    names = sorted(path.name for path in pushed.folder.iterdir())
    assert names == [
        "model-00000-of-00002.safetensors",
        "model-00001-of-00002.safetensors",
        INDEX,
    ]
    publisher.check(1)


def test_a_frozen_base_is_read_as_well(publisher: Publisher) -> None:
    publisher.step()
    blobstore.freeze(["base", "policy"], store=publisher.store)
    publisher.push(base="base")
    publisher.check(1)
    shutil.rmtree(publisher.folder)
