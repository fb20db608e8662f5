from __future__ import annotations

import json
from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import ModelNotFound, NotFound
from blobstore.operations.sign.report import check_signatures
from blobstore.store.local import LocalStore
from tests.support.frozen import put
from tests.support.signing import KeyFiles, key_files, policy, public_key


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    put(store, "model", {"x": 1})
    put(store, "plain", {"x": 2})
    return store


def states(store: LocalStore, *keys: Path) -> list[tuple[str, str, str]]:
    (model,) = check_signatures("model", keys=keys, store=store)
    return sorted((one.kind, one.state, one.signer) for one in model.signatures)


def test_names_the_signer_of_each_signature(store: LocalStore, key: KeyFiles) -> None:
    signed = blobstore.sign("model", key.private, store=store)

    model, plain = check_signatures(store=store, keys=[key.public])

    assert (str(model.reference), model.digest) == ("model:latest", signed.digest)
    assert states(store, key.public) == [
        ("cosign", "valid", "key.pub"),
        ("oms", "valid", "key.pub"),
    ]
    assert {one.key for one in model.signatures} == {public_key(key).fingerprint}
    assert (plain.signatures, plain.is_unsigned, plain.verdict) == ((), True, None)


def test_does_not_vouch_for_keys_that_it_does_not_know(
    store: LocalStore, key: KeyFiles, tmp_path: Path
) -> None:
    blobstore.sign("model", key.private, store=store)
    other = key_files(tmp_path, "other").public
    assert states(store) == [("cosign", "not checked", ""), ("oms", "not checked", "")]
    assert states(store, other) == [("cosign", "unknown key", ""), ("oms", "unknown key", "")]


def test_reports_signatures_that_were_altered(store: LocalStore, key: KeyFiles) -> None:
    blobstore.sign("model", key.private, store=store)
    put(store, "other", {"x": 3})
    other = blobstore.sign("other", key.private, store=store)
    digest = Digest.of(store.read_manifest("model"))
    (bundle,) = (one for one in store.signatures(digest) if b"bundle" in one)
    value = json.loads(bundle)
    value["dsseEnvelope"]["signatures"][0]["sig"] = "MAYCAQECAQE="
    store.keep_signature(digest, json.dumps(value).encode(), is_verified=True)
    store.keep_signature(digest, b"{}", is_verified=True)
    for data in store.signatures(other.digest):
        store.keep_signature(digest, data, is_verified=True)

    (model,) = check_signatures("model", keys=[key.public], store=store)

    wrong = [one.message for one in model.signatures if one.state == "invalid"]
    assert len(model.signatures) == 6
    assert len(wrong) == 4
    assert any("was altered" in message for message in wrong)
    assert sum(str(other.digest) in message for message in wrong) == 2
    assert model.is_faulty


def test_says_what_the_policy_says(store: LocalStore, key: KeyFiles) -> None:
    policy(store, key)
    blobstore.sign("model", key.private, store=store)

    model, plain = check_signatures(store=store)

    assert (model.action, model.is_trusted, model.is_faulty) == ("enforce", True, False)
    assert model.verdict is not None
    assert model.verdict.signer == "ours"
    assert (plain.action, plain.is_trusted, plain.is_faulty) == ("enforce", False, True)
    assert "no signature" in plain.reason


def test_reports_models_and_keys_that_do_not_exist(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        check_signatures("none", store=store)
    with pytest.raises(NotFound):
        check_signatures("model", keys=[tmp_path / "none"], store=store)
