"""Addresses of models in registries: ``[oci://]host[:port]/repository[:tag|@sha256:…]``.

With ``http://`` or ``https://`` instead, the address says whether TLS is used, and names a server that only
reads, such as ``blobstore serve``.

Registries allow only lower case in the names of repositories, and any number of parts. Names of models in
a store have a host, one namespace and a model. So every name has an address: ``__`` in a namespace stands for
a slash. Only some addresses are those of a name.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from blobstore.core.digest import Digest
from blobstore.core.escape import quote, quote_url
from blobstore.core.schemes import WEB, respelled, scheme_of
from blobstore.errors import InvalidReference, UsageError
from blobstore.manifests.reference import DEFAULT_HOST, DEFAULT_NAMESPACE, DEFAULT_TAG, Reference

SCHEME: Final = "oci://"
MAX_REPOSITORY: Final = 255
_SLASH: Final = "__"
"""What stands for a slash between the outer parts of a repository in the namespace of a name."""
# The grammar of the distribution specification. The alternatives in the repetition exclude each other, so
# that matching takes linear time.
_PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", re.ASCII)
_HOST = re.compile(
    r"(?:\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)(?::[0-9]{1,5})?",
    re.ASCII,
)
_LIBRARY_HOSTS: Final = frozenset({DEFAULT_HOST, "docker.io"})
"""Registries that put models without a namespace into ``library``, as names in a store do."""


@dataclass(frozen=True, slots=True, order=True)
class RemoteReference:
    """The address of a manifest. Every part has been checked, so it can become part of a URL."""

    host: str
    """With the port, if one was given."""
    repository: str
    tag: str = DEFAULT_TAG
    digest: Digest | None = None
    """If it is given, the tag is only a note for people."""
    scheme: str = field(default="", compare=False)
    """``http`` or ``https``, if the address said so."""

    def __post_init__(self) -> None:
        check_host(self.host)
        check_repository(self.repository)
        if not is_tag(self.tag):
            raise InvalidReference(
                f"not a tag: {quote(self.tag)}; expected 1 to 128 letters, digits, '_', '-' and '.'"
            )

    @classmethod
    def parse(cls, text: str) -> RemoteReference:
        """Return the address that ``text`` spells.

        Raises:
            InvalidReference: it has no host, or a part of it is not valid.
            InvalidDigest: the text after ``@`` is not a digest.
        """
        scheme, spelled = split_scheme(text)
        host, slash, rest = spelled.partition("/")
        if not slash or not (spelled != text or is_host(host)):
            raise InvalidReference(
                f"not the address of a registry: {quote_url(text)}; "
                "expected [oci://]host[:port]/repository[:tag|@sha256:…]"
            )
        name, at, digest = rest.partition("@")
        repository, colon, tag = name.partition(":")
        if colon and not tag:
            raise InvalidReference(
                f"not the address of a model: {quote_url(text)} has an empty tag"
            )
        if host in _LIBRARY_HOSTS and "/" not in repository:
            repository = f"{DEFAULT_NAMESPACE}/{repository}"
        if scheme:  # a server finds names in any case by their small letters
            repository = repository.lower()
        return cls(
            host,
            repository,
            tag if colon else DEFAULT_TAG,
            Digest.parse(digest) if at else None,
            scheme,
        )

    @classmethod
    def of(cls, name: Reference) -> RemoteReference:
        """Return the address at which a model of that name is pushed.

        Raises:
            InvalidReference: a registry allows no such name, even in lower case.
        """
        is_bare = name.namespace == DEFAULT_NAMESPACE and name.host not in _LIBRARY_HOSTS
        namespace = name.namespace.replace(_SLASH, "/")
        path = name.model if is_bare else f"{namespace}/{name.model}"
        return cls(name.host, path.lower(), name.tag)

    def name(self) -> Reference:
        """Return the name whose address this is, and no other one.

        Raises:
            InvalidReference: no name is like that, or the address is that of a digest.
        """
        outer, _, model = self.repository.rpartition("/")
        namespace = outer.replace("/", _SLASH) or DEFAULT_NAMESPACE
        try:
            name = Reference(self.host, namespace, model, self.tag)
            is_own = self.digest is None and RemoteReference.of(name) == self
        except InvalidReference:
            is_own = False
        if not is_own:
            raise InvalidReference(
                f"no model in a store can be named {quote(self)}", advice="give a NAME for it"
            )
        return name

    def nearest_name(self) -> Reference:
        """Return a name for what has the address, as :meth:`name`; for other addresses one that is near.

        Raises:
            InvalidReference: no name has such a host or such parts.
        """
        with suppress(InvalidReference):
            return replace(self, digest=None).name()
        parts = self.repository.split("/")
        namespace = parts[-2] if len(parts) > 1 else DEFAULT_NAMESPACE
        return Reference(self.host, namespace, parts[-1], self.tag)

    @property
    def reference(self) -> str:
        """What a request for the manifest ends with: the digest if there is one, else the tag."""
        return str(self.digest) if self.digest else self.tag

    def uses_plain_http(self, plain_http: bool | None = None) -> bool | None:
        """Return whether to do without TLS: what the address says, or else ``plain_http``."""
        return self.scheme == "http" if self.scheme else plain_http

    def check_writable(self) -> None:
        """Check that models can be pushed there. Raises UsageError."""
        if self.scheme:
            option = "--plain-http" if self.scheme == "http" else "--no-plain-http"
            # With the scheme: without it, commands take this for the name of a model in the store.
            address = f"oci://{replace(self, scheme='')}"
            raise UsageError(
                f"{quote(self)} is the address of a server that only reads",
                advice=f"for a registry, write {quote(address)} {option}",
            )

    def __str__(self) -> str:
        """Return the address without ``oci://``."""
        start = f"{self.scheme}://" if self.scheme else ""
        repository = self.repository
        if self.host in _LIBRARY_HOSTS and repository.count("/") == 1:
            repository = repository.removeprefix(f"{DEFAULT_NAMESPACE}/")
        return f"{start}{self.host}/{repository}" + (
            f"@{self.digest}" if self.digest else f":{self.tag}"
        )

    def __repr__(self) -> str:
        return f"RemoteReference({str(self)!r})"


