"""Certificates that a server cannot use are named before it listens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from blobstore.errors import BlobstoreError, UsageError
from blobstore.serve.listener import read_certificate
from blobstore.serve.serve import serve
from blobstore.store.local import LocalStore
from tests.support.tls import Authority, Pair


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Authority(tmp_path).pair()


def test_a_pair_is_read(pair: Pair) -> None:
    assert read_certificate(*pair).minimum_version.name != "TLSv1"


@pytest.mark.parametrize(
    ("chain", "key", "message"),
    [
        ("server.crt", "other.key", "the key '.*other.key' is not that of the certificate"),
        ("server.crt", "hidden.key", "'.*hidden.key', is malformed or has a password"),
        ("server.key", "server.key", "'.*server.key' has no certificate in PEM"),
        ("server.crt", "server.crt", "'.*server.crt' has no private key in PEM"),
        ("cut.crt", "server.key", "cannot use the certificate '.*cut.crt'"),
        ("server.crt", "none.key", "cannot read the private key '.*none.key': No such file"),
        ("none.crt", "server.key", "cannot read the certificate '.*none.crt': No such file"),
    ],
)
def test_a_pair_that_cannot_be_used_is_named(
    pair: Pair, chain: str, key: str, message: str
) -> None:
    folder = pair.chain.parent
    Authority(folder).pair("other")
    Authority(folder).pair("hidden", password=b"secret")
    (folder / "cut.crt").write_bytes(pair.chain.read_bytes()[:300])
    with pytest.raises(BlobstoreError, match=message) as caught:
        read_certificate(folder / chain, folder / key)
    assert not re.search("secret|BEGIN", str(caught.value))


def test_a_certificate_needs_its_key(store: LocalStore, pair: Pair) -> None:
    for chain, key in ((pair.chain, None), (None, pair.key)):
        with pytest.raises(UsageError, match="both a certificate and its key"):
            serve(store, tls_cert=chain, tls_key=key)
