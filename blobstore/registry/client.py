"""The client of one registry: manifests, blobs, uploads, tags and referrers."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from blobstore.core import limits, strict_json
from blobstore.core.digest import Digest
from blobstore.core.escape import cli_command, quote
from blobstore.core.libraries import optional_libraries
from blobstore.core.limits import Budget
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    Damaged,
    InvalidDigest,
    InvalidManifest,
    ModelNotFound,
    NotFound,
    RemoteError,
    RemoteRefused,
)
from blobstore.http import protocol
from blobstore.http.protocol import Reply, Request
from blobstore.http.retry import Patience
from blobstore.registry import response_rules, upload
from blobstore.registry.credentials import Credentials, LoginFiles
from blobstore.registry.manifest import (
    ACCEPTED,
    MAX_SIZE,
    OCI_INDEX,
    ImageIndex,
    RemoteDescriptor,
    RemoteManifest,
)
from blobstore.registry.reference import (
    check_host,
    check_reference,
    check_repository,
    is_repository,
    is_tag,
)
from blobstore.registry.upload import Upload, UploadSession

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
    from typing import Self

    from blobstore.core.rate_limit import RateLimiter
    from blobstore.http.rules import Rule

_PULL: Final = "pull"
_PUSH: Final = "pull,push"
_DELETE: Final = "pull,delete"
_PAGE: Final = 1000
_MAX_PAGES: Final = 1000
_MAX_TYPE: Final = 255
"""Letters of a media type."""
_MARGIN: Final = 30  # seconds of a response, beyond those that the server was asked to wait
_API_HOSTS: Final = {"docker.io": "registry-1.docker.io"}
"""Registries that answer at another host than their addresses say."""


class RegistryClient:
    """One registry. Any number of threads may use it; it is closed at the end of a ``with`` block."""

    def __init__(
        self,
        host: str,
        *,
        plain_http: bool | None = None,
        credentials: Credentials | None = None,
        limiter: RateLimiter | None = None,
        patience: Patience | None = None,
        part_size: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            host: ``host[:port]``.
            plain_http: whether to do without TLS; by default only for this machine.
            credentials: where to look for a login; by default in the files of Podman and Docker.
            limiter: limits the bytes of blobs per second, in both directions together.
            patience: how long to wait and how often to try again.
            part_size: bytes of a blob that one request sends at most; by default 64 MiB.
            headers: more headers of each request.

        Raises:
            InvalidReference: the host is not valid.
            RemoteError: certificates or proxies that were set up cannot be used.
            MissingLibrary: the extra ``registry`` is not installed.
        """
        check_host(host)
        with optional_libraries():  # here: a push to object storage imports this module too
            from blobstore.http.transport import Transport
        self.host, self._part_size = host, part_size
        known = credentials or LoginFiles()
        api_host = _API_HOSTS.get(host, host)
        if plain_http is None:
            plain_http = protocol.is_loopback(protocol.host_of(f"https://{api_host}"))
        self._transport = Transport(
            api_host,
            plain_http=plain_http,
            find_login=lambda repository: known.find(host, repository),
            limiter=limiter,
            patience=patience or Patience(),
            headers=headers,
        )

    @property
    def part_size(self) -> int:
        """Bytes of a blob that one request sends at most, unless the registry takes no parts."""
        return self._part_size or upload.PART

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()

    def abort(self) -> None:
        """End all requests of other threads now, as cancelled."""
        self._transport.abort()

    def check_login(self) -> bool:
        """Check that the registry accepts the credentials; return whether it asked for any.

        Raises:
            RemoteRefused: it does not.
            RemoteError: it cannot be reached, or is no registry.
        """
        what = f"login at {quote(self.host)}"
        url = f"{self._transport.base}/v2/"
        self._transport.fetch(Request(what=what, method="GET", url=url, rule=response_rules.BASE))
        return self._transport.has_login()

    def get_manifest(self, repository: str, reference: str) -> RemoteManifest:
        """Return the manifest of a tag or digest.

        Raises:
            ModelNotFound: the registry has no such manifest.
            InvalidManifest: it is too large, or not a manifest.
            BlobDamaged: it has another digest.
            RemoteError: the registry cannot be reached, or fails.
        """
        request = self._manifest_request("GET", repository, reference, response_rules.MANIFEST)
        reply = self._transport.ask(request, MAX_SIZE)
        if reply is None:
            start = self._transport.base
            if "://" not in protocol.address_of(start):
                start = f"oci://{self.host}"
            raise ModelNotFound(
                f"{request.what}: the registry has none",
                advice=f"{cli_command('list', f'{start}/{repository}')} lists the tags",
            )
        media_type = reply.headers.get("content-type", "").partition(";")[0].strip()
        try:
            manifest = RemoteManifest.received(media_type, reply.body)
        except InvalidManifest as error:
            raise error.at(request.what) from None
        # The digest that was asked for decides. For a tag, the registry states one, and must keep
        # to it.
        expected = reference if ":" in reference else reply.headers.get("docker-content-digest")
        # Other algorithms are not computed here.
        if expected and expected.startswith("sha256:") and str(manifest.digest) != expected:
            raise BlobDamaged(f"{request.what}: has the digest {manifest.digest}")
        return manifest

    def head_manifest(self, repository: str, reference: str) -> Digest | None:
        """Return the digest of a tag's manifest, which is fetched if the registry does not state the digest.

        Returns None if there is no such tag, or if the registry does not answer the question.

        Raises:
            RemoteError: the registry cannot be reached.
        """
        reply = self._transport.ask(
            self._manifest_request("HEAD", repository, reference, response_rules.MANIFEST_LOOK)
        )
        if reply is None:
            return None
        try:
            return Digest.parse(reply.headers.get("docker-content-digest", ""))
        except InvalidDigest:  # the header is optional
            with contextlib.suppress(RemoteError, Damaged, ModelNotFound):
                return self.get_manifest(repository, reference).digest
        return None

    def watch_manifest(
        self, repository: str, tag: str, known: Digest | None, wait: int
    ) -> tuple[Digest, bool]:
        """Return the digest of a tag's manifest, and whether the server has waited up to ``wait`` seconds for it.

        Raises ModelNotFound if there is no such tag, and RemoteError.
        """
        request = self._manifest_request("HEAD", repository, tag, response_rules.MANIFEST_WATCH)
        if known is not None:
            condition = {"if-none-match": f'"{known}"', "prefer": f"wait={wait}"}
            headers = {**request.headers, **condition}
            request = replace(request, headers=headers, timeout=wait + _MARGIN)
        reply = self._transport.ask(request)
        if reply is None:
            raise ModelNotFound(f"{request.what}: the registry has none")
        if reply.status == HTTPStatus.NOT_MODIFIED and known is not None:
            return known, "preference-applied" in reply.headers
        with contextlib.suppress(InvalidDigest):  # the header is optional
            return Digest.parse(reply.headers.get("docker-content-digest", "")), False
        return self.get_manifest(repository, tag).digest, False

    def put_manifest(
        self,
        repository: str,
        reference: str,
        manifest: RemoteManifest,
        send_missing: Callable[[frozenset[str]], object] | None = None,
    ) -> None:
        """Publish a manifest under a tag, or under its digest. Its blobs must be there.

        Args:
            repository: where to.
            reference: the tag or digest.
            manifest: the manifest.
            send_missing: if the registry lacks blobs that it said to have, this is called with the digests
                that it names, which may be none, and the manifest is sent once more.

        Raises:
            RemoteRefused: the registry refuses it.
            BlobDamaged: it stored other bytes.
            RemoteError: the registry cannot be reached, or fails.
        """
        check_reference(reference)
        request = Request(
            what=f"push of manifest {quote(f'{repository}:{reference}')}",
            method="PUT",
            url=f"{self._url(repository)}/manifests/{reference}",
            rule=response_rules.MANIFEST_PUT,
            headers={"content-type": manifest.media_type},
            body=lambda: (manifest.data,),
            size=len(manifest.data),
            scopes=_scopes(repository, _PUSH),
        )
        try:
            reply = self._transport.fetch(request)
        except RemoteRefused as error:
            if send_missing is None or not response_rules.names_missing_blobs(error):
                raise
            send_missing(error.digests)
            reply = self._transport.fetch(request)
        # A registry that changes the bytes breaks every reference by digest.
        stored = reply.headers.get("docker-content-digest", "")
        if stored.startswith("sha256:") and stored != str(manifest.digest):
            raise BlobDamaged(f"{request.what}: the registry stored {quote(stored)} instead")

    def delete_manifest(self, repository: str, reference: str) -> None:
        """Remove a tag; or a manifest by its digest, with all of its tags.

        Raises:
            ModelNotFound: the registry has no such tag or manifest.
            RemoteRefused: the registry removes no tags, or nothing at all; or access is denied.
            RemoteError: the registry cannot be reached, or fails.
        """
        request = self._manifest_request(
            "DELETE", repository, reference, response_rules.MANIFEST_DELETE, _DELETE
        )
        try:
            reply = self._transport.ask(request)
        except RemoteRefused as error:
            if not response_rules.refuses_deletion(error):
                raise
            address = f"oci://{self.host}/{repository}@DIGEST"
            by_digest = f"{cli_command('rm', address)} removes a manifest"
            raise RemoteRefused(
                error.message,
                advice="the registry may be set up to delete nothing"
                if ":" in reference
                else f"the registry deletes no tags; {by_digest} with all of its tags",
                status=error.status,
                code=error.code,
            ) from None
        if reply is None:
            raise ModelNotFound(f"{request.what}: the registry has none")

    def blob_size(self, repository: str, digest: Digest, *, for_upload: bool = False) -> int | None:
        """Return the size of a blob as the registry states it; None if it has none.

        With ``for_upload``, a blob counts as missing if the registry does not say.

        Raises:
            RemoteError: the registry cannot be reached, or fails.
        """
        rule = response_rules.BLOB_LOOK if for_upload else response_rules.BLOB_SIZE
        request = self._blob_request("HEAD", repository, digest, rule)
        reply = self._transport.ask(request)
        if reply is None:
            return None
        size = protocol.content_length(reply.headers.get("content-length"))
        if size is None and not for_upload:
            raise RemoteError(f"{request.what}: the registry does not state its size")
        return size

    def read_blob(
        self, repository: str, digest: Digest, begin: int, end: int, *, size: int | None = None
    ) -> Generator[bytes, None, None]:
        """Yield the bytes of a blob from ``begin`` to before ``end``; nothing is hashed.

        If the connection is lost, it goes on with the next byte on another one. With the ``size`` of
        the blob, all of it is one plain request, which caches between here and the registry can
        answer. A blob of another size is then found before its bytes.

        Raises:
            BlobMissing: the registry does not have it.
            BlobDamaged: it has another length.
            RemoteError: the registry cannot be reached, or fails.
        """
        # Empty ranges are never asked for: see `protocol.range_of`.
        if begin < end:
            yield from self._transport.retry().resumed(
                begin, end, lambda at: self._read(repository, digest, at, end, size)
            )

    def mount_blob(self, repository: str, digest: Digest, source: str) -> bool:
        """Make a blob of another repository one of this; return whether the registry did.

        Raises:
            RemoteError: the registry cannot be reached.
        """
        check_repository(source)
        reply = self._transport.ask(
            Request(
                what=f"mount of blob {digest.short}",
                method="POST",
                url=f"{self._url(repository)}/blobs/uploads/?mount={digest}&from={source}",
                rule=response_rules.MOUNT,
                body=lambda: (),
                scopes=_scopes(repository, _PUSH) | _scopes(source, _PULL),
            )
        )
        return reply is not None

    def upload_blob(
        self,
        repository: str,
        digest: Digest,
        size: int,
        pieces: Callable[[int], Iterable[bytes | memoryview]],
        *,
        session: UploadSession | None = None,
        on_session: Callable[[UploadSession], object] = lambda _: None,
    ) -> int:
        """Upload a blob; return how many bytes of ``session`` the server still had.

        Args:
            repository: where to.
            digest: its digest.
            size: its bytes.
            pieces: yields its bytes from an offset on, each time it is called.
            session: an upload of this blob to go on with, from a process that was killed.
            on_session: called with the newest session after each part.

        Raises:
            RemoteRefused: the registry refuses it.
            RemoteError: the registry cannot be reached, or fails.
            BlobDamaged: the pieces end early.
        """
        blobs = f"{self._url(repository)}/blobs"
        scopes = _scopes(repository, _PUSH)
        return Upload(
            self._transport, blobs, scopes, digest, size, pieces, on_session, self._part_size
        ).run(session)

    def tags(self, repository: str) -> Iterator[str]:
        """Yield the tags of a repository.

        Raises:
            ModelNotFound: there is no such repository.
            RemoteError: the registry cannot be reached, or fails.
        """
        what = f"tags of {quote(repository)}"
        url = f"{self._url(repository)}/tags/list?n={_PAGE}"
        budget = Budget(limits.TAGS, what)
        for reply in self._pages(
            _scopes(repository, _PULL), what, url, response_rules.TAGS, budget
        ):
            if reply is None:
                raise ModelNotFound(f"{what}: the registry has no such repository")
            # Tags become parts of URLs.
            yield from _listed(reply, "tags", is_tag, budget, what)

    def repositories(self) -> Iterator[str]:
        """Yield the repositories that the registry lists, which may be some of them only.

        Raises:
            NotFound: the registry lists none.
            RemoteError: the registry cannot be reached, denies access or fails.
        """
        what = f"repositories of {quote(self._transport.base)}"
        url = f"{self._transport.base}/v2/_catalog?n={_PAGE}"
        budget = Budget(limits.TAGS, what)
        scopes = frozenset({protocol.REPOSITORIES_SCOPE})
        for reply in self._pages(scopes, what, url, response_rules.REPOSITORIES, budget):
            if reply is None:
                raise NotFound(f"{what}: the registry does not list them")
            yield from _listed(reply, "repositories", is_repository, budget, what)

    def referrers(
        self,
        repository: str,
        digest: Digest,
        on_error: Callable[[RemoteError], object] = lambda _: None,
    ) -> tuple[RemoteDescriptor, ...]:
        """Return the manifests that refer to another one, such as signatures; by a tag if the registry lists none.

        ``on_error`` is called with why the registry does not list it.

        Raises:
            InvalidManifest: the list is malformed.
            RemoteError: the registry cannot be reached, or fails.
        """
        what = f"referrers of {digest.short}"
        url = f"{self._url(repository)}/referrers/{digest}"
        found: list[RemoteDescriptor] = []
        budget = Budget(limits.REFERRERS, what)
        scopes = _scopes(repository, _PULL)
        for reply in self._pages(scopes, what, url, response_rules.REFERRERS, budget, on_error):
            if reply is None:
                break
            try:
                listed = _index(RemoteManifest.of(OCI_INDEX, reply.body)).manifests
            except InvalidManifest as error:  # a page of a proxy, for one
                on_error(RemoteError(f"{what}: {error}"))
                break
            budget.spend(0, len(listed))
            found += map(_without_texts, listed)
        else:
            # The list was read to its end.
            return tuple(found)
        return tuple(found) or self._tagged_referrers(repository, digest)

    def _tagged_referrers(self, repository: str, digest: Digest) -> tuple[RemoteDescriptor, ...]:
        """Return the referrers that the tag of a manifest lists.

        Raises:
            InvalidManifest: the list is malformed.
            RemoteError: the registry cannot be reached, or fails.
        """
        try:
            return _index(self.get_manifest(repository, digest.file_name)).manifests
        except ModelNotFound:
            return ()

    def _pages(
        self,
        scopes: frozenset[str],
        what: str,
        first: str,
        rule: Rule,
        budget: Budget,
        on_error: Callable[[RemoteError], object] = lambda _: None,
    ) -> Iterator[Reply | None]:
        """Yield the responses to a request for a list; None if it is missing."""
        url: str | None = first
        for _ in range(_MAX_PAGES):
            if url is None:
                return
            request = Request(what=what, method="GET", url=url, rule=rule, scopes=scopes)
            reply = self._transport.ask(request, MAX_SIZE, on_error)
            budget.spend(0 if reply is None else len(reply.body), 0)
            yield reply
            if reply is None:
                return
            url = protocol.next_page(reply.headers.get("link"), reply.url)
        raise RemoteError(f"{what}: the list has more than {_MAX_PAGES} pages")

    def _read(
        self, repository: str, digest: Digest, begin: int, end: int, size: int | None
    ) -> Generator[bytes, None, None]:
        """Yield bytes of a blob from one response."""
        is_whole = begin == 0 and end == size
        headers = {} if is_whole else {"range": protocol.range_of(begin, end)}
        request = self._blob_request("GET", repository, digest, response_rules.BLOB, headers)
        with self._transport.send(request) as response:
            if response.status_code in response_rules.BLOB.absent:
                raise BlobMissing(f"{request.what}: the registry does not have it")
            yield from self._transport.span(request, response, begin, end, size)

    def _blob_request(
        self,
        method: str,
        repository: str,
        digest: Digest,
        rule: Rule,
        headers: Mapping[str, str] | None = None,
    ) -> Request:
        return Request(
            what=f"blob {digest.short}",
            method=method,
            url=f"{self._url(repository)}/blobs/{digest}",
            rule=rule,
            headers=headers or {},
            scopes=_scopes(repository, _PULL),
        )

    def _manifest_request(
        self, method: str, repository: str, reference: str, rule: Rule, actions: str = _PULL
    ) -> Request:
        check_reference(reference)
        separator = "@" if ":" in reference else ":"
        return Request(
            what=f"manifest {quote(f'{self.host}/{repository}{separator}{reference}')}",
            method=method,
            url=f"{self._url(repository)}/manifests/{reference}",
            rule=rule,
            headers={"accept": ", ".join(ACCEPTED)},
            scopes=_scopes(repository, actions),
        )

    def _url(self, repository: str) -> str:
        check_repository(repository)
        return f"{self._transport.base}/v2/{repository}"


def _listed(
    reply: Reply, key: str, is_valid: Callable[[object], bool], budget: Budget, what: str
) -> list[str]:
    """Return the names in a page of a list. Raises RemoteError."""
    try:
        found = strict_json.loads(reply.body)[key]
    except (ValueError, KeyError, TypeError):
        found = 0
    # A repository without tags may have null instead of a list.
    found = [] if found is None else found
    if not isinstance(found, list) or not all(map(is_valid, found)):
        raise RemoteError(f"{what}: the registry sent no list of {key}")
    budget.spend(0, len(found))
    return found


def _scopes(repository: str, actions: str) -> frozenset[str]:
    return frozenset({protocol.scope(repository, actions)})


def _without_texts(item: RemoteDescriptor) -> RemoteDescriptor:
    """Return the used fields of an entry in a list of referrers, which may be long."""
    return RemoteDescriptor(
        item.media_type[:_MAX_TYPE],
        item.digest,
        item.size,
        artifact_type=item.artifact_type[:_MAX_TYPE],
    )


def _index(manifest: RemoteManifest) -> ImageIndex:
    content = manifest.parse()
    if not isinstance(content, ImageIndex):
        raise InvalidManifest("the registry's list of referrers is not an image index")
    return content
