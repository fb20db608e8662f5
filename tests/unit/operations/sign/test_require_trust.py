from __future__ import annotations

import os
from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import InvalidPolicy, InvalidSignature, NotFound, NotTrusted
from blobstore.manifests.reference import Reference
from blobstore.operations.maintenance.copy_to_store import copy_to_store
from blobstore.operations.sign import require_trust
from blobstore.operations.sign.require_trust import check_trust, read_policy, read_signature
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.frozen import put
from tests.support.signing import KeyFiles, key_files, policy

MODEL = Reference.parse("model")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    put(store, "model", {"x": 1})
    return store


def test_without_a_policy_a_model_is_opened_after_one_look_for_the_file(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[object] = []

    def note(path: Path) -> os.stat_result:
        looked.append(path)
        return os.lstat(path)

    class System:
        environ, stat = os.environ, staticmethod(note)

    monkeypatch.setattr(require_trust, "os", System)
    monkeypatch.setattr(LocalStore, "signatures", None)
    blobstore.open("model", store=store).close()
    assert looked == [store.policy_path]


def test_a_policy_that_this_user_cannot_see_is_not_ignored() -> None:
    with sandbox.common_folder() as folder:
        store = LocalStore(folder / "store")
        put(store, "model", {"x": 1})
        (folder / "store").chmod(0o755)
        store.policy_path.parent.chmod(0o700)
        outcome = sandbox.call(lambda: blobstore.open("model", store=store), unprivileged=True)
        assert outcome.startswith("InvalidPolicy: cannot read the policy")


def test_opens_a_signed_model_and_refuses_all_others(store: LocalStore, key: KeyFiles) -> None:
    policy(store, key)
    with pytest.raises(
        NotTrusted, match="has no signature by a key that rule '\\*' trusts: 'ours'"
    ):
        blobstore.open("model", store=store)

    blobstore.sign("model", key.private, store=store)

    blobstore.open("model", store=store).close()
    put(store, "model", {"x": 2})
    with pytest.raises(NotTrusted):
        blobstore.open("model", store=store)


def test_a_model_keeps_its_signatures_under_other_names_and_in_other_stores(
    store: LocalStore, key: KeyFiles, tmp_path: Path
) -> None:
    blobstore.sign("model", key.private, store=store)
    blobstore.rename("model", "renamed", store=store)
    other = LocalStore(tmp_path / "other")
    copy_to_store("renamed", other, "copy", store=store)
    for place, name in ((store, "renamed"), (other, "copy")):
        policy(place, key)
        blobstore.open(name, store=place).close()


def test_a_policy_that_only_warns_lets_the_model_be_opened(
    store: LocalStore, key: KeyFiles
) -> None:
    policy(store, key, "warn")
    with pytest.warns(UserWarning, match="model model:latest is not trusted: it has no signature"):
        blobstore.open("model", store=store).close()


def test_a_signature_of_another_manifest_does_not_count(store: LocalStore, key: KeyFiles) -> None:
    put(store, "other", {"x": 5})
    blobstore.sign("other", key.private, store=store)
    policy(store, key)
    for data in store.signatures(Digest.of(store.read_manifest("other"))):
        store.keep_signature(Digest.of(store.read_manifest("model")), data, is_verified=True)
    with pytest.raises(NotTrusted, match="none of its signatures"):
        check_trust(store, MODEL, store.read_manifest("model"))


def test_damaged_and_unknown_signatures_prove_nothing(store: LocalStore, key: KeyFiles) -> None:
    blobstore.sign("model", key.private, store=store)
    digest = Digest.of(store.read_manifest("model"))
    policy(store, key)
    for path in (store.folder("signatures") / digest.hex).iterdir():
        path.write_bytes(path.read_bytes()[:-2])
    for data in (b"", b"[]", b'{"mediaType":"x"}', b"[" * 9999):
        store.keep_signature(digest, data, is_verified=True)
    with pytest.raises(NotTrusted):
        check_trust(store, MODEL, store.read_manifest("model"))


def test_the_variable_names_another_policy_which_must_exist(
    store: LocalStore, key: KeyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy(store, key)
    lenient = tmp_path / "require_trust.toml"
    monkeypatch.setenv("BLOBSTORE_TRUST", str(lenient))
    with pytest.raises(InvalidPolicy, match="does not exist"):
        blobstore.open("model", store=store)
    lenient.write_text('version = 1\ndefault = "off"\n[keys]\nours = "key.pub"')
    blobstore.open("model", store=store).close()
    found = read_policy(store)
    assert found is not None
    assert [one.name for one in found.keys] == ["ours"]
    monkeypatch.setenv("BLOBSTORE_TRUST", "")
    with pytest.raises(NotTrusted):
        blobstore.open("model", store=store)


def test_a_policy_that_cannot_be_used_refuses_every_model(
    store: LocalStore, key: KeyFiles, tmp_path: Path
) -> None:
    def check(problem: str) -> None:
        with pytest.raises(InvalidPolicy, match=problem):
            blobstore.open("model", store=store)

    policy(store, key)
    key.public.unlink()
    check("no key file")
    store.policy_path.write_text("rules")
    check("not valid TOML")
    store.policy_path.write_bytes(bytes(2 << 20))
    check("over the limit")
    store.policy_path.unlink()
    store.policy_path.mkdir()
    check("not a regular file")
    store.policy_path.rmdir()
    store.policy_path.symlink_to(tmp_path / "nothing")
    check("does not exist")


def test_reads_a_signature_of_a_manifest_from_a_file(
    store: LocalStore, key: KeyFiles, tmp_path: Path
) -> None:
    file = tmp_path / "model.sig"
    blobstore.sign("model", key.private, store=store, out=file)
    assert read_signature(file).manifest == Digest.of(store.read_manifest("model"))
    with pytest.raises(NotFound):
        read_signature(tmp_path / "none")
    with pytest.raises(InvalidSignature, match="JSON"):
        read_signature(key.public)


def test_a_signature_that_came_with_a_model_and_is_in_the_store_counts_once(
    store: LocalStore, key: KeyFiles, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    blobstore.sign("model", key_files(tmp_path / "other").private, store=store)
    policy(store, key)
    data = store.read_manifest("model")
    kept = list(store.signatures(Digest.of(data)))
    with pytest.raises(NotTrusted, match=rf"none of its signatures \({len(kept)}\) is"):
        check_trust(store, MODEL, data, kept)


def test_the_command_that_lists_signatures_is_named_for_models_of_the_store_only(
    store: LocalStore, key: KeyFiles
) -> None:
    policy(store, key)
    data = store.read_manifest("model")
    listing = "'blobstore verify model:latest --quick --signatures' lists its signatures"
    for name, advice in (("model", listing), ("absent", "")):
        with pytest.raises(NotTrusted) as caught:
            check_trust(store, Reference.parse(name), data)
        assert caught.value.advice.startswith(advice)
        assert bool(caught.value.advice) == bool(advice)
