from __future__ import annotations

import os
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.core.files import FileVersion, read_regular
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.operations.describe.disk_usage import measure_models, measure_usage
from blobstore.operations.describe.info import model_info
from blobstore.operations.describe.list import choose_models, list_models
from blobstore.operations.describe.show import describe_model
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store import references
from blobstore.store.catalog import read_catalog
from blobstore.store.local import LocalStore
from blobstore.store.reachability import ReachableBlobs
from blobstore.store.references import References
from tests.support import sandbox
from tests.support.models import add_blob, add_blobs, blob

T = TypeVar("T")
Damage = Callable[[bytes], bytes]
VERSION = FileVersion(1, 2, 3, 4, 5)
A, B, C = (Digest.of(bytes([number])) for number in range(3))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """Return a store of three models that have blobs in common; all of their manifests are known."""
    monkeypatch.setattr(references, "_MARGIN_NS", -(10**12))
    store = LocalStore(tmp_path / "store")
    for name, blobs in {"a": "xy", "b": "yz", "c": "c"}.items():
        add_blobs(store, name, {one: blob((one, "U8", (3,), one.encode() * 3)) for one in blobs})
    copy_model("a", "copy", store=store)
    collect_garbage(store=store, older_than=0)
    read_catalog(store)
    return store


def manifest(blobs: dict[Digest, int]) -> Manifest:
    """Return a manifest of blobs with these sizes; the first is the config."""
    config, *layers = (Descriptor(media_types.TENSOR, *blob) for blob in blobs.items())
    return Manifest(config=config, layers=tuple(layers))


def path_of(store: LocalStore) -> Path:
    return store._layout.references(os.geteuid())


def answers(store: LocalStore) -> tuple[object, ...]:
    """Return what the operations say that ask what all manifests reference."""
    removed = remove_models(["a", "b"], store=store, dry_run=True)
    usage = measure_usage(store=store)
    return (
        list_models(store=store),
        (removed.blobs, removed.size, removed.bases, removed.is_last),
        (usage.models, usage.together_unique, usage.referenced, usage.without_sharing),
    )


