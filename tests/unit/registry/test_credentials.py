"""Docker's configuration: read, written and asked for its helpers."""

from __future__ import annotations

import base64
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import BlobstoreError, UsageError
from blobstore.registry.credentials import DockerCredentials, check_user
from blobstore.registry.protocol import Login

LOGIN = Login("alice", "se:cret")
PACKED = base64.b64encode(b"alice:se:cret").decode()
HELPER = """\
#!/usr/bin/env python3
import json, pathlib, sys
kept = pathlib.Path(__file__).with_name("kept.json")
logins = json.loads(kept.read_text()) if kept.exists() else {}
action, text = sys.argv[1], sys.stdin.read()
if action == "store":
    entry = json.loads(text)
    logins[entry["ServerURL"]] = entry
elif action == "erase":
    del logins[text]
elif text == "locked.example":
    sys.exit("\\x1b[31mthe keychain is locked")
elif text == "silent.example":
    print("not JSON")
elif text == "empty.example":
    print("{}")
elif text not in logins:
    print("credentials not found in native keychain")
    sys.exit(1)
else:
    print(json.dumps(logins[text]))
kept.write_text(json.dumps(logins))
"""


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a credential helper on the PATH; return the file with what it keeps."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "docker-credential-fake"
    program.write_text(HELPER, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder / "kept.json"


def docker(folder: Path, **config: Any) -> DockerCredentials:
    if config:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return DockerCredentials(folder)


def test_configuration_is_where_docker_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)
    assert DockerCredentials().path == tmp_path / ".docker" / "config.json"
    monkeypatch.setenv("DOCKER_CONFIG", "/elsewhere")
    assert DockerCredentials().path == Path("/elsewhere/config.json")


def test_there_is_no_login_without_a_configuration(tmp_path: Path) -> None:
    assert docker(tmp_path).find("ghcr.io") is None
    assert docker(tmp_path, auths={"other.example": {"auth": PACKED}}).find("ghcr.io") is None


@pytest.mark.parametrize(
    ("key", "host"),
    [
        ("ghcr.io", "ghcr.io"),
        ("https://ghcr.io", "ghcr.io"),
        ("https://ghcr.io/v1/", "ghcr.io"),
        ("localhost:5000", "localhost:5000"),
        ("https://index.docker.io/v1/", "docker.io"),
    ],
)
def test_login_is_found_under_every_name_of_its_registry(
    tmp_path: Path, key: str, host: str
) -> None:
    assert docker(tmp_path, auths={key: {"auth": PACKED}}).find(host) == LOGIN


@pytest.mark.parametrize("host", ["ghcr.io:443", "evil.ghcr.io", "ghcr.io.evil.example", "io"])
def test_login_of_another_host_or_port_is_not_used(tmp_path: Path, host: str) -> None:
    assert docker(tmp_path, auths={"ghcr.io": {"auth": PACKED}}).find(host) is None


def test_identity_token_wins_over_a_password(tmp_path: Path) -> None:
    found = docker(tmp_path, auths={"a.example": {"auth": PACKED, "identitytoken": "t"}})

    assert found.find("a.example") == Login("<token>", "t")


@pytest.mark.parametrize("entry", [{}, None, 1, {"auth": ""}, {"auth": 1}, {"identitytoken": ""}])
def test_entry_without_a_password_is_no_login(tmp_path: Path, entry: Any) -> None:
    assert docker(tmp_path, auths={"a.example": entry}).find("a.example") is None


