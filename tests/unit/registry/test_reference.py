from __future__ import annotations

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import InvalidDigest, InvalidReference, UsageError
from blobstore.manifests.reference import Reference
from blobstore.registry.reference import RemoteReference, host_in

DIGEST = Digest.of(b"x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost/model", RemoteReference("localhost", "model")),
        ("localhost:5000/a/b/c:v1", RemoteReference("localhost:5000", "a/b/c", "v1")),
        ("oci://registry/model", RemoteReference("registry", "model")),
        ("ghcr.io/org/m_x", RemoteReference("ghcr.io", "org/m_x")),
        ("[::1]:5000/model", RemoteReference("[::1]:5000", "model")),
        (f"ghcr.io/m@{DIGEST}", RemoteReference("ghcr.io", "m", "latest", DIGEST)),
        (f"ghcr.io/m:v1@{DIGEST}", RemoteReference("ghcr.io", "m", "v1", DIGEST)),
        ("docker.io/model", RemoteReference("docker.io", "library/model")),
        ("oci://registry.ollama.ai/m", RemoteReference("registry.ollama.ai", "library/m")),
    ],
)
def test_address_is_parsed(text: str, expected: RemoteReference) -> None:
    assert RemoteReference.parse(text) == expected
    assert RemoteReference.parse(f"oci://{expected}").reference == expected.reference


@pytest.mark.parametrize(
    "text",
    [
        "",
        "model",
        "org/model",
        "oci://",
        "oci://host",
        "docker://ghcr.io/org/model",
        "ghcr.io/",
        "ghcr.io/Org/model",
        "ghcr.io/org//model",
        "ghcr.io/../model",
        "ghcr.io/org/..",
        "ghcr.io/org/.model",
        "ghcr.io/org/model-",
        "ghcr.io/org/a___b",
        "ghcr.io/org/model:",
        "ghcr.io/org/model:a b",
        "ghcr.io/org/model:.a",
        "ghcr.io/org/model?x=y",
        "ghcr.io/org/model#x",
        "ghcr.io/org/mod\nel",
        "ghcr.io/org/mödel",
        f"ghcr.io/{'a/' * 127}aa",
        f"ghcr.io/org/model:{'a' * 129}",
        "user@ghcr.io/org/model",
        "user:password@ghcr.io/org/model",
        "gh..cr.io/model",
        "-ghcr.io/model",
        "ghcr.io:port/model",
        "ghcr.io:123456/model",
        "gh cr.io/model",
        "ghcr.io\\@evil.com/model",
    ],
)
def test_other_text_than_an_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidReference):
        RemoteReference.parse(text)


@pytest.mark.parametrize(
    ("text", "spelled", "plain_http"),
    [
        ("http://cache:8080/Org/Model-7B", "http://cache:8080/org/model-7b:latest", True),
        ("https://cache/m:V1", "https://cache/m:V1", False),
        ("HTTPS://cache/m", "https://cache/m:latest", False),
        (f"http://cache/m@{DIGEST}", f"http://cache/m@{DIGEST}", True),
        ("http://[::1]:8080/m", "http://[::1]:8080/m:latest", True),
        ("oci://cache:80/m", "cache:80/m:latest", None),
    ],
)
def test_the_scheme_of_an_address_says_whether_tls_is_used(
    text: str, spelled: str, plain_http: bool | None
) -> None:
    address = RemoteReference.parse(text)
    assert str(address) == spelled
    assert RemoteReference.parse(spelled) == address
    assert address.uses_plain_http() is plain_http
    assert address.uses_plain_http(plain_http=True) is (plain_http is not False)


def test_a_server_that_only_reads_has_the_names_of_a_registry() -> None:
    address = RemoteReference.parse("http://cache:8080/org/model")
    assert address == RemoteReference("cache:8080", "org/model")
    assert address.name() == Reference.parse("cache:8080/org/model")
    with pytest.raises(
        UsageError, match="for a registry, write 'oci://cache:8080/org/model:latest' --"
    ):
        address.check_writable()
    RemoteReference.parse("cache:8080/org/model").check_writable()


