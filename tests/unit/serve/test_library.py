"""How long models are kept, and when they are looked at again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from blobstore.core import capacity, limits
from blobstore.errors import UsageError
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.serve import library as served
from blobstore.serve.library import MAX_MODELS, Library
from blobstore.serve.pulled import Origin, PulledModels
from blobstore.serve.unprepared import NotPrepared, prepared
from blobstore.serve.visible import Visible
from blobstore.store.local import LocalStore
from tests.support.models import moe_tensors, write_folder
from tests.support.serve import ask, body_of

MODEL = Reference.parse("org/model")


def test_blobs_of_a_model_that_was_asked_for_stay_until_it_is_idle(
    library: Library, tmp_path: Path
) -> None:
    store = library.store
    create(write_folder(tmp_path / "other", moe_tensors()), "other", store=store)
    response = ask(library, "/org/model/resolve/main/config.json")
    blobs = store.resolve("org/model").blobs
    remove_models(["org/model"], store=store)
    collect_garbage(store=store, older_than=0, force=True)
    assert store.has_blobs(blobs)
    assert body_of(store, response)
    library.release_idle(3600)
    collect_garbage(store=store, older_than=0, force=True)
    assert store.has_blobs(blobs)
    library.release_idle(0)
    collect_garbage(store=store, older_than=0, force=True)
    assert store.has_blobs(blobs)  # the response is still there
    del response
    library.release_idle(0)
    collect_garbage(store=store, older_than=0, force=True)
    assert not store.has_blobs(blobs)


def test_the_same_work_has_the_same_key(library: Library) -> None:
    keys = []
    for _ in range(2):
        with pytest.raises(NotPrepared) as caught:
            library.model(MODEL)
        keys.append(caught.value.key)
    assert keys[0] == keys[1]
    caught.value.prepare()
    assert library.model(MODEL) is library.model(MODEL)


def test_a_model_is_prepared_when_documents_of_others_leave_the_memory(library: Library) -> None:
    with pytest.raises(NotPrepared) as caught:
        library.model(MODEL)
    with limits.Held() as others:
        others.add(limits.DOCUMENTS.most, "others")
        with pytest.raises(limits.Crowded):
            caught.value.prepare()
    caught.value.prepare()
    assert library.model(MODEL)
    assert limits.DOCUMENTS.taken == 0


def test_names_of_one_model_share_what_was_prepared(library: Library) -> None:
    copy_model("org/model", "org/model:v2", store=library.store)
    models = [
        prepared(partial(library.model, Reference.parse(name)))
        for name in ("org/model", "org/model:v2")
    ]
    assert models[0] is models[1]


def test_only_some_models_are_kept(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_MODELS > 1
    monkeypatch.setattr("blobstore.serve.library.MAX_MODELS", 1)
    small = Library(library.store)
    folder = library.store.root.parent / "other"
    create(write_folder(folder, moe_tensors()), "org/other", store=library.store)
    for _ in range(2):
        for name in ("model", "other"):
            assert ask(small, f"/org/{name}/resolve/main/config.json").status == 200
    with pytest.raises(NotPrepared):
        small.model(MODEL)
    assert len(list(library.store.folder("leases").iterdir())) == 1


@pytest.mark.parametrize(("most", "kept"), [(1, ["m2", "m3"]), (1 << 20, ["m1", "m2", "m3"])])
def test_manifests_of_kept_models_have_limited_size(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, kept: list[str]
) -> None:
    """The last two are kept whatever they have, so that the next request finds what it needs."""
    monkeypatch.setattr(served, "MAX_MANIFESTS", most)
    library = Library(store)
    names = [Reference.parse(f"m{number}") for number in (1, 2, 3)]
    for name in names:
        folder = write_folder(tmp_path / name.model, {name.model: np.zeros(1)})
        create(folder, name, store=store)
        prepared(partial(library.model, name))
        prepared(partial(library.artifact, name))
    for question in (library.model, library.artifact):
        found = []
        for name in names:
            with contextlib.suppress(NotPrepared):
                question(name)
                found.append(name.model)
        assert found == kept


def test_large_models_are_prepared_one_at_a_time(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is not next is answered again later, and takes no thread from others until then."""
    monkeypatch.setattr(NotPrepared, "pause", 0)
    image = Reference.parse("org/model:latest.image")
    questions = (
        partial(library.model, MODEL),
        partial(library.artifact, MODEL),
        partial(library.artifact, image),
        partial(library.model, MODEL, with_digests=True),
    )
    for limit, is_prepared in ((1 << 20, True), (100, False)):
        monkeypatch.setattr(served, "_LARGE", limit)
        library.release_idle(0)
        for question in questions:
            with another_has(library._large), another_has(library._hashing):
                with pytest.raises(NotPrepared) as first:
                    question()
                first.value.prepare()
                with contextlib.nullcontext() if is_prepared else pytest.raises(NotPrepared):
                    question()
            prepared(question)


@contextlib.contextmanager
def another_has(lock: threading.RLock) -> Iterator[None]:
    """Let another thread hold a lock within the block."""
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(lock.acquire).result()
        try:
            yield
        finally:
            thread.submit(lock.release).result()


def test_a_pattern_that_is_too_long_is_refused_at_once(library: Library) -> None:
    with pytest.raises(UsageError, match="characters"):
        Library(library.store, allow=["a" * 2000])


def test_a_list_of_many_names_reads_the_records_as_often_as_one_of_a_few(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    really = PulledModels._look

    def counted(self: PulledModels) -> None:
        looks.append(1)
        really(self)

    library.pulled.keep(Origin("org/gated", "0" * 40), is_public=False)
    ask(library, "/v2/_catalog")
    monkeypatch.setattr(PulledModels, "_look", counted)
    counts = []
    for number in range(2, 30):
        copy_model("org/model", f"org/model:v{number}", store=library.store)
        if number in {2, 29}:
            with pytest.raises(NotPrepared) as caught:
                Visible.of(library).models()
            caught.value.prepare()
            looks.clear()
            assert len(Visible.of(library).models()) == number
            counts.append(len(looks))
    assert counts[0] == counts[1]


def test_the_image_of_a_model_does_not_depend_on_a_tag_that_the_client_may_not_see(
    library: Library,
) -> None:
    image = Reference.parse("org/model:latest.image")
    copy_model("org/model", image, store=library.store)
    assert library.named_by(image) == image
    few = library.only(("org/model:latest",))
    assert few.named_by(image) == Reference.parse("org/model")
    assert prepared(lambda: few.artifact(image)) is not None


def test_what_reads_all_bytes_of_a_model_has_threads_that_take_turns(library: Library) -> None:
    assert prepared(partial(library.model, MODEL)) is not None
    with pytest.raises(NotPrepared) as digests:
        library.model(MODEL, with_digests=True)
    with pytest.raises(NotPrepared) as image:
        library.artifact(Reference.parse(f"{MODEL}.image"))
    assert digests.value.threads is image.value.threads is capacity.HASH
    assert 0 < capacity.HASH.at_once < capacity.HASH.most


def test_wrong_bytes_of_a_repository_say_nothing_of_another(library: Library) -> None:
    model = prepared(lambda: library.model(MODEL))
    assert model is not None
    fetched = replace(model, origin=Origin("org/model", "a" * 40))
    library.distrust("evil/model", ["e"])
    assert not library.is_distrusted(fetched, "e")
    library.distrust("org/model", ["e"])
    assert library.is_distrusted(fetched, "e")
    assert not library.is_distrusted(model, "e"), "it is the store's own"
