from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.store.local import LocalStore
from tests.support.frozen import put
from tests.support.signing import KeyFiles, key_files, policy, public_key
from tests.unit.cli.running import run, run_forked, run_json


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    put(store, "model", {"x": 1})
    return store


def test_signs_and_says_with_which_key_and_what_was_read(
    store: LocalStore, key: KeyFiles, tmp_path: Path
) -> None:
    file = tmp_path / "model.sig"

    shown = run("sign", "model", "--key", key.private, "--out", file, "--store", store.root)

    fingerprint = public_key(key).fingerprint
    assert f"with key {fingerprint[:16]}: 1 file, written to {file}" in shown.stdout
    assert "note: hashed 1 weight file of 80.1 kB, because" in shown.stderr
    again = run_json("sign", "model", "--key", key.private, "--store", store.root)
    assert again.keys() == {
        "name",
        "digest",
        "key",
        "files",
        "hashed",
        "bytes_hashed",
        "file",
        "notices",
        "seconds",
    }
    assert (again["name"], again["key"], again["file"]) == ("model:latest", fingerprint, None)
    run("sign", "model", "--key", key.private, "--out", file, "--store", store.root, exit_code=1)
    run("sign", "model", "--key", key.private, "--out", file, "--force", "--store", store.root)


def test_reads_the_passphrase_from_the_environment(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_files(tmp_path, passphrase=b"secret").private
    arguments = ("sign", "model", "--key", key, "--store", store.root)

    refused = run_forked(*arguments)
    assert refused.returncode == 2
    assert b"set BLOBSTORE_KEY_PASSPHRASE" in refused.stderr
    monkeypatch.setenv("BLOBSTORE_KEY_PASSPHRASE", "wrong")
    assert "wrong passphrase" in run(*arguments, exit_code=2).stderr
    monkeypatch.setenv("BLOBSTORE_KEY_PASSPHRASE", "secret")
    shown = run(*arguments)
    assert "secret" not in shown.output


def test_verify_reports_who_signed_what(store: LocalStore, key: KeyFiles) -> None:
    run("sign", "model", "--key", key.private, "--store", store.root)
    put(store, "plain", {"x": 2})
    fingerprint = public_key(key).fingerprint
    options = ("--signatures", "--store", store.root)

    shown = run("verify", *options, "--key", key.public, exit_code=4).stdout
    assert f"  oms: signed by key.pub (key {fingerprint[:16]})\n" in shown
    assert "  cosign: signed by key.pub" in shown
    assert "0 signatures, but a key was given\n1 fault: 2 models" in shown
    shown = run("verify", "model", *options).stdout
    assert f"  oms: not checked: no key was given (key {fingerprint[:16]})\n" in shown
    other = key_files(store.root.parent, "other").public
    # A key is reason enough to look at signatures.
    shown = run("verify", "model", "--key", other, "--store", store.root, exit_code=4).stdout
    assert "2 signatures, none by a key that was given\n" in shown
    assert "1 fault: 1 model" in shown
    assert f"  oms: not verified: signed by another key (key {fingerprint[:16]})\n" in shown
    value = run_json("verify", "model", "--quick", *options, "--key", key.public)
    (model,) = value["signatures"]
    assert {one["state"] for one in model["signatures"]} == {"valid"}
    assert (model["action"], model["trusted"], model["reason"]) == (None, None, "")
    assert "signatures" not in run_json("verify", "model", "--store", store.root)
    error = run("verify", "--key", key.public, "oci://127.0.0.1:1/x", exit_code=2).stderr
    assert "--remote cannot be combined with" in error


def test_commands_that_describe_models_say_who_signed_them_and_what_was_checked(
    store: LocalStore, key: KeyFiles
) -> None:
    def described(name: str) -> list[str]:
        table = run("list", "-v", name, "--store", store.root).stdout.splitlines()
        info = run("info", name, "--store", store.root).stdout.splitlines()
        show = run("show", name, "--store", store.root).stdout.splitlines()
        start = table[0].index("SIGNED BY")
        rows = (line.partition("signed by")[2] for line in (*info, *show))
        return [table[1][start:].strip(), *(row.strip() for row in rows if row)]

    put(store, "plain", {"x": 2})
    assert described("plain") == ["-"]
    assert "SIGNED BY" not in run("list", "--store", store.root).stdout
    run("sign", "model", "--key", key.private, "--store", store.root)
    short = public_key(key).fingerprint[:16]
    by = f"a key that is not named (cosign, not checked), key {short} (oms, not checked)"
    assert described("model") == [by] * 3
    policy(store, key_files(store.root.parent, "other"))
    assert described("model") == [by.replace("not checked", "not verified")] * 3
    policy(store, key)
    assert described("model") == ["ours (cosign, oms)"] * 3
    for command in ("info", "show", "list"):
        found = run_json(command, "model", "--store", store.root)
        model = found["models"][0] if command == "list" else found
        assert {(one["state"], one["signer"]) for one in model["signatures"]} == {("valid", "ours")}
    # A policy that cannot be used keeps nobody from looking.
    store.policy_path.write_text("version = 2")
    assert described("model") == [by] * 3


def test_verify_fails_if_the_policy_refuses_a_model(store: LocalStore, key: KeyFiles) -> None:
    policy(store, key)
    arguments = ("verify", "model", "--signatures", "--store", store.root)
    assert "0 signatures, refused by the policy: it has no" in run(*arguments, exit_code=4).stdout
    assert run_json(*arguments, exit_code=4)["signatures"][0]["trusted"] is False
    policy(store, key, "warn")
    assert "the policy warns" in run(*arguments).stdout
    run("sign", "model", "--key", key.private, "--store", store.root)
    assert "2 signatures, trusted by the policy" in run(*arguments).stdout


def test_unpack_asks_the_policy_and_takes_signatures_along(
    store: LocalStore, key: KeyFiles, tmp_path: Path
) -> None:
    archive, bundle = tmp_path / "x.bsar", tmp_path / "x.sig"
    run("sign", "model", "--key", key.private, "--out", bundle, "--store", store.root)
    run("pack", "model", archive, "--no-signatures", "--store", store.root)
    other = LocalStore(tmp_path / "other")
    policy(other, key)
    arguments = ("unpack", archive, "--store", other.root)

    refused = run(*arguments, exit_code=1)
    assert "the policy refuses model model:latest" in refused.stderr
    assert not other.has_model("model")
    run(*arguments, "--signature", bundle)
    assert "1 signature, trusted" in run("verify", "--signatures", "--store", other.root).stdout
    run(*arguments)
    run("unpack", archive, "--verify-only", "--signature", bundle, exit_code=2)
    run(*arguments, "--signature", key.public, exit_code=4)
    put(store, "second", {"x": 3})
    run("sign", "second", "--key", key.private, "--out", bundle, "--force", "--store", store.root)
    assert "signs none of the models" in run(*arguments, "--signature", bundle, exit_code=4).stderr


def test_unpack_keeps_what_the_policy_accepts_and_counts_the_rest(
    store: LocalStore, key: KeyFiles, tmp_path: Path
) -> None:
    archive, theirs = tmp_path / "x.bsar", key_files(tmp_path, "theirs")
    for one in (key, theirs):
        run("sign", "model", "--key", one.private, "--store", store.root)
    run("pack", "model", archive, "--store", store.root)
    other = LocalStore(tmp_path / "other")
    policy(other, key)
    shown = run("unpack", archive, "--store", other.root)
    assert shown.stderr == (
        "note: model:latest: signatures that came with it and are not kept: 2 "
        "(no key of the policy made them)\n"
    )
    verified = run("verify", "--signatures", "--store", other.root).stdout
    assert "2 signatures, trusted by the policy" in verified


def test_unpack_notes_what_the_policy_only_warns_about(
    store: LocalStore, key: KeyFiles, tmp_path: Path
) -> None:
    archive = tmp_path / "x.bsar"
    run("pack", "model", archive, "--store", store.root)
    other = LocalStore(tmp_path / "other")
    policy(other, key, "warn")
    shown = run("unpack", archive, "--store", other.root)
    assert "note: model model:latest is not trusted: it has no signature" in shown.stderr
