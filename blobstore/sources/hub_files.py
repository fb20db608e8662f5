"""Fetches files of the Hub to places that their listing names, and transfers the bytes with the Hub's own client.

The client's ``hf_hub_download`` makes paths of what the server says of a file: of its ``ETag``, of the commit in
``X-Repo-Commit``, and of its Xet hash. A hostile server could write to any place. Here a place follows from the listing
of the commit alone, whose digests are checked, and the layout is that of the client's cache.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

from blobstore.core.escape import escape, quote
from blobstore.errors import DamagedSource

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from huggingface_hub.utils._xet import XetFileData

    from blobstore.core.workers import WorkerPool
    from blobstore.sources.hub_listing import ListedFile

_PORTS: Final = {"http": 80, "https": 443}
_KEPT_SECONDS: Final = 120
"""The client asks again a minute before an answer expires."""


def fetch(
    repo: str, commit: str, file: ListedFile, part: Path, path: Path, count: FileCount
) -> None:
    """Download a file to ``part``, after the bytes that are there, and rename it to ``path``.

    The bytes are not compared with the digest.

    Raises:
        DamagedSource: the Hub sends more or less than it lists.
        httpx2.HTTPError, OSError, RuntimeError, ValueError: the client failed.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get, xet_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # not in __all__
    from huggingface_hub.utils._runtime import is_xet_available

    url, headers = hf_hub_url(repo, file.name, revision=commit), build_hf_headers()
    found = get_hf_file_metadata(
        url, timeout=constants.HF_HUB_ETAG_TIMEOUT, headers=headers, retry_on_errors=True
    )
    for parent in (part.parent, path.parent):
        parent.mkdir(parents=True, exist_ok=True)
    bar, xet = _bar_class(count), found.xet_file_data if is_xet_available() else None
    if not _is_of_same_server(url, xet.refresh_route if xet else found.location):
        headers.pop("authorization", None)
    if xet and _comes_from_a_server(xet, headers):
        xet_get(
            incomplete_path=part,
            xet_file_data=xet,
            headers=headers,
            expected_size=file.size,
            tqdm_class=bar,
        )
    else:
        with part.open("ab") as stream:
            if (begin := stream.tell()) > file.size:
                begin = stream.seek(stream.truncate(0))
            if begin < file.size or not begin:
                http_get(found.location, stream, resume_size=begin, headers=headers, tqdm_class=bar)
    if (size := part.stat().st_size) != file.size:
        raise count.damaged(f"the Hub sends {size} of the {file.size} bytes that it lists")
    part.replace(path)


def _comes_from_a_server(xet: XetFileData, headers: dict[str, str]) -> bool:
    """Return whether the Hub names a server for Xet. Its library takes a path, too, and would write there."""
    from huggingface_hub.utils._xet import refresh_xet_connection_info

    found = refresh_xet_connection_info(file_data=xet, headers=headers)
    # The client keeps the answer until it expires, and does not ask again now.
    is_kept = found.expiration_unix_epoch > time.time() + _KEPT_SECONDS
    return is_kept and found.endpoint.startswith(("https://", "http://"))


def _is_of_same_server(url: str, other: str) -> bool:
    """Return whether both are on one server, which may see the token. Raises ValueError."""
    one, two = map(urlsplit, (url, other))
    ports = [it.port or _PORTS.get(it.scheme) for it in (one, two)]
    return (one.scheme, one.hostname, ports[0]) == (two.scheme, two.hostname, ports[1])


def link(path: Path, place: Path) -> None:
    """Make a link to a file. Other processes read a cache, so a link that is there already stays. Raises OSError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        place.symlink_to(path)
    except FileExistsError:
        if not place.is_symlink() or place.readlink() != path:
            new = place.with_name(f".{secrets.token_hex(8)}.link")
            new.symlink_to(path)
            new.replace(place)


class FileCount:
    """Reports the bytes of one file, and ends a download that has more of them than are listed.

    The client tells its progress bar of bytes before it writes them, and takes back those that it fetches
    again. It neither reports bytes that are cached under another name, nor ends a body of chunks that has no end.
    """

    def __init__(self, pool: WorkerPool, file: ListedFile, repository: str) -> None:
        self._pool = pool
        self._file = file
        self._repository = repository
        self._seen = 0

    def add(self, count: int) -> None:
        """Report bytes. Raises DamagedSource if the file has fewer."""
        self._seen += count
        if self._seen > self._file.size:
            raise self.damaged(f"the Hub sends more than the {self._file.size} bytes that it lists")
        self._pool.report(count, f"fetching {escape(self._file.name)}")

    def damaged(self, fault: str) -> DamagedSource:
        """Return the error of a file that is not as it is listed."""
        return DamagedSource(
            f"file {quote(self._file.name)} of {self._repository} does not match the Hub's listing: "
            f"{fault}; try again"
        )

    def finish(self) -> None:
        """Report what the client did not."""
        self.add(self._file.size - self._seen)


def _bar_class(count: FileCount) -> Any:
    """Return a progress bar class for the client that reports to ``count`` and prints nothing."""

    class Bar:
        n = 0
        total = None

        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            self.update(initial)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: None

        def update(self, step: float | None = 1) -> None:
            if step:
                count.add(int(step))

        def update_transfer(self, step: float | None = 1) -> None:
            """Count nothing. Without this method, the client adds a bar for the bytes on the wire."""

    return Bar
