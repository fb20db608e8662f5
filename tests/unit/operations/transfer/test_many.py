from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from blobstore.core.digest import Digest
from blobstore.core.outcomes import Outcome
from blobstore.errors import (
    BlobMissing,
    MissingLibrary,
    ModelNotFound,
    NameConflict,
    NameTaken,
    NotFound,
    UsageError,
)
from blobstore.manifests.reference import Reference
from blobstore.objects.store import ObjectStore
from blobstore.operations.transfer.many import (
    find_remote_models,
    place_of,
    pull_models,
    push_models,
)
from blobstore.operations.transfer.pull import pull_model
from blobstore.operations.transfer.push import Pushed, push_model
from blobstore.registry.client import RegistryClient
from blobstore.remotes.catalog import read_remote_catalog
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.damage import blob_path
from tests.support.models import add_blobs
from tests.support.options import grouped
from tests.support.registry import Server


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "local")
    for name, value in (("one", 1), ("team/two:v1", 2), ("team/three:v1", 3)):
        frozen.put(store, name, {"shared": 9, name.rpartition("/")[2].partition(":")[0]: value})
    return store


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket"


def test_models_travel_together_and_progress_ends_at_the_size_of_all(
    local: LocalStore, bucket: str, tmp_path: Path
) -> None:
    steps: list[tuple[str, int, int]] = []
    names = list(local.references())
    done = push_models(names, bucket, store=local, progress=lambda *step: steps.append(step))
    assert [model.name for model in done] == list(map(str, names))
    assert all(model.error is None for model in done)
    size = sum(sum(blob.size for blob in local.resolve(name).blobs) for name in names)
    assert steps[-1][1:] == (size, size)
    assert steps[0][0].startswith("1 of 3 models, one:latest: ")
    assert [at for _, at, _ in steps] == sorted(at for _, at, _ in steps)

    found = find_remote_models([bucket], all_models=True)
    pulled = pull_models(found, store=tmp_path / "other")
    assert [str(model.result.reference) for model in pulled if model.result] == list(
        map(str, names)
    )


def test_one_that_fails_does_not_keep_others_from_following(local: LocalStore, bucket: str) -> None:
    blob_path(local, "two", "team/two:v1").unlink()
    done = push_models(list(local.references()), bucket, store=local)
    assert [type(model.error) for model in done] == [type(None), type(None), BlobMissing]
    assert [entry.address for entry in find_remote_models([f"{bucket}/team/*"])] == [
        f"{bucket}/team/three:v1"
    ]
    absent, unread = push_models(["nothing", "one"], bucket, store=local)
    assert (type(absent.error), unread.error) == (ModelNotFound, None)


def test_globs_select_models_of_a_store(local: LocalStore, bucket: str) -> None:
    push_models(list(local.references()), bucket, store=local)
    assert [entry.address for entry in find_remote_models([f"{bucket}/on?", f"{bucket}/one"])] == [
        f"{bucket}/one:latest",
        f"{bucket}/one",
    ]
    with pytest.raises(ModelNotFound, match="no model matches"):
        find_remote_models([f"{bucket}/x*"])
    with pytest.raises(NotFound):
        find_remote_models([f"{bucket}/typo/x*"])


def test_several_models_need_a_place_and_no_name(local: LocalStore, bucket: str) -> None:
    with pytest.raises(UsageError, match="the address of one model"):
        push_models(list(local.references()), f"{bucket}/one:v1", store=local)
    with pytest.raises(UsageError, match="the host of a registry cannot be a glob"):
        find_remote_models(["host.exampl*"])


def test_in_a_registry_each_model_gets_the_repository_of_its_name(
    local: LocalStore, server: Server, remote: str, tmp_path: Path
) -> None:
    done = push_models(list(local.references()), remote, store=local)
    assert [str(model.result.remote) for model in done if model.result] == [
        f"{remote}/one:latest",
        f"{remote}/team/three:v1",
        f"{remote}/team/two:v1",
    ]
    found = find_remote_models([f"{remote}/team/two:v*", f"oci://{remote}/one"])
    assert [entry.address for entry in found] == [f"{remote}/team/two:v1", f"oci://{remote}/one"]
    pulled = pull_models(found, store=tmp_path / "other")
    namespace = remote.partition("/")[2].replace("/", "__")
    names = [f"{server.host}/{namespace}{name}" for name in ("__team/two:v1", "/one:latest")]
    assert [str(model.result.reference) for model in pulled if model.result] == names


@pytest.mark.parametrize(
    "options", [{}, {"max_layers": 1}, {"layout": "ollama"}, {"layout": "image"}]
)
def test_a_model_has_the_same_id_in_a_registry_as_in_a_store(
    local: LocalStore, remote: str, options: dict[str, Any]
) -> None:
    pushed = push_model("one", remote, store=local, **grouped(options))

    (entry,) = read_remote_catalog(f"oci://{remote}")

    assert entry.digest == Digest.of(local.read_manifest("one"))
    assert entry.registry_digest == pushed.digest


