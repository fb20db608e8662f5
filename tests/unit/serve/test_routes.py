"""The rules for all requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.errors import InvalidManifest
from blobstore.operations.create.create import create
from blobstore.operations.maintenance.names import copy_model
from blobstore.operations.sign.sign import sign_model
from blobstore.serve.access import Access, Token
from blobstore.serve.library import Library
from blobstore.serve.messages import Request, Response
from blobstore.serve.routes import answer
from blobstore.serve.unprepared import List, NotListed, NotPrepared, prepared
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, write_folder
from tests.support.serve import ask, body_of, json_of
from tests.support.signing import key_files


@pytest.mark.parametrize(
    "method", ["PUT", "POST", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"]
)
def test_the_server_only_reads(library: Library, method: str) -> None:
    for target in (
        "/api/models/org/model",
        "/org/model/resolve/main/config.json",
        "/v2/x/blobs/uploads/",
    ):
        response = ask(library, target, method)
        assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "target", ["/a%0d%0aX: y", "/../../etc/passwd\0", "//[", "*", "/" + "a" * 10**5]
)
def test_a_malformed_target_is_a_bad_request(library: Library, target: str) -> None:
    assert ask(library, target).status in (400, 404)


def test_the_root_says_what_the_server_is(library: Library) -> None:
    response = ask(library, "/")
    assert (response.status, response.headers["Content-Type"][:10]) == (200, "text/plain")
    assert b"docs/guides/serve.md" in body_of(library.store, response)
    assert ask(library, "/", access=Access(tokens=[Token(b"a-long-token")])).status == 401


def test_a_token_has_an_owner_if_the_server_takes_it(library: Library) -> None:
    access, target = Access(tokens=[Token(b"a-long-token")]), "/api/whoami-v2"
    right, wrong = {"authorization": "Bearer a-long-token"}, {"authorization": "Bearer hf_wrong"}
    owner = json_of(ask(library, target, headers=right, access=access))
    assert (owner["type"], owner["name"]) == ("user", "blobstore")
    assert owner["auth"]["accessToken"] == {"displayName": "blobstore", "role": "read"}
    assert ask(library, target, headers=wrong, access=access).status == 401
    assert ask(library, target, access=access).status == 401
    # A server without tokens takes any, and says so to nobody who has none.
    assert ask(library, target, headers=wrong).status == 200
    assert ask(library, target).status == 401
    assert ask(library, target, "POST", headers=right, access=access).status == 405


def test_a_target_may_name_the_host(library: Library) -> None:
    path = "/org/model/resolve/main/config.json"
    expected = ask(library, path)
    local = Access(hosts=())
    for host in ("localhost", "127.0.0.1:8080"):
        for target in (f"http://{host}{path}", f"HTTPS://{host}{path}"):
            response = ask(library, target, headers={"host": "evil.example"}, access=local)
            assert (response.status, response.parts) == (200, expected.parts)
    headers = {"host": "localhost"}
    assert ask(library, f"http://evil.example{path}", headers=headers, access=local).status == 421
    assert ask(library, "http://localhost", access=local).status == 200
    for target in (f"http://u@localhost{path}", f"http://{path}", f"ftp://localhost{path}"):
        assert ask(library, target, headers=headers, access=local).status == 400


@pytest.fixture
def above(tmp_path: Path) -> Library:
    """A library of a store that has another ``org/model``, without its own folder, as ``v2``."""
    store = LocalStore(tmp_path / "above")
    create(write_folder(tmp_path / "other", dense_tensors()), "org/model:v2", store=store)
    return Library(store)


@pytest.mark.parametrize(
    ("target", "method"),
    [
        ("/org/model/resolve/main/extra/notes.txt", "HEAD"),
        ("/org/model/resolve/COMMIT/extra/notes.txt", "GET"),
        ("/api/models/org/model/tree/COMMIT", "GET"),
        ("/v2/org/model/manifests/latest", "GET"),
        ("/v2/org/model/manifests/DIGEST", "GET"),
        ("/v2/org/model/blobs/BLOB", "GET"),
    ],
)
def test_what_a_store_lacks_is_answered_from_the_shared_one(
    library: Library, above: Library, target: str, method: str
) -> None:
    main = ask(library, "/org/model/resolve/main/config.json")
    manifest = ask(library, "/v2/org/model/manifests/latest")
    target = target.replace("COMMIT", main.headers["X-Repo-Commit"])
    target = target.replace("DIGEST", manifest.headers["Docker-Content-Digest"])
    target = target.replace("BLOB", json_of(manifest)["layers"][0]["digest"])
    expected = ask(library, target, method)
    assert expected.status == 200
    found = ask(above, target, method, shared=library)
    assert replace(found, in_use=expected.in_use) == expected
    assert ask(above, target, method).status == 404
    other = Access(tokens=[Token(b"a-long-token", models=("other/*",))])
    headers = {"authorization": "Bearer a-long-token"}
    hidden = ask(above, target, method, headers=headers, access=other, shared=library)
    assert hidden.status == 404


def test_a_name_of_a_store_counts_before_that_of_the_shared_one(
    library: Library, above: Library
) -> None:
    copy_model("org/model", "org/model:v2", store=library.store)
    copy_model("org/model", "org/theirs", store=library.store)
    both = partial(ask, above, shared=library)
    commit = both("/org/model/resolve/v2/config.json").headers["X-Repo-Commit"]
    assert commit == ask(above, "/org/model/resolve/v2/config.json").headers["X-Repo-Commit"]
    assert both("/org/model/resolve/v2/extra/notes.txt").status == 404
    for target in ("/org/model/resolve/v9/config.json", "/none/resolve/main/config.json"):
        assert both(target) == ask(above, target)


@pytest.mark.parametrize(
    "target",
    [
        "/org/theirs/resolve/v9/config.json",
        "/api/models/org/theirs/revision/v9",
        "/v2/org/theirs/manifests/v9",
        f"/v2/org/theirs/blobs/sha256:{'0' * 64}",
    ],
)
def test_what_both_stores_lack_is_answered_by_the_one_that_has_the_repository(
    library: Library, above: Library, target: str
) -> None:
    copy_model("org/model", "org/theirs", store=library.store)
    found = ask(above, target, shared=library)
    assert found == ask(library, target) == ask(above, target, "HEAD", shared=library)
    assert found != ask(above, target)


def test_a_signature_of_the_shared_store_is_found_below_other_tags_of_a_store(
    library: Library, above: Library, tmp_path: Path
) -> None:
    copy_model("org/model", "org/signed", store=library.store)
    copy_model("org/model:v2", "org/signed:v1", store=above.store)
    sign_model("org/signed", key_files(tmp_path).private, store=library.store)
    manifest = ask(library, "/v2/org/signed/manifests/latest")
    target = f"/v2/org/signed/referrers/{manifest.headers['Docker-Content-Digest']}"
    found = ask(above, target, shared=library)
    assert found == ask(library, target)
    assert json_of(found)["manifests"]


def test_lists_of_both_stores_find_each_ones_own_spelling(library: Library, above: Library) -> None:
    copy_model("org/model:v2", "ORG/Both", store=above.store)
    copy_model("org/model", "org/both:v2", store=library.store)
    both = partial(ask, above, shared=library)
    assert json_of(both("/v2/org/both/tags/list"))["tags"] == ["latest", "v2"]
    other = Access(tokens=[Token(b"a-long-token", models=("org/*",))])
    headers = {"authorization": "Bearer a-long-token"}
    shown = ask(above, "/v2/org/both/tags/list", headers=headers, access=other, shared=library)
    assert json_of(shown)["tags"] == ["v2"]


def test_lists_have_the_models_of_a_store_and_of_the_shared_one(
    library: Library, above: Library
) -> None:
    copy_model("org/model", "org/Theirs", store=library.store)
    copy_model("org/model", "org/model:v2", store=library.store)
    both = partial(ask, above, shared=library)
    found = json_of(both("/api/models"))
    assert [one["id"] for one in found] == ["org/Theirs", "org/model"]
    assert json_of(both("/api/models?limit=1&cursor=org/Theirs")) == found[1:]
    assert [one["id"] for one in json_of(both("/api/models?filter=safetensors"))] == [
        one["id"] for one in json_of(ask(library, "/api/models?filter=safetensors"))
    ]
    assert json_of(both("/api/models?sort=lastModified"))
    assert json_of(both("/v2/_catalog"))["repositories"] == ["org/model", "org/theirs"]
    assert json_of(both("/v2/org/model/tags/list"))["tags"] == ["latest", "v2"]
    assert json_of(both("/v2/org/model/tags/list?n=1&last=latest"))["tags"] == ["v2"]
    assert json_of(both("/v2/org/theirs/tags/list"))["tags"] == ["latest"]
    assert json_of(both("/api/models/org/theirs/refs"))["branches"]
    refs = json_of(both("/api/models/org/model/refs"))
    main, v2 = (
        ask(one, f"/org/model/resolve/{tag}/config.json").headers["X-Repo-Commit"]
        for one, tag in ((library, "main"), (above, "v2"))
    )
    assert refs["branches"][0]["targetCommit"] == main
    assert [one["targetCommit"] for one in refs["tags"]] == [v2]
    assert both("/v2/none/tags/list").status == both("/api/models/none/refs").status == 404


def test_an_unknown_address_is_absent(library: Library) -> None:
    for target in (
        "/none",
        "/api",
        "/api/whoami",
        "/favicon.ico",
        "/../x",
        "//",
        "/%2e%2e/%2e%2e",
    ):
        assert ask(library, target).status == 404


def test_a_damaged_model_is_an_error_of_the_server(library: Library) -> None:
    library.store.manifest_path("org/model").write_bytes(b"{")
    with pytest.raises(InvalidManifest, match="org/model"):
        ask(library, "/api/models/org/model")


def works_for(question: Callable[[], Response]) -> list[NotPrepared]:
    """Return the work that the answer to a question needs, up to the making of a list."""
    works: list[NotPrepared] = []
    while not (works and isinstance(works[-1], List)):
        try:
            question()
        except NotPrepared as work:
            works.append(work)
            if not isinstance(work, List):
                work.prepare()
        else:
            break
    return works


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    "target",
    [
        *(f"/org/model/resolve/main/d/{word}" for word in ("list", "models", "refs", "_catalog")),
        *("/org/model/raw/main/tags/list", "/org/model/resolve/refs/list"),
        *("/api/models/refs", "/api/models/org/models", "/api/models/org/model/tree/refs"),
        *("/api/models/org/model/revision/list", "/api/models/org/model/commits/models"),
        *("/v2/org/model/manifests/list", "/v2/org/model/blobs/refs", "/v2/tags/manifests/list"),
        *("/v2/org/model/referrers/_catalog", "/v2/org/_catalog", "/v2/tags/list", "/list"),
    ],
)
def test_only_lists_are_made_as_lists(library: Library, method: str, target: str) -> None:
    works = works_for(lambda: answer(Request(method, target, {}), library, Access()))
    assert not [work for work in works if isinstance(work, List)]


@pytest.mark.parametrize(
    "target",
    [
        *("/api/models", "/api/models/?filter=x", "/v2/_catalog?n=1"),
        *("/api/models/org/model/refs", "/v2/org/model/tags/list", "/v2/tags/tags/list"),
    ],
)
def test_no_model_is_prepared_where_lists_are_made(library: Library, target: str) -> None:
    *_, work = works_for(lambda: answer(Request("GET", target, {}), library, Access()))
    assert isinstance(work, List)
    assert isinstance(work.prepare, partial)
    for part in works_for(work.prepare.args[0]):
        assert isinstance(part, NotListed) or part.key[0] == library._describe


@given(
    st.sampled_from(["GET", "HEAD", "POST"]),
    st.lists(
        st.sampled_from(
            ["api", "models", "v2", "org", "model", "resolve", "main", "tree", "refs", "blobs"]
        )
        | st.text(max_size=20),
        max_size=8,
    ),
    st.dictionaries(
        st.sampled_from(["range", "if-range", "host", "authorization", "accept", "if-none-match"]),
        st.text(max_size=30),
        max_size=3,
    ),
    st.binary(max_size=50),
)
def test_any_request_has_a_response(
    method: str, segments: list[str], headers: dict[str, str], body: bytes
) -> None:
    library = Library(LocalStore("/nonexistent/store"))
    request = Request(method, "/" + "/".join(segments), headers, body)
    response = prepared(lambda: answer(request, library, Access(hosts=())))
    assert response.status in range(200, 500)
