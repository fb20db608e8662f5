"""Requests to object storage, by the library obstore, with errors of :mod:`blobstore.errors`.

Credentials, regions and endpoints come from where the tools of each provider look for them; for S3 that
is the environment, then the profile of ``~/.aws``, then the machine's role.
"""

from __future__ import annotations

import configparser
import contextlib
import fcntl
import os
import re
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from blobstore.core import interrupts, limits
from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError, Conflict, MissingLibrary, RemoteError, RemoteRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from datetime import datetime

    from typing_extensions import Buffer

    from blobstore.objects.address import StoreAddress

CHUNK: Final = 16 * 2**20
"""Bytes of a part of a large upload."""
_STALL: Final = "30s"
"""Without a byte of an answer that is read."""
_TIMEOUT: Final = "10m"
"""Of a request with its answer; many parts of uploads share a slow connection."""
_UPLOADS: Final = 4
"""Parts of one upload that are sent at once."""
_RETRIES: Final = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"max_backoff": timedelta(seconds=10)},
}
_MAX_LISTED: Final = limits.LISTING.count
_MAX_LIST_SECONDS: Final = 3600.0
_PROBE: Final = ".blobstore/probe"
_ENVIRONMENT_KEYS: Final = {
    "AWS_ACCESS_KEY_ID": "access_key_id",
    "AWS_SECRET_ACCESS_KEY": "secret_access_key",
    "AWS_SESSION_TOKEN": "session_token",
}
_OTHERS: Final = {
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "ca_bundle": ("AWS_CA_BUNDLE",),
}
_ROLES: Final = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
"""Where obstore finds credentials by itself, or needs none."""
_PROFILE_KEYS: Final = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
    "ca_bundle": "ca_bundle",
}
_STATUS = re.compile(r"status code: (\d{3})[^:]*(?::.*?<Code>([A-Za-z]{1,60})</Code>)?", re.DOTALL)
_CAUSE = re.compile(r'message: "([^"\\]{1,100})"|(TimedOut|Timeout)\b')
_DENIED: Final = {"400", "401", "403"}
"""S3 answers requests with expired credentials with 400, without a reason if there is no body."""
_EXPIRED: Final = {
    "ExpiredToken",
    "ExpiredTokenException",
    "TokenRefreshRequired",
    "RequestExpired",
}
_THROTTLED: Final = {"429", "503"}
_REDIRECTED: Final = {"301", "302", "307", "308"}
_Found = TypeVar("_Found")


class ObjectInfo(NamedTuple):
    """What a listing says about an object."""

    key: str
    """Below the prefix of the store."""
    size: int
    modified: datetime


class ObjectVersion(NamedTuple):
    """The content of a small object, and what identifies it."""

    data: bytes
    tag: str | None
    """The ETag."""


class ObjectPiece(NamedTuple):
    """Bytes of an object, and the size of the whole."""

    data: memoryview
    size: int


