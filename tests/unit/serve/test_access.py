"""Tokens, host names, and pages of other sites."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from blobstore.serve.access import Access, Token, parse_tokens
from blobstore.serve.library import Library
from blobstore.serve.messages import Request
from blobstore.store.local import LocalStore
from tests.support.serve import ask, json_of

TOKEN = b"hf_first-token"
SEVERAL = (TOKEN, b"the-second-token", b"the-second-token:and-more")
ACCESS = Access(tokens=list(map(Token, SEVERAL)))


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "header",
    ["Bearer hf_first-token", "bearer the-second-token", basic("anyone:hf_first-token")],
)
def test_a_token_is_a_bearer_or_a_password(library: Library, header: str) -> None:
    response = ask(
        library, "/api/models/org/model", headers={"authorization": header}, access=ACCESS
    )
    assert response.status == 200


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer hf_first",
        "Token hf_first-token",
        "Basic ???",
        basic("hf_first-token"),
        basic("a:b"),
    ],
)
def test_without_a_token_nothing_is_answered(library: Library, header: str) -> None:
    for target in ("/api/models/org/model", "/org/model/resolve/main/config.json", "/none", "/v2/"):
        response = ask(library, target, headers={"authorization": header}, access=ACCESS)
        assert response.status == 401
        expected = "Basic" if target == "/v2/" else "Bearer"
        assert response.headers["WWW-Authenticate"].startswith(expected)
        assert "model" not in str(json_of(response))


def test_health_needs_no_token(library: Library) -> None:
    assert ask(library, "/healthz", access=ACCESS).status == 200
    assert ask(library, "/readyz", access=ACCESS).status == 200


def test_a_server_is_ready_while_its_store_is_there(tmp_path: Path) -> None:
    library = Library(LocalStore(tmp_path / "store"))
    assert ask(library, "/readyz").status == 503
    assert ask(library, "/healthz").status == 200
    library.store.root.mkdir()
    assert ask(library, "/readyz").status == 200
    shared = Library(LocalStore(tmp_path / "shared"))
    assert ask(library, "/readyz", shared=shared).status == 503
    shared.store.root.mkdir()
    assert ask(library, "/readyz", shared=shared).status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8080", 200),
        ("localhost:8080", 200),
        ("LOCALHOST", 200),
        ("[::1]:8080", 200),
        ("[::1]", 200),
        ("cache:8080", 200),
        ("evil.example:8080", 421),
        ("localhost.evil.example", 421),
        ("", 421),
    ],
)
def test_a_page_that_rebinds_a_host_name_gets_nothing(
    library: Library, host: str, status: int
) -> None:
    response = ask(
        library, "/api/models/org/model", headers={"host": host}, access=Access(hosts=("cache",))
    )
    assert response.status == status


def test_a_page_of_another_site_gets_nothing(library: Library) -> None:
    for site, status in {"cross-site": 403, "same-site": 403, "none": 200}.items():
        response = ask(library, "/api/models/org/model", headers={"sec-fetch-site": site})
        assert response.status == status


def test_a_token_file_has_one_token_on_each_line() -> None:
    tokens = [Token(b"first-token"), Token(b"second-token")]
    assert parse_tokens(b"# site\n\n first-token \nsecond-token\r\n") == (tokens, "")


@pytest.mark.parametrize("data", [b"", b"# none\n", b"short\n", b"two words-in-it\n", b"\xff" * 20])
def test_lines_without_a_token_are_wrong_and_do_not_count(data: bytes) -> None:
    tokens, wrong = parse_tokens(data)
    assert (tokens, "token" in wrong) == ([], True)
    tokens, wrong = parse_tokens(data + b"\na-right-token\n")
    assert (tokens, bool(wrong)) == ([Token(b"a-right-token")], data.strip()[:1] not in {b"", b"#"})


LINES = b"""# a site
a-token-of-the-rack
name=ci-runner models=team/*,org/a:v1 secret-of-ci
models=public/* secret-of-all
name=ops of-ops-alone
"""


def test_a_line_may_have_a_name_and_globs_before_its_token() -> None:
    assert parse_tokens(LINES) == (
        [
            Token(b"a-token-of-the-rack"),
            Token(b"secret-of-ci", "ci-runner", ("team/*", "org/a:v1")),
            Token(b"secret-of-all", "", ("public/*",)),
            Token(b"of-ops-alone", "ops"),
        ],
        "",
    )


@pytest.mark.parametrize(
    "line",
    [
        "model=team/* the-secret-token",
        "name=a name=b the-secret-token",
        "name= the-secret-token",
        "name=a/b the-secret-token",
        f"name={'a' * 65} the-secret-token",
        "models= the-secret-token",
        "models=a,,b the-secret-token",
        f"models={'*' * 10_000} the-secret-token",
        "the-secret-token models=team/*",
        "models=team/*",
        "name=the-runner",
    ],
)
def test_a_line_that_says_something_else_opens_nothing(line: str) -> None:
    tokens, wrong = parse_tokens(f"{line}\na-right-token\n".encode())
    assert (tokens, wrong[:19]) == ([Token(b"a-right-token")], "line 1 of the token")
    assert "secret" not in wrong


def test_a_token_with_two_limits_has_the_first() -> None:
    tokens, wrong = parse_tokens(b"models=a a-right-token\na-right-token\nmodels=a a-right-token\n")
    assert tokens == [Token(b"a-right-token", "", ("a",))]
    assert "line 2" in wrong


def test_a_file_that_is_cut_off_anywhere_opens_no_more() -> None:
    limits = {one.secret: one.models for one in parse_tokens(LINES)[0]}
    for end in range(len(LINES)):
        for one in parse_tokens(LINES[:end])[0]:
            assert one.models in [
                models for secret, models in limits.items() if secret.startswith(one.secret)
            ]


def test_a_token_has_its_name_in_the_log(library: Library) -> None:
    access = Access(tokens=[Token(b"secret-of-ci", "ci"), Token(b"secret-of-ci:and-more", "more")])
    for given, name in {
        "secret-of-ci": "ci",
        "secret-of-ci:hf_up": "ci",
        "secret-of-ci:and-more": "more",
        "secret-of-ci:and-more:hf_up": "more",
        "secret-of-c": "",
    }.items():
        request = Request("GET", "/", {"authorization": f"Bearer {given}"})
        assert access.name(request) == name


def test_with_no_token_at_all_nobody_is_let_in(library: Library) -> None:
    for headers in ({}, {"authorization": "Bearer any-token"}):
        response = ask(library, "/api/models/org/model", headers=headers, access=Access(tokens=()))
        assert response.status == 401


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer hf_first-token", ""),
        ("Bearer hf_first-token:", ""),
        ("Bearer hf_first-token:hf_up", "hf_up"),
        ("Bearer the-second-token:hf:up", "hf:up"),
        ("Bearer the-second-token:and-more", ""),
        ("Bearer the-second-token:hf_first-token", ""),
        ("Bearer hf_first-token:hf_first-token:hf_up", ""),
        ("Bearer the-second-token:and-more:hf_up", "hf_up"),
        (basic("user:hf_first-token:hf_up"), "hf_up"),
        (basic("user:hf_first-token:hf_up\r\nX-Evil: x"), ""),
        ("Bearer hf_other:hf_up", ""),
        ("", ""),
    ],
)
def test_the_token_for_an_upstream_follows_that_of_the_server(header: str, token: str) -> None:
    request = Request("GET", "/", {"authorization": header})
    assert ACCESS.upstream_token(request) == token


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer hf_up", "hf_up"),
        (basic("user:hf_up"), "hf_up"),
        ("Bearer a b", ""),
        ("Basic ???", ""),
        ("", ""),
    ],
)
def test_without_tokens_of_the_server_all_of_it_is_for_an_upstream(header: str, token: str) -> None:
    assert Access().upstream_token(Request("GET", "/", {"authorization": header})) == token