def read_manifests(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names whose manifests a reading of the catalog reads."""
    found = []
    real = LocalStore.read_manifest

    def read(store: LocalStore, reference: object) -> bytes:
        found.append(str(reference))
        return real(store, reference)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "read_manifest", read)
        read_catalog(store)
    return found


def test_no_manifest_is_read_twice(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_manifests(store, monkeypatch) == []
    copy_model("c", "new", store=store)
    assert read_manifests(store, monkeypatch) == ["new:latest"]
    assert read_manifests(store, monkeypatch) == []


def test_a_manifest_that_was_replaced_is_read_again(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {str(entry.reference): entry.blobs for entry in read_catalog(store)}
    copy_model("b", "a", store=store, force=True)
    found = {str(entry.reference): entry.blobs for entry in read_catalog(store)}
    assert found["a:latest"] == found["b:latest"] != before["a:latest"]
    assert read_manifests(store, monkeypatch) == []


def test_a_manifest_that_may_change_within_a_tick_of_the_clock_is_read_again(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path_of(store).unlink()
    monkeypatch.setattr(references, "_MARGIN_NS", 3600 * 10**9)
    for _ in range(2):
        assert len(set(read_manifests(store, monkeypatch))) == 4
    assert not path_of(store).exists()


def checked(data: bytes) -> bytes:
    return references._MAGIC + b"%08x\n" % zlib.crc32(data) + data


def body(data: bytes) -> bytes:
    return data[len(references._MAGIC) + 9 :]


HEAD = 40
"""Bytes of the counts. No folder of these tests is old enough for a listing to be kept."""
BLOB = 32 + 8 + 4
"""Bytes that the tables have of a blob."""


def one_reference(data: bytes) -> bytes:
    """Say with a right checksum that each manifest references one blob, all of them the same."""
    blobs, manifests, *_ = struct.unpack_from("=5Q", body(data))
    rest = bytearray(struct.pack("=5Q", blobs, manifests, manifests, 0, 0) + body(data)[HEAD:])
    begin = HEAD + BLOB * blobs
    for number in range(manifests):
        end = begin + references._RECORD.size * (number + 1)
        rest[end - 18 : end - 2] = struct.pack("=Q2I", number, 1, 1)
    end = begin + references._RECORD.size * manifests
    return checked(bytes(rest[:end]) + bytes(4 * manifests))


def no_blobs(data: bytes) -> bytes:
    """Say with a right checksum that a manifest has no blob, not even a config."""
    blobs, *_ = struct.unpack_from("=5Q", body(data))
    end = HEAD + BLOB * blobs + references._RECORD.size
    return checked(body(data)[: end - 10] + bytes(8) + body(data)[end - 2 :])


def with_uses(data: bytes, count: int) -> bytes:
    """Say with a right checksum that so many manifests reference each blob."""
    blobs, *_ = struct.unpack_from("=5Q", body(data))
    begin = HEAD + 40 * blobs
    uses = struct.pack("=i", count) * blobs
    return checked(body(data)[:begin] + uses + body(data)[begin + len(uses) :])


DAMAGES: dict[str, Damage] = {
    "absent": lambda data: b"",
    "truncated": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
    "flipped": lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
    "of another version": lambda data: data.replace(b"references 6", b"references 0"),
    "no counts": lambda data: checked(b"x"),
    "counts beyond the end": lambda data: checked(struct.pack("=5Q", *(2**60,) * 5)),
    "a manifest without blobs": no_blobs,
    "more uses than manifests": lambda data: with_uses(data, 2**31 - 1),
    "fewer uses than none": lambda data: with_uses(data, -1),
    "of another store": lambda data: checked(bytes(HEAD)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_operations_give_the_same_answers_whatever_the_file_is(
    store: LocalStore, damage: Damage
) -> None:
    right = answers(store)
    whole = path_of(store).read_bytes()
    path_of(store).write_bytes(damage(whole))
    assert answers(store) == right
    assert answers(store) == right
    assert len(path_of(store).read_bytes()) == len(whole)


def swapped(data: bytes) -> bytes:
    """Say with a right checksum that each blob is another one."""
    blobs, *_ = struct.unpack_from("=5Q", body(data))
    digests = body(data)[HEAD : HEAD + 32 * blobs]
    return checked(body(data)[:HEAD] + bytes(reversed(digests)) + body(data)[HEAD + 32 * blobs :])


HOSTILE: dict[str, Damage] = {
    "one reference each": one_reference,
    "other digests": swapped,
    "a number beyond the blobs": lambda data: checked(body(data)[:-4] + b"\xff" * 4),
    "no uses": lambda data: with_uses(data, 0),
}


def damage_file(store: LocalStore, damage: Damage) -> None:
    path_of(store).write_bytes(damage(path_of(store).read_bytes()))


@pytest.mark.parametrize("damage", [*DAMAGES.values(), *HOSTILE.values()], ids=[*DAMAGES, *HOSTILE])
@pytest.mark.parametrize("is_listed", [False, True], ids=["", "after a list"])
def test_gc_removes_only_garbage_whatever_the_file_is(
    store: LocalStore, damage: Damage, *, is_listed: bool
) -> None:
    used = {blob for entry in read_catalog(store) for blob in entry.blobs}
    garbage = {add_blob(store, b"%d" % number)[0] for number in range(10)}
    damage_file(store, damage)
    if is_listed:
        read_catalog(store)
    expected = {digest.file_name for digest in garbage}
    for is_dry in (True, False):
        found = collect_garbage(store=store, older_than=0, force=True, dry_run=is_dry)
        assert {one.path.name for one in found.blobs} == expected
    assert all(map(store.has_hot, used))


@pytest.mark.parametrize("garbage", [1, 10])
def test_gc_keeps_a_blob_whose_digest_has_escapes_in_a_manifest(
    store: LocalStore, garbage: int
) -> None:
    for number in range(garbage):
        add_blob(store, b"%d" % number)
    layer = store.resolve("c").layers[0].digest
    path = store.manifest_path("c")
    spelled = "".join(f"\\u{ord(one):04x}" for one in layer.hex)
    path.write_text(path.read_text().replace(layer.hex, spelled))
    say_that_it_was_read(store, "c")
    damage_file(store, one_reference)
    assert len(collect_garbage(store=store, older_than=0, force=True).blobs) == garbage
    assert store.has_hot(layer)


def say_that_it_was_read(store: LocalStore, name: str, data: bytes | None = None) -> None:
    """Say in the file of references that the manifest of a name is intact, with its content or other bytes."""
    known = store.known_references()
    data = data or store.read_manifest(name)
    version = store.manifest_version(name)
    known.add(version, Digest.of(data), Manifest.from_bytes(data), config=b"{}")
    known.save(keeps_others=True)


def test_gc_finds_a_manifest_that_was_changed_without_a_new_version(store: LocalStore) -> None:
    before = store.read_manifest("c")
    new, _ = add_blob(store, b"new")
    old = store.resolve("c").layers[0].digest
    store.manifest_path("c").write_bytes(before.replace(old.hex.encode(), new.hex.encode()))
    say_that_it_was_read(store, "c", before)
    assert collect_garbage(store=store, older_than=0, force=True).blobs == ()
    assert store.has_hot(new)


def test_gc_believes_the_file_only_until_it_has_found_candidates(store: LocalStore) -> None:
    marks = ReachableBlobs(store)
    marks.update()
    copy_model("c", "late", store=store)
    say_that_it_was_read(store, "late")
    damage_file(store, one_reference)
    marks.references = store.known_references()
    marks.prove(())
    remove_models(["c"], store=store)
    marks.update()
    assert {blob.digest.hex for blob in store.resolve("late").blobs} <= marks.reached()


def test_gc_without_garbage_opens_no_manifest(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    real = read_regular

    def read(path: str, limit: int) -> bytes:
        opened.append(path)
        return real(path, limit)

    monkeypatch.setattr("blobstore.store.reachability.read_regular", read)
    collect_garbage(store=store, older_than=0)
    assert opened == []
    add_blob(store, b"garbage")
    collect_garbage(store=store, older_than=0, force=True)
    assert len(opened) == 4


OPENED: list[str] | None = None
"""The paths that this process opens, if somebody asks."""


def note_opened(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and OPENED is not None and isinstance(arguments[0], str | bytes | Path):
        OPENED.append(os.fsdecode(arguments[0]))


sys.addaudithook(note_opened)  # it cannot be removed


def use_model(store: LocalStore) -> None:
    with blobstore.open("c", store=store) as model:
        model.state_dict()


@pytest.mark.parametrize(
    "command",
    [
        use_model,
        lambda store: describe_model("c", store=store),
        lambda store: verify_models(["c"], store=store),
        lambda store: list_models(store=store),
        lambda store: model_info("c", store=store),
        lambda store: measure_usage(["c"], store=store),
        lambda store: measure_models(["c"], store=store),
        lambda store: copy_model("c", "new", store=store),
        lambda store: remove_models(["c"], store=store),
        lambda store: collect_garbage(store=store),
    ],
    ids=["open", "show", "verify", "list", "info", "du", "du NAME", "cp", "rm", "gc"],
)
def test_a_command_on_one_model_opens_no_file_of_another(
    store: LocalStore, command: Callable[[LocalStore], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {str(store.manifest_path("c"))}
    own |= {store.blob_path(blob.digest) for blob in store.resolve("c").blobs}
    others = {str(path) for name in ("blobs", "manifests") for path in files(store, name)} - own
    assert len(others) == 3 + 3
    opened: list[str] = []
    monkeypatch.setattr(sys.modules[__name__], "OPENED", opened)
    command(store)
    assert opened
    assert others.isdisjoint(opened)


def save_model(store: LocalStore) -> None:
    blobstore.save({"new": np.zeros(3)}, "saved", store=store)


def list_one(store: LocalStore) -> None:
    (found,) = choose_models(
        store,
        lambda name, _: str(name) == "c:latest",
        repositories=[Reference.parse("c")],
        read_shared=False,
        read_sources=False,
        read_signatures=False,
        read_metrics=False,
        on_error=None,
    ).models
    assert found.digest is not None


@pytest.mark.parametrize(
    ("command", "reads_names"),
    [
        (use_model, False),
        (save_model, False),
        (lambda store: describe_model("c", store=store), False),
        (lambda store: verify_models(["c"], store=store), False),
        (lambda store: copy_model("c", "new", store=store), False),
        (lambda store: list_models(store=store), True),
        (list_one, False),
        (lambda store: model_info("c", store=store), True),
        (lambda store: measure_models(["c"], store=store), True),
        (lambda store: freeze_models(["c"], store=store), True),
        (lambda store: remove_models(["c"], store=store), True),
    ],
    ids=["open", "save", "show", "verify", "cp", "list", "list NAME", "info", "du", "freeze", "rm"],
)
def test_a_command_on_one_model_asks_the_status_of_no_file_of_another(
    store: LocalStore,
    command: Callable[[LocalStore], object],
    reads_names: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {str(store.manifest_path("c"))}
    own |= {store.blob_path(blob.digest) for blob in store.resolve("c").blobs}
    others = {str(path) for name in ("blobs", "manifests") for path in files(store, name)} - own
    listed = f"{store.folder('blobs')}/"  # a listing can give the status of all
    seen: list[str] = []
    for name, end in {"stat": "", "lstat": "", "scandir": "/"}.items():
        monkeypatch.setattr(os, name, noting(getattr(os, name), seen, end))
    command(store)
    monkeypatch.undo()
    assert seen
    looked_at = {*others, listed}.intersection(seen)
    assert reads_names == bool(looked_at)
    assert not any(path.startswith(listed) for path in looked_at)


def noting(call: Callable[..., T], seen: list[str], end: str) -> Callable[..., T]:
    def noted(path: str | Path | int = ".", **options: object) -> T:
        seen.append(f"{path}{end}")
        return call(path, **options)

    return noted


def files(store: LocalStore, name: Literal["blobs", "manifests"]) -> list[Path]:
    return [path for path in store.folder(name).rglob("*") if path.is_file()]


def test_a_file_that_others_can_write_or_that_is_a_link_is_ignored(store: LocalStore) -> None:
    right = answers(store)
    path_of(store).write_bytes(one_reference(path_of(store).read_bytes()))
    assert answers(store) != right
    path_of(store).chmod(0o620)
    assert answers(store) == right
    path_of(store).write_bytes(one_reference(path_of(store).read_bytes()))
    target = path_of(store).with_name("target")
    path_of(store).replace(target)
    path_of(store).symlink_to(target)
    assert answers(store) == right


def test_a_file_that_cannot_be_written_is_not_an_error(store: LocalStore) -> None:
    right = answers(store)
    path_of(store).unlink()
    path_of(store).mkdir()
    assert answers(store) == right


def test_a_full_disk_keeps_neither_the_answers_nor_the_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "_MARGIN_NS", -(10**12))
    with sandbox.small_disk(tmp_path / "disk", 2**20) as disk:
        store = LocalStore(disk / "store")
        add_blobs(store, "a", {"x": blob(("x", "U8", (3,), b"abc"))})
        add_blob(store, b"garbage")
        right = next(iter(read_catalog(store))).blobs
        path_of(store).unlink()
        before = files(store, "blobs")
        sandbox.fill(disk)
        assert next(iter(read_catalog(store))).blobs == right
        left = {path.name for path in path_of(store).parent.glob("*references*")}
        assert left == {f"references-{os.geteuid()}-names"}, "written before the disk was full"
        collect_garbage(store=store, older_than=0, force=True)
        assert len(files(store, "blobs")) == len(before) - 1


def test_manifests_may_disagree_about_the_size_of_a_blob() -> None:
    known = References()
    one = known.add(VERSION, A, manifest({B: 5, C: 6}))
    other = known.add(VERSION._replace(inode=9), B, manifest({C: 7, B: 5}))
    assert one.sizes == [5, 6]
    assert other.sizes == [7, 5]
    assert known.known(VERSION) == one
    assert known.known(VERSION._replace(inode=9)) is None


def test_blobs_of_manifests_that_are_gone_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "references"
    first = References(path)
    for number in range(20):
        blobs = {Digest.of(b"%d" % number): number, C: 3}
        name = Digest.of(b"m%d" % number)
        first.add(VERSION._replace(inode=number), name, manifest(blobs))
    first.save()
    second = References(path)
    assert second.known(VERSION._replace(inode=7)) is not None
    second.listings.is_new = True
    second.save()
    again = References(path)
    found = again.known(VERSION._replace(inode=7))
    assert found is not None
    assert [again.digest(number) for number in found.blobs] == [Digest.of(b"7"), C]
    assert found.sizes == [7, 3]
    assert len(again) == 2
    assert again.number(C) == found.blobs[1]
    assert again.known(VERSION._replace(inode=8)) is None


@pytest.mark.parametrize("asked", [1, 100], ids=["few", "many"])
def test_a_blob_is_found_by_its_whole_digest(tmp_path: Path, asked: int) -> None:
    path = tmp_path / "references"
    first = References(path)
    first.add(VERSION, A, manifest({B: 5, C: 6}))
    first.save()
    # The end of one digest and the start of the next, which stands before the second of these.
    between = Digest(B.hex[32:] + C.hex[:32])
    others = [Digest.of(b"%d" % number) for number in range(asked)]
    again = References(path)
    found = again.numbers([C, between, B, *others])
    assert [found[one] for one in (B, C)] == [0, 1]
    assert sorted(found.values()) == list(range(3 + asked))
    assert again.digest(found[between]) == between
