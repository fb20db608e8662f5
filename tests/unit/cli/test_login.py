from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.http.protocol import Login
from blobstore.registry.credentials import LoginFiles
from blobstore.store.local import LocalStore
from tests.support.frozen import put
from tests.support.raw_server import RawServer, Received, reply
from tests.support.registry import Server, htpasswd_registry, token_registry
from tests.support.token_server import TokenServer
from tests.unit.cli.running import run, run_json

LOGIN = Login("alice", "secret")
OPTIONS = ("--username", "alice", "--password-stdin")


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a Docker configuration that only this test uses."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path / "config.json"


@pytest.fixture
def registry() -> Iterator[RawServer]:
    def answer(request: Received) -> bytes:
        is_right = request.headers.get("authorization") == LOGIN.basic
        return reply(200) if is_right else reply(401, www_authenticate='Basic realm="x"')

    with RawServer(answer) as server:
        yield server


@pytest.mark.parametrize("text", ["secret", "secret\n", "secret\r\n"])
def test_login_is_checked_and_kept(registry: RawServer, config: Path, text: str) -> None:
    result = run("login", registry.host, *OPTIONS, stdin=text)

    assert result.output == (
        f"logged in at {registry.host} as alice; the password is in '{config}'\n"
    )
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert LoginFiles().find(registry.host) == LOGIN


def test_wrong_password_is_not_kept(registry: RawServer, config: Path) -> None:
    result = run("login", registry.host, *OPTIONS, stdin="wrong", exit_code=1)

    assert f"error: login at '{registry.host}': status 401" in result.output
    assert "wrong" not in result.output
    assert not config.exists()


def test_https_means_tls_on_this_machine_too(registry: RawServer, config: Path) -> None:
    registry.plain_answer = reply(400)
    result = run("login", f"https://{registry.host}", *OPTIONS, stdin="secret", exit_code=1)

    assert f"begin with http://{registry.host}" in result.output
    assert not registry.requests
    assert not config.exists()


def test_password_that_was_not_asked_for_is_noted() -> None:
    with RawServer(lambda _: reply(200)) as server:
        result = run("login", server.host, *OPTIONS, stdin="secret")
        assert "note: the registry did not ask for a password" in result.stderr

        assert not run_json("login", server.host, *OPTIONS, stdin="secret")["checked"]


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (OPTIONS, "", "the password is empty"),
        (OPTIONS, "\n", "the password is empty"),
        (("--username", "a:b", "--password-stdin"), "x", "not the name of a user: 'a:b'"),
        (("--username", "alice"), "x", "give --username and --password-stdin"),
        (("--password-stdin",), "x", "give --username and --password-stdin"),
    ],
)
def test_wrong_usage_is_refused_before_the_registry_is_asked(
    registry: RawServer, arguments: tuple[str, ...], stdin: str, message: str
) -> None:
    result = run("login", registry.host, *arguments, stdin=stdin, exit_code=2)

    assert message in result.output
    assert registry.requests == []


@pytest.mark.parametrize(
    "host", ["", "https://ghcr.io/team", "ghcr.io/team", "a b", "user@ghcr.io"]
)
@pytest.mark.parametrize("command", ["login", "logout"])
def test_other_text_than_a_host_is_refused(host: str, command: str) -> None:
    options = OPTIONS if command == "login" else ()

    result = run(command, *options, "--", host, stdin="secret", exit_code=2)

    assert "not the host of a registry" in result.output


def test_logout_forgets_the_login(config: Path) -> None:
    LoginFiles().store("a.example", LOGIN)

    assert run("logout", "oci://a.example/").output == (
        f"logged out of a.example; the password was in '{config}'\n"
    )
    assert json.loads(config.read_text(encoding="utf-8"))["auths"] == {}
    assert run("logout", "a.example").output == "nothing to do: not logged in at a.example\n"
    assert run_json("logout", "a.example") == {"host": "a.example", "removed": False}


# Commands that read a registry which asks for a login

READS = [
    ("show", "oci://{}"),
    ("list", "oci://{}"),
    ("du", "oci://{}"),
    ("diff", "oci://{0}", "oci://{0}"),
    ("verify", "--remote", "{}"),
    ("pull", "{}", "copy"),
]
reads = pytest.mark.parametrize("command", READS, ids=lambda command: command[0])


@pytest.fixture(scope="module")
def protected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a registry that asks for a password."""
    folder = tmp_path_factory.mktemp("htpasswd")
    with htpasswd_registry(folder, LOGIN.user, LOGIN.password) as server:
        yield server


@pytest.fixture
def pushed(protected: Server, store: LocalStore) -> str:
    """Push a model; return its address."""
    put(store, "a", {"x": 1})
    remote = f"{protected.host}/team/a:latest"
    LoginFiles().store(protected.host, LOGIN)
    run("push", "a", remote)
    return remote


@reads
def test_a_login_is_used_by_every_command_that_reads_a_registry(
    pushed: str, command: tuple[str, ...]
) -> None:
    words = [word.format(pushed) for word in command]
    run(*words)
    assert run_json(*words)


@reads
@pytest.mark.parametrize(
    ("login", "advice"),
    [
        (None, "'blobstore login {}' may be needed"),
        (Login("alice", "s3cret"), "the credentials for {} give no access to it"),
    ],
    ids=["no password", "wrong password"],
)
def test_without_the_right_password_nothing_is_read(
    pushed: str, protected: Server, command: tuple[str, ...], login: Login | None, advice: str
) -> None:
    LoginFiles().erase(protected.host)
    if login is not None:
        LoginFiles().store(protected.host, login)
    words = [word.format(pushed) for word in command]
    result = run(*words, exit_code=1)
    assert advice.format(protected.host) in result.stderr
    assert "s3cret" not in result.output
    assert "401" in run_json(*words, exit_code=1)["error"]["message"]


@pytest.fixture
def tokens() -> Iterator[TokenServer]:
    with TokenServer(LOGIN.user, LOGIN.password) as server:
        yield server


def test_tokens_give_access_to_some_repositories_and_expire(
    tokens: TokenServer, tmp_path: Path, store: LocalStore
) -> None:
    put(store, "a", {"x": 1})
    with token_registry(tmp_path / "registry", tokens) as server:
        LoginFiles().store(server.host, LOGIN)
        for name in ("open", "closed"):
            run("push", "a", f"{server.host}/team/{name}")
        tokens.denied.add("team/closed")
        tokens.seconds = 1  # the client asks for another one each time
        for command in READS:
            run(*(word.format(f"{server.host}/team/open") for word in command))
            words = [word.format(f"{server.host}/team/closed") for word in command]
            refused = run(*words, exit_code=1)
            assert "give no access to it" in refused.stderr
