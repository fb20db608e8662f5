"""The operation ``verify --signatures``: reports the signatures of models, and the verdict of the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from blobstore.core.arguments import local_path
from blobstore.core.digest import Digest
from blobstore.core.escape import escape, quote
from blobstore.errors import InvalidSignature
from blobstore.operations.sign.require_trust import policy_keys, read_policy
from blobstore.signatures.cosign import envelopes, parse_envelope, read_envelope
from blobstore.signatures.keys import PublicKey, read_key
from blobstore.signatures.policy import Verdict, decide
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.name_patterns import named_models

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from blobstore.errors import StoreError
    from blobstore.manifests.reference import Names, Reference
    from blobstore.signatures.policy import Action
    from blobstore.signatures.signature import Kind
    from blobstore.store.signatures import KeptSignature

State = Literal["valid", "invalid", "unknown key", "not checked"]
_NOT_LOOKED_UP = "not looked up at an address; 'blobstore pull' fetches signatures"
_SHOWN = 16
"""Digits of a key's fingerprint that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSignature:
    """A signature of a model."""

    kind: Kind | Literal["unknown"]
    state: State
    """Whether a known key made it; ``invalid`` if it is malformed or was altered, ``not checked`` if no key
    is known."""
    signer: str = ""
    """The name of that key."""
    key: str = ""
    """Its fingerprint, or the one that the signature states."""
    signed_as: str = ""
    """The name that the model had, if a known key made the signature; nothing else is parsed."""
    created: int | None = None
    """In seconds since the epoch, if the signature says so."""
    message: str = ""
    """What is wrong with it."""

    @property
    def short_key(self) -> str:
        """The start of the key's fingerprint."""
        return self.key[:_SHOWN]


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedModel:
    """The signatures of a model, and the verdict of the policy."""

    reference: Reference
    digest: Digest
    """The digest of its manifest."""
    signatures: tuple[CheckedSignature, ...]
    verdict: Verdict | None
    """None if there is no policy."""
    needs_key: bool = False
    """Whether keys were given, so that a signature is asked for."""

    @property
    def action(self) -> Action | None:
        """What happens if the model is not trusted; None without a policy."""
        return self.verdict.action if self.verdict else None

    @property
    def is_trusted(self) -> bool | None:
        """Whether the model has what the policy asks for; None without a policy."""
        return self.verdict.is_trusted if self.verdict else None

    @property
    def reason(self) -> str:
        """Why the model is not trusted."""
        return self.verdict.reason if self.verdict else ""

    @property
    def is_faulty(self) -> bool:
        """Whether a signature is invalid or the one asked for is missing, or the policy refuses the model."""
        is_invalid = any(one.state == "invalid" for one in self.signatures)
        return is_invalid or self.is_unsigned or bool(self.verdict and self.verdict.is_refused)

    @property
    def is_unsigned(self) -> bool:
        """Whether keys were given and no signature is by a key that is known."""
        return self.needs_key and all(one.state != "valid" for one in self.signatures)


def check_signatures(
    references: Names = (),
    *,
    keys: Sequence[str | os.PathLike[str]] = (),
    store: StoreLike = None,
    on_error: Callable[[StoreError], object] | None = None,
) -> tuple[SignedModel, ...]:
    """Return the signers of models, as far as they can be verified.

    Args:
        references: names of models, by default all.
        keys: files of public keys, besides those of the policy.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        on_error: called with the error of each folder of manifests that cannot be read, which is then
            skipped; by default the first of these errors is raised.

    Raises:
        ModelNotFound: the store has no such model.
        UsageError, NotFound: a key cannot be used.
        InvalidPolicy: the policy cannot be used.
        StoreError: the store cannot be read.
        MissingLibrary: ``cryptography`` is not installed.
    """
    store = LocalStore.to_read(store)
    policy = read_policy(store)
    known = [
        PublicKey.from_pem(read_key(path), path.name)
        for path in (local_path(it, "source") for it in keys)
    ]
    known += policy.keys if policy is not None else ()
    found = []
    for reference in named_models(store, references) or tuple(store.references(on_error=on_error)):
        digest = Digest.of(store.read_manifest(reference))
        signatures = envelopes(store.signatures(digest))
        verdict = decide(policy, reference, digest, signatures) if policy is not None else None
        found.append(
            SignedModel(
                reference=reference,
                digest=digest,
                signatures=signatures_of(store, digest, known),
                verdict=verdict,
                needs_key=bool(keys),
            )
        )
    return tuple(found)


