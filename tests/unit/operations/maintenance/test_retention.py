from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from blobstore.errors import ModelNotFound, NameTaken, UsageError
from blobstore.manifests.reference import Reference
from blobstore.operations.maintenance.names import copy_model, remove_models, rename_model
from blobstore.operations.maintenance.retention import expired_models
from blobstore.store.local import LocalStore
from tests.support import frozen

DAY = 86400.0


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Models of two names, of which the one of tag vN is N days old; ``run:best`` is ``run:v3`` too."""
    store, now = LocalStore(tmp_path / "store"), time.time()
    for name, value in (("run:v1", 1), ("run:v2", 2), ("run:v3", 3), ("run:best", 3), ("x:v9", 9)):
        frozen.put(store, name, {"w": value})
        days = {"best": 3}.get(name[-4:]) or int(name[-1])
        moment = now - days * DAY
        os.utime(store.manifest_path(name), (moment, moment))
    return store


def expired(store: LocalStore, **rules: float) -> list[str]:
    return [str(name) for name in expired_models(store.references(), store=store, **rules)]  # type: ignore[arg-type]


def test_the_newest_of_each_name_are_kept(store: LocalStore) -> None:
    remove_models(["run:best"], store=store)
    assert expired(store, keep_last=1) == ["run:v3", "run:v2"]
    assert expired(store, keep_last=2) == ["run:v3"]
    assert expired(store, keep_last=3) == []
    assert len(expired(store, keep_last=0)) == 4


def test_of_steps_of_one_moment_the_last_ones_are_the_newest(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    for step in (10, 9):
        frozen.put(store, f"run:step-{step}", {"w": step})
        os.utime(store.manifest_path(f"run:step-{step}"), (1, 1))
    assert expired(store, keep_last=1) == ["run:step-9"]


def test_remove_keeps_what_the_rules_keep(store: LocalStore) -> None:
    removed = remove_models("*", older_than="36h", keep_last=1, store=store)

    assert [str(entry.reference) for entry in removed.names] == ["run:v2"]
    assert removed.kept == 4 == len([*store.references()])
    with pytest.raises(UsageError, match="not a time"):
        remove_models("*", older_than="old", store=store)


def test_what_is_young_is_kept(store: LocalStore) -> None:
    remove_models(["run:best"], store=store)
    assert expired(store, older_than=2.5 * DAY) == ["x:v9", "run:v3"]
    assert expired(store, older_than=1.5 * DAY, keep_last=2) == ["run:v3"]


def test_an_alias_and_its_model_stay(store: LocalStore) -> None:
    assert expired(store, keep_last=1) == ["run:v2"]
    assert expired(store, older_than=2.5 * DAY) == ["x:v9"]
    assert expired(store, keep_last=0) == ["x:v9", "run:v2", "run:v1"]
    # Whether the rule is for the alias or not.
    steps = [name for name in store.references() if name.tag != "best"]
    assert expired_models(steps, keep_last=1, store=store) == [Reference.parse("run:v2")]
    # A name of another model is no alias.
    copy_model("run:v2", "kept", store=store)
    assert expired(store, keep_last=1) == ["run:v2"]


def test_a_model_that_did_not_change_is_as_many_steps_as_before(store: LocalStore) -> None:
    for number in (4, 5):  # as a nightly import names it
        copy_model("run:v2", f"run:v{number}", store=store)
        os.utime(store.manifest_path(f"run:v{number}"), (time.time() + number,) * 2)
    remove_models(["run:best"], store=store)
    assert expired(store, keep_last=1) == ["run:v3", "run:v2", "run:v1", "run:v4"]
    with pytest.raises(NameTaken):
        copy_model("run:v1", "run:v5", store=store)


def test_a_fresh_alias_ousts_no_newer_model(store: LocalStore) -> None:
    os.utime(store.manifest_path("run:best"))
    assert expired(store, keep_last=1) == ["run:v2"]
    copy_model("run:v3", "run:good", store=store)
    assert expired(store, keep_last=2) == []


def test_in_a_copy_an_alias_is_no_model_of_its_own_however_old_it_is(store: LocalStore) -> None:
    os.utime(store.manifest_path("run:best"), (1, 1))  # names are given in their order
    assert expired(store, keep_last=1) == ["run:v2"]
    with pytest.raises(NameTaken):
        copy_model("run:v1", "run:v3", store=store)
    assert copy_model("run:v1", "run:best", store=store).replaced


@pytest.fixture
def steps(tmp_path: Path) -> LocalStore:
    """Steps of a run with their states, of which the one of step N is N days old; all have the same weights but 3."""
    store, now = LocalStore(tmp_path / "steps"), time.time()
    for step in (1, 2, 3, 4):
        for name, value in ((f"run:s{step}.state", step), (f"run:s{step}", 10 * (step == 3))):
            frozen.put(store, name, {"w": value})
            moment = now - step * DAY
            os.utime(store.manifest_path(name), (moment, moment))
    return store


def test_a_step_and_its_state_count_as_one(steps: LocalStore) -> None:
    assert expired(steps, keep_last=2) == ["run:s4", "run:s4.state", "run:s3", "run:s3.state"]
    assert expired(steps, keep_last=4) == []
    assert expired(steps, older_than=3.5 * DAY) == ["run:s4", "run:s4.state"]


def test_states_alone_can_be_removed(steps: LocalStore) -> None:
    states = [name for name in steps.references() if name.tag.endswith(".state")]
    found = expired_models(states, keep_last=3, store=steps)
    assert list(map(str, found)) == ["run:s4.state"]


@pytest.mark.parametrize("alias", ["run:best", "run:best.state"])
def test_an_alias_protects_a_step_and_its_state(steps: LocalStore, alias: str) -> None:
    copy_model("run:s3.state" if alias.endswith(".state") else "run:s3", alias, store=steps)
    assert expired(steps, keep_last=1) == ["run:s4", "run:s4.state", "run:s2", "run:s2.state"]
    states = [name for name in steps.references() if name.tag.endswith(".state")]
    found = expired_models(states, keep_last=1, store=steps)
    assert list(map(str, found)) == ["run:s4.state", "run:s2.state"]


def test_a_manifest_that_cannot_be_read_is_kept(store: LocalStore) -> None:
    store.manifest_path("run:v2").write_bytes(b"{")
    assert "run:v2" not in expired(store, keep_last=0)


def test_a_rule_is_needed(store: LocalStore) -> None:
    with pytest.raises(UsageError, match="give keep_last or older_than"):
        expired_models(["x:v9"], store=store)
    with pytest.raises(UsageError, match="at least 0"):
        expired_models(["x:v9"], keep_last=-1, store=store)
    with pytest.raises(ModelNotFound):
        expired_models(["none"], keep_last=1, store=store)


def test_an_alias_moves_without_force_and_the_tag_of_a_step_does_not(store: LocalStore) -> None:
    os.utime(store.manifest_path("run:best"))
    assert copy_model("run:v1", "run:best", store=store).replaced
    assert copy_model("run:v2", "run:best", store=store).replaced
    assert store.read_manifest("run:best") == store.read_manifest("run:v2")
    # Its own tag, or one whose model has no other, and a model of another name.
    for source, target in (("run:v1", "run:v2"), ("run:v1", "run:v3"), ("x:v9", "run:best")):
        with pytest.raises(NameTaken):
            copy_model(source, target, store=store)
    with pytest.raises(NameTaken):
        rename_model("run:v1", "run:best", store=store)
    store.manifest_path("run:best").write_bytes(b"{")
    with pytest.raises(NameTaken):
        copy_model("run:v1", "run:best", store=store)
