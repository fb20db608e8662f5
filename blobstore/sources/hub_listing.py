"""Lists the files of a Hub repository at one commit, with sizes and digests.

The listing comes from the Hub's API, from the copy of it in the client's cache, or from the cached files:
the client names each one by its digest. The API is asked with the client's session, so that its variables and
hooks apply, but not by the client itself, which waits without a limit if a busy server asks it to. ``serve`` uses the
same functions for its upstream, with a transport that needs no client.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote as url_quote

from blobstore.core import interrupts, limits, strict_json
from blobstore.core.digest import git_digester
from blobstore.core.escape import quote, quote_place
from blobstore.core.file_kinds import HEAD
from blobstore.core.files import read_regular, write_file
from blobstore.errors import BlobstoreError, RemoteError, SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
REVISION = re.compile(r"(?!.*\.\.)[^\s/~^:?*\[\\-][^\s~^:?*\[\\]*")
"""The references that git allows, so that a revision cannot lead out of a cache, or to another address."""
DIGESTS = {"sha256": re.compile(r"[0-9a-f]{64}", re.ASCII), "sha1": COMMIT}
"""The form of digests by algorithms."""
_BUSY = (429, 503)
_MAX_TRIES = 5
_MAX_PAGES = 2000
"""Pages of a list; each page of the Hub has a thousand files."""
_MAX_WAIT = 120
"""Seconds to wait for a busy Hub, over all requests of a listing."""
_MAX_CACHED_LISTING = limits.HUB_LISTING.all
_PIECE = 1 << 20
_OF_THE_TRANSFER = frozenset({"content-encoding", "content-length", "transfer-encoding"})
"""Headers about the transfer of a body, not about its content."""
_TREE_VERSION = 1
"""Version of the client's cached listings."""


class ListedFile(NamedTuple):
    """A file as the Hub lists it.

    ``algorithm`` is ``sha256``, or ``sha1`` of a git blob. It is empty if the digest is not known.
    """

    name: str
    size: int
    algorithm: str
    digest: str


Listing = dict[str, ListedFile]
"""Files by name."""
_Entry = dict[str, Any]
"""A file in the form of the client's cache."""
Entries = dict[str, _Entry]
"""Files by name."""


def list_repository(repo: str, revision: str | None) -> tuple[str, Entries]:
    """Ask the Hub for a commit and the entries of its files.

    Raises:
        SourceError: the answer is not that of a Hub.
        RemoteError: the answer is too large.
        httpx2.HTTPError, OfflineModeIsEnabled: the Hub cannot be reached, or refuses. A busy Hub is
            asked again a few times.
    """
    hub = _Hub()
    with _answers(repo):
        commit = _commit(hub, repo, revision)
        budget = limits.Budget(limits.HUB_LISTING, "the list of files of the Hub")
        entries = dict(entries_of(hub.get(f"{repo}/tree/{commit}?recursive=true"), budget))
        listing_of(entries.items())
    return commit, entries


def find_commit(repo: str, revision: str | None) -> str:
    """Ask the Hub for the commit that a revision is now. Raises as :func:`list_repository`."""
    with _answers(repo):
        return _commit(_Hub(), repo, revision)


def _commit(hub: _Hub, repo: str, revision: str | None) -> str:
    at = f"/revision/{url_quote(revision, safe='')}" if revision else ""
    (page,) = hub.get(f"{repo}{at}")
    commit: str = strict_json.loads_any(page)["sha"]
    if not COMMIT.fullmatch(commit):
        raise SourceError(f"the Hub names no commit for {quote(repo)}")
    return commit