def signatures_of(
    store: LocalStore, manifest: Digest, keys: Sequence[PublicKey] | None = None
) -> tuple[CheckedSignature, ...]:
    """Return the signatures of a manifest, checked with keys; by default those of the policy."""
    known = policy_keys(store) if keys is None else keys
    return _sorted(_check_kept(kept, manifest, known) for kept in store.kept_signatures(manifest))


def check_unkept(
    signatures: Iterable[bytes], manifest: Digest, keys: Sequence[PublicKey]
) -> tuple[CheckedSignature, ...]:
    """Return signatures of a manifest that are in no store, checked with keys."""
    return _sorted(_check(data, manifest, keys) for data in signatures)


def _sorted(checked: Iterable[CheckedSignature]) -> tuple[CheckedSignature, ...]:
    return tuple(sorted(checked, key=lambda one: (one.kind, one.created or 0, one.key)))


def describe_signers(signatures: Iterable[CheckedSignature] | None) -> str:
    """Return who signed a model, for people, and what of it was not verified; empty if nobody did.

    None stands for the signatures of a model elsewhere, which are not looked up.
    """
    if signatures is None:
        return _NOT_LOOKED_UP
    kinds: dict[tuple[str, str], list[str]] = {}
    for one in signatures:
        who = one.signer or (f"key {one.short_key}" if one.key else "a key that is not named")
        mark = {"valid": "", "unknown key": "not verified"}.get(one.state, one.state)
        kinds.setdefault((who, mark), []).append(one.kind)
    return ", ".join(
        f"{who} ({', '.join([*dict.fromkeys(found), *[mark] * bool(mark)])})"
        for (who, mark), found in kinds.items()
    )


def _check_kept(
    kept: KeptSignature, manifest: Digest, keys: Sequence[PublicKey]
) -> CheckedSignature:
    if kept.data is None:
        problem = "is damaged; 'blobstore gc' removes it" if kept.is_damaged else "cannot be read"
        return _invalid(f"the file {quote(kept.path.name)} {problem}")
    return _check(kept.data, manifest, keys)


def _check(data: bytes, manifest: Digest, keys: Sequence[PublicKey]) -> CheckedSignature:
    """Check one signature. What it states is parsed only if a known key made it."""
    try:
        envelope = read_envelope(data)
    except InvalidSignature as error:
        return _invalid(str(error))
    kind, hint = envelope.kind, escape(envelope.hint, 64)
    found = next((one for one in keys if envelope.is_by(one)), None)
    if found is None:
        if envelope.hint and any(one.fingerprint == envelope.hint for one in keys):
            return _invalid("it was altered: it names a key that did not make it", kind, hint)
        return CheckedSignature(kind=kind, state="unknown key" if keys else "not checked", key=hint)
    try:
        signature = parse_envelope(envelope)
    except InvalidSignature as error:
        return _invalid(str(error), kind, found.fingerprint)
    if signature.manifest != manifest:
        message = f"it signs {signature.manifest or 'no manifest'}"
        return _invalid(message, kind, found.fingerprint)
    return CheckedSignature(
        kind=kind,
        state="valid",
        signer=found.name,
        key=found.fingerprint,
        signed_as=signature.name,
        created=signature.created,
    )


def _invalid(
    message: str, kind: Kind | Literal["unknown"] = "unknown", key: str = ""
) -> CheckedSignature:
    return CheckedSignature(kind=kind, state="invalid", key=key, message=message)
