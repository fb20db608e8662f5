"""The operation ``sign``: signs a model with a key, for the store, for folders and for registries.

Two signatures are made. An OMS bundle lists the files of the model's folder and names its manifest, and a
signature for cosign names the manifest alone. Weights are read only if nothing records the digest of a file.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from blobstore.core.arguments import local_path
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import write_file
from blobstore.core.targets import check_new_file
from blobstore.core.workers import check_jobs
from blobstore.errors import (
    BlobstoreError,
    InvalidManifest,
    InvalidPolicy,
    StoreError,
    UsageError,
)
from blobstore.folders.digests import (
    FolderDigests,
    Layout,
    folder_digests,
    has_folder,
)
from blobstore.manifests.reference import Reference
from blobstore.operations.sign.require_trust import read_policy
from blobstore.signatures import cosign
from blobstore.signatures.bundle import (
    is_ignored,
    pre_authentication_encoding,
    statement,
    write_bundle,
)
from blobstore.signatures.cosign import signed_by
from blobstore.signatures.keys import PrivateKey, read_key
from blobstore.signatures.policy import decide
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from blobstore.core.progress import Progress
    from blobstore.signatures.keys import Passphrase
    from blobstore.signatures.signature import Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """The result of :func:`blobstore.sign`."""

    reference: Reference
    digest: Digest
    """The digest of the manifest, which is signed."""
    key: str
    """The fingerprint of the key."""
    files: int
    """Files of the folder that the bundle lists; 0 if the model has no such folder, and no bundle."""
    hashed: int
    """Weight files that had to be read, because nothing records their digests."""
    bytes_hashed: int
    out: Path | None
    """The file of the bundle, if one was asked for."""
    seconds: float
    notices: tuple[str, ...] = ()
    """Why the policy does not accept the signatures that were made, if it does not."""


def sign_model(
    reference: str | Reference,
    key: str | os.PathLike[str],
    *,
    store: StoreLike = None,
    out: str | os.PathLike[str] | None = None,
    layout: Layout = "export",
    passphrase: Callable[[], Passphrase] | None = None,
    force: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Signed:
    """Sign a model, and store the signatures with its manifest.

    A model of GGUF files has no folder that a bundle could list. Only its manifest is signed then.

    The signer vouches for what the manifest names: nothing is verified here unless it has to be read.

    Args:
        reference: the model's name.
        key: the file of a private key in PEM, of the curve P-256, P-384 or P-521.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        out: a new file for the OMS bundle, too. ``model_signing verify key`` accepts it for the folder.
        layout: the folder that the bundle lists: that of ``export``, or that of ``link``.
        passphrase: called if the key is encrypted.
        force: replace an existing file ``out``.
        jobs: number of threads that hash; by default one per processor.
        progress: called with the current blob, bytes done and total bytes.

    Returns:
        the digest of the manifest, the key, and what was hashed.

    Raises:
        ModelNotFound: the store has no such model.
        NotFound: there is no such key.
        UsageError: the key is malformed, of another kind, or needs a passphrase; or an argument is invalid.
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged.
        BlobstoreError: the model has no such folder, or ``out`` exists or cannot be written.
        StoreError: the store cannot be written.
        MissingLibrary: ``cryptography`` is not installed.
    """
    started = time.monotonic()
    check_jobs(jobs)
    if layout not in get_args(Layout):
        raise UsageError(f"unknown layout {quote(layout)}; expected export or link")
    reference, store = Reference.of(reference), LocalStore.of(store)
    target = None if out is None else local_path(out)
    if target is not None:
        check_new_file(target, force=force)
    data, manifest = store.parse(reference)
    try:
        store.check_manifest(data, manifest)
    except InvalidManifest as error:
        raise error.at(quote(store.manifest_path(reference))) from None
    path = local_path(key, "source")
    private = PrivateKey.from_pem(read_key(path), str(path), passphrase)
    try:
        if target is not None or has_folder(manifest):
            digests = folder_digests(store, manifest, layout, jobs, progress)
        else:
            digests = FolderDigests({}, 0, 0)
    except BlobstoreError as error:
        raise error.at(f"model {reference}") from error
    digest = Digest.of(data)
    made = list(_signatures(private, reference, digest, digests.files, store))
    for item in made:
        store.keep_signature(digest, item, is_verified=True)
    notices = tuple(_unused(store, reference, digest, private))
    if target is not None:
        try:
            write_file(target, [made[-1], b"\n"])
        except OSError as error:
            raise BlobstoreError(f"cannot write {quote(target)}: {error.strerror}") from error
    return Signed(
        reference=reference,
        digest=digest,
        key=private.public.fingerprint,
        files=sum(not is_ignored(file) for file in digests.files),
        hashed=digests.hashed,
        bytes_hashed=digests.bytes_hashed,
        out=target,
        notices=notices,
        seconds=time.monotonic() - started,
    )


def _unused(
    store: LocalStore, reference: Reference, manifest: Digest, key: PrivateKey
) -> Iterator[str]:
    """Read the signatures again as ``open`` does, and yield why the policy does not accept them.

    Raises:
        StoreError: they cannot be read.
    """

    def own() -> Iterator[Signature]:
        return signed_by(store.signatures(manifest), [key.public])

    if not any(one.manifest == manifest for one in own()):
        folder = quote(store.signature_folder(manifest))
        raise StoreError(f"the signature was written to {folder}, and cannot be read there")
    try:
        policy = read_policy(store)
    except InvalidPolicy as error:
        yield f"the policy cannot be used: {error}"
        return
    if policy is None:
        return
    verdict = decide(policy, reference, manifest, own())
    if not verdict.is_trusted:
        yield f"the policy does not accept this signature: {verdict.reason}"


def _signatures(
    key: PrivateKey,
    reference: Reference,
    manifest: Digest,
    files: Mapping[str, Digest],
    store: LocalStore,
) -> Iterator[bytes]:
    """Yield the signature for cosign, and the OMS bundle if there are files.

    Those that the store has are not made again.
    """
    own = list(signed_by(store.signatures(manifest), [key.public]))
    former = next((one.data for one in own if one.stated == manifest), None)
    identity = f"{reference.host}/{reference.namespace}/{reference.model}"
    simple = cosign.payload(identity, manifest, int(time.time()))
    yield former or cosign.write_signature(simple, key.sign(simple, is_sha256=True))
    if files:
        payload = statement(str(reference), files, manifest)
        encoded = pre_authentication_encoding(payload)
        former = next((one.data for one in own if one.signed == encoded), None)
        yield former or write_bundle(payload, key.sign(encoded), key.public.fingerprint)
