"""Addresses of stores and models in object storage."""

from __future__ import annotations

import pytest

from blobstore.errors import InvalidReference
from blobstore.objects.address import StoreAddress, is_address, model_addresses


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket",
        "s3://bucket/prefix",
        "gs://bucket/a/b",
        "az://container/x",
        "file:///srv/models",
    ],
)
def test_addresses_are_spelled_as_they_are_read(text: str) -> None:
    assert str(StoreAddress.parse(text)) == text


@pytest.mark.parametrize("text", ["s3://bucket/", "s3://bucket//"])
def test_slashes_at_the_end_are_ignored(text: str) -> None:
    assert StoreAddress.parse(text) == StoreAddress("s3", "bucket")


@pytest.mark.parametrize(
    "text",
    [
        "bucket/prefix",
        "s3:/bucket",
        "s3://",
        "s3:///prefix",
        "s3://b",
        "s3://bucket/../other",
        "s3://bucket/a//b",
        "s3://bucket/a\nb",
        "s3://bucket/a?b",
        "s3://bucket/a*",
        "s3://user@bucket/a",
        "file://srv/models",
        "http://bucket/prefix",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidReference):
        StoreAddress.parse(text)


@pytest.mark.parametrize("model", ["", "/llama"])
def test_a_password_in_an_address_is_refused_and_not_shown(model: str) -> None:
    with pytest.raises(InvalidReference, match="'…@bucket'; credentials belong in") as caught:
        list(model_addresses(f"s3://key:sEcReT@bucket/team{model}"))
    assert "sEcReT" not in str(caught.value)
    assert "key" not in str(caught.value)


def test_the_shortest_name_of_a_model_comes_first() -> None:
    found = [
        str(one.store) + " " + str(one.reference)
        for one in model_addresses("s3://b-1/x/y/team/llama:v1")
    ]
    assert found == [
        "s3://b-1/x/y/team llama:v1",
        "s3://b-1/x/y team/llama:v1",
        "s3://b-1/x y/team/llama:v1",
    ]


def test_a_model_may_lie_at_the_root_of_a_bucket() -> None:
    (found,) = model_addresses("s3://bucket/llama")
    assert (str(found.store), str(found.reference)) == ("s3://bucket", "llama:latest")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("s3://bucket", "has no name"),
        ("s3://bucket/:v1", "has no name"),
        ("s3://bucket/llama:", "has an empty tag"),
        ("s3://bucket/-x", "not a model name"),
    ],
)
def test_what_names_no_model_is_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidReference, match=why):
        list(model_addresses(text))


def test_only_known_schemes_are_addresses() -> None:
    assert is_address("s3://x")
    assert not any(map(is_address, ("oci://x", "s3", "x/s3://y", 5)))