@pytest.mark.parametrize("packed", ["%%%", "YWxpY2U=", "/w=="])
def test_malformed_password_is_an_error_that_does_not_show_it(tmp_path: Path, packed: str) -> None:
    with pytest.raises(BlobstoreError, match="auths of 'a.example' are malformed") as caught:
        docker(tmp_path, auths={"a.example": {"auth": packed}}).find("a.example")
    assert packed not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", "[" * 10_000, " " * (2**20 + 1)])
def test_malformed_configuration_is_an_error_with_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")

    with pytest.raises(BlobstoreError, match="config.json'"):
        docker(tmp_path).find("a.example")
    with pytest.raises(BlobstoreError, match="config.json'"):
        docker(tmp_path).store("a.example", LOGIN)
    assert (tmp_path / "config.json").read_text(encoding="utf-8") == text


def test_login_is_stored_in_a_file_that_only_its_owner_can_read(tmp_path: Path) -> None:
    credentials = docker(tmp_path / "new" / "docker")

    assert credentials.store("a.example", LOGIN) == f"'{credentials.path}'"

    assert stat.S_IMODE(credentials.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(credentials.path.parent.stat().st_mode) == 0o700
    assert credentials.find("a.example") == LOGIN
    assert os.listdir(credentials.path.parent) == ["config.json"]


def test_everything_else_in_the_configuration_stays(tmp_path: Path) -> None:
    others = {
        "auths": {"b.example": {"auth": PACKED}},
        "HttpHeaders": {"x": "y"},
        "detachKeys": "q",
    }
    credentials = docker(tmp_path, **others)

    credentials.store("a.example", LOGIN)
    assert credentials.erase("a.example")

    assert json.loads(credentials.path.read_text(encoding="utf-8")) == others


def test_new_login_replaces_the_old_one_under_all_of_its_names(tmp_path: Path) -> None:
    credentials = docker(tmp_path, auths={"https://a.example/v1/": {"auth": PACKED}})

    credentials.store("a.example", Login("bob", "x"))

    written = json.loads(credentials.path.read_text(encoding="utf-8"))
    assert list(written["auths"]) == ["a.example"]
    assert credentials.find("a.example") == Login("bob", "x")


def test_configuration_that_is_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("{}", encoding="utf-8")
    (tmp_path / "config.json").symlink_to("real.json")

    docker(tmp_path).store("a.example", LOGIN)

    assert (tmp_path / "config.json").is_symlink()
    assert PACKED in (tmp_path / "real.json").read_text(encoding="utf-8")


def test_erasing_reports_whether_there_was_a_login(tmp_path: Path) -> None:
    credentials = docker(tmp_path)

    assert not credentials.erase("a.example")
    assert not credentials.path.exists()
    credentials.store("a.example", LOGIN)
    assert credentials.erase("a.example")
    assert not credentials.erase("a.example")
    assert credentials.find("a.example") is None


@pytest.mark.parametrize(
    "config", [{"credsStore": "fake"}, {"credHelpers": {"a.example": "fake"}, "credsStore": "x"}]
)
def test_helper_keeps_the_password_and_the_file_does_not(
    tmp_path: Path, helper: Path, config: dict[str, Any]
) -> None:
    credentials = docker(tmp_path, **config)
    assert credentials.find("a.example") is None

    assert credentials.store("a.example", LOGIN) == "credential helper 'fake'"

    assert json.loads(credentials.path.read_text(encoding="utf-8"))["auths"] == {"a.example": {}}
    assert credentials.find("a.example") == LOGIN
    assert credentials.erase("a.example")
    assert not credentials.erase("a.example")
    assert json.loads(helper.read_text(encoding="utf-8")) == {}


def test_file_is_used_if_the_helper_has_no_login(tmp_path: Path, helper: Path) -> None:
    credentials = docker(tmp_path, credsStore="fake", auths={"a.example": {"auth": PACKED}})

    assert credentials.find("a.example") == LOGIN


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("locked.example", r"'docker-credential-fake' failed: \\x1b\[31mthe keychain is locked"),
        ("silent.example", "'docker-credential-fake' sent no credentials"),
        ("empty.example", "credential helper 'fake' sent no user and secret"),
    ],
)
def test_failing_helper_is_an_error_with_its_words_escaped(
    tmp_path: Path, helper: Path, host: str, message: str
) -> None:
    with pytest.raises(BlobstoreError, match=message):
        docker(tmp_path, credsStore="fake").find(host)


def test_missing_helper_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BlobstoreError, match="'docker-credential-gone' .* is not installed"):
        docker(tmp_path, credsStore="gone").find("a.example")


@pytest.mark.parametrize("name", ["../evil", "a/b", "a b", "-x", ["x"], 1, "x" * 65])
def test_name_of_a_helper_is_never_a_path(tmp_path: Path, name: Any) -> None:
    with pytest.raises(BlobstoreError, match="malformed helper"):
        docker(tmp_path, credsStore=name).find("a.example")


@pytest.mark.parametrize("user", ["", "a:b", "a\nb", "a\x1b"])
def test_user_that_cannot_be_sent_is_refused(user: str) -> None:
    with pytest.raises(UsageError, match="not the name of a user"):
        check_user(user)
