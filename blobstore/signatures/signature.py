"""A signature of a model, of either kind: before what it signs is parsed, and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blobstore.core.digest import Digest
    from blobstore.signatures.keys import PublicKey

Kind = Literal["oms", "cosign"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Signed bytes that were not parsed, and their signature. They mean nothing unless :meth:`is_by` a key."""

    kind: Kind
    hint: str = ""
    """The fingerprint of the key; empty if the signature does not say."""
    signed: bytes = field(repr=False)
    """The bytes that were signed."""
    signature: bytes = field(repr=False)
    """In DER."""
    subject: bytes | None = field(default=None, repr=False)
    """The manifest in a registry that a signature for cosign is of, if that names the model's."""
    data: bytes = field(repr=False)
    """The signature as it is stored."""

    def is_by(self, key: PublicKey) -> bool:
        """Return whether the key made this signature."""
        if self.hint and self.hint != key.fingerprint:
            return False
        return key.has_signed(self.signed, self.signature, is_sha256=self.kind == "cosign")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature(Envelope):
    """The statement of a signature. It means nothing unless :meth:`is_by` a key that is trusted."""

    manifest: Digest | None
    """The manifest that it signs; None for a bundle of another program, which signs files only."""
    stated: Digest | None = None
    """The digest in a signature for cosign: that of the manifest, or of the one in a registry."""
    name: str
    """The model's name when it was signed."""
    created: int | None = None
    """When it was made, in seconds since the epoch, if it says so."""
    files: Mapping[str, Digest] = field(default_factory=dict, repr=False)
    """The files of the model's folder; cosign's signatures have none."""