@contextmanager
def _answers(repo: str) -> Iterator[None]:
    """Raise SourceError if the block reads a response that is not one of the Hub."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError:
        raise  # some are ValueErrors, but their own message is better
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SourceError(
            f"{quote(repo)}: the server is not the Hub, or its listing is malformed; "
            "check HF_ENDPOINT, HF_TOKEN and the network"
        ) from error


def entries_of(pages: Iterable[bytes], budget: limits.Budget) -> Iterator[tuple[str, _Entry]]:
    """Yield the files that the pages of a tree list, in the form of the client's cache.

    Raises:
        RemoteError: there are more bytes or entries than ``budget`` has. Those beyond are not parsed.
        AttributeError, KeyError, TypeError, ValueError: a page is malformed.
    """
    for page in pages:
        budget.spend(len(page), 0)
        for file in strict_json.elements(page):
            budget.spend(0)
            if file["type"] != "file":
                continue
            entry = {"size": file["size"], "blob_id": file["oid"]}
            if large := file.get("lfs"):
                known = {"lfs_sha256": large["oid"], "lfs_size": file["size"]}
                entry |= known | {"xet_hash": file.get("xetHash")}
            yield file["path"], entry
        del page  # before the next one is fetched


def digester_of(file: ListedFile) -> hashlib._Hash:
    """Return a hasher for the kind of digest that the Hub lists for a file."""
    return git_digester(file.size) if file.algorithm == "sha1" else hashlib.new(file.algorithm)


def pages_of(url: str, ask: Callable[[str], tuple[bytes, str | None]]) -> Iterator[bytes]:
    """Yield the pages of an answer. A caller drops one before it asks for the next.

    Args:
        url: of the first page.
        ask: returns the page at a URL, and the URL of the next one.

    Raises:
        RemoteError: there are too many.
    """
    following: str | None = url
    for _ in range(_MAX_PAGES):
        if following is None:
            return
        page, following = ask(following)
        pages = [page]
        del page  # else it would stay in memory while the next one is fetched
        yield pages.pop()
    raise RemoteError(f"{quote_place(url)} has more than {_MAX_PAGES} pages")


class _Hub:
    """Asks the Hub's API, and waits for a busy Hub for a limited time in total."""

    def __init__(self) -> None:
        self._left = float(_MAX_WAIT)

    def _complete(self, send: Callable[[], AbstractContextManager[Any]]) -> Any:
        """Send a request, and return the response with its body, which is limited in size."""
        with send() as stream:
            body = limits.read_document(
                stream.iter_bytes(_PIECE),
                limits.HUB_LISTING.one,
                "a page of the Hub",
                "check HF_ENDPOINT",
            )
            headers = stream.headers.multi_items()
            kept = [item for item in headers if item[0] not in _OF_THE_TRANSFER]
            return type(stream)(
                stream.status_code, headers=kept, content=body, request=stream.request
            )

    def get(self, path: str) -> Iterator[bytes]:
        """Yield the pages of an answer."""
        from huggingface_hub import constants

        return pages_of(f"{constants.ENDPOINT}/api/models/{path}", self._ask)

    def _ask(self, url: str) -> tuple[bytes, str | None]:
        from huggingface_hub import constants

        # The client documents these, but marks nothing in this module as exported.
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # not in __all__
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        # Only the Hub itself gets the token, and not the server of another page.
        token = None if url.startswith(f"{constants.ENDPOINT}/") else False
        for tries in range(_MAX_TRIES):
            # Without a timeout, it would wait forever for a Hub that is silent.
            stream = partial(
                get_session().stream,
                "GET",
                url,
                headers=build_hf_headers(token=token),
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )
            response = interrupts.call(partial(self._complete, stream))
            if response.status_code not in _BUSY or tries + 1 == _MAX_TRIES:
                break
            seconds = retry_after(response.headers, default=2**tries)
            if seconds > self._left:
                break
            self._left -= seconds
            interrupts.sleep(seconds)
        hf_raise_for_status(response)
        return response.content, response.links.get("next", {}).get("url")


