"""Finds the policy of a store, and applies it to a model that is about to be used."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from blobstore.core.digest import Digest
from blobstore.core.escape import cli_command, join_some, quote
from blobstore.errors import (
    BlobstoreError,
    InvalidPolicy,
    InvalidSignature,
    MissingLibrary,
    NotFound,
    NotTrusted,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from blobstore.errors import RemoteError
    from blobstore.manifests.reference import Reference
    from blobstore.signatures.keys import PublicKey
    from blobstore.signatures.policy import Policy, Verdict
    from blobstore.signatures.signature import Signature
    from blobstore.store.local import LocalStore
    from blobstore.store.signatures import KeptSignature

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
    from blobstore.signatures.keys import read_key
    from blobstore.signatures.policy import MAX_POLICY_SIZE, parse_policy

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


def policy_keys(store: LocalStore) -> Sequence[PublicKey]:
    """Return the keys of the policy; none if there is no policy, or it cannot be used."""
    with suppress(InvalidPolicy, MissingLibrary):
        policy = read_policy(store)
        return policy.keys if policy is not None else ()
    return ()


def check_trust(
    store: LocalStore,
    reference: Reference,
    data: bytes,
    signatures: Iterable[bytes] = (),
    policy: Policy | None = None,
    errors: Sequence[RemoteError] = (),
) -> Verdict | None:
    """Return what the policy says about a model; None if there is no policy.

    Args:
        store: the store, whose policy and signatures count.
        reference: the model's name.
        data: the bytes of its manifest.
        signatures: more signatures, which came with the model; the store may have them too.
        policy: the policy, if it was read before.
        errors: why signatures that may have come with the model could not be read.

    Raises:
        NotTrusted: the policy refuses the model.
        InvalidPolicy, MissingLibrary: as :func:`read_policy`.
    """
    policy = policy or read_policy(store)
    if policy is None:
        return None
    from blobstore.signatures.cosign import envelopes
    from blobstore.signatures.policy import decide

    manifest = Digest.of(data)
    every = _distinct(chain(store.signatures(manifest), signatures))
    verdict = decide(policy, reference, manifest, envelopes(every))
    if errors and not verdict.is_trusted:
        why = join_some([one.message for one in errors], 2)
        verdict = replace(verdict, reason=f"{verdict.reason}; signatures could not be read: {why}")
    if verdict.is_refused:
        raise NotTrusted(
            f"the policy refuses model {reference}: {verdict.reason}",
            advice=_advice(store, reference, manifest) if store.has_model(reference) else "",
        )
    return verdict


def _distinct(signatures: Iterable[bytes]) -> Iterator[bytes]:
    seen = set[Digest]()
    for one in signatures:
        if (digest := Digest.of(one)) not in seen:
            seen.add(digest)
            yield one


def _advice(store: LocalStore, reference: Reference, manifest: Digest) -> str:
    """Return an editor of a model's signatures, which lists them, replaces damaged ones and adds one."""
    folder = quote(store.signature_folder(manifest))
    damaged = sum(one.data is None for one in store.kept_signatures(manifest))
    return (
        f"{cli_command('verify', reference, '--quick', '--signatures')} lists its signatures in {folder}"
        f"{f' (damaged: {damaged})' if damaged else ''}; "
        f"{cli_command('sign', reference, '--key', 'FILE')} adds one by a key of yours"
    )


def unusable_signatures(store: LocalStore, manifests: Iterable[Digest]) -> Iterator[KeptSignature]:
    """Yield the signatures that are damaged, and unverified ones that no rule of the policy can use.

    Verified ones stay, whatever the policy of this user is: another user of the store may need them, and some
    cannot be made again. Without keys of a policy that can be read, it is unknown which signatures can be used.
    """
    from blobstore.signatures.cosign import signed_by

    keys = policy_keys(store)
    for manifest in manifests:
        for kept in store.kept_signatures(manifest):
            if kept.data is None:
                if kept.is_damaged:  # one that cannot be read may be intact
                    yield kept
            elif (
                keys
                and not kept.is_verified
                and not any(one.manifest == manifest for one in signed_by([kept.data], keys))
            ):
                yield kept


def require_trust(
    store: LocalStore,
    reference: Reference,
    data: bytes,
    attached: Callable[[Callable[[RemoteError], object]], Iterable[bytes]] = lambda _: (),
) -> Verdict | None:
    """Check a model that is about to be used, and return what :func:`check_trust` does.

    A model that is not trusted, but may be used, is a warning of Python.

    Args:
        store: the store, whose policy and signatures count.
        reference: the model's name.
        data: the bytes of its manifest.
        attached: returns the signatures that are kept with a remote model, which are read only if the
            policy needs them; it is called with what notes why they cannot be read.
    """
    errors: list[RemoteError] = []
    verdict = check_trust(store, reference, data, attached(errors.append), errors=errors)
    for notice in verdict.notices(reference) if verdict is not None else ():
        warnings.warn(notice, stacklevel=3)
    return verdict


def read_signature(path: Path) -> Signature:
    """Return the signature in a file, which is not verified.

    Raises:
        NotFound: there is no such file.
        InvalidSignature: it is malformed, or does not sign a manifest.
        BlobstoreError: it cannot be read.
    """
    from blobstore.core.files import read_regular
    from blobstore.signatures.cosign import parse_signature
    from blobstore.store.signatures import MAX_SIGNATURE_SIZE

    try:
        # Without the end of line that 'sign --out' adds, it is the signature that the store may have.
        data = read_regular(path, MAX_SIGNATURE_SIZE + 1).removesuffix(b"\n")
        signature = parse_signature(data)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"there is no file {quote(path)}") from None
    except OSError as error:
        raise BlobstoreError(f"cannot read {quote(path)}: {error.strerror}") from error
    except InvalidSignature as error:
        raise error.at(quote(path)) from None
    if signature.manifest is None:
        raise InvalidSignature(f"{quote(path)} signs files only, and no manifest of a model")
    return signature
