"""Signatures that no key has verified: they cost little, displace nothing, and are removed."""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path

import pytest

import blobstore
from blobstore.core import limits
from blobstore.core.digest import Digest
from blobstore.core.files import read_regular
from blobstore.core.limits import Limit
from blobstore.errors import InvalidSignature, NotTrusted, StoreError
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.sign import require_trust
from blobstore.operations.sign.report import check_signatures
from blobstore.operations.transfer.pull import pull_model
from blobstore.signatures import cosign
from blobstore.signatures.bundle import statement, write_bundle
from blobstore.signatures.signature import Envelope, Signature
from blobstore.store import signatures
from blobstore.store.local import LocalStore
from tests.support.frozen import put
from tests.support.signing import KeyFiles, key_files, policy


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    put(store, "model", {"x": 1})
    return store


def manifest_of(store: LocalStore, name: str = "model") -> Digest:
    return Digest.of(store.read_manifest(name))


def forged(manifest: Digest, number: int) -> bytes:
    return write_bundle(statement(f"{number}", {}, manifest), b"x" * 70, "")


def age(store: LocalStore) -> None:
    for path in store.folder("signatures").rglob("*.*"):
        os.utime(path, (0, time.time() - 7200))


def pin(store: LocalStore, manifest: Digest) -> None:
    store.policy_path.write_text(
        f'version = 1\n[[rules]]\nmatch = "*"\naction = "enforce"\npins = ["{manifest}"]\n'
    )


@pytest.mark.slow
@pytest.mark.parametrize("has_policy", [True, False])
def test_a_remote_cannot_push_out_the_signature_of_a_model(
    store: LocalStore, key: KeyFiles, tmp_path: Path, has_policy: bool
) -> None:
    """Each of six pulls brings twenty forged bundles, whose digests come before the real ones."""
    blobstore.sign("model", key.private, store=store)
    manifest = manifest_of(store)
    kept = list(store.signatures(manifest))
    if has_policy:
        policy(store, key)
    first = min(Digest.of(data).hex for data in kept)
    numbers = iter(range(100_000))
    for pull in range(6):
        bucket = tmp_path / f"bucket-{pull}"
        bucket.mkdir()
        blobstore.push("model", f"file://{bucket}", store=store)
        folder = next(bucket.rglob(f"{manifest.hex}/*.sig")).parent
        for path in folder.iterdir():
            path.unlink()
        while len(list(folder.iterdir())) < 20:
            data = forged(manifest, next(numbers))
            if (digest := Digest.of(data).hex) < first:
                (folder / f"{digest}.sig").write_bytes(data)
        pulled = pull_model(f"file://{bucket}/model:latest", "model", store=store)
        assert pulled.signatures == (0 if has_policy else 20)
    found = list(store.kept_signatures(manifest))
    assert [one.data for one in found if one.is_verified] == kept
    assert len(found) == len(kept) + (0 if has_policy else limits.UNVERIFIED.count)
    policy(store, key)
    blobstore.open("model", store=store).close()


def test_signatures_that_are_pulled_without_a_policy_count_once_there_is_one(
    store: LocalStore, key: KeyFiles, tmp_path: Path
) -> None:
    blobstore.sign("model", key.private, store=store)
    (tmp_path / "bucket").mkdir()
    blobstore.push("model", f"file://{tmp_path}/bucket", store=store)
    other = LocalStore(tmp_path / "other")
    pull_model(f"file://{tmp_path}/bucket/model:latest", "model", store=other)
    assert not any(one.is_verified for one in other.kept_signatures(manifest_of(other)))
    policy(other, key)
    blobstore.open("model", store=other).close()


def test_unverified_signatures_take_the_place_of_the_oldest_ones_alone(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Digest.of(b"m")
    for limit, left in ((Limit(10, 100, 3), 3), (Limit(10, 20, 100), 2)):
        monkeypatch.setattr(limits, "UNVERIFIED", limit)
        store.keep_signature(manifest, b"verified".ljust(10), is_verified=True)
        for number in range(6):
            store.keep_signature(manifest, b"%010d" % number, is_verified=False)
            folder = store.signature_folder(manifest)
            for path in folder.glob("*.unverified"):
                status = path.stat()
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 10**9))
        found = [one.data for one in store.kept_signatures(manifest)]
        assert found == [b"verified".ljust(10), *(b"%010d" % (5 - n) for n in range(left))]
    store.keep_signature(manifest, b"x" * 11, is_verified=False)
    store.keep_signature(manifest, b"verified".ljust(10), is_verified=False)
    store.keep_signature(manifest, b"%010d" % 5, is_verified=True)
    assert [one.is_verified for one in store.kept_signatures(manifest)].count(True) == 2
    assert len(list(store.signatures(manifest))) == 3


