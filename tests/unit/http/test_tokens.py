"""Access to registries that ask for a password or for tokens: real ones, and every form of challenge."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from blobstore.core import capacity
from blobstore.core.capacity import Capacity
from blobstore.core.digest import Digest
from blobstore.errors import BlobstoreError, RemoteError, RemoteRefused
from blobstore.http.protocol import Challenge, Login, Reply, Request
from blobstore.http.tokens import Authorizer
from blobstore.registry.client import RegistryClient
from blobstore.registry.credentials import GivenLogin
from tests.support.registry import Server, htpasswd_registry, token_registry
from tests.support.token_server import TokenServer

LOGIN = Login("alice", "se:cret ü")
WRONG = Login("alice", "wrong")
NOBODY = GivenLogin(None)
DATA = b"x" * 1000
DIGEST = Digest.of(DATA)
BASE = "https://registry.example"
BEARER = Challenge("bearer", "https://auth.example/token", "the service")
PULL = frozenset({"repository:a:pull"})


@pytest.fixture(scope="session")
def tokens() -> Iterator[TokenServer]:
    with TokenServer(*LOGIN) as server:
        yield server


@pytest.fixture(scope="session")
def token_server(tokens: TokenServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with token_registry(tmp_path_factory.mktemp("token"), tokens) as server:
        yield server


@pytest.fixture(scope="session")
def password_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with htpasswd_registry(tmp_path_factory.mktemp("htpasswd"), *LOGIN) as server:
        yield server


def logged_in(server: Server, login: Login | None = LOGIN) -> RegistryClient:
    return RegistryClient(server.host, credentials=GivenLogin(login))


def push(client: RegistryClient, repository: str) -> None:
    client.upload_blob(repository, DIGEST, len(DATA), lambda offset: [DATA[offset:]])


def test_password_is_sent_when_the_registry_asks_for_it(
    password_server: Server, repository: str
) -> None:
    with logged_in(password_server) as client:
        assert client.check_login()
        push(client, repository)
        assert client.blob_size(repository, DIGEST) == len(DATA)


@pytest.mark.parametrize(
    ("login", "advice"),
    [
        (WRONG, r"the credentials for 127\.0\.0\.1:\d+ give no access"),
        (None, "'blobstore login 127.0.0.1:"),
    ],
)
def test_wrong_or_missing_password_is_refused(
    password_server: Server, repository: str, login: Login | None, advice: str
) -> None:
    with logged_in(password_server, login) as client:
        for action in (client.check_login, lambda: push(client, repository)):
            with pytest.raises(RemoteRefused, match=f"status 401.*{advice}"):
                action()


def test_token_is_fetched_once_for_each_set_of_scopes(
    tokens: TokenServer, token_server: Server, repository: str
) -> None:
    tokens.requests.clear()
    with logged_in(token_server) as client:
        client.blob_size(repository, DIGEST)
        push(client, repository)
        assert client.blob_size(repository, DIGEST) == len(DATA)
        push(client, repository)

    scopes = [scopes for _, _, scopes in tokens.requests]
    assert scopes == [[f"repository:{repository}:pull"], [f"repository:{repository}:pull,push"]]


def test_mount_asks_for_access_to_both_repositories(
    tokens: TokenServer, token_server: Server, repository: str
) -> None:
    with logged_in(token_server) as client:
        push(client, repository)
        tokens.requests.clear()
        assert client.mount_blob(f"{repository}-copy", DIGEST, repository)

    [(_, _, scopes)] = tokens.requests
    assert sorted(scopes) == [
        f"repository:{repository}-copy:pull,push",
        f"repository:{repository}:pull",
    ]


def test_public_repository_is_read_without_a_login_and_not_written(
    token_server: Server, repository: str
) -> None:
    with logged_in(token_server) as client:
        push(client, repository)
    with logged_in(token_server, None) as client:
        assert b"".join(client.read_blob(repository, DIGEST, 0, len(DATA))) == DATA
        with pytest.raises(RemoteRefused, match="'blobstore login 127.0.0.1:.*' may be needed"):
            push(client, f"{repository}-other")


def test_wrong_password_is_refused_by_the_server_of_the_tokens(
    token_server: Server, repository: str
) -> None:
    with (
        logged_in(token_server, WRONG) as client,
        pytest.raises(RemoteRefused, match="token for '127.0.0.1': status 401"),
    ):
        client.blob_size(repository, DIGEST)


def test_identity_token_is_posted(
    tokens: TokenServer, token_server: Server, repository: str
) -> None:
    tokens.requests.clear()
    with logged_in(token_server, Login("<token>", tokens.refresh)) as client:
        push(client, repository)

    assert [(method, given) for method, given, _ in tokens.requests] == [("POST", tokens.refresh)]


def test_expired_token_is_replaced(
    tokens: TokenServer, token_server: Server, repository: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "seconds", -120)  # the registry tolerates a minute
    tokens.requests.clear()
    with logged_in(token_server) as client:
        with pytest.raises(RemoteRefused, match="status 401"):
            client.blob_size(repository, DIGEST)
        monkeypatch.undo()
        assert client.blob_size(repository, DIGEST) is None

    assert len(tokens.requests) == 3  # two that do not help, and one that does


class Realm:
    """Issues tokens without a network."""

    def __init__(self, *bodies: str) -> None:
        self.requests: list[Request] = []
        self.bodies = list(bodies)
        self.time = 0.0

    def fetch(self, request: Request, limit: int) -> Reply:
        self.requests.append(request)
        number = len(self.requests)
        body = self.bodies.pop(0) if self.bodies else json.dumps({"token": f"t{number}"})
        return Reply(200, {}, body.encode(), request.url)

    def authorizer(self, login: Login | None = LOGIN, base: str = BASE) -> Authorizer:
        return Authorizer(base, lambda _: login, self.fetch, lambda: self.time)


def test_nothing_is_sent_before_the_registry_asks() -> None:
    assert Realm().authorizer().authorization(PULL) is None


def test_token_is_used_until_shortly_before_it_expires() -> None:
    realm = Realm('{"token": "t1", "expires_in": 100}')
    authorizer = realm.authorizer()
    assert authorizer.learn(BEARER, PULL, None)

    headers = []
    for realm.time in (0, 79, 80):
        headers.append(authorizer.authorization(PULL))

    assert headers == ["Bearer t1", "Bearer t1", "Bearer t2"]


@pytest.mark.parametrize("lifetime", ["-1", "0", "1", '"soon"', "null", "1e300", "[]"])
def test_absurd_lifetime_of_a_token_is_corrected(lifetime: str) -> None:
    realm = Realm(f'{{"token": "t1", "expires_in": {lifetime}}}')
    authorizer = realm.authorizer()
    authorizer.learn(BEARER, PULL, None)

    headers = []
    for realm.time in (0, 47, 3600):
        headers.append(authorizer.authorization(PULL))

    assert headers[:1] + headers[2:] == ["Bearer t1", "Bearer t2"]
    assert len(realm.requests) == 2


def test_rejected_token_is_replaced_once_for_all_threads() -> None:
    realm = Realm()
    authorizer = realm.authorizer()
    authorizer.learn(BEARER, PULL, None)
    rejected = authorizer.authorization(PULL)
    replaced = []

    def again() -> None:
        authorizer.learn(BEARER, PULL, rejected)
        replaced.append(authorizer.authorization(PULL))

    threads = [threading.Thread(target=again) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert replaced == ["Bearer t2"] * 8
    assert len(realm.requests) == 2


@pytest.mark.parametrize("row", [capacity.TOKEN, capacity.TRIAL])
@pytest.mark.parametrize("more", [1, 40])
def test_threads_beyond_the_one_that_asks_wait_for_what_it_learns(row: Capacity, more: int) -> None:
    realm = Realm()
    authorizer = realm.authorizer()
    is_token = row is capacity.TOKEN
    challenge = BEARER if is_token else Challenge("basic")
    authorizer.learn(challenge, PULL, None)
    trying = threading.Semaphore(row.most)
    accepted = threading.Event()

    def send(_: int) -> str | None:
        with authorizer.authorized(PULL) as header:
            if not is_token and not accepted.is_set():
                assert trying.acquire(blocking=False), "two try a password at once"
                accepted.set()
                trying.release()
                authorizer.judge(header, 200)
            return header

    with ThreadPoolExecutor(row.most + more) as threads:
        headers = set(threads.map(send, range(row.most + more)))
    assert headers == ({"Bearer t1"} if is_token else {LOGIN.basic})
    assert len(realm.requests) == is_token


def test_scopes_that_the_registry_asks_for_are_added() -> None:
    realm = Realm()
    authorizer = realm.authorizer()
    authorizer.learn(BEARER, PULL, None)
    rejected = authorizer.authorization(PULL)

    more = BEARER._replace(scopes=frozenset({"repository:other:pull"}))
    assert authorizer.learn(more, PULL, rejected)
    authorizer.authorization(PULL)
    authorizer.authorization(PULL)

    assert [request.url.count("scope=") for request in realm.requests] == [1, 2]


def test_password_goes_to_the_realm_and_into_no_text() -> None:
    realm = Realm()
    authorizer = realm.authorizer()
    authorizer.learn(BEARER, PULL, None)
    authorizer.authorization(PULL)

    [request] = realm.requests
    assert request.url == (
        "https://auth.example/token?service=the+service&scope=repository%3Aa%3Apull"
    )
    sent = request.headers["authorization"].removeprefix("Basic ")
    assert base64.b64decode(sent).decode() == f"{LOGIN.user}:{LOGIN.password}"
    assert LOGIN.password not in repr(LOGIN) + repr(request)


@pytest.mark.parametrize(
    ("base", "challenge", "message"),
    [
        (BASE, BEARER._replace(realm="http://auth.example/token"), "from https to http"),
        (BASE, BEARER._replace(realm="http://127.0.0.1/token"), "from https to http"),
        (BASE, BEARER._replace(realm=""), "without a Location"),
        (BASE, BEARER._replace(realm="file:///etc/passwd"), "malformed URL"),
        (BASE, BEARER._replace(realm="https://user:x@auth.example/"), "malformed URL"),
        (BASE, BEARER._replace(realm="https://auth.example:x/"), "malformed URL"),
        (BASE, BEARER._replace(realm="https://auth.example/\r\nx: y"), "malformed URL"),
        ("http://registry.example", BEARER, "which is not encrypted"),
        ("http://registry.example", Challenge("basic"), "which is not encrypted"),
        ("http://127.0.0.1", BEARER._replace(realm="http://auth.example/"), "not encrypted"),
        ("http://127.0.0.1.example", Challenge("basic"), "which is not encrypted"),
    ],
)
def test_credentials_are_never_sent_to_a_wrong_place(
    base: str, challenge: Challenge, message: str
) -> None:
    realm = Realm()
    authorizer = realm.authorizer(base=base)

    with pytest.raises(RemoteError, match=message) as caught:
        if authorizer.learn(challenge, PULL, None):
            authorizer.authorization(PULL)

    assert realm.requests == []
    assert str(caught.value).isprintable()


def test_plain_registry_may_be_read_without_credentials() -> None:
    realm = Realm()
    authorizer = realm.authorizer(None, "http://registry.example")
    authorizer.learn(BEARER._replace(realm="http://auth.example/"), PULL, None)

    assert authorizer.authorization(PULL) == "Bearer t1"
    assert realm.requests[0].headers == {}


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{}",
        "[]",
        '"t"',
        '{"token": 1}',
        '{"token": ""}',
        '{"token": "a b"}',
        '{"token": "a\\r\\nx: y"}',
        '{"token": "\\u00fc"}',
        "[" * 50_000,
    ],
)
def test_realm_that_sends_no_token_is_an_error(body: str) -> None:
    authorizer = Realm(body).authorizer()
    authorizer.learn(BEARER, PULL, None)

    with pytest.raises(RemoteError, match="the server that issues tokens sent none"):
        authorizer.authorization(PULL)


def test_credentials_are_looked_up_once_and_only_if_they_are_needed() -> None:
    calls: list[str] = []

    def find(repository: str) -> Login:
        calls.append(repository)
        return LOGIN

    authorizer = Authorizer(BASE, find, Realm().fetch)
    authorizer.authorization(PULL)
    assert calls == []
    authorizer.learn(BEARER, PULL, None)
    for _ in range(3):
        authorizer.authorization(PULL)
    assert calls == ["a"]


def test_requests_go_without_credentials_that_cannot_be_looked_up() -> None:
    def find(_: str) -> Login:
        raise BlobstoreError("the keychain is locked")

    authorizer = Authorizer(BASE, find, Realm().fetch)
    authorizer.learn(BEARER, PULL, None)

    assert authorizer.authorization(PULL) == "Bearer t1"
    assert authorizer.problem == "the keychain is locked"


def test_login_of_one_repository_is_not_used_for_another() -> None:
    realm = Realm()
    logins = {"a": LOGIN, "b": Login("bob", "x"), "c": None}
    authorizer = Authorizer(BASE, logins.get, realm.fetch)
    authorizer.learn(BEARER, PULL, None)

    for name in logins:
        authorizer.authorization(frozenset({f"repository:{name}:pull"}))

    sent = [request.headers.get("authorization") for request in realm.requests]
    assert sent == [LOGIN.basic, Login("bob", "x").basic, None]
    for other in "bc":
        both = frozenset({"repository:a:pull,push", f"repository:{other}:pull"})
        with pytest.raises(RemoteRefused, match="different credentials"):
            authorizer.authorization(both)


@pytest.mark.parametrize(("status", "sent"), [(401, 1), (403, 2)])
def test_password_that_a_realm_refuses_is_sent_once(status: int, sent: int) -> None:
    calls: list[Request] = []

    def refuse(request: Request, _: int) -> Reply:
        calls.append(request)
        raise RemoteRefused("refused", status=status)

    authorizer = Authorizer(BASE, lambda _: LOGIN, refuse)
    authorizer.learn(BEARER, PULL, None)

    # With 403, it may be right, and open another repository.
    for scopes in (PULL, PULL, frozenset({"repository:b:pull"})):
        with pytest.raises(RemoteRefused, match="refused"):
            authorizer.authorization(scopes)
    assert len(calls) == sent


@pytest.mark.parametrize(
    ("status", "is_proven"), [(200, True), (404, True), (429, False), (503, False)]
)
def test_only_some_statuses_prove_a_password(status: int, is_proven: bool) -> None:
    authorizer = Realm().authorizer()
    authorizer.learn(Challenge("basic"), PULL, None)
    for one in (status, 401):
        authorizer.judge(LOGIN.basic, one)
    if is_proven:
        assert authorizer.authorization(PULL) == LOGIN.basic
        return
    with pytest.raises(RemoteRefused, match="login at 'registry.example': status 401"):
        authorizer.authorization(PULL)
