from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.core.interrupts import Stopped
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    InvalidManifest,
    ModelNotFound,
    NameConflict,
    StoreBusy,
    StoreError,
)
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.layers_digest import layers_digest
from blobstore.manifests.model import MAX_MANIFEST_SIZE, Manifest, ModelConfig
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore, default_root
from blobstore.store.names import NewModel, replace_any
from blobstore.store.notes import NoteKind
from blobstore.store.scan import folders_and_files
from tests.support import sandbox
from tests.support.ollama_store import add_gguf_model

NAME = Reference.parse("m")

KIND = NoteKind("a note 1")


def put(store: LocalStore, data: bytes = b"config") -> Descriptor:
    with store.ingest() as ingest:
        added = ingest.add(len(data), lambda: [data])
        ingest.publish()
    return Descriptor(media_type=media_types.CONFIG, digest=added.digest, size=added.size)


def publish(store: LocalStore, name: str = "m") -> Manifest:
    manifest = Manifest(config=put(store), layers=())
    store.names.publish(replace_any(name), manifest)
    return manifest


def write(store: LocalStore, data: bytes) -> Path:
    path = store.manifest_path(NAME)
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    return path


# A request to stop


@pytest.mark.usefixtures("requested")
def test_a_request_to_end_the_program_stops_whatever_reads_manifests(store: LocalStore) -> None:
    with pytest.raises(Stopped):
        store.resolve(NAME)


# The root


def test_the_environment_sets_the_default_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOBSTORE_HOME", "/some/where")
    assert LocalStore().root == Path("/some/where")
    monkeypatch.setenv("BLOBSTORE_HOME", "")
    monkeypatch.setenv("HOME", "/me")
    assert default_root() == Path("/me/.blobstore")
    assert LocalStore("/given").root == Path("/given")
    assert repr(LocalStore("/a\nb")) == "LocalStore('/a\\nb')"


# Names


def proven(store: LocalStore) -> Manifest:
    """Publish a manifest whose config has the digest of its layers."""
    layer = put(store, b"{}")._replace(media_type=media_types.JSON, name="a.json")
    config = put(store, ModelConfig(layers_digest=layers_digest([layer])).to_bytes())
    manifest = Manifest(config=config, layers=(layer,))
    store.names.publish(replace_any(NAME), manifest)
    return manifest


def test_a_manifest_that_was_changed_is_not_resolved(store: LocalStore) -> None:
    manifest = proven(store)
    assert store.resolve(NAME) == manifest
    path = store.manifest_path(NAME)
    changed = path.read_bytes().replace(b'"a.json"', b'"b.json"')
    path.write_bytes(changed)
    with pytest.raises(InvalidManifest, match=f"^'{path}': the manifest was changed since"):
        store.resolve(NAME)
    data, parsed = store.parse(NAME)
    assert data == changed
    assert [layer.name for layer in parsed.layers] == ["b.json"]


def test_without_its_config_a_manifest_is_not_proven(store: LocalStore) -> None:
    manifest = proven(store)
    data = store.read_manifest(NAME)
    assert store.check_manifest(data, manifest)
    path = Path(store.blob_path(manifest.config.digest))
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"completion", b"completiom"))
    assert not store.check_manifest(data, manifest)
    path.unlink()
    assert not store.check_manifest(data, manifest)
    assert store.resolve(NAME) == manifest


def test_a_changed_size_of_the_config_is_detected(store: LocalStore) -> None:
    manifest = proven(store)
    size = manifest.config.size
    wrong = replace(manifest, config=manifest.config._replace(size=size + 1))
    with pytest.raises(InvalidManifest, match="the manifest was changed since it was written"):
        store.check_manifest(wrong.to_bytes(), wrong)


