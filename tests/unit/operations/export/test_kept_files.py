"""Files that a model keeps as they are, besides tensors and small files."""

from __future__ import annotations

import filecmp
import os
import tracemalloc
from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged, UsageError
from blobstore.operations.archive.pack import pack_models
from blobstore.operations.archive.unpack import unpack_archive
from blobstore.operations.compare.diff import diff_models
from blobstore.operations.create.create import create
from blobstore.operations.export.export import export_model
from blobstore.operations.export.link import link_model
from blobstore.operations.maintenance.repair import repair_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.planning.plan import QuantizeOptions
from blobstore.sources.base import SourceOptions
from blobstore.store.local import LocalStore


@pytest.fixture
def kept(tmp_path: Path, store: LocalStore) -> Path:
    """A folder without tensors, which is the model ``k``."""
    folder = tmp_path / "kept"
    (folder / "onnx").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "onnx" / "x.onnx").write_bytes(b"opaque")
    (folder / "x.gguf").write_bytes(b"GGUF")
    os.truncate(folder / "x.gguf", 64 * 2**20 + 5)
    create(folder, "k", store=store, source_options=SourceOptions(keep=("*.gguf", "*.onnx")))
    return folder


@pytest.mark.slow
def test_kept_files_are_exported_unchanged(store: LocalStore, kept: Path, out: Path) -> None:
    exported = export_model("k", out, store=store)
    assert (exported.files, exported.tensors, exported.shards) == (3, 0, 0)
    for name in ("config.json", "onnx/x.onnx", "x.gguf"):
        assert filecmp.cmp(kept / name, out / name, shallow=False)


@pytest.mark.slow
def test_a_damaged_kept_file_is_not_exported(store: LocalStore, kept: Path, out: Path) -> None:
    del kept
    blob = Path(store.blob_path(Digest.of(b"opaque")))
    blob.chmod(0o600)
    blob.write_bytes(b"0paque")
    with pytest.raises(BlobDamaged, match="is damaged: its bytes have digest"):
        export_model("k", out, store=store)
    assert not out.exists()


@pytest.mark.slow
def test_large_kept_files_are_linked_and_small_ones_copied(
    store: LocalStore, kept: Path, out: Path
) -> None:
    linked = link_model("k", out, store=store)
    assert (linked.files, linked.links, linked.bytes_linked) == (3, 1, 64 * 2**20 + 5)
    assert (out / "x.gguf").is_symlink()
    assert not (out / "onnx" / "x.onnx").is_symlink()
    assert filecmp.cmp(kept / "x.gguf", out / "x.gguf", shallow=False)


@pytest.mark.slow
def test_kept_files_are_verified_shared_and_diffed(store: LocalStore, kept: Path) -> None:
    again = create(kept, "again", store=store, source_options=SourceOptions(keep=("*",)))
    assert again.bytes_written < 1000
    assert verify_models([], store=store).faults == ()
    assert diff_models("k", "again", store=store).is_same
    digest = store.resolve("k").layers[-2].digest
    with blobstore.open("k", store=store) as model:
        assert list(model) == []
        assert model.read_file("onnx/x.onnx") == b"opaque"
        assert model.file_path("x.gguf") == Path(store.blob_path(digest))


@pytest.mark.slow
def test_a_model_of_kept_files_alone_has_nothing_to_quantize(store: LocalStore, kept: Path) -> None:
    with pytest.raises(UsageError, match="has no tensors, so there is nothing to quantize"):
        create(
            kept,
            "q",
            store=store,
            source_options=SourceOptions(keep=("*.gguf",)),
            quantize=QuantizeOptions("int4"),
        )


@pytest.mark.slow
def test_kept_files_survive_an_archive(store: LocalStore, kept: Path, tmp_path: Path) -> None:
    pack_models(["k"], tmp_path / "k.bsar", store=store)
    other = LocalStore(tmp_path / "other")
    unpack_archive(tmp_path / "k.bsar", store=other)
    export_model("k", tmp_path / "out", store=other)
    assert filecmp.cmp(kept / "x.gguf", tmp_path / "out" / "x.gguf", shallow=False)


@pytest.mark.slow
def test_kept_files_are_repaired_from_their_source(store: LocalStore, kept: Path) -> None:
    large = store.resolve("k").layers[-2].digest
    for digest in (Digest.of(b"opaque"), large):
        Path(store.blob_path(digest)).unlink()
    repaired = repair_models(["k"], kept, store=store)
    assert {item.digest for item in repaired.repaired} == {Digest.of(b"opaque"), large}
    assert verify_models([], store=store).faults == ()


@pytest.mark.slow
def test_kept_files_are_read_in_pieces(store: LocalStore, kept: Path) -> None:
    tracemalloc.start()
    create(kept, "large", store=store, source_options=SourceOptions(keep=("*.gguf",)))
    assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    tracemalloc.stop()