def first_bytes(repo: str, commit: str, name: str) -> bytes | None:
    """Ask the Hub for the first bytes of a file, as many as say what it is; None if it refuses.

    They are not verified, so they may only decide what is not fetched.

    Raises:
        httpx2.HTTPError, OSError: the Hub cannot be reached.
    """
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]  # not in __all__

    headers = build_hf_headers() | {"Range": f"bytes=0-{HEAD - 1}", "Accept-Encoding": "identity"}
    url, timeout = hf_hub_url(repo, name, revision=commit), constants.HF_HUB_ETAG_TIMEOUT

    def read() -> bytes | None:
        stream = get_session().stream
        with stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as answer:
            if not answer.is_success:
                return None
            found = b""
            for piece in answer.iter_bytes(HEAD):  # some servers send all of it
                found += piece
                if len(found) >= HEAD:
                    break
            return found[:HEAD]

    return interrupts.call(read)


def retry_after(headers: Any, default: float = 0) -> float:
    """Return for how many seconds a server asks its client to wait."""
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]  # not in __all__

    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    import email.utils  # imports sockets

    try:
        return max(email.utils.parsedate_to_datetime(text).timestamp() - time.time(), 0)
    except (ValueError, OverflowError):
        return default


def cached_snapshot(storage: Path, revision: str | None) -> Path | None:
    """Return the snapshot that a repository's folder in the cache has of a revision."""
    commit = revision or "main"
    if not COMMIT.fullmatch(commit):
        try:
            commit = read_regular(storage / "refs" / commit, 100).decode().strip()
        except (OSError, ValueError, BlobstoreError):
            return None
    folder = storage / "snapshots" / commit
    return folder if COMMIT.fullmatch(commit) and folder.is_dir() else None


def cached_listing(snapshot: Path) -> Listing | None:
    """Return the listing that the cache has for a snapshot; None if there is none."""
    try:
        value = strict_json.loads_any(read_regular(_tree_path(snapshot), _MAX_CACHED_LISTING))
        return (
            listing_of(value["files"].items()) if value["format_version"] == _TREE_VERSION else None
        )
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return None
    except BlobstoreError:
        return None


def cache_listing(snapshot: Path, revision: str | None, entries: Entries) -> None:
    """Write a listing and the commit of a branch to the cache, as the client does, for offline use.

    The client would ask the Hub for both once more.

    Raises:
        OSError: the cache cannot be written.
    """
    storage = snapshot.parents[1]
    tree = {"format_version": _TREE_VERSION, "files": entries}
    files = {_tree_path(snapshot): json.dumps(tree)}
    if not COMMIT.fullmatch(revision or ""):
        files[storage / "refs" / (revision or "main")] = snapshot.name
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, [content.encode()], durable=False)


def _tree_path(snapshot: Path) -> Path:
    return snapshot.parents[1] / "trees" / f"{snapshot.name}.json"


def files_in_snapshot(snapshot: Path) -> Listing:
    """Return the files of a snapshot with the digests by which the client named them.

    Without links, as on file systems that have none, the digests are not known. A broken link is listed as an
    empty file, and checking it fails.
    """
    found = {}
    for path in sorted(snapshot.rglob("*")):
        target = Path(os.path.realpath(path))
        name, digest = path.relative_to(snapshot).as_posix(), target.name
        algorithm = next((a for a, form in DIGESTS.items() if form.fullmatch(digest)), "")
        if not target.is_dir():
            size = target.stat().st_size if target.is_file() else 0
            found[name] = ListedFile(name, size, algorithm, digest)
    return found


def listing_of(entries: Iterable[tuple[str, _Entry]]) -> Listing:
    """Return the listing of files by their names and entries.

    Raises AttributeError, KeyError, TypeError or ValueError if an entry is malformed.
    """
    listing = {}
    for name, entry in entries:
        sha256, size = entry.get("lfs_sha256"), entry["size"]
        algorithm, digest = ("sha256", sha256) if sha256 else ("sha1", entry["blob_id"])
        if type(size) is not int or size < 0 or not DIGESTS[algorithm].fullmatch(digest):
            raise ValueError(f"no size or digest of {quote(name)}")
        if "\0" not in name and {"", ".", ".."}.isdisjoint(name.split("/")):
            listing[name] = ListedFile(name, size, algorithm, digest)
    return listing