def split_scheme(text: str) -> tuple[str, str]:
    """Return ``http``, ``https`` or nothing, and an address without its scheme.

    Raises:
        InvalidReference: its scheme is not one of registries.
    """
    scheme = scheme_of(text)
    if scheme not in WEB and (meant := respelled(text)):
        raise InvalidReference(
            f"not the address of a registry: {quote_url(text)}",
            advice=f"write {quote_url(meant)[1:-1]}",
        )
    if scheme not in {None, "oci", *WEB}:
        meant = quote_url(f"{SCHEME}{text.partition('://')[2]}")
        raise InvalidReference(
            f"not the address of a registry: {quote_url(text)} begins with {scheme}://",
            advice=f"write {meant}"
            if scheme == "docker"
            else "expected [oci://]host[:port]/repository[:tag|@sha256:…], http://, https://, s3://, gs://, "
            "az:// or file://",
        )
    if scheme in WEB:
        return str(scheme), text.partition("://")[2]
    return "", text.removeprefix(SCHEME)


def is_host(text: str) -> bool:
    """Return whether the part of a name before its first slash can only be a host, as with docker."""
    return "." in text or ":" in text or text == "localhost"


def is_tag(value: object) -> bool:
    """Return whether a value is a valid tag."""
    return isinstance(value, str) and _TAG.fullmatch(value) is not None


def is_repository(value: object) -> bool:
    """Return whether a value is the valid name of a repository."""
    return (
        isinstance(value, str)
        and len(value) <= MAX_REPOSITORY
        and _REPOSITORY.fullmatch(value) is not None
    )


def check_host(text: str) -> None:
    """Check a host with or without a port.

    Raises:
        InvalidReference: it is not valid.
    """
    if _HOST.fullmatch(text) is None or ".." in text:
        advice = "; 'blobstore login' takes user names and passwords" if "@" in text else ""
        raise InvalidReference(
            f"not the host of a registry: {quote_url(text)}; expected host[:port]{advice}"
        )


def host_in(text: str) -> str:
    """Return the host of a registry that a user named, with or without a scheme.

    Raises:
        InvalidReference: it is not valid, or has more than a host and a port.
    """
    host = split_scheme(text)[1].removesuffix("/")
    check_host(host)
    return host


def check_repository(text: str) -> None:
    """Check the name of a repository.

    Raises:
        InvalidReference: it is not valid.
    """
    if not is_repository(text):
        raise InvalidReference(
            f"not the name of a repository: {quote(text)}; expected parts of lower-case letters, "
            f"digits and single '.', '_', '__' or '-' between '/', {MAX_REPOSITORY} characters at most"
        )


def check_reference(text: str) -> None:
    """Check a tag or a digest, as the end of a URL.

    Raises:
        InvalidReference, InvalidDigest: it is neither.
    """
    if ":" in text:
        Digest.parse(text)
    elif not is_tag(text):
        raise InvalidReference(f"neither a tag nor a digest: {quote(text)}")
