"""The addresses of upstreams, and what is asked of them first."""

from __future__ import annotations

import pytest

from blobstore.errors import UsageError
from blobstore.serve.upstream import Revision, Upstream


@pytest.mark.parametrize(
    "url",
    ["https://huggingface.co", "http://127.0.0.1:8080/", "https://[::1]:9/prefix", "http://cache"],
)
def test_an_upstream_is_a_url(url: str) -> None:
    assert Upstream.parse(url).url == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "huggingface.co",
        "file:///etc",
        "ftp://host",
        "https://",
        "https://user:password@host",
        "https://host?query",
        "https://host#fragment",
        "https://ho st",
        "https://host:0",
        "https://host:x",
        "https://[::1",
        "https://h\u00f6st",
        "https://host\n",
    ],
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="not the URL of an upstream"):
        Upstream.parse(url)


@pytest.mark.parametrize(
    ("names", "probe"),
    [
        (["README.md", "model.safetensors"], "model.safetensors"),
        (["README.md", "a/pytorch_model.bin"], "a/pytorch_model.bin"),
        (["README.md", "config.json"], "README.md"),
    ],
)
def test_access_is_tried_at_a_file_of_weights(names: list[str], probe: str) -> None:
    assert Revision("a" * 40, names, "org/model").probe == probe