class ObjectClient:
    """The objects below one prefix of a bucket. Any number of threads may use it."""

    def __init__(self, address: StoreAddress) -> None:
        """Send nothing yet.

        Raises:
            MissingLibrary: obstore is not installed.
            RemoteError: the configuration cannot be used.
        """
        try:
            import obstore
        except ImportError as error:
            raise MissingLibrary(
                "object storage needs the package obstore: pip install 'tensor-blobstore[objects]'"
            ) from error
        self.address = address
        self._api = obstore
        self._lock = threading.Lock()
        self._is_proven = False
        with _translated(f"{address}"):
            self._settings = _settings(address)
            self._reading, self._writing = _connect(address, self._settings)

    def get(self, key: str, limit: int) -> ObjectVersion | None:
        """Return an object of at most ``limit`` bytes, or None if there is none.

        Raises:
            RemoteError: it is larger, or cannot be read.
        """

        def send() -> ObjectVersion | None:
            found = self._api.get(self._reading, key)
            if (size := found.meta["size"]) > limit:
                raise RemoteError(f"{self._name(key)}: {size} bytes, expected at most {limit}")
            return ObjectVersion(bytes(found.bytes()), found.meta["e_tag"])

        return self._find(key, send)

    def size(self, key: str) -> int | None:
        """Return the size of an object, or None if there is none."""
        return self._find(key, lambda: int(self._api.head(self._reading, key)["size"]))

    def modified(self, key: str) -> datetime | None:
        """Return when an object was written, by the server's clock, or None if there is none."""

        def send() -> datetime:
            found: datetime = self._api.head(self._reading, key)["last_modified"]
            return found

        return self._find(key, send)

    def read(self, key: str, begin: int, end: int) -> ObjectPiece | None:
        """Return bytes of an object, fewer if it ends before; None if there is no such object.

        The range must not be empty.
        """

        def send() -> ObjectPiece:
            found = self._api.get(self._reading, key, options={"range": (begin, end)})
            pieces = iter(found.stream(min_chunk_size=end - begin))
            data = memoryview(next(pieces, b""))
            if len(data) > end - begin or next(pieces, None) is not None:
                raise RemoteError(f"{self._name(key)}: the server sends more bytes than asked for")
            return ObjectPiece(data, found.meta["size"])

        return self._find(key, send)

    def put(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
        """Write an object, whatever was there; an iterable is sent in parts. Readers see all of it or none."""
        whole = isinstance(data, (bytes, bytearray, memoryview))

        def send() -> None:
            self._api.put(
                self._writing,
                key,
                data,
                use_multipart=not whole,
                chunk_size=CHUNK,
                max_concurrency=_UPLOADS,
            )

        self._call(key, send, may_repeat=whole)

    def replace(self, key: str, data: bytes, tag: str | None) -> None:
        """Write a small object if it still has the ETag ``tag``, or if there is none and ``tag`` is None.

        Raises:
            Conflict: another process was faster.
            RemoteError: the server ignores conditions, or fails.
        """
        self.check_conditions()
        if not self._is_written(key, data, tag):
            # The response to a write that succeeded may have been lost, and the write repeated.
            found = self.get(key, len(data))
            if found is None or found.data != data:
                raise Conflict(f"{self._name(key)} was written by another process")

    def check_conditions(self) -> None:
        """Check, once, that the server refuses to write an object whose condition is not met.

        Names are safe only then. Nothing is remembered beyond this process, as a server may be replaced.

        Raises:
            RemoteError: it writes the object nevertheless.
        """
        if self._is_proven or self.address.scheme == "file":
            return
        is_new = self._is_written(_PROBE, b"", None)
        if (is_new and self._is_written(_PROBE, b"", None)) or self._is_written(_PROBE, b"", '"0"'):
            raise RemoteError(
                f"{quote(self.address)}: the server ignores conditional requests, so that two "
                "processes could overwrite each other's models",
                advice="use a server that supports If-None-Match and If-Match",
            )
        self._is_proven = True

    def check_bucket(self) -> None:
        """Check that the bucket exists. Raises RemoteError."""
        next(iter(self.list("manifests")), None)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are absent are no error."""

        def send() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._api.delete(self._writing, key)

        for key in keys:
            self._call(key, send)

    def list(self, folder: str) -> Iterator[ObjectInfo]:
        """Yield the objects whose keys begin with ``folder`` and a slash.

        Raises:
            RemoteError: the list cannot be read, or does not end.
        """

        def begin() -> tuple[Iterator[Any], Any]:
            pages = self._api.list(self._reading, folder, chunk_size=1000)
            return pages, next(pages, None)

        pages, page = self._call(folder, begin)
        until, count, former = time.monotonic() + _MAX_LIST_SECONDS, 0, None
        while page:
            count += len(page)
            if page[0]["path"] == former or count > _MAX_LISTED or time.monotonic() > until:
                raise RemoteError(f"{self._name(folder)}: the server sends a list without end")
            former = page[0]["path"]
            for item in page:
                if item["path"].startswith(f"{folder}/"):
                    yield ObjectInfo(item["path"], item["size"], item["last_modified"])
            with _translated(self._name(folder)):
                page = next(pages, None)

    def _is_written(self, key: str, data: bytes, tag: str | None) -> bool:
        """Write an object if its condition is met, and return whether it was."""
        mode: Any = "create" if tag is None else {"e_tag": tag}

        def send() -> bool:
            try:
                if tag is not None and self.address.scheme == "file":
                    return self._is_file_replaced(key, data, tag)
                self._api.put(self._writing, key, data, mode=mode, use_multipart=False)
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                return False
            except FileNotFoundError as error:
                if tag is None or _code(error) == "NoSuchBucket":
                    raise
                return False
            return True

        return self._call(key, send)

    def _is_file_replaced(self, key: str, data: bytes, tag: str) -> bool:
        """Replace a file, under a lock, because obstore compares no ETags of files."""
        folder = Path("/", self.address.prefix, ".blobstore")
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "names.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._api.head(self._reading, key)["e_tag"] != tag:
                return False
            self._api.put(self._writing, key, data, use_multipart=False)
            return True

    def _find(self, key: str, send: Callable[[], _Found]) -> _Found | None:
        """Return what a request for an object finds, None if there is no such object."""

        def find() -> _Found | None:
            try:
                return send()
            except FileNotFoundError as error:
                if _code(error) == "NoSuchBucket":
                    raise
                return None

        return self._call(key, find)

    def _call(self, key: str, send: Callable[[], _Found], *, may_repeat: bool = True) -> _Found:
        """Send requests, once more if access was denied and the user's credentials have changed since."""
        with _translated(self._name(key)):
            settings = self._settings
            try:
                return interrupts.call(send)
            except Exception as error:
                if not (_is_denied(error) and self._renew(settings) and may_repeat):
                    raise
            return interrupts.call(send)

    def _renew(self, used: dict[str, str]) -> bool:
        """Read the user's settings again; return whether they differ from those that were used."""
        with self._lock:
            if self._settings is used:
                found = _settings(self.address)
                if found == used:
                    return False
                self._reading, self._writing = _connect(self.address, found)
                self._settings = found
            return True

    @property
    def _errors(self) -> Any:
        return self._api.exceptions

    def _name(self, key: str) -> str:
        return quote(f"{self.address}/{key}")


def _connect(address: StoreAddress, settings: dict[str, str]) -> tuple[Any, Any]:
    """Return what reads, and what writes."""
    from obstore import store

    prefix = address.prefix or None
    if address.scheme == "file":
        files = store.LocalStore(f"/{address.prefix}", automatic_cleanup=False, mkdir=True)
        return files, files
    client: dict[str, Any] = {"timeout": _TIMEOUT, "connect_timeout": "10s"}
    config: Any = dict(settings)
    if address.scheme == "s3":
        client["allow_http"] = settings.get("endpoint", "").startswith("http://")
        if bundle := config.pop("ca_bundle", None):
            client["root_certificate"] = Path(bundle).read_bytes()
    kinds: dict[str, Any] = {"gs": store.GCSStore, "az": store.AzureStore, "s3": store.S3Store}
    reading, writing = (
        kinds[address.scheme](
            address.bucket,
            prefix=prefix,
            config=config,
            client_options=client | more,
            retry_config=_RETRIES,
        )
        for more in ({"read_timeout": _STALL}, {})
    )
    return reading, writing


def _settings(address: StoreAddress) -> dict[str, str]:
    """Return the user's settings for S3. The environment comes before the profile.

    AWS's variables: https://docs.aws.amazon.com/sdkref/latest/guide/settings-reference.html
    """
    if address.scheme != "s3":
        return {}
    environment = os.environ
    found = _profile(environment)
    if "AWS_ACCESS_KEY_ID" in environment:
        found = {key: found[key] for key in found.keys() - set(_ENVIRONMENT_KEYS.values())}
        for variable, key in _ENVIRONMENT_KEYS.items():
            if variable in environment:
                found[key] = environment[variable]
    for key, variables in _OTHERS.items():
        values = filter(None, map(environment.get, variables))
        if value := next(values, None):
            found[key] = value
    is_alone = not found.keys() & {"access_key_id"} and not any(map(environment.get, _ROLES))
    if is_alone and environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        raise RemoteRefused(
            f"{quote(address)}: there are no credentials in the environment or the profile",
            advice="set AWS_PROFILE or AWS_ACCESS_KEY_ID, or for a public bucket "
            "AWS_SKIP_SIGNATURE=true",
        )
    return found


def _profile(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of the user's profile.

    AWS's files: https://docs.aws.amazon.com/sdkref/latest/guide/file-format.html
    """
    name = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or "default"
    settings: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        path = Path(environment.get(variable) or Path("~/.aws", file)).expanduser()
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read_string(path.read_text(encoding="utf-8"))
        except OSError:
            continue
        except (configparser.Error, UnicodeDecodeError):
            # The parser's message may show a line with a secret.
            raise RemoteError(f"{quote(path)} is not a valid file of AWS's tools") from None
        if parser.has_section(section):
            settings |= dict(parser[section])
    return {ours: settings[theirs] for theirs, ours in _PROFILE_KEYS.items() if theirs in settings}


class _translated:  # noqa: N801
    """Gives errors of obstore our types, and one line."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is None or isinstance(error, BlobstoreError):
            return
        from obstore import exceptions

        found = _STATUS.search(str(error))
        status, code = found.groups() if found else (None, None)
        shown = f" (status {', '.join(filter(None, (status, code)))})" if status else ""
        if code in _EXPIRED:
            raise RemoteRefused(
                f"{self._what}: the credentials have expired{shown}",
                advice="renew them, and repeat",
            ) from None
        if code == "NoSuchBucket":
            raise RemoteError(f"{self._what}: there is no such bucket{shown}") from None
        if _is_denied(error):
            raise RemoteRefused(
                f"{self._what}: access denied{shown}",
                advice="check the credentials, which may have expired, and the permissions of the "
                "bucket",
            ) from None
        if status in _THROTTLED:
            raise RemoteError(
                f"{self._what}: the server is overloaded, and refuses requests for too long{shown}",
                advice="try again later, or with fewer streams",
            ) from None
        if status in _REDIRECTED or "redirect" in str(error):
            raise RemoteError(
                f"{self._what}: the server redirects to another place{shown}",
                advice="set AWS_REGION to the region of the bucket, or check AWS_ENDPOINT_URL",
            ) from None
        if isinstance(error, (exceptions.BaseError, ValueError, OSError, NotImplementedError)):
            raise RemoteError(f"{self._what}: {_line(error)}{shown}") from None


def _is_denied(error: BaseException) -> bool:
    from obstore import exceptions

    if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
        return True
    found = _STATUS.search(str(error))
    if found is None or found[1] not in _DENIED:
        return False
    return found[1] != "400" or found[2] is None or found[2] in _EXPIRED


def _code(error: BaseException) -> str | None:
    """Return S3's code of an error."""
    found = _STATUS.search(str(error))
    return found[2] if found else None


def _line(error: BaseException) -> str:
    """Return the end of the first line of an error, and its cause, which say what went wrong."""
    first, _, rest = str(error).partition("\n")
    if _STATUS.search(first):
        return "the request failed"
    cause = _CAUSE.search(rest)
    why = f" ({cause[1] or 'timed out'})" if cause else ""
    return quote(f"{first.rpartition(' - ')[2][:300]}{why}")
