"""Addresses in object storage: ``s3://bucket/prefix`` of a store, ``s3://bucket/prefix/name:tag`` of a model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from blobstore.core.escape import quote, quote_place
from blobstore.errors import InvalidReference
from blobstore.manifests.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMES: Final = ("s3", "gs", "az", "file")
_ADDRESS = re.compile(rf"({'|'.join(SCHEMES)})://([^/]*)(?:/(.*))?", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", re.ASCII)
_PART = re.compile(r"[^\x00-\x1f\x7f/\\?#*]{1,255}")
_MAX_NAME_PARTS: Final = 3


def is_address(name: object) -> bool:
    """Return whether a name is an address in object storage."""
    return isinstance(name, str) and name.partition("://")[0] in SCHEMES and "://" in name


@dataclass(frozen=True, slots=True, order=True)
class StoreAddress:
    """The address of a store. Every part has been checked."""

    scheme: str
    bucket: str
    """The bucket or container; empty for ``file``."""
    prefix: str = ""
    """Without slashes at its ends; the absolute path without its first slash for ``file``."""

    def __post_init__(self) -> None:
        if self.scheme == "file":
            if self.bucket:
                raise InvalidReference(
                    f"{quote(str(self))}: write file:///folder with three slashes"
                )
        elif "@" in self.bucket:  # what is before it may be a password
            raise InvalidReference(
                f"not the name of a bucket: {quote('…@' + self.bucket.rpartition('@')[2])}; credentials "
                "belong in the environment or in a profile"
            )
        elif _BUCKET.fullmatch(self.bucket) is None:
            raise InvalidReference(
                f"not the name of a bucket: {quote(self.bucket)}; expected "
                f"{self.scheme}://bucket/prefix"
            )
        for part in self.prefix.split("/") if self.prefix else ():
            if part in {".", ".."} or _PART.fullmatch(part) is None:
                raise InvalidReference(f"not a prefix in object storage: {quote(self.prefix)}")

    @classmethod
    def parse(cls, text: str) -> StoreAddress:
        """Return the address that ``text`` spells.

        Raises:
            InvalidReference: it is not an address, or a part of it is not valid.
        """
        found = _ADDRESS.fullmatch(text)
        if found is None:
            raise InvalidReference(
                f"not an address in object storage: {quote_place(text)}; expected "
                "s3://bucket/prefix, gs://, az:// or file:///"
            )
        scheme, bucket, path = found.groups()
        return cls(scheme, bucket, (path or "").strip("/"))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


@dataclass(frozen=True, slots=True, order=True)
class ModelAddress:
    """The address of a model: that of its store, and its name there."""

    store: StoreAddress
    reference: Reference

    def name(self) -> Reference:
        """Return the name that the model has in its store."""
        return self.reference

    def nearest_name(self) -> Reference:
        """Return the same name."""
        return self.reference

    def __str__(self) -> str:
        return f"{self.store}/{self.reference}"


def has_tag(text: str) -> bool:
    """Return whether an address ends with the tag of a model, so that it is not that of a store."""
    return ":" in text.rpartition("/")[2]


def model_addresses(text: str) -> Iterator[ModelAddress]:
    """Yield the addresses of models that ``text`` may spell, the one with the shortest name first.

    ``s3://bucket/team/llama:v1`` is ``llama:v1`` of the store ``s3://bucket/team``, or ``team/llama:v1`` of
    the store ``s3://bucket``.

    Raises:
        InvalidReference: it is not the address of a model.
    """
    whole = StoreAddress.parse(text.rpartition(":")[0] if has_tag(text) else text)
    parts = whole.prefix.split("/")
    tag = text.rpartition("/")[2].partition(":")
    if not parts[-1] or (has_tag(text) and not tag[0]):
        raise InvalidReference(f"not the address of a model: {quote(text)} has no name")
    if tag[1] and not tag[2]:
        raise InvalidReference(f"not the address of a model: {quote(text)} has an empty tag")
    are_valid = False
    for count in range(1, min(len(parts), _MAX_NAME_PARTS) + 1):
        name = "/".join(parts[-count:]) + "".join(tag[1:])
        try:
            reference = Reference.parse(name)
        except InvalidReference:
            if not are_valid:
                raise
            return
        are_valid = True
        prefix = "/".join(parts[:-count])
        yield ModelAddress(StoreAddress(whole.scheme, whole.bucket, prefix), reference)
