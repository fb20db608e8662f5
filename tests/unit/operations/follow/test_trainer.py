"""A name that follows the folder of a trainer, which an independent program writes."""

from __future__ import annotations

import json
import os
import shutil
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import (
    BlobDamaged,
    BlobstoreError,
    DamagedSource,
    ModelNotFound,
    SourceNotFound,
    UnsupportedSource,
)
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.follow import patched_model, trainer
from blobstore.operations.follow.follow import Followed
from blobstore.operations.follow.trainer import find_manifest
from blobstore.planning.plan import QuantizeOptions
from blobstore.sources.huggingface import HuggingFaceFolder
from blobstore.sources.weight_deltas import Patch
from blobstore.sources.weight_versions import OpenChanges, WeightVersion
from blobstore.store.local import LocalStore
from tests.readers.weight_versions import INDEX, Trainer
from tests.support.damage import blob_path, flip
from tests.support.models import write_folder
from tests.support.training import Weights, first_weights, steps, write_weights


class Run:
    """A trainer, and a store with the model that it starts from."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.weights = first_weights()
        self.base = write_weights(folder / "base", self.weights)
        self.store = LocalStore(folder / "store")
        create(self.base, "policy", store=self.store)
        self.trainer = Trainer(folder / "versions", self.weights, **options)
        self._folder = folder
        self._steps = steps(self.weights, 20)

    @property
    def source(self) -> str:
        return f"slime:{self.trainer.folder}"

    def step(self) -> Path:
        self.weights = next(self._steps)
        return self.trainer.publish(self.weights)

    def follow(self, **options: Any) -> list[Followed]:
        return list(blobstore.follow("policy", self.source, store=self.store, once=True, **options))

    def check(self) -> None:
        """Check that the name has the weights of the last step, with the digests of a whole import."""
        shutil.rmtree(self._folder / "expected", ignore_errors=True)
        expected = write_weights(self._folder / "expected", self.weights)
        create(expected, "expected", store=self.store)
        assert self.store.read_manifest("policy") == self.store.read_manifest("expected")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksums", ["xxh3-128", "blake3", "adler32"])
def test_each_version_becomes_one_of_the_name(
    tmp_path: Path, encoding: str, checksums: str
) -> None:
    run = Run(tmp_path, encoding=encoding, checksums=checksums)
    previous = Digest.of(run.store.read_manifest("policy"))
    for number in range(1, 4):
        folder = run.step()
        (followed,) = run.follow()
        assert (followed.version, followed.previous) == (f"{number:06d}", previous)
        size = sum(path.stat().st_size for path in folder.iterdir())
        assert followed.bytes_fetched == size
        previous = followed.digest
        run.check()
    assert run.follow() == []


def test_versions_that_were_missed_come_in_one_step(run: Run) -> None:
    for _ in range(3):
        run.step()
    (followed,) = run.follow(keep_last=1)
    assert (followed.version, str(followed.kept)) == ("000003", "policy:latest-v000003")
    run.check()


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_the_memory_of_missed_versions_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    run = Run(tmp_path, encoding=encoding)
    most = Counter[str]()
    opened: dict[str, list[weakref.ref[Patch]]] = defaultdict(list)
    patch = OpenChanges.patch

    def counted(version: OpenChanges, name: str, nbytes: int) -> Patch:
        made = patch(version, name, nbytes)
        opened[name].append(weakref.ref(made))
        alive = [one for it in opened[name] if (one := it()) is not None]
        most[name] = max(most[name], sum(one.memory for one in alive[:-1]) - nbytes)
        return made

    monkeypatch.setattr(OpenChanges, "patch", counted)
    monkeypatch.setattr(patched_model, "MAX_WINDOW", 1)
    for _ in range(9):
        run.step()
    run.follow()
    run.check()
    assert max(map(len, opened.values())) >= 9
    assert max(most.values()) <= 0, "the next one may need as much"


def test_more_versions_are_made_up_for_than_files_may_be_open(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = 0
    most = 0

    class Counted(OpenChanges):
        def __init__(self, version: WeightVersion) -> None:
            nonlocal opened, most
            super().__init__(version)
            opened += len(version.files)
            most = max(most, opened)

        def close(self) -> None:
            nonlocal opened
            opened -= len(self.version.files)
            super().close()

    monkeypatch.setattr(trainer, "_OPEN_FILES", 3)
    monkeypatch.setattr(trainer, "OpenChanges", Counted)
    for _ in range(8):
        run.step()
    (followed,) = run.follow()
    assert followed.version == "000008"
    assert 0 < most <= 3
    run.check()
    assert run.follow() == []


def test_without_its_note_a_store_finds_out_which_version_it_has(run: Run) -> None:
    for _ in range(2):
        run.step()
    run.follow()
    for note in run.store.folder("remotes").glob("followed-*"):
        note.unlink()
    assert run.follow() == []
    for note in run.store.folder("remotes").glob("followed-*"):
        note.unlink()
    run.step()
    (followed,) = run.follow()
    assert followed.version == "000003"
    run.check()


def test_a_version_is_not_taken_before_its_index_is_there(run: Run) -> None:
    run.step()
    run.follow()
    index = run.step() / INDEX
    content = index.read_bytes()
    index.unlink()
    assert run.follow() == []
    index.write_bytes(content)
    assert len(run.follow()) == 1
    run.check()


def test_a_version_without_changes_is_only_counted(run: Run) -> None:
    run.step()
    run.follow()
    run.trainer.publish(run.weights)
    assert run.follow() == []
    run.step()
    assert run.follow()[0].version == "000003"
    run.check()


def test_a_full_version_begins_again(run: Run, tmp_path: Path) -> None:
    run.step()
    folder = tmp_path / "versions" / "weight_v000002"
    write_weights(folder, run.weights)
    run.trainer.version = 2
    run.step()
    other = LocalStore(tmp_path / "other")
    (followed,) = blobstore.follow("policy", run.source, store=other, once=True)
    assert (followed.version, followed.previous) == ("000003", None)
    assert len(run.follow()) == 1
    run.check()
    assert other.read_manifest("policy") == run.store.read_manifest("policy")


def test_a_single_file_is_a_full_version(run: Run, tmp_path: Path) -> None:
    weights = {name: array + array for name, array in run.weights.items()}
    folder = write_folder(tmp_path / "versions" / "weight_v000001", weights)
    (followed,) = run.follow()
    assert followed.version == "000001"
    with blobstore.open("policy", store=run.store) as model:
        assert set(model) == set(weights)
    assert run.follow() == []
    (folder / "README.md").write_text("written after the weights")
    (again,) = run.follow()
    assert (again.version, again.previous) == ("000001", followed.digest)


def test_a_single_file_of_another_model_is_refused(run: Run, tmp_path: Path) -> None:
    weights = dict(run.weights)
    del weights["model.norm.weight"]
    write_folder(tmp_path / "versions" / "weight_v000001", weights)
    before = run.store.read_manifest("policy")
    with pytest.raises(DamagedSource, match=r"no index, and tensor 'model\.norm\.weight'"):
        run.follow()
    assert run.store.read_manifest("policy") == before
    other = LocalStore(tmp_path / "other")  # nothing to compare with
    assert len(list(blobstore.follow("policy", run.source, store=other, once=True))) == 1


def test_a_change_in_one_file_is_no_full_version_before_its_index_is_there(
    run: Run, tmp_path: Path
) -> None:
    run.step()
    run.follow()
    before = run.store.read_manifest("policy")
    folder = tmp_path / "versions" / "weight_v000002"
    folder.mkdir()
    save_file(
        {"model.norm.weight": np.zeros(9, np.uint8)},
        folder / "model.safetensors",
        metadata={"model.norm.weight": "0" * 32},
    )
    assert run.follow() == []
    assert run.store.read_manifest("policy") == before


def test_a_version_that_is_written_again_under_its_number_is_taken(
    run: Run, tmp_path: Path
) -> None:
    run.step()
    (first,) = run.follow()
    run.trainer = Trainer(tmp_path / "versions", first_weights())
    run._steps = steps(first_weights(), 5, share=0.01)
    run.step()
    (followed,) = run.follow()
    assert (followed.version, followed.previous) == ("000001", first.digest)
    run.check()
    assert run.follow() == []


def test_a_trainer_that_began_again_and_went_past_the_version_is_noticed(
    run: Run, tmp_path: Path
) -> None:
    run.step()
    run.follow()
    run.trainer = Trainer(tmp_path / "versions", first_weights())
    run._steps = steps(first_weights(), 5, share=0.01)
    for _ in range(2):
        run.step()
    assert run.follow()[0].version == "000002"
    run.check()


def test_a_version_that_was_only_copied_or_touched_is_what_it_was(run: Run, tmp_path: Path) -> None:
    run.step()
    run.step()
    run.follow()
    blobstore.gc(store=run.store, older_than=0, force=True)  # and with it the first model
    os.utime(tmp_path / "versions" / "weight_v000002" / INDEX, (1, 1))
    assert run.follow() == []
    run.step()
    assert run.follow()[0].version == "000003"
    run.check()


def test_a_trainer_that_begins_again_begins_with_the_model_that_it_started_from(
    run: Run, tmp_path: Path
) -> None:
    for _ in range(3):
        run.step()
        run.follow()
    run.trainer = Trainer(tmp_path / "versions", first_weights())
    assert run.follow() == []  # nothing is there yet
    run._steps = steps(first_weights(), 5, share=0.01)
    run.step()
    (followed,) = run.follow()
    assert followed.version == "000001"
    run.check()


def test_a_trainer_that_begins_again_needs_its_first_model(run: Run, tmp_path: Path) -> None:
    run.step()
    run.step()
    run.follow()
    blobstore.gc(store=run.store, older_than=0, force=True)
    damaged = run.store.manifest_path(Reference.parse("damaged"))
    damaged.parent.mkdir()
    damaged.symlink_to("nowhere")
    run.trainer = Trainer(tmp_path / "versions", first_weights())
    run.step()
    before = run.store.read_manifest("policy")
    with pytest.raises(ModelNotFound, match="begins again with version 1"):
        run.follow()
    assert run.store.read_manifest("policy") == before


def test_another_model_is_refused_and_the_tensor_is_named(run: Run) -> None:
    blobstore.save(
        {name: array + array for name, array in run.weights.items()}, "policy", store=run.store
    )
    before = run.store.read_manifest("policy")
    run.step()
    with pytest.raises(DamagedSource, match=r"tensor 'model\.layers\.\d\.mlp.* have the checksum"):
        run.follow()
    assert run.store.read_manifest("policy") == before


def test_a_missing_model_and_a_missing_folder_are_errors(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no complete version"):
        run.follow()
    run.step()
    with pytest.raises(ModelNotFound, match="import the folder"):
        list(blobstore.follow("other", run.source, store=run.store, once=True))
    with pytest.raises(SourceNotFound, match="cannot read"):
        list(blobstore.follow("policy", f"sglang:{tmp_path}/no", store=run.store, once=True))


def test_a_model_that_was_converted_is_refused(run: Run) -> None:
    create(run.base, "policy", store=run.store, quantize=QuantizeOptions("int8"))
    run.step()
    with pytest.raises(UnsupportedSource, match="without --quantize"):
        run.follow()


def test_damage_of_a_tensor_that_does_not_change_is_not_published(run: Run) -> None:
    flip(blob_path(run.store, "model.norm.weight", "policy"), -1)
    run.step()
    before = run.store.read_manifest("policy")
    with pytest.raises(BlobDamaged, match=r"model\.norm\.weight"):
        run.follow()
    assert run.store.read_manifest("policy") == before


# What is wrong with a folder, done to it, and how it is named.


def _with_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        value = json.loads((folder / INDEX).read_text())
        change(value)
        (folder / INDEX).write_text(json.dumps(value))

    return apply


def _with_file(
    change: Callable[[Weights, dict[str, str]], object],
) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        path = min(folder.glob("*.safetensors"))
        tensors = load_file(path)
        length = int.from_bytes(path.read_bytes()[:8], "little")
        metadata = json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]
        change(tensors, metadata)
        save_file(tensors, path, metadata=metadata)

    return apply


def _link(name: str) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        target = folder.parent / "outside"
        if (folder / name).exists():
            (folder / name).rename(target)
        else:
            target.write_text("secret")
        (folder / name).symlink_to(target)

    return apply


def _first(tensors: Weights) -> str:
    return min(tensors)


def _bomb(tensors: Weights, _: dict[str, str]) -> None:
    import zstandard

    frame = zstandard.ZstdCompressor(level=19).compress(bytes(2**28))
    tensors[_first(tensors)] = np.frombuffer(frame, np.uint8)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "a lying checksum": (
        _with_file(lambda tensors, texts: texts.update({_first(tensors): "0" * 32})),
        "have the checksum .* and the file says '0000",
    ),
    "no checksum": (
        _with_file(lambda tensors, texts: texts.pop(_first(tensors))),
        "has no checksum of tensor",
    ),
    "altered bytes": (
        _with_file(
            lambda tensors, _: tensors.update({_first(tensors): tensors[_first(tensors)][:-9]})
        ),
        "ends too early|not a frame of zstd",
    ),
    "a frame that never ends": (_with_file(_bomb), "is larger than the tensor"),
    "no frame": (
        _with_file(lambda tensors, _: tensors.update({_first(tensors): np.zeros(9, np.uint8)})),
        "not a frame of zstd",
    ),
    "no vector": (
        _with_file(
            lambda tensors, _: tensors.update({_first(tensors): np.zeros((3, 3), np.uint8)})
        ),
        "expected a vector of U8",
    ),
    "another type": (
        _with_file(lambda tensors, _: tensors.update({_first(tensors): np.zeros(9, np.int8)})),
        "expected a vector of U8",
    ),
    "a tensor that the index lacks": (
        _with_file(lambda tensors, texts: (tensors.update(x=np.zeros(9, np.uint8)), texts)),
        "tensor 'x' is not both in the file",
    ),
    "a tensor that the file lacks": (
        _with_index(lambda value: value["weight_map"].update(x=min(value["weight_map"].values()))),
        "tensor 'x' is not both in the file",
    ),
    "a tensor that the model lacks": (
        lambda folder: (
            _with_file(
                lambda tensors, texts: (
                    tensors.update(x=np.zeros(9, np.uint8)),
                    texts.update(x="0"),
                )
            )(folder),
            _with_index(
                lambda value: value["weight_map"].update(x=min(value["weight_map"].values()))
            )(folder),
        ),
        "changes tensor 'x', which the model does not have",
    ),
    "a path as the name of a file": (
        _with_index(lambda value: value["weight_map"].update(x="../outside.safetensors")),
        "is not the plain name",
    ),
    "a file that is missing": (
        _with_index(lambda value: value["weight_map"].update(x="no.safetensors")),
        "is missing",
    ),
    "another number": (
        _with_index(lambda value: value["metadata"].update(version="000009")),
        "expected version 1",
    ),
    "a base that comes later": (
        _with_index(lambda value: value["metadata"].update(base_version="000001")),
        "an earlier base_version",
    ),
    "a number that is an object": (
        _with_index(lambda value: value["metadata"].update(base_version={"x": 1})),
        "an earlier base_version",
    ),
    "another encoding": (
        _with_index(lambda value: value["metadata"].update(delta_encoding="pickle")),
        "delta_encoding is 'pickle'",
    ),
    "another compression": (
        _with_index(lambda value: value["metadata"].update(compression_format="lz4")),
        "compression_format is 'lz4'",
    ),
    "another kind of checksum": (
        _with_index(lambda value: value["metadata"].update(checksum_format=["crc32"])),
        "checksum_format is",
    ),
    "no JSON": (lambda folder: (folder / INDEX).write_bytes(b"{"), "not valid JSON"),
    "a list of names": (_with_index(lambda value: value.update(weight_map=[])), "no 'weight_map'"),
    "a link to weights": (_link("model-00000-of-00002.safetensors"), "neither a file nor a folder"),
    "a link to a small file": (_link("config.json"), "neither a file nor a folder"),
    "a pipe": (lambda folder: os.mkfifo(folder / "pipe"), "neither a file nor a folder"),
    "deep folders": (
        lambda folder: (folder / "/".join("d" * 66)).mkdir(parents=True),
        "has folders more than 64 deep",
    ),
    "a truncated file": (
        lambda folder: os.truncate(folder / "model-00000-of-00002.safetensors", 500),
        "safetensors",
    ),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_what_is_wrong_is_named_and_nothing_is_published(run: Run, wrong: str) -> None:
    change, message = WRONG[wrong]
    change(run.step())
    before = run.store.read_manifest("policy")
    with pytest.raises(BlobstoreError, match=message):
        run.follow()
    assert run.store.read_manifest("policy") == before
    assert list(run.store.references()) == [blobstore.Reference.of("policy")]


def test_a_version_that_is_a_link_is_refused(run: Run) -> None:
    folder = run.step()
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")
    with pytest.raises(DamagedSource, match="is not a folder"):
        run.follow()


def test_a_file_that_becomes_a_link_after_a_version_was_checked_is_not_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_weights(tmp_path / "versions" / "weight_v000001", run.weights)
    secret = write_weights(tmp_path / "private", {n: a + a for n, a in run.weights.items()})
    before = run.store.read_manifest("policy")
    real = HuggingFaceFolder

    for name in ("config.json", min(path.name for path in folder.glob("*.safetensors"))):

        def swapping(*args: Any, name: str = name, **options: Any) -> HuggingFaceFolder:
            (folder / name).rename(tmp_path / name)
            (folder / name).symlink_to(secret / name)
            return real(*args, **options)

        monkeypatch.setattr(trainer, "HuggingFaceFolder", swapping)
        with pytest.raises(BlobstoreError, match="link|cannot"):
            run.follow()
        (tmp_path / name).replace(folder / name)
        assert run.store.read_manifest("policy") == before


def test_a_version_that_becomes_a_link_after_it_was_checked_is_read_as_it_was(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_weights(tmp_path / "versions" / "weight_v000001", run.weights)
    secret = write_weights(tmp_path / "private", {n: a + a for n, a in run.weights.items()})
    real = HuggingFaceFolder

    def swapping(*args: Any, **options: Any) -> HuggingFaceFolder:
        folder.rename(tmp_path / "moved")
        folder.symlink_to(secret)
        return real(*args, **options)

    monkeypatch.setattr(trainer, "HuggingFaceFolder", swapping)
    run.follow()
    run.check()


def test_a_chain_with_a_gap_is_refused(run: Run) -> None:
    run.step()
    run.follow()
    missing = run.step()
    run.step()
    shutil.rmtree(missing)
    with pytest.raises(DamagedSource, match="missing"):
        run.follow()


def test_changes_outside_of_a_tensor_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, encoding="overwrite")
    for payload, message in (
        (np.array([1, 2**31], "<u4").tobytes() + b"x", "byte 2147483648 changes"),
        (np.array([2**32 - 1], "<u4").tobytes(), "4294967295 bytes change"),
        (np.array([9], "<u4").tobytes(), "ends too early"),
        (b"\x01", "ends too early"),
        (np.array([0], "<u4").tobytes() + b"x", "is larger than the tensor"),
    ):
        import zstandard

        frame = np.frombuffer(zstandard.ZstdCompressor().compress(payload), np.uint8)
        run.trainer = Trainer(tmp_path / "versions", first_weights(), encoding="overwrite")
        run._steps = steps(first_weights(), 5)
        _with_file(lambda tensors, _, frame=frame: tensors.update({_first(tensors): frame}))(  # type: ignore[misc]
            run.step()
        )
        with pytest.raises(DamagedSource, match=message):
            run.follow()


def test_a_refused_version_is_reported_until_it_is_right(run: Run) -> None:
    folder = run.step()
    path = min(folder.glob("*.safetensors"))
    intact = path.read_bytes()
    path.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    errors: list[str] = []
    stop = threading.Event()

    def on_error(error: BlobstoreError, _: float) -> None:
        errors.append(str(error))
        path.write_bytes(intact)

    found = blobstore.follow(
        "policy", run.source, store=run.store, interval=0.01, on_error=on_error, stop=stop
    )
    assert next(found).version == "000001"
    assert len(errors) == 1
    run.check()
    stop.set()
    assert list(found) == []


def test_experts_in_packs_are_trained_too(tmp_path: Path) -> None:
    from tests.support.models import moe_tensors

    weights: Weights = {
        name: array.astype(ml_dtypes.bfloat16) for name, array in moe_tensors().items()
    }
    store = LocalStore(tmp_path / "store")
    for form in ("packed", "stacked"):
        create(write_folder(tmp_path / "base", weights), "policy", store=store, experts=form)  # type: ignore[arg-type]
        trainer = Trainer(tmp_path / "versions", weights)
        (new,) = steps(weights, 1, share=0.2)
        trainer.publish(new)
        source = f"slime:{trainer.folder}"
        assert len(list(blobstore.follow("policy", source, store=store, once=True))) == 1
        expected = write_folder(tmp_path / "expected", new)
        create(expected, "expected", store=store, experts=form)  # type: ignore[arg-type]
        assert store.read_manifest("policy") == store.read_manifest("expected")


def test_a_manifest_is_found_by_another_name_if_its_own_is_gone(store: LocalStore) -> None:
    blobstore.save({"w": np.zeros(2)}, "other", store=store)
    data, gone = store.read_manifest(Reference.parse("other")), Reference.parse("gone")
    assert trainer.find_manifest(store, gone, Digest.of(data)) == data
    assert trainer.find_manifest(store, gone, Digest.of(b"")) is None


def test_a_manifest_without_its_blobs_is_not_found(run: Run) -> None:
    name = Reference.parse("policy")
    digest = Digest.of(run.store.read_manifest(name))
    assert find_manifest(run.store, name, digest) == run.store.read_manifest(name)
    Path(run.store.blob_path(run.store.resolve(name).layers[0].digest)).unlink()
    assert find_manifest(run.store, name, digest) is None