@pytest.mark.parametrize("is_registry", [True, False])
def test_a_dry_run_counts_what_models_share_once(
    is_registry: bool, local: LocalStore, remote: str, bucket: str
) -> None:
    place, names = remote if is_registry else bucket, list(local.references())

    planned = push_models(names, place, store=local, dry_run=True)
    pushed = push_models(names, place, store=local)

    def sent(models: list[Outcome[Pushed]]) -> list[int]:
        return [model.result.bytes_sent for model in models if model.result]

    assert sent(planned) == sent(pushed)
    assert len(sent(pushed)) == 3
    assert sent(pushed)[1] < sent(pushed)[0]


def test_a_missing_library_is_reported_once_and_not_for_each_model(
    local: LocalStore, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingLibrary, match="obstore is not installed"):
        push_models(list(local.references()), bucket, store=local)


@pytest.mark.parametrize("is_registry", [True, False])
@pytest.mark.parametrize("order", [("base", "tune", "run"), ("run", "tune", "base")])
def test_bases_come_before_what_is_compressed_against_them(
    is_registry: bool, order: tuple[str, ...], remote: str, bucket: str, tmp_path: Path
) -> None:
    origin, other = LocalStore(tmp_path / "origin"), LocalStore(tmp_path / "other")
    frozen.put(origin, "base", {"a": 1})
    add_blobs(origin, "tune", {"a": frozen.layer("a", frozen.tuned(5, 1))})
    add_blobs(origin, "run", {"a": frozen.layer("a", frozen.tuned(6, 1))})
    place = remote if is_registry else bucket
    push_models(["base"], place, store=origin)
    push_models(["run", "tune"], place, store=origin, cold=True, base="base")
    found = find_remote_models(f"{place}/{name}:latest" for name in order)

    planned = pull_models(found, store=other, dry_run=True)
    pulled = pull_models(found, store=other)

    assert pulled[0].name == f"{place}/base:latest"
    for models in (planned, pulled):
        assert [model.result.notices for model in models if model.result] == [()] * 3
        assert [bool(model.result.bytes_saved) for model in models if model.result] == [
            False, True, True
        ]  # fmt: skip
    assert [model.result and model.result.bytes_fetched for model in planned] == [
        model.result and model.result.bytes_fetched for model in pulled
    ]


def test_a_base_that_could_not_be_fetched_is_named_as_missing(bucket: str, tmp_path: Path) -> None:
    origin = LocalStore(tmp_path / "origin")
    frozen.put(origin, "base", {"a": 1})
    add_blobs(origin, "tune", {"a": frozen.layer("a", frozen.tuned(5, 1))})
    push_models(["base"], bucket, store=origin)
    push_models(["tune"], bucket, store=origin, cold=True, base="base")
    (tmp_path / "bucket" / "blobs" / blob_path(origin, "a", "base").name).unlink()

    base, tune = pull_models(
        find_remote_models([bucket], all_models=True), store=tmp_path / "other"
    )

    assert isinstance(base.error, BlobMissing)
    assert tune.result
    assert "pull the base model first" in tune.result.notices[0]


def test_of_models_with_bases_of_each_other_only_one_is_fetched_whole(
    bucket: str, tmp_path: Path
) -> None:
    origin = LocalStore(tmp_path / "origin")
    for number in range(4):
        add_blobs(origin, f"m{number}", {"a": frozen.layer("a", frozen.tuned(number + 5, 1))})
    for number, base in enumerate(("m1", "m2", "m1", "m0")):
        push_models([f"m{number}"], bucket, store=origin, cold=True, base=base)
    found = find_remote_models([bucket], all_models=True)

    pulled = pull_models(found, store=tmp_path / "other")

    assert [model.name for model in pulled] == [
        f"{bucket}/m{number}:latest" for number in (2, 1, 0, 3)
    ]
    results = [model.result for model in pulled if model.result]
    assert [bool(result.bytes_saved) for result in results] == [False, True, True, True]
    assert [result.notices for result in results] == [()] * 4
    (alone,) = pull_models(found[3:], store=tmp_path / "third")
    assert alone.result
    assert "pull the base model first" in alone.result.notices[0]
    whole = pull_models(found, store=tmp_path / "fourth", cold=False)
    assert [model.name for model in whole] == [entry.address for entry in found]


