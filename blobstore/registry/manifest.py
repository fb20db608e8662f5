"""What a registry returns under a tag or a digest: a manifest, kept byte for byte."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blobstore.core.digest import Digest


@dataclass(frozen=True, slots=True)
class RemoteManifest:
    """The bytes of a manifest, which must not change, and their media type."""

    media_type: str
    data: bytes = field(repr=False)
    digest: Digest
