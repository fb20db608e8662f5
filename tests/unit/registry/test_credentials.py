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
from blobstore.http.protocol import Login
from blobstore.registry.credentials import LoginFile, LoginFiles, check_user

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


def docker(folder: Path, **config: Any) -> LoginFile:
    if config:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return LoginFile(folder / "config.json")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Return the files that may have logins, in the order in which they are read, all of them missing."""
    for name in ("run", "settings", "docker"):
        (tmp_path / name / "containers").mkdir(parents=True)
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    return {
        "run": tmp_path / "run/containers/auth.json",
        "settings": tmp_path / "settings/containers/auth.json",
        "docker": tmp_path / "docker/config.json",
    }


def packed(user: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:x".encode()).decode()}


def write(path: Path, **auths: Any) -> None:
    path.write_text(json.dumps({"auths": {"a.example": packed(path.parent.name)} | auths}))


def test_files_are_read_in_the_order_of_podman(places: dict[str, Path]) -> None:
    for name in reversed(places):
        write(places[name])
        found = LoginFiles().find("a.example")
        assert found is not None
        assert found.user == places[name].parent.name
    assert LoginFiles().find("b.example") is None


def test_file_of_the_environment_is_the_only_one(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(places["run"])
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "own.json"))
    assert LoginFiles().find("a.example") is None

    assert LoginFiles().store("a.example", LOGIN) == f"'{tmp_path / 'own.json'}'"

    assert LoginFiles().find("a.example") == LOGIN


def test_new_login_is_kept_where_the_old_one_was_and_in_dockers_file_otherwise(
    places: dict[str, Path],
) -> None:
    assert LoginFiles().store("b.example", LOGIN) == f"'{places['docker']}'"
    write(places["settings"])
    assert LoginFiles().store("a.example", LOGIN) == f"'{places['settings']}'"
    assert LoginFiles().find("a.example") == LOGIN


def test_logout_forgets_the_login_in_all_files(places: dict[str, Path]) -> None:
    for path in places.values():
        write(path)

    assert LoginFiles().erase("a.example") == tuple(f"'{path}'" for path in places.values())

    assert LoginFiles().find("a.example") is None


def test_docker_reads_its_file_from_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert LoginFiles().store("a.example", LOGIN) == f"'{tmp_path / '.docker/config.json'}'"


def test_nothing_is_known_and_nothing_fails_without_a_home_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)

    assert LoginFiles().find("a.example") is None


def test_file_that_cannot_be_read_does_not_hide_the_others(places: dict[str, Path]) -> None:
    places["run"].write_text("{")
    with pytest.raises(BlobstoreError, match="auth.json'"):
        LoginFiles().find("a.example")
    write(places["docker"])
    assert LoginFiles().find("a.example") is not None


@pytest.mark.parametrize(
    ("repository", "user"),
    [
        ("teama/x", "teama"),
        ("teama/deep/x", "deep"),
        ("teama/deeper/x", "teama"),
        ("teamb", "teamb"),
        ("teambuilding/x", "host"),
        ("", "host"),
    ],
)
def test_login_of_the_longest_path_is_used(tmp_path: Path, repository: str, user: str) -> None:
    auths = {
        "a.example/teama": packed("teama"),
        "a.example": packed("host"),
        "https://a.example/teama/deep/": packed("deep"),
        "a.example/teamb": packed("teamb"),
    }

    found = docker(tmp_path, auths=auths).find("a.example", repository)

    assert found is not None
    assert found.user == user


def test_login_of_another_path_is_no_login(tmp_path: Path) -> None:
    file = docker(tmp_path, auths={"a.example/teama": packed("teama")})

    assert file.find("a.example", "teamb/x") is None
    assert file.find("a.example") is None
    file.store("a.example", LOGIN)
    assert file.erase("a.example")
    assert file.find("a.example", "teama/x") is not None


def test_user_and_password_are_read_as_fields(tmp_path: Path) -> None:
    entry = {"username": LOGIN.user, "password": LOGIN.password}

    assert docker(tmp_path, auths={"a.example": entry}).find("a.example") == LOGIN


@pytest.mark.parametrize("text", ["", "\ufeff", " \n"])
def test_empty_configuration_has_no_logins(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")

    assert docker(tmp_path).find("a.example") is None


def test_byte_order_mark_before_a_configuration_is_ignored(tmp_path: Path) -> None:
    text = json.dumps({"auths": {"a.example": {"auth": PACKED}}})
    (tmp_path / "config.json").write_text(f"\ufeff{text}", encoding="utf-8")

    assert docker(tmp_path).find("a.example") == LOGIN


def test_file_is_used_if_the_helper_is_missing(tmp_path: Path) -> None:
    credentials = docker(tmp_path, credsStore="gone", auths={"a.example": {"auth": PACKED}})

    assert credentials.find("a.example") == LOGIN


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
        ("registry-1.docker.io", "docker.io"),
        ("ghcr.io/", "ghcr.io"),
        ("ghcr.io/v2/", "ghcr.io"),
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


@pytest.mark.parametrize("text", ["[]", "{", "\x00", "[" * 10_000, " " * (2**20 + 1)])
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_file_is_used_if_the_helper_has_no_login(tmp_path: Path, helper: Path) -> None:
    credentials = docker(tmp_path, credsStore="fake", auths={"a.example": {"auth": PACKED}})

    assert credentials.find("a.example") == LOGIN


@pytest.mark.slow
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