def test_a_copy_in_another_store_stays_unverified(store: LocalStore, tmp_path: Path) -> None:
    manifest, other = manifest_of(store), LocalStore(tmp_path / "other")
    store.keep_signature(manifest, b"mine", is_verified=True)
    store.keep_signature(manifest, b"theirs", is_verified=False)
    blobstore.copy_to_store("model", other, store=store)
    found = {one.data: one.is_verified for one in other.kept_signatures(manifest)}
    assert found == {b"mine": True, b"theirs": False}


def test_a_policy_of_pins_reads_no_signature(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.keep_signature(manifest_of(store), b"[" * 9999, is_verified=True)
    pin(store, manifest_of(store))

    def refuse(data: bytes) -> None:
        raise AssertionError(data)

    monkeypatch.setattr(cosign, "read_envelope", refuse)
    blobstore.open("model", store=store).close()


def test_what_is_signed_is_parsed_only_if_a_trusted_key_signed_it(
    store: LocalStore, key: KeyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forged ones come first; of the real ones, one is enough."""
    manifest = manifest_of(store)
    blobstore.sign("model", key.private, store=store)
    age(store)
    for number in range(5):
        store.keep_signature(manifest, forged(manifest, number), is_verified=True)
    policy(store, key)
    parsed = []
    parse = cosign.parse_envelope

    def count(envelope: Envelope) -> Signature:
        parsed.append(envelope)
        return parse(envelope)

    monkeypatch.setattr("blobstore.signatures.policy.parse_envelope", count)
    blobstore.open("model", store=store).close()
    assert len(parsed) == 1


def test_an_envelope_of_many_values_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json.JSONDecoder, "decode", lambda *_: pytest.fail("it was parsed"))
    with pytest.raises(InvalidSignature, match="more than 4 MiB of memory"):
        cosign.read_envelope(b"[" + b"[]," * 30_000 + b"[]]")


def test_sign_says_that_the_policy_has_another_key(
    store: LocalStore, key: KeyFiles, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = key_files(tmp_path / "other")
    policy(store, key)
    (notice,) = blobstore.sign("model", other.private, store=store).notices
    assert "the policy does not accept this signature: none of its signatures" in notice
    assert notice.startswith("the policy does not accept this signature: ")
    assert blobstore.sign("model", key.private, store=store).notices == ()
    store.policy_path.write_text("rules")
    (notice,) = blobstore.sign("model", key.private, store=store).notices
    assert notice.startswith("the policy cannot be used: ")


def test_sign_fails_if_it_cannot_read_what_it_wrote(
    store: LocalStore, key: KeyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "signatures", lambda _: iter(()))
    with pytest.raises(StoreError, match="cannot be read there"):
        blobstore.sign("model", key.private, store=store)


def test_a_signature_that_is_too_large_to_be_read_is_written_once(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blobstore.store.signatures.MAX_SIGNATURE_SIZE", 3)
    store.keep_signature(Digest.of(b"m"), b"data", is_verified=True)
    assert [one.data for one in store.kept_signatures(Digest.of(b"m"))] == [None]


def test_signing_again_replaces_a_damaged_file(store: LocalStore, key: KeyFiles) -> None:
    store.keep_signature(Digest.of(b"m"), b"data", is_verified=True)
    (kept,) = store.kept_signatures(Digest.of(b"m"))
    kept.path.chmod(0o644)
    kept.path.write_bytes(b"datax")
    assert [one.data for one in store.kept_signatures(Digest.of(b"m"))] == [None]
    store.keep_signature(Digest.of(b"m"), b"data", is_verified=True)
    assert list(store.signatures(Digest.of(b"m"))) == [b"data"]


def test_a_damaged_file_is_named_and_gc_removes_it(store: LocalStore, key: KeyFiles) -> None:
    blobstore.sign("model", key.private, store=store)
    policy(store, key)
    paths = [one.path for one in store.kept_signatures(manifest_of(store))]
    for path in paths:
        path.chmod(0o644)
        path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(NotTrusted, match="no signature") as caught:
        blobstore.open("model", store=store)
    assert f"(damaged: {len(paths)})" in caught.value.advice
    assert "'blobstore sign model:latest --key FILE'" in caught.value.advice
    (model,) = check_signatures("model", store=store)
    assert all(f"{path.name}' is damaged" in str(model.signatures) for path in paths)
    assert {item.path.name for item in collect_garbage(store=store).leftovers} == {
        path.name for path in paths
    }
    blobstore.sign("model", key.private, store=store)
    blobstore.open("model", store=store).close()


def test_gc_removes_unverified_signatures_that_no_key_of_the_policy_made(
    store: LocalStore, key: KeyFiles
) -> None:
    manifest = manifest_of(store)
    blobstore.sign("model", key.private, store=store)
    real = set(store.signatures(manifest))
    for number, is_verified in ((1, True), (2, False)):
        store.keep_signature(manifest, forged(manifest, number), is_verified=is_verified)
    store.keep_signature(manifest, b"[]", is_verified=True)
    age(store)
    assert not collect_garbage(store=store).leftovers  # without a policy, nobody can say
    pin(store, manifest)
    assert not collect_garbage(store=store).leftovers
    store.policy_path.write_text("rules")
    assert not collect_garbage(store=store).leftovers
    policy(store, key)
    dry = collect_garbage(store=store, dry_run=True).leftovers
    assert len(dry) == 1
    assert collect_garbage(store=store).leftovers == dry
    # Those that somebody has verified stay: another user of the store may have another policy.
    assert set(store.signatures(manifest)) == real | {forged(manifest, 1), b"[]"}


def test_gc_keeps_a_signature_that_it_cannot_read(store: LocalStore, key: KeyFiles) -> None:
    blobstore.sign("model", key.private, store=store)
    policy(store, key)
    for kept in store.kept_signatures(manifest_of(store)):
        kept.path.unlink()
        kept.path.mkdir()
    assert not collect_garbage(store=store).leftovers


def test_gc_reads_intact_signatures_only_while_others_may_write(
    store: LocalStore, key: KeyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobstore.sign("model", key.private, store=store)
    reads: list[Path] = []
    store.lock_timeout = 0

    def noted(path: Path, limit: int) -> bytes:
        with store._locks.shared():  # or the file is not read
            reads.append(path)
            return read_regular(path, limit)

    monkeypatch.setattr(signatures, "read_regular", noted)
    assert not collect_garbage(store=store).leftovers
    assert sorted(reads) == sorted(store.folder("signatures").rglob("*.sig"))


def test_gc_keeps_a_damaged_signature_that_was_written_again_since_it_looked(
    store: LocalStore, key: KeyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobstore.sign("model", key.private, store=store)
    (path, *_) = store.folder("signatures").rglob("*.sig")
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(b"damaged")
    alone = store.exclusive_lock

    def locked() -> object:
        path.write_bytes(data)
        return alone()

    monkeypatch.setattr(store, "exclusive_lock", locked)
    assert not collect_garbage(store=store).leftovers
    assert path.read_bytes() == data


def test_a_signature_from_a_file_is_the_one_that_the_store_has(
    store: LocalStore, key: KeyFiles, tmp_path: Path
) -> None:
    blobstore.sign("model", key.private, store=store, out=tmp_path / "m.sig")
    assert require_trust.read_signature(tmp_path / "m.sig").data in set(
        store.signatures(manifest_of(store))
    )


def test_a_model_with_forged_signatures_alone_is_refused(store: LocalStore, key: KeyFiles) -> None:
    manifest = manifest_of(store)
    policy(store, key)
    for number in range(3):
        store.keep_signature(manifest, forged(manifest, number), is_verified=number == 0)
    with (
        warnings.catch_warnings(),
        pytest.raises(NotTrusted, match=r"none of its signatures \(3\)"),
    ):
        blobstore.open("model", store=store)
