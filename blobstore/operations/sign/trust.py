"""Finds the policy of a store, and applies it to a model that is about to be used."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import (
    BlobstoreError,
    InvalidPolicy,
    InvalidSignature,
    MissingLibrary,
    NotFound,
    NotTrusted,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from blobstore.manifests.reference import Reference
    from blobstore.operations.sign.policy import Policy, Verdict
    from blobstore.operations.sign.signature import Signature
    from blobstore.store.local import LocalStore

VARIABLE: Final = "BLOBSTORE_TRUST"
"""The environment variable with the path of the policy file."""


def read_policy(store: LocalStore) -> Policy | None:
    """Return the policy of ``$BLOBSTORE_TRUST``, or of the store; None if there is no file.

    Without a policy, this takes the time of one look-up of a file.

    Raises:
        InvalidPolicy: it cannot be read or breaks the format, or the file of the variable is missing.
        MissingLibrary: it has keys, and ``cryptography`` is not installed.
    """
    named = os.environ.get(VARIABLE)
    path = Path(named) if named else store.policy_path
    try:
        os.stat(path)  # noqa: PTH116 - most stores have none, and this is fast
    except (FileNotFoundError, NotADirectoryError):
        if not named and not path.is_symlink():
            return None
        raise InvalidPolicy(f"the policy file {quote(path)} does not exist") from None
    except OSError as error:
        raise InvalidPolicy(f"cannot read the policy {quote(path)}: {error.strerror}") from error
    from blobstore.core.files import read_regular
    from blobstore.operations.sign.keys import read_key
    from blobstore.operations.sign.policy import MAX_POLICY_SIZE, parse_policy

    try:
        data = read_regular(path, MAX_POLICY_SIZE)
        return parse_policy(data, lambda name: read_key(path.parent / name))
    except OSError as error:
        raise InvalidPolicy(f"cannot read the policy {quote(path)}: {error.strerror}") from error
    except InvalidPolicy as error:
        raise error.at(f"policy {quote(path)}") from None
    except MissingLibrary:
        raise
    except BlobstoreError as error:
        raise InvalidPolicy(f"policy {quote(path)}: {error}") from None


def parsed(signatures: Iterable[bytes]) -> Iterator[Signature]:
    """Yield the signatures that can be parsed. The others prove nothing."""
    from blobstore.operations.sign.cosign import parse_signature

    for data in signatures:
        with suppress(InvalidSignature):
            yield parse_signature(data)


def check_trust(
    store: LocalStore,
    reference: Reference,
    data: bytes,
    signatures: Iterable[Signature] = (),
    policy: Policy | None = None,
) -> Verdict | None:
    """Return what the policy says about a model; None if there is no policy.

    Args:
        store: the store, whose policy and signatures count.
        reference: the model's name.
        data: the bytes of its manifest.
        signatures: more signatures, which came with the model.
        policy: the policy, if it was read before.

    Raises:
        NotTrusted: the policy refuses the model.
        InvalidPolicy, MissingLibrary: as :func:`read_policy`.
    """
    policy = policy or read_policy(store)
    if policy is None:
        return None
    from blobstore.operations.sign.policy import decide

    manifest = Digest.of(data)
    found = {one.data: one for one in (*parsed(store.signatures(manifest)), *signatures)}
    verdict = decide(policy, reference, manifest, found.values())
    if verdict.is_refused:
        command = f"'blobstore verify {reference} --quick --signatures'"
        raise NotTrusted(
            f"the policy refuses model {reference}: {verdict.reason}",
            advice=f"{command} lists its signatures" if store.has_model(reference) else "",
        )
    return verdict


def require_trust(store: LocalStore, reference: Reference, data: bytes) -> None:
    """Check a model that is about to be used, as :func:`check_trust` does.

    A model that is not trusted, but may be used, is a warning of Python.
    """
    verdict = check_trust(store, reference, data)
    for notice in verdict.notices(reference) if verdict is not None else ():
        warnings.warn(notice, stacklevel=3)


def read_signature(path: Path) -> Signature:
    """Return the signature in a file, which is not verified.

    Raises:
        NotFound: there is no such file.
        InvalidSignature: it is malformed, or does not sign a manifest.
        BlobstoreError: it cannot be read.
    """
    from blobstore.core.files import read_regular
    from blobstore.operations.sign.cosign import parse_signature
    from blobstore.store.signatures import MAX_SIGNATURE_SIZE

    try:
        signature = parse_signature(read_regular(path, MAX_SIGNATURE_SIZE))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"there is no file {quote(path)}") from None
    except OSError as error:
        raise BlobstoreError(f"cannot read {quote(path)}: {error.strerror}") from error
    except InvalidSignature as error:
        raise error.at(quote(path)) from None
    if signature.manifest is None:
        raise InvalidSignature(f"{quote(path)} signs files only, and no manifest of a model")
    return signature