def test_a_huge_config_is_not_read(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Manifest(config=put(store, b" " * (2**20 + 1)), layers=())
    monkeypatch.setattr(store._hot, "open", lambda *_: pytest.fail("opened"))
    assert not store.check_manifest(manifest.to_bytes(), manifest)


def test_a_name_is_replaced_in_one_step(store: LocalStore) -> None:
    publish(store)
    descriptor = put(store, b"other")
    other = Manifest(config=descriptor, layers=())
    store.names.publish(replace_any(NAME), other)
    assert store.resolve(NAME) == other
    assert list(store.folder("temporary").iterdir()) == []


def test_a_manifest_is_placed_byte_for_byte(store: LocalStore) -> None:
    manifest = publish(store, "other")
    data = b"  " + manifest.to_bytes()
    store.folder("temporary").rmdir()  # as in a store of Ollama's
    store.names.place(NewModel(replace_any(NAME), data, manifest.blobs))
    assert store.read_manifest(NAME) == data


def test_removing_a_name_removes_its_empty_folders(store: LocalStore) -> None:
    for name in ("host/n/m", "n/m:t", "n/m:u"):
        publish(store, name)
    for name in ("host/n/m", "n/m:t"):
        store.names.remove(Reference.parse(name))
    assert list(map(str, store.references())) == ["n/m:u"]
    assert not (store.folder("manifests") / "host").exists()
    assert len(list(store.folder("blobs").iterdir())) == 1
    with pytest.raises(ModelNotFound, match="no model 'n/m:t'"):
        store.names.remove(Reference.parse("n/m:t"))
    store.names.remove(Reference.parse("n/m:u"))
    assert list(store.folder("manifests").iterdir()) == []


def test_a_name_is_removed_durably(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store)
    paths = (store.names.published.path(NAME), store.manifest_path(NAME))
    link, folder = (path.parent.stat().st_ino for path in paths)
    synced = []

    def noting(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, store.manifest_path(NAME).exists()))

    monkeypatch.setattr(os, "fsync", noting)
    store.names.remove(NAME)
    assert synced == [(link, True), (folder, False)]


def test_many_names_are_removed_with_one_sync_of_their_folders(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"model:{number}" for number in range(5)]
    for name in (*names, "other"):
        publish(store, name)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    store.names.remove(*names)
    assert len(synced) == 2
    assert list(map(str, store.references())) == ["other:latest"]


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_only_the_owner_can_write_a_manifest(store: LocalStore, umask: int) -> None:
    assert sandbox.call(lambda: publish(store) and "done", umask=umask) == "done"
    mode = store.manifest_path(NAME).stat().st_mode
    assert stat.S_IMODE(mode) == 0o644 & ~umask


def test_the_folders_of_ollama_contain_no_files_of_ours(store: LocalStore) -> None:
    publish(store)
    assert sorted(path.name for path in store.root.iterdir()) == [
        ".blobstore",
        "blobs",
        "manifests",
    ]
    files = [path for path in store.folder("manifests").rglob("*") if path.is_file()]
    assert files == [store.manifest_path(NAME)]


def test_a_manifest_with_missing_or_damaged_blobs_gets_no_name(store: LocalStore) -> None:
    old = publish(store)
    missing = Descriptor(media_type="x", digest=Digest.of(b"none"), size=4)
    with pytest.raises(BlobMissing):
        store.names.publish(replace_any(NAME), Manifest(config=old.config, layers=(missing,)))
    short = Descriptor(media_type="x", digest=old.config.digest, size=7)
    with pytest.raises(BlobDamaged):
        store.names.publish(replace_any(NAME), Manifest(config=short, layers=()))
    assert store.resolve(NAME) == old
    with pytest.raises(BlobMissing):
        store.names.publish(replace_any("new"), Manifest(config=missing, layers=()))
    with pytest.raises(ModelNotFound):
        store.resolve(Reference.parse("new"))


@pytest.mark.parametrize(
    ("first", "second"),
    [("m", "M"), ("n/m", "N/m"), ("m:t", "m:T"), ("h/n/m", "H/n/m"), ("n/m:a", "N/M:b")],
)
def test_names_that_differ_only_in_case_are_rejected(
    store: LocalStore, first: str, second: str
) -> None:
    manifest = publish(store, first)
    with pytest.raises(
        NameConflict, match=f"'{Reference.parse(second)}' differs only in case from"
    ):
        store.names.check_name(Reference.parse(second))
    with pytest.raises(NameConflict):
        store.names.publish(replace_any(second), manifest)
    store.names.check_name(Reference.parse(first))
    assert len(list(store.references())) == 1


def test_names_that_differ_in_more_than_case_are_accepted(store: LocalStore) -> None:
    for name in ("m", "m2", "n/M", "m:x", "N/other"):
        publish(store, name)
    assert len(list(store.references())) == 5


