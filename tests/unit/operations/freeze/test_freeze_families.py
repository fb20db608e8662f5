"""Models that are coded by others: what is kept for them, and what becomes of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import blobstore
from blobstore.errors import BlobDamaged, ModelNotFound
from blobstore.manifests.reference import Reference
from blobstore.operations.export.export import export_model
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.maintenance.disk_usage import Space, measure_usage
from blobstore.operations.maintenance.gc import Removed, _Collection, collect_garbage
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.maintenance.repair import repair_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store.local import LocalStore
from tests.support.frozen import (
    COUNT,
    flip,
    flip_in_place,
    forms_of,
    layer,
    layers,
    put,
    tuned,
    weights,
)
from tests.support.models import add_blobs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from blobstore.core.digest import Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.store.cold import ColdBlob

BASE = {"x": 1, "y": 2}
CHILD, SIBLING = "child", "sibling"


def put_child(store: LocalStore, name: str, step: int) -> None:
    """Give a store what a little training makes of the model ``base``."""
    data = {key: layer(key, tuned(step, seed)) for key, seed in BASE.items()}
    add_blobs(store, name, data)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store", lock_timeout=0.05)
    put(store, "base", BASE)
    put_child(store, CHILD, 10)
    put(store, "stays", {"z": 3})  # and with it the config of all
    return store


def base_of(store: LocalStore, name: str, key: str) -> Digest | None:
    return store.open_cold(layers(store, name)[key].digest).base


def assert_whole(store: LocalStore, name: str = CHILD, step: int = 10) -> None:
    for options in ({}, {"copy": True}, {"verify": "rehash"}):
        with blobstore.open(name, store=store, **options) as model:  # type: ignore[arg-type]
            for key, seed in BASE.items():
                assert model[key].tobytes() == tuned(step, seed)


def test_a_tuned_model_is_coded_by_the_one_it_was_made_from(store: LocalStore) -> None:
    alone = freeze_models([CHILD], store=store, find_base=False, dry_run=True)
    frozen = freeze_models([CHILD], store=store)
    assert frozen.bases == ((Reference.parse(CHILD), Reference.parse("base")),)
    assert frozen.stored < 0.7 * alone.stored
    for key in BASE:
        assert base_of(store, CHILD, key) == layers(store, "base")[key].digest
    assert_whole(store)
    assert verify_models(store=store).faults == ()


@pytest.mark.parametrize("order", [["base", CHILD], [CHILD, "base"]])
def test_a_family_is_frozen_together(store: LocalStore, order: list[str]) -> None:
    put_child(store, SIBLING, 11)
    frozen = freeze_models([*order, SIBLING], store=store)
    assert {item.outcome for item in frozen.blobs} == {"frozen"}
    assert len(frozen.bases) == 2
    coded = {str(name) for name, _ in frozen.bases}
    assert not coded & {str(base) for _, base in frozen.bases}  # one deep
    assert_whole(store)
    assert_whole(store, SIBLING, 11)
    thaw_models(["base"], store=store)
    assert_whole(store)
    freeze_models(["base"], store=store)
    thaw_models([CHILD, SIBLING], store=store)
    assert_whole(store)
    assert set(forms_of(store, CHILD).values()) == {"hot"}


def test_a_base_is_never_coded_by_another(store: LocalStore) -> None:
    freeze_models([CHILD], store=store, base="base")
    frozen = freeze_models(["base"], store=store, base=CHILD)
    assert [item.base for item in frozen.blobs] == [None, None]
    assert forms_of(store, "base") == dict.fromkeys(BASE, "cold")
    assert_whole(store)


def test_what_is_coded_by_another_is_no_base(store: LocalStore) -> None:
    freeze_models([CHILD], store=store, base="base")
    put_child(store, SIBLING, 11)
    freeze_models([SIBLING], store=store, base=CHILD)
    assert [base_of(store, SIBLING, key) for key in BASE] == [None, None]
    assert_whole(store, SIBLING, 11)


def test_models_that_are_not_alike_are_coded_alone(store: LocalStore) -> None:
    put(store, "other", {"x": 5, "y": 6})
    assert freeze_models(["other"], store=store).bases == ()
    frozen = freeze_models([CHILD], store=store, base="other")
    assert [item.base for item in frozen.blobs] == [None, None]


def test_a_base_can_be_done_without(store: LocalStore) -> None:
    frozen = freeze_models([CHILD], store=store, find_base=False)
    assert frozen.bases == ()
    assert [item.base for item in frozen.blobs] == [None, None]


def test_rejects_a_base_that_is_not_there(store: LocalStore) -> None:
    with pytest.raises(ModelNotFound):
        freeze_models([CHILD], store=store, base="none")


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_blobs_of_a_base_outlive_its_name(store: LocalStore, is_frozen: bool) -> None:
    freeze_models([CHILD, "base"] if is_frozen else [CHILD], store=store, base="base")
    removed = remove_models(["base"], store=store)
    assert (removed.blobs, removed.size) == (0, 0)
    assert removed.bases == 2
    assert removed.bases_size > 0
    assert collect_garbage(store, older_than=0).blobs == ()
    assert_whole(store)
    thaw_models([CHILD], store=store)
    assert len(collect_garbage(store, older_than=0).blobs) == 2
    assert_whole(store)


def test_what_nobody_needs_goes_with_its_base(store: LocalStore) -> None:
    freeze_models([CHILD, "base"], store=store, base="base")
    removed = remove_models([CHILD, "base"], store=store)
    assert (removed.blobs, removed.bases) == (4, 0)
    found = collect_garbage(store, older_than=0)
    names = [item.path.name for item in found.blobs]
    assert len(names) == 4
    assert list(store.folder("cold").iterdir()) == []


def test_a_base_is_kept_for_what_is_leased_or_young(store: LocalStore) -> None:
    freeze_models([CHILD], store=store, base="base")
    child = [item.digest for item in layers(store, CHILD).values()]
    with store.lease() as lease:
        lease.hold(child)
        remove_models([CHILD, "base"], store=store)
        assert collect_garbage(store, older_than=0).blobs == ()
    old = [Path(store.blob_path(item)) for item in map(_base, map(store._cold.open, child))]
    for path in old:
        os.utime(path, (1, 1))
    assert collect_garbage(store, older_than=1000).blobs == ()  # the deltas are young
    assert len(collect_garbage(store, older_than=0).blobs) == 4


def _base(blob: ColdBlob) -> Digest:
    base = blob.base
    assert base is not None
    return base


def test_an_unreadable_cold_blob_that_is_needed_stops_collecting(store: LocalStore) -> None:
    freeze_models([CHILD], store=store, base="base")
    remove_models(["base"], store=store)
    path = store.cold_path(layers(store, CHILD)["x"].digest)
    whole = Path(path).read_bytes()
    flip(path, -1)
    with pytest.raises(BlobDamaged):
        collect_garbage(store, older_than=0)
    Path(path).write_bytes(whole)
    assert collect_garbage(store, older_than=0).blobs == ()
    assert_whole(store)


def test_a_damaged_base_of_what_is_garbage_stops_no_collection(store: LocalStore) -> None:
    freeze_models(["base", CHILD], store=store, base="base")
    child = layers(store, CHILD)["x"].digest
    bases = [item.digest for item in layers(store, "base").values()]
    remove_models([CHILD, "base"], store=store)
    for base in bases:
        flip(store.cold_path(base), -1)
        os.utime(store.cold_path(base), (1, 1))
    assert collect_garbage(store, older_than=1000).blobs == ()  # for what is coded by them is young
    assert store.has_cold(child)
    assert len(collect_garbage(store, older_than=0).blobs) == 4


def test_usage_tells_bases_that_no_model_has_from_garbage(store: LocalStore) -> None:
    freeze_models([CHILD], store=store, base="base")
    sizes = [layers(store, "base")[key].size for key in BASE]
    assert measure_usage(store=store).bases == Space()
    remove_models(["base"], store=store)
    usage = measure_usage(store=store)
    assert (usage.bases, usage.unreferenced) == (Space(2, sum(sizes)), Space())
    thaw_models([CHILD], store=store)
    usage = measure_usage(store=store)
    assert (usage.bases.files, usage.unreferenced.files) == (0, 2)


def test_a_missing_base_is_found(store: LocalStore) -> None:
    freeze_models([CHILD], store=store, base="base")
    digest = layers(store, "base")["x"].digest
    Path(store.blob_path(digest)).unlink()
    Path(store.base_path(digest)).unlink()
    faults = [fault for fault in verify_models(store=store).faults if "child" in fault.reference]
    assert [fault.layer for fault in faults] == ["x"]
    quick = verify_models(store=store, quick=True).faults
    assert {fault.reference for fault in quick} == {"base:latest", "child:latest"}
    with pytest.raises(BlobDamaged, match="base"):
        blobstore.open(CHILD, store=store)["x"]
    child = layers(store, CHILD)["x"]
    with pytest.raises(BlobDamaged, match=f"its base {digest} is missing"):
        store.exists(child.digest, child.size)


def test_a_base_that_goes_because_others_thaw_is_no_fault(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze_models([CHILD], store=store, base="base")
    base = layers(store, "base")["x"].digest
    remove_models(["base"], store=store)
    check_digest = LocalStore.check_digest

    def racing(self: LocalStore, digest: Digest, *arguments: Any) -> None:
        if digest == base:
            thaw_models([CHILD], store=store)
            collect_garbage(store, older_than=0)
        check_digest(self, digest, *arguments)

    monkeypatch.setattr(LocalStore, "check_digest", racing)
    assert verify_models([Reference.parse(CHILD)], store=store).faults == ()
    assert not store.has(base)


def test_a_damaged_base_is_found_in_what_is_coded_by_it(store: LocalStore) -> None:
    freeze_models([CHILD], store=store, base="base")
    digest = layers(store, "base")["x"].digest
    flip_in_place(store.blob_path(digest))  # and its second name with it
    faults = verify_models(store=store).faults
    assert {fault.reference for fault in faults} == {"base:latest", "child:latest"}
    (told,) = (fault for fault in faults if fault.reference == "child:latest")
    assert f"its base, {digest}, is damaged: blob '{store.blob_path(digest)}'" in told.message
    assert told.blob == str(layers(store, CHILD)["x"].digest)


def test_a_base_that_is_damaged_in_one_form_is_told_of_its_own_model(store: LocalStore) -> None:
    freeze_models([CHILD], store=store, base="base")
    flip(store.blob_path(layers(store, "base")["x"].digest))
    assert_whole(store)  # by the second name
    faults = verify_models(store=store).faults
    assert [(fault.reference, fault.layer) for fault in faults] == [("base:latest", "x")]


def test_a_base_is_mended_by_its_second_name(store: LocalStore) -> None:
    freeze_models([CHILD], store=store, base="base")
    digest = layers(store, "base")["x"].digest
    flip(store.blob_path(digest))  # a new file
    repaired = repair_models(store=store)
    assert [mended.digest for mended in repaired.mended] == [digest]
    assert repaired.faults == ()
    assert Path(store.base_path(digest)).samefile(store.blob_path(digest))
    assert_whole(store)


def damage_lost_base(store: LocalStore, form: str) -> Descriptor:
    """Freeze the child by a base that no manifest names any more; damage that in a form of it."""
    item = layers(store, "base")["x"]
    freeze_models([CHILD, "base"], store=store, base="base")
    if form != "cold":
        thaw_models(["base"], store=store, keep_cold=form == "hot beside cold")
    hot, cold = store.blob_path(item.digest), store.cold_path(item.digest)
    if form == "pinned":
        lose_like_ollama(store, "base")
        flip_in_place(store.base_path(item.digest))
    else:
        remove_models(["base"], store=store)
        flip_in_place(cold if form == "cold" else hot)
    return item


@pytest.mark.parametrize("form", ["hot", "cold", "pinned", "hot beside cold"])
@pytest.mark.parametrize("origin", ["folder", "store", "nothing"])
def test_a_base_that_no_manifest_names_is_found_and_mended(
    store: LocalStore, tmp_path: Path, form: str, origin: str
) -> None:
    source = None if origin == "nothing" else tmp_path / "source"
    if origin == "folder":
        export_model("base", tmp_path / "source", store=store)
    elif origin == "store":
        put(LocalStore(tmp_path / "source"), "other", BASE)
    item = damage_lost_base(store, form)
    has_other = form == "hot beside cold"
    found = verify_models([Reference.parse(CHILD)], store=store)
    assert {fault.layer for fault in found.faults} == {"x"}
    of_base = [fault for fault in found.faults if fault.blob == str(item.digest)]
    place = {"cold": store._layout.cold_blob, "pinned": store._layout.base_blob}
    path = place.get(form, store._layout.blob)(item.digest)
    assert [f"'{path}' is damaged" in fault.message for fault in of_base] == [True]
    assert len(found.faults) == (1 if has_other else 2)
    repaired = repair_models(source=source, store=store)
    if source is None and not has_other:
        assert repaired.mended == ()
        assert repaired.faults == verify_models(store=store).faults
        return
    assert [mended.digest for mended in repaired.mended] == [item.digest]
    assert repaired.faults == ()
    assert verify_models(store=store).faults == ()
    assert_whole(store)
    collect_garbage(store, older_than=0)
    assert_whole(store)


def test_a_quick_look_finds_a_lost_base_that_was_cut(store: LocalStore) -> None:
    freeze_models([CHILD], store=store, base="base")
    lose_like_ollama(store, "base")
    assert verify_models(store=store, quick=True).faults == ()
    bases = [store.open_cold(item.digest).base for item in layers(store, CHILD).values()]
    path = Path(store.base_path(next(base for base in bases if base)))
    path.chmod(0o600)
    os.truncate(path, 100)
    faults = verify_models(store=store, quick=True).faults
    assert any("expected" in fault.message and path.name in fault.message for fault in faults)


def test_a_model_s_card_names_its_base(store: LocalStore, tmp_path: Path) -> None:
    put_child(store, SIBLING, 11)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(layer("x", tuned(12, 1)))
    (folder / "README.md").write_text("---\nlicense: mit\nbase_model:\n- org/Sib-ling\n---\n# A\n")
    blobstore.create(folder, "mine", store=store)
    frozen = freeze_models(["mine"], store=store)
    assert frozen.bases == ((Reference.parse("mine"), Reference.parse(SIBLING)),)


def test_a_child_can_be_made_anew_when_its_base_is_gone(store: LocalStore) -> None:
    """Removing base and name, and creating the same model again, finds nothing that is half there."""
    freeze_models([CHILD], store=store, base="base")
    remove_models(["base", CHILD], store=store)
    collect_garbage(store, older_than=0)
    put_child(store, CHILD, 10)
    assert_whole(store)
    assert len(tuned(10, 1)) == 2 * COUNT
    assert tuned(10, 1) != weights(1)


def pins(store: LocalStore) -> set[str]:
    folder = store.folder("bases")
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def lose_like_ollama(store: LocalStore, name: str) -> None:
    """Remove a name and its blobs, as a program does that knows nothing of cold blobs."""
    files = [store.blob_path(item.digest) for item in layers(store, name).values()]
    store.manifest_path(Reference.parse(name)).unlink()
    for file in files:
        Path(file).unlink(missing_ok=True)


def test_no_other_program_takes_a_base_away(store: LocalStore) -> None:
    freeze_models([CHILD], store=store, base="base")
    assert pins(store) == {item.digest.file_name for item in layers(store, "base").values()}
    lose_like_ollama(store, "base")
    assert_whole(store)
    assert verify_models(store=store).faults == ()
    assert collect_garbage(store, older_than=0).blobs == ()
    thaw_models([CHILD], store=store)
    assert_whole(store)
    collect_garbage(store, older_than=0)
    assert pins(store) == set()
    assert_whole(store)


def test_a_base_that_was_thawed_is_as_safe(store: LocalStore) -> None:
    freeze_models([CHILD, "base"], store=store, base="base")
    assert pins(store) == set()
    thaw_models(["base"], store=store)
    assert set(forms_of(store, "base").values()) == {"hot"}
    assert len(pins(store)) == 2
    lose_like_ollama(store, "base")
    assert_whole(store)


def test_a_base_that_is_frozen_gives_its_room_back(store: LocalStore) -> None:
    freeze_models([CHILD], store=store, base="base")
    freeze_models(["base"], store=store)
    assert pins(store) == set()
    assert set(forms_of(store, "base").values()) == {"cold"}
    assert_whole(store)


def test_where_there_are_no_hard_links_nothing_is_coded_by_what_is_hot(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refuse)
    frozen = freeze_models([CHILD], store=store, base="base")
    assert {(item.outcome, item.base) for item in frozen.blobs} == {("frozen", None)}
    assert set(forms_of(store, CHILD).values()) == {"cold"}
    assert pins(store) == set()
    thaw_models([CHILD], store=store)
    freeze_models(["base"], store=store, find_base=False)
    freeze_models([CHILD], store=store, base="base")
    assert base_of(store, CHILD, "x") == layers(store, "base")["x"].digest
    thaw_models(["base"], store=store)
    assert set(forms_of(store, "base").values()) == {"both"}
    lose_like_ollama(store, "base")
    assert_whole(store)


def test_nothing_is_coded_by_bytes_that_have_rotted(store: LocalStore) -> None:
    """Once the base is repaired, what was coded by the wrong bytes could not be had any more."""
    path = store.blob_path(layers(store, "base")["x"].digest)
    whole = Path(path).read_bytes()
    flip(path)
    frozen = freeze_models([CHILD], store=store, base="base")
    assert {item.name: item.base is None for item in frozen.blobs} == {"x": True, "y": False}
    Path(path).unlink()
    Path(path).write_bytes(whole)
    assert_whole(store)


def test_a_base_that_is_repaired_has_its_second_name_again(
    store: LocalStore, tmp_path: Path
) -> None:
    freeze_models([CHILD], store=store, base="base")
    export_model("base", tmp_path / "source", store=store)
    digest = layers(store, "base")["x"].digest
    whole = Path(store.blob_path(digest)).read_bytes()
    Path(store.blob_path(digest)).chmod(0o644)
    Path(store.blob_path(digest)).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert verify_models(store=store).faults
    repaired = repair_models(source=tmp_path / "source", store=store)
    assert repaired.faults == ()
    assert Path(store.base_path(digest)).read_bytes() == whole
    assert Path(store.base_path(digest)).samefile(store.blob_path(digest))
    lose_like_ollama(store, "base")
    assert_whole(store)


def test_what_is_frozen_again_while_garbage_is_removed_keeps_its_base(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze_models([CHILD], store=store, base="base")
    remove_models([CHILD, "base"], store=store)
    sweep = _Collection._sweep
    swept: list[object] = []

    def and_then(self: _Collection, candidates: Iterable[Path]) -> Iterator[Removed]:
        yield from sweep(self, candidates)
        if not swept:  # others act between two batches
            put(store, "base", BASE)
            put_child(store, CHILD, 10)
            freeze_models([CHILD], store=store, base="base")
            remove_models(["base"], store=store)
        swept.append(candidates)

    monkeypatch.setattr(_Collection, "_sweep", and_then)
    collect_garbage(store, older_than=0)
    assert len(swept) == 2
    assert_whole(store)


def test_no_base_is_removed_while_cold_blobs_are_away(store: LocalStore) -> None:
    freeze_models([CHILD], store=store, base="base")
    remove_models(["base"], store=store)
    away = store.folder("cold").rename(store.folder("cold").with_name("away"))
    collect_garbage(store, older_than=0)
    away.rename(store.folder("cold"))
    assert_whole(store)
    remove_models([CHILD], store=store)
    collect_garbage(store, older_than=0)
    assert pins(store) == set()