def test_every_address_has_a_name_that_is_near() -> None:
    near = RemoteReference.parse(f"ghcr.io/a/b/model:v1@{DIGEST}").nearest_name()
    assert near == Reference.parse("ghcr.io/a__b/model:v1")
    for deep in ("a.b/c/model", "a__b/c/model"):  # which give no name of their own
        near = RemoteReference.parse(f"ghcr.io/{deep}").nearest_name()
        assert near == Reference.parse("ghcr.io/c/model")


@pytest.mark.parametrize("digest", ["", "sha256:", "sha256:xyz", f"sha512:{'0' * 128}"])
def test_malformed_digest_is_refused(digest: str) -> None:
    with pytest.raises(InvalidDigest):
        RemoteReference.parse(f"ghcr.io/model@{digest}")


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("localhost:5000/model", "localhost:5000/model:latest"),
        ("ghcr.io/lab__team/model", "ghcr.io/lab/team/model:latest"),
        ("ghcr.io/a_b__c__d-e/f__g", "ghcr.io/a_b/c/d-e/f__g:latest"),
        ("ghcr.io/org/model:v1", "ghcr.io/org/model:v1"),
        ("model", "registry.ollama.ai/model:latest"),
        ("docker.io/model", "docker.io/model:latest"),
    ],
)
def test_names_and_addresses_stand_for_each_other(name: str, address: str) -> None:
    reference = Reference.parse(name)

    assert str(RemoteReference.of(reference)) == address
    assert RemoteReference.parse(address).name() == reference


def test_no_two_addresses_give_one_name() -> None:
    parts = ["lab/team/llama", "lab2/team/llama", "team/llama", "lab/team__llama", "llama"]
    names = [str(RemoteReference.parse(f"ghcr.io/{part}").name()) for part in parts]
    assert names == [
        *("ghcr.io/lab__team/llama:latest", "ghcr.io/lab2__team/llama:latest"),
        *("ghcr.io/team/llama:latest", "ghcr.io/lab/team__llama:latest", "ghcr.io/llama:latest"),
    ]
    assert all("library" not in name for name in names)
    with pytest.raises(InvalidReference, match="give a NAME"):
        RemoteReference.parse("ghcr.io/lab__team/llama").name()


def test_address_of_a_name_is_in_lower_case() -> None:
    assert str(RemoteReference.of(Reference.parse("ghcr.io/Org/Model-7B:Q4"))) == (
        "ghcr.io/org/model-7b:Q4"
    )


@pytest.mark.parametrize("name", ["ghcr.io/org/a___b", "ghcr.io/_org/model", "ghcr.io/org/model."])
def test_name_that_no_registry_allows_has_no_address(name: str) -> None:
    with pytest.raises(InvalidReference, match="not the name of a repository"):
        RemoteReference.of(Reference.parse(name))


@pytest.mark.parametrize(
    "address",
    [
        "ghcr.io/a/o.rg/model",
        "ghcr.io/o.rg/model",
        f"ghcr.io/{'a/' * 30}model",
        "ghcr.io/library/model",
        f"ghcr.io/org/{'m' * 81}",
        f"ghcr.io/org/model@{DIGEST}",
    ],
)
def test_address_of_no_name_asks_for_one(address: str) -> None:
    with pytest.raises(InvalidReference, match=f"named '{address}.*; give a NAME"):
        RemoteReference.parse(address).name()


@pytest.mark.parametrize(
    "text", ["oci://user:secret@host/a", "user:secret@host:5000/a", "https://user:secret@host/a"]
)
def test_password_in_an_address_is_not_shown(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        RemoteReference.parse(text)
    assert "secret" not in str(caught.value)
    with pytest.raises(UsageError) as caught:
        host_in(text.removesuffix("/a"))
    assert "secret" not in str(caught.value)