def test_a_path_that_was_taken_for_a_name_is_explained(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    publish(store, "other")
    (tmp_path / "models" / "m").mkdir(parents=True)
    (tmp_path / "models" / "n:v1").touch()
    for name in ("models/m", "models/n:v1"):
        with pytest.raises(ModelNotFound, match=f"'blobstore create {name}' imports what is there"):
            store.resolve(Reference.parse(name))


def test_an_unknown_name_is_not_found(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=f"no model 'm:latest' in the store '{tmp_path}/store'"):
        store.resolve(NAME)
    publish(store, "other")
    for name in ("m", "other:t", "n/other"):
        with pytest.raises(ModelNotFound):
            store.resolve(Reference.parse(name))


# Damaged manifests


def test_a_malformed_manifest_is_reported(store: LocalStore) -> None:
    path = write(store, b'{"schemaVersion":2}')
    with pytest.raises(InvalidManifest, match=rf"^'{path}': \$\.mediaType: expected a text"):
        store.resolve(NAME)


def test_a_manifest_over_the_limit_is_not_read(store: LocalStore) -> None:
    path = write(store, b"")
    os.truncate(path, MAX_MANIFEST_SIZE + 1)
    with pytest.raises(InvalidManifest, match="has 67108865 bytes, over the limit of 67108864"):
        store.resolve(NAME)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Path.mkdir, "is not a regular file"),
        (os.mkfifo, "is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda path: path.symlink_to("gone"), "is a broken symbolic link"),
        (lambda path: path.symlink_to(path), "is a broken symbolic link"),
    ],
)
def test_a_manifest_that_is_not_a_regular_file_is_damaged_and_listed_unless_it_is_a_folder(
    store: LocalStore, make: Callable[[Path], None], what: str
) -> None:
    path = store.manifest_path(NAME)
    path.parent.mkdir(parents=True)
    make(path)
    with pytest.raises(InvalidManifest, match=f"{re.escape(str(path))}' {what}"):
        store.resolve(NAME)
    assert list(store.references()) == ([] if path.is_dir() else [NAME])


def test_a_folder_that_vanishes_while_it_is_listed_is_skipped(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store)
    publish(store, "n/other")
    gone = store.manifest_path(Reference.parse("n/other")).parent.parent

    def seen(path: str) -> tuple[list[str], list[str]]:
        found = folders_and_files(path)
        if path == str(gone.parent):
            shutil.rmtree(gone, ignore_errors=True)
        return found

    monkeypatch.setattr("blobstore.store.manifests.folders_and_files", seen)
    assert list(store.references()) == [NAME]


def test_files_whose_paths_are_not_names_are_skipped(store: LocalStore) -> None:
    publish(store)
    folder = store.manifest_path(NAME).parent
    (folder / ".DS_Store").touch()
    (folder / "a b").touch()
    (folder / "sub").mkdir()
    (folder.parent / "file").touch()
    (store.folder("manifests") / "too" / "deep" / "for" / "a").mkdir(parents=True)
    assert list(store.references()) == [NAME]


def test_ollama_s_own_models_are_read(store: LocalStore) -> None:
    manifest = add_gguf_model(store, "llama3:8b")
    before = {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()}
    assert store.resolve(Reference.parse("llama3:8b")) == manifest
    assert list(map(str, store.references())) == ["llama3:8b"]
    publish(store)
    assert all(path.read_bytes() == data for path, data in before.items())


# Stores that cannot be used


def test_an_absent_store_has_no_names(store: LocalStore) -> None:
    assert list(store.references()) == []
    assert not store.root.exists()


def test_a_file_in_place_of_the_store_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    store = LocalStore(tmp_path / "file")
    uses: list[Callable[[], object]] = [
        lambda: list(store.references()),
        lambda: store.resolve(NAME),
        lambda: put(store),
    ]
    for use in uses:
        with pytest.raises(StoreError, match=f"^the store '{tmp_path}/file' is not a folder$"):
            use()
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_a_store_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="Not a directory"):
        put(LocalStore(tmp_path / "file" / "store"))


@pytest.mark.parametrize("name", ["blobs", "manifests", ".blobstore"])
def test_a_file_in_place_of_a_folder_is_reported(store: LocalStore, name: str) -> None:
    store.root.mkdir()
    (store.root / name).touch()
    with pytest.raises(StoreError, match=f"writing to the store .* failed: .*{name}"):
        put(store)