def test_repositories_below_an_address_are_listed_and_pulled_however_deep(
    local: LocalStore, server: Server, tmp_path: Path
) -> None:
    # The registry is shared with other tests.
    push_models(["one", "team/two:v1"], f"{server.host}/deep/er", store=local)
    push_models(["one"], f"{server.host}/deep", store=local)
    places = [
        f"{server.host}/deep/{name}" for name in ("er/one:latest", "er/team/two:v1", "one:latest")
    ]

    def listed(text: str, *, all_models: bool = True) -> list[str]:
        return [one.address for one in find_remote_models([text], all_models=all_models)]

    assert listed(f"oci://{server.host}/deep") == places
    assert listed(f"oci://{server.host}/deep/") == places
    assert set(listed(f"oci://{server.host}")) >= set(places)
    assert listed(f"oci://{server.host}/deep/er/*", all_models=False) == places[:2]
    with pytest.raises(ModelNotFound, match="no model matches"):
        listed(f"oci://{server.host}/deep/x*", all_models=False)
    with pytest.raises(ModelNotFound, match="no such repository"):
        listed(f"oci://{server.host}/dee")

    found = find_remote_models([f"oci://{server.host}/deep"], all_models=True)
    pulled = pull_models(found, store=tmp_path / "other")
    names = [
        f"{server.host}/{name}"
        for name in ("deep__er/one:latest", "deep__er__team/two:v1", "deep/one:latest")
    ]
    assert [str(model.result.reference) for model in pulled if model.result] == names
    again = pull_models(found, store=tmp_path / "other")
    assert [model.result.blobs_fetched for model in again if model.result] == [0, 0, 0]

    # A prefix takes the place of what tells two of them apart.
    with pytest.raises(NameConflict, match="would both become 'lab/one:latest'"):
        pull_models(found, store=tmp_path / "third", prefix="lab")
    assert not (tmp_path / "third").exists()
    chosen = [entry for entry in found if "/er/" in entry.address]
    moved = pull_models(chosen, store=tmp_path / "third", prefix="lab")
    named = [str(model.result.reference) for model in moved if model.result]
    assert named == ["lab/one:latest", "lab/two:v1"]


def test_names_of_two_places_are_two_names_and_lead_back_to_them(
    local: LocalStore, server: Server, tmp_path: Path
) -> None:
    for place, name in (("lab", "one"), ("lab2", "team/two:v1")):
        push_model(name, f"{server.host}/{place}/back/llama", store=local)
    other = LocalStore(tmp_path / "other")
    for place in ("lab", "lab2"):
        pulled = pull_model(f"oci://{server.host}/{place}/back/llama", store=other)
        assert str(pulled.reference) == f"{server.host}/{place}__back/llama:latest"
        pushed = push_model(pulled.reference, store=other)
        assert str(pushed.remote) == f"{server.host}/{place}/back/llama:latest"

    # A name that was chosen is refused to the other place, and the message says where it came from.
    first, second = (f"{server.host}/{place}/back/llama:latest" for place in ("lab", "lab2"))
    pull_model(first, "llama", store=other)
    with pytest.raises(NameTaken, match=f"name 'llama:latest', which came from '{first}'"):
        pull_model(second, "llama", store=other)


@pytest.mark.parametrize(
    ("remote", "place"),
    [
        ("localhost:5000", "oci://localhost:5000/team/one:v1"),
        ("localhost:5000/lab/", "oci://localhost:5000/lab/team/one:v1"),
        ("docker.io", "oci://docker.io/team/one:v1"),
        ("http://cache:8080", "http://cache:8080/team/one:v1"),
        ("https://localhost:8443/lab", "https://localhost:8443/lab/team/one:v1"),
    ],
)
def test_a_model_has_its_own_place_below_an_address(remote: str, place: str) -> None:
    assert place_of(remote, Reference.parse("team/one:v1")) == place


def test_a_model_without_a_namespace_has_none_on_its_way(
    local: LocalStore, server: Server, tmp_path: Path
) -> None:
    push_model("one", f"{server.host}/alone", store=local)
    pulled = pull_model(f"oci://{server.host}/alone", store=tmp_path / "other")
    assert str(pulled.reference) == str(pulled.remote) == f"{server.host}/alone:latest"
    pushed = push_model(f"{server.host}/alone", store=tmp_path / "other")
    assert str(pushed.remote) == f"{server.host}/alone:latest"


@pytest.mark.parametrize("is_registry", [True, False])
def test_a_glob_reads_the_manifests_of_its_models_only(
    is_registry: bool,
    local: LocalStore,
    remote: str,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in range(5):
        push_model(
            "one", f"{remote}:v{number}" if is_registry else f"{bucket}/one:v{number}", store=local
        )
    read = []
    kind = RegistryClient if is_registry else ObjectStore
    names = ["head_manifest", "get_manifest"] if is_registry else ["read_manifest"]
    for name in names:
        real = getattr(kind, name)

        def counted(self: object, *arguments: Any, real: Any = real, **options: Any) -> Any:
            read.append(arguments)
            return real(self, *arguments, **options)

        monkeypatch.setattr(kind, name, counted)
    (found,) = find_remote_models([f"{remote}:*3" if is_registry else f"{bucket}/one:*3"])
    assert found.address.endswith(":v3")
    assert 0 < len(read) <= 3
