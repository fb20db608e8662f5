from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import blobstore
from blobstore.core.schemes import advice_for, check_path, respelled, scheme_of
from blobstore.errors import UsageError


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("s3://bucket/x", "s3"),
        ("S3://bucket", "s3"),
        (Path("s3://bucket"), "s3"),  # which has one slash left
        ("git+ssh://host", "git+ssh"),
        ("hf:/x", "hf"),
        ("hf:org/x", None),
        ("./s3:/x", None),
        ("model:tag", None),
        ("c:/x", None),
        (3, None),
    ],
)
def test_a_scheme_is_what_precedes_two_slashes(text: object, scheme: str | None) -> None:
    assert scheme_of(text) == scheme


@pytest.mark.parametrize("role", ["source", "store", "target"])
@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "oci", "file", "hf", "https", "docker"])
def test_every_known_scheme_is_refused_with_advice(role: str, scheme: str) -> None:
    with pytest.raises(UsageError, match="is an address, not the path") as caught:
        check_path(f"{scheme}://host/x", role)  # type: ignore[arg-type]
    assert caught.value.advice


def test_a_dash_is_no_file_to_write() -> None:
    with pytest.raises(UsageError, match="'-' is no path.*'./-' is a file"):
        check_path("-", "target")
    check_path("./-", "target")
    check_path("-", "source")


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
def test_a_text_that_no_path_can_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="has a character that no path can have"):
        check_path(text, "source")
    check_path("\udc80", "source")  # a byte that is not Unicode
    calls: list[Callable[[], object]] = [
        lambda: blobstore.open(f"{text}.gguf"),
        lambda: blobstore.verify(store=text),
        lambda: blobstore.check_signatures(keys=[text]),
        lambda: blobstore.start_server(token_file=text),
        lambda: blobstore.inspect(text),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="no path can have"):
            call()


def test_an_unknown_scheme_is_refused_too_and_secrets_are_not_shown() -> None:
    with pytest.raises(UsageError) as caught:
        check_path("ftp://user:word@host/x", "target")
    assert "word" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("S3://bucket/x", "s3://bucket/x"),
        ("s3:/bucket/x", "s3://bucket/x"),
        ("OCI:///host/x:v1", "oci://host/x:v1"),
        ("Http://host/x", "http://host/x"),
        ("file:/folder/x", "file:///folder/x"),
        ("file://folder/x", "file:///folder/x"),
        *((text, "") for text in ("s3://bucket/x", "file:///folder", "s3:5000/x", "s3://", "x")),
    ],
)
def test_an_address_that_is_nearly_one_is_spelled_right(text: str, address: str) -> None:
    assert respelled(text) == address


def test_a_short_hub_id_gets_its_slashes() -> None:
    assert advice_for("hf:org/x", "source") == "for the Hub's repository, say hf://org/x"
    assert advice_for("ollama:x:8b", "source") == "for Ollama's model, say ollama://x:8b"
    assert not advice_for("org/x", "source")


@pytest.mark.parametrize(
    "text",
    ["hf://org/x", "ollama://llama3.2", "https://huggingface.co/org/x", "http://hf.co/org/x"],
)
def test_what_create_imports_is_said_with_the_command(text: str) -> None:
    assert advice_for(text, "source") == f"'blobstore create {text} NAME' imports it"