@pytest.mark.slow
def test_a_read_only_store_can_be_read_and_reports_why_it_cannot_be_written() -> None:
    with sandbox.common_folder() as folder:
        store = LocalStore(folder / "store")
        publish(store)
        for path in store.root.rglob("*"):
            path.chmod(0o555 if path.is_dir() else 0o444)
        store.root.chmod(0o555)
        assert sandbox.call(lambda: store.resolve(NAME).config.size, unprivileged=True) == "6"
        inner = f"{folder}/store/.blobstore"
        for use, name, place in (
            (lambda: put(store, b"new"), "store", rf"{inner}/leases/\d+-[0-9a-f]+"),
            (lambda: publish_again(store), "store", f"{inner}/lock"),
            (lambda: put(LocalStore(store.root / "x")), "store/x", f"{folder}/store/x"),
        ):
            outcome = sandbox.call(use, unprivileged=True)
            message = f"StoreError: no permission to write to the store '{folder}/{name}'"
            assert re.fullmatch(rf"{message} \('{place}'\)", outcome)


def publish_again(store: LocalStore) -> None:
    store.names.publish(replace_any("other"), store.resolve(NAME))


def test_an_unreadable_manifest_is_a_store_error() -> None:
    with sandbox.common_folder() as folder:
        store = LocalStore(folder)
        publish(store)
        path = store.manifest_path(NAME)
        path.chmod(0)
        outcome = sandbox.call(lambda: store.resolve(NAME), unprivileged=True)
    assert outcome == f"StoreError: cannot read manifest '{path}': Permission denied"


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    with sandbox.small_disk(tmp_path / "disk", 2**20) as disk:
        store = LocalStore(disk / "store")
        publish(store)
        before = sorted(store.root.rglob("*"))
        with pytest.raises(StoreError, match=f"no space left for the store '{disk}/store'"):
            put(store, bytes(2**21))
        assert sorted(store.root.rglob("*")) == before
        put(store, bytes(2**18))


# The header index


def test_the_index_is_a_cache(store: LocalStore) -> None:
    key = Digest.of(b"key")
    store.root.mkdir()
    store.write_note(KIND, key, b"value")  # readers write it, and create no folders
    assert store.read_note(KIND, key) is None
    assert not any(store.root.iterdir())
    store.folder("headers").mkdir(parents=True)
    store.write_note(KIND, key, b"value")
    assert store.read_note(KIND, key) == b"value"
    store.write_note(KIND, key, b"other")
    assert store.read_note(KIND, key) == b"other"
    assert [path.name for path in store.folder("headers").iterdir()] == [key.hex]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_an_index_that_is_not_a_regular_file_is_ignored(
    store: LocalStore, make: Callable[[Path], None]
) -> None:
    key = Digest.of(b"key")
    store.folder("headers").mkdir(parents=True)
    make(store.folder("headers") / key.hex)
    assert store.read_note(KIND, key) is None
    if make is Path.mkdir:
        store.write_note(KIND, key, b"value")  # impossible, but not an error
        assert store.read_note(KIND, key) is None
        assert len(list(store.folder("headers").iterdir())) == 1


def test_an_index_that_cannot_be_written_is_not_an_error() -> None:
    with sandbox.common_folder() as folder:
        folder.chmod(0o555)
        store = LocalStore(folder)
        outcome = sandbox.call(
            lambda: store.write_note(KIND, Digest.of(b""), b""), unprivileged=True
        )
        assert outcome == "None"
        assert list(folder.iterdir()) == []


# Read-only and full disks


def test_a_store_on_a_read_only_disk_can_be_read(tmp_path: Path) -> None:
    with sandbox.small_disk(tmp_path / "disk", 2**20) as disk:
        store = LocalStore(disk / "store")
        manifest = publish(store)
        config = manifest.config
        before = sorted(store.root.rglob("*"))
        with sandbox.read_only(disk):
            assert store.resolve(NAME) == manifest
            assert store.read_blob(config.digest, config.size) == b"config"
            store.check_digest(config.digest, config.size)
            read_only = f"the store '{disk}/store' is on a read-only file system"
            for use in (lambda: put(store, b"new"), lambda: publish_again(store)):
                with pytest.raises(StoreError, match=read_only):
                    use()
            store.write_note(KIND, Digest.of(b"key"), b"value")  # impossible, but not an error
            assert store.read_note(KIND, Digest.of(b"key")) is None
            assert sorted(store.root.rglob("*")) == before


def test_a_full_disk_keeps_the_old_manifest(tmp_path: Path) -> None:
    with sandbox.small_disk(tmp_path / "disk", 2**20) as disk:
        store = LocalStore(disk / "store")
        old = publish(store)
        new = Manifest(config=put(store, b"other"), layers=())
        filler = sandbox.fill(disk)
        for name in (NAME, Reference.parse("new")):
            with pytest.raises(StoreError, match=f"no space left for the store '{disk}/store'"):
                store.names.publish(replace_any(name), new)
        store.write_note(KIND, Digest.of(b"key"), b"value")
        assert list(store.folder("headers").iterdir()) == []
        assert list(store.folder("temporary").iterdir()) == []
        assert list(store.references()) == [NAME]
        assert store.resolve(NAME) == old
        filler.unlink()
        store.names.publish(replace_any(NAME), new)
        assert store.resolve(NAME) == new


def test_an_open_manifest_survives_its_replacement(store: LocalStore) -> None:
    old = publish(store)
    with store.manifest_path(NAME).open("rb") as stream:
        store.names.publish(replace_any(NAME), Manifest(config=put(store, b"other"), layers=()))
        assert Manifest.from_bytes(stream.read()) == old


def test_a_manifest_that_cannot_be_synced_gets_no_name(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = publish(store)
    new = Manifest(config=put(store, b"other"), layers=())
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for name in (NAME, Reference.parse("new")):
        with pytest.raises(StoreError, match="failed: Input/output error"):
            store.names.publish(replace_any(name), new)
    assert list(store.folder("temporary").iterdir()) == []
    assert list(store.references()) == [NAME]
    assert store.resolve(NAME) == old


# Stores below folders without permission


@pytest.mark.slow
@pytest.mark.parametrize("mode", [0o000, 0o444])
@pytest.mark.parametrize(
    "closed", ["", "manifests", "manifests/registry.ollama.ai", "manifests/registry.ollama.ai/n/m"]
)
def test_names_that_cannot_be_listed_are_an_error_and_not_absent(closed: str, mode: int) -> None:
    with sandbox.common_folder() as folder:
        store = LocalStore(folder)
        publish(store, "n/m")
        (folder / closed).chmod(mode)
        outcome = sandbox.call(
            lambda: [store.read_manifest(name) for name in store.references()], unprivileged=True
        )
        (folder / closed).chmod(0o755)
    # The names in a folder without the right to search it are known, and what they have is not.
    what = "list|look at|read manifest"
    assert re.match(f"StoreError: cannot ({what}) '{folder}/manifests", outcome)
    assert outcome.endswith(": Permission denied")


@pytest.mark.slow
def test_a_store_below_a_closed_folder_is_an_error() -> None:
    with sandbox.common_folder() as folder:
        store = LocalStore(folder / "closed" / "store")
        manifest = publish(store)
        (folder / "closed").chmod(0)
        uses: list[Callable[[], object]] = [
            lambda: list(store.references()),
            lambda: store.resolve(NAME),
            lambda: put(store, b"new"),
            lambda: store.names.publish(replace_any(NAME), manifest),
            lambda: store.check_size(manifest.config.digest, manifest.config.size),
        ]
        outcomes = [sandbox.call(use, unprivileged=True) for use in uses]
        (folder / "closed").chmod(0o755)
    for outcome in outcomes:
        assert outcome.startswith("StoreError: ")
        assert f"'{folder}/closed/store" in outcome
        assert outcome.endswith(": Permission denied")


def test_no_manifest_is_published_while_another_process_reads_them(store: LocalStore) -> None:
    manifest = publish(store, "other")
    store.lock_timeout = 0.05
    with store._locks.shared(), pytest.raises(StoreBusy):
        store.names.publish(replace_any("model"), manifest)
    assert not store.has_model("model")


def test_of_two_names_that_differ_only_in_case_one_is_published(store: LocalStore) -> None:
    manifest = publish(store, "other")
    store.lock_timeout = 60
    check, both = store.names.check_name, threading.Barrier(2)

    def late(reference: str | Reference) -> None:
        check(reference)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)

    store.names.check_name = late  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        done = [
            pool.submit(store.names.publish, replace_any(name), manifest)
            for name in ("model", "MODEL")
        ]
        errors = [type(item.exception()) for item in done]
    assert sorted(errors, key=str) == [type(None), NameConflict]


def test_a_user_without_home_folder_must_name_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("BLOBSTORE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    with pytest.raises(StoreError, match="there is no home folder; set BLOBSTORE_HOME"):
        LocalStore()
