"""Downloads repositories of the Hugging Face Hub through its own client, and verifies them.

Tokens, cache, offline mode and endpoint are those of the client, as its users know them. The client
does not verify what it receives: it accepts a damaged body of the right length, and caches it under
the digest that it should have. So each file is compared here with the listing of the exact commit:
sha256 for large files, git's sha1 for small ones.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from blobstore.core.escape import escape, quote
from blobstore.core.workers import WorkerPool
from blobstore.errors import BlobstoreError, DamagedSource, SourceError, SourceNotFound, UsageError
from blobstore.manifests.file_names import MAX_DEPTH
from blobstore.sources.base import KEPT_FILES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from blobstore.core.progress import Progress

SCHEME = "hf://"
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_ID = re.compile(rf"(?:{SCHEME})?{_PART}/{_PART}|{SCHEME}{_PART}", re.ASCII)
# The references that git allows, so that a revision cannot lead out of the client's cache.
_REVISION = re.compile(r"(?!.*\.\.)[^\s/~^:?*\[\\-][^\s~^:?*\[\\]*")
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_DIGESTS = {"sha256": re.compile(r"[0-9a-f]{64}", re.ASCII), "sha1": _COMMIT}
_WANTED = ("*.safetensors", *KEPT_FILES)
_MAX_REPO = 96
"""The client's own limit."""
_DOWNLOADS = 4
"""Threads that download."""
_CHECKS = 2
"""Threads that hash files."""
_CHUNK = 1 << 20
# By class name, because the client is not imported yet. The nearest base of an error counts.
_TEXTS = {
    "GatedRepoError": "{name} is gated: accept its terms on the Hub, then log in or set HF_TOKEN",
    "RepositoryNotFoundError": "no folder and no Hub repository {name}; if it is private, log in or "
    "set HF_TOKEN",
    "RevisionNotFoundError": "{name}: no such revision on the Hub",
    "LocalEntryNotFoundError": "{name}: the Hub cannot be reached, and the cache has not all of its "
    "files; check the network, HF_HUB_OFFLINE and HF_ENDPOINT",
    "HfHubHTTPError": "{name}: the Hub answered with status {status}; {advice}",
    "HFValidationError": "not a Hub id: {name}",
    "Exception": "{name}: the download failed: {reason}; check the network and try again",
}
_KINDS: dict[str, type[BlobstoreError]] = {
    "RepositoryNotFoundError": SourceNotFound,
    "RevisionNotFoundError": SourceNotFound,
    "HFValidationError": UsageError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSnapshot:
    """A repository at one commit in the client's cache."""

    folder: Path
    repo: str
    revision: str
    """The commit's hash."""
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Listed:
    """A file as the Hub lists it. ``algorithm`` is ``sha256``, or ``sha1`` of a git blob."""

    name: str
    size: int
    algorithm: str
    digest: str


def is_hub_id(text: str) -> bool:
    """Return whether ``text`` is ``org/name`` or ``hf://org/name``, either with ``@revision``.

    The Hub's oldest repositories have a name of one part. They need ``hf://``: a bare word is a path.
    """
    name = text.partition("@")[0]
    repo = name.removeprefix(SCHEME)
    is_sound = ".." not in repo and "--" not in repo and not repo.endswith(".git")
    return is_sound and len(repo) <= _MAX_REPO and _ID.fullmatch(name) is not None


def parse_hub_id(text: str) -> tuple[str, str | None]:
    """Return the repository and the revision, None for the default branch.

    Raises:
        UsageError: ``text`` is not a Hub id.
    """
    repo, at, revision = text.removeprefix(SCHEME).partition("@")
    if not is_hub_id(text) or (at and not _REVISION.fullmatch(revision)):
        raise UsageError(
            f"not a Hub id: {quote(text)}; expected hf://org/name or hf://org/name@revision"
        )
    return repo, revision or None


def download(text: str, *, progress: Progress | None = None) -> HubSnapshot:
    """Download the files of a repository that a store keeps, and verify them against its listing.

    Files in the client's cache are verified, but not downloaded again. Without the Hub (offline mode,
    no network) the cached snapshot is used and compared with the listing that the client cached; if
    there is none, a notice says so.

    Raises:
        UsageError: ``text`` is not a Hub id.
        SourceNotFound: the repository or the revision does not exist.
        SourceError: access is denied, or the Hub cannot be reached and the cache is incomplete.
        DamagedSource: a file does not match the listing.
    """
    repo, revision = parse_hub_id(text)
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    listed: list[_Listed] | None = None
    with _client_errors(repo, revision):
        if (found := _list(repo, revision)) is not None:
            commit, listed = found
            folder = _fetch(repo, revision, commit, listed, progress)
        else:
            # The check finds missing files; that of the client would expect files that we do not need.
            folder = Path(
                snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[])
            )
            # The cached listing may be missing or unreadable.
            with suppress(
                CachedRepoTreeNotFoundError, AttributeError, KeyError, TypeError, ValueError
            ):
                listed = _wanted(get_cached_repo_tree(repo, revision=folder.name))
    if listed is not None:
        _check(folder, repo, listed, progress)
        return HubSnapshot(folder=folder, repo=repo, revision=folder.name)
    notice = (
        f"the Hub cannot be reached: {_name(repo, revision)} is read from the cache, without "
        "comparing its files with the Hub's listing"
    )
    return HubSnapshot(folder=folder, repo=repo, revision=folder.name, notices=(notice,))


def _list(repo: str, revision: str | None) -> tuple[str, list[_Listed]] | None:
    """Return the commit and its wanted files; None if the Hub cannot be reached."""
    import httpx2
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    api = HfApi()
    # Without a timeout, the client waits forever for a Hub that accepts connections and is silent.
    wait = constants.HF_HUB_ETAG_TIMEOUT
    try:
        commit = api.model_info(repo, revision=revision, timeout=wait).sha
        if commit is None or not _COMMIT.fullmatch(commit):
            raise SourceError(f"the Hub names no commit for {_name(repo, revision)}")
        tree = api.list_repo_tree(repo, recursive=True, revision=commit)
        return commit, _wanted(tree)
    except (OfflineModeIsEnabled, httpx2.ConnectError, httpx2.TimeoutException):
        return None
    except HfHubHTTPError:
        raise  # some are ValueErrors, but their own message is better
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SourceError(
            f"{_name(repo, revision)}: the server is not the Hub, or its listing is malformed; "
            "check HF_ENDPOINT, HF_TOKEN and the network"
        ) from error


def _wanted(tree: Iterable[Any]) -> list[_Listed]:
    """Return the files that a store keeps, with checkpoints only in folders without safetensors.

    Raises ValueError if the listing is malformed.
    """
    from huggingface_hub import RepoFile

    files = [item for item in tree if isinstance(item, RepoFile)]
    safe = {it.path.rpartition("/")[0] for it in files if it.path.endswith(".safetensors")}
    wanted = []
    for item in files:
        folder, _, name = item.path.rpartition("/")
        parts = item.path.split("/")
        if len(parts) > MAX_DEPTH or not {"", ".", ".."}.isdisjoint(parts):
            continue
        patterns = _WANTED if folder in safe else (*_WANTED, "*pytorch_model*.bin")
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            continue
        large = item.lfs
        size, algorithm, digest = (
            (large.size, "sha256", large.sha256) if large else (item.size, "sha1", item.blob_id)
        )
        # The client accepts any JSON as size and digest.
        if type(size) is not int or size < 0 or not _DIGESTS[algorithm].fullmatch(digest):
            raise ValueError(f"no size or digest of {quote(item.path)}")
        wanted.append(_Listed(item.path, size, algorithm, digest))
    return wanted


def _fetch(
    repo: str,
    revision: str | None,
    commit: str,
    listed: Sequence[_Listed],
    progress: Progress | None,
) -> Path:
    """Download the listed files to the client's cache; return the folder of the snapshot."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub import try_to_load_from_cache as cached
    from huggingface_hub.errors import RemoteEntryNotFoundError

    if not listed:
        raise SourceError(f"{_name(repo, revision)} has no files that a store keeps")
    missing = [it for it in listed if not isinstance(cached(repo, it.name, revision=commit), str)]
    pool = WorkerPool(_DOWNLOADS, progress, sum(file.size for file in missing))

    def fetch(file: _Listed) -> None:
        count = _FileCount(pool, file)
        try:
            hf_hub_download(repo, file.name, revision=commit, tqdm_class=_bar_class(count))
        except RemoteEntryNotFoundError as error:
            raise DamagedSource(
                f"file {quote(file.name)} of {_name(repo, commit)}: the Hub lists it, but does not "
                "serve it; choose another revision"
            ) from error
        count.add(file.size)

    pool.run(missing, fetch)
    # All files are cached now. This caches the commit and the listing of the branch as well.
    first, quiet = listed[0].name, _bar_class(None)
    snapshot_download(
        repo, revision=revision, allow_patterns=[glob.escape(first)], tqdm_class=quiet
    )
    path = hf_hub_download(repo, first, revision=commit, tqdm_class=quiet)
    return Path(path).parents[first.count("/")]


class _FileCount:
    """Reports the bytes of one file, and never more than it has.

    The client does not report bytes that are cached under another name, and reports some twice after
    a retry.
    """

    def __init__(self, pool: WorkerPool, file: _Listed) -> None:
        self._pool = pool
        self._size = file.size
        self._what = f"fetching {escape(file.name)}"
        self._seen = 0

    def add(self, count: int) -> None:
        seen = min(max(self._seen + count, 0), self._size)
        self._pool.report(seen - self._seen, self._what)
        self._seen = seen


def _bar_class(count: _FileCount | None) -> Any:
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
            if count is not None and step:
                count.add(int(step))

        def update_transfer(self, step: float | None = 1) -> None:
            """Count nothing. Without this method, the client adds a bar for the bytes on the wire."""

    return Bar


def _check(folder: Path, repo: str, listed: Sequence[_Listed], progress: Progress | None) -> None:
    """Compare every file with the listing."""
    from huggingface_hub import constants

    pool = WorkerPool(_CHECKS, progress, sum(file.size for file in listed))
    cache = os.path.realpath(constants.HF_HUB_CACHE)

    def check(file: _Listed) -> None:
        what = f"checking {escape(file.name)}"
        link = folder / file.name
        try:
            fault = _fault_of(link, file, cache, lambda count: pool.report(count, what))
        except (OSError, ValueError) as error:
            fault = f"it cannot be read: {_reason(error)}; check {quote(link)}"
        if fault is not None:
            raise DamagedSource(
                f"file {quote(file.name)} of {_name(repo, folder.name)} does not match the Hub's "
                f"listing: {fault}"
            )

    pool.run(listed, check)


def _fault_of(link: Path, file: _Listed, cache: str, report: Callable[[int], None]) -> str | None:
    """Return the fault of a cached file and what to do about it; None if there is none."""
    path = Path(os.path.realpath(link))  # unlike resolve(), it survives a loop of links
    if not path.is_relative_to(cache):
        # The advice is to remove the link: its target is not part of the cache.
        return f"it is a link out of the cache; remove {quote(link)} and try again"
    if not path.is_file():
        return "it is not in the cache; try again with the Hub in reach"
    again = f"remove {quote(path)} and try again"
    size = path.stat().st_size
    if size != file.size:
        return f"it has {size} bytes, the Hub lists {file.size}; {again}"
    digester = hashlib.new(file.algorithm, usedforsecurity=False)
    if file.algorithm == "sha1":
        digester.update(b"blob %d\0" % file.size)  # git hashes this header too
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digester.update(buffer[:count])
            report(count)
    digest = digester.hexdigest()
    if digest != file.digest:
        return f"its {file.algorithm} is {digest}, the Hub lists {file.digest}; {again}"
    return None


@contextmanager
def _client_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Convert errors of the client to ours, with a message of one line."""
    import httpx2

    try:
        yield
    except BlobstoreError:
        raise
    # The client's Xet library raises RuntimeError; the client rejects arguments with ValueError.
    except (httpx2.HTTPError, OSError, RuntimeError, ValueError) as error:
        found = next(base for kind in type(error).__mro__ if (base := kind.__name__) in _TEXTS)
        status = getattr(getattr(error, "response", None), "status_code", 0)
        advice = "log in, or set HF_TOKEN" if status in (401, 403) else "try again later"
        name, reason = _name(repo, revision), _reason(error)
        raise _KINDS.get(found, SourceError)(
            _TEXTS[found].format(name=name, status=status, advice=advice, reason=reason)
        ) from error


def _reason(error: BaseException) -> str:
    """Return the first line of an error, or only its type if the line has the token."""
    from huggingface_hub import get_token

    line = str(error).partition("\n")[0]
    token = get_token()
    if not line or (token and token in line):
        return type(error).__name__
    return escape(line, 200).rstrip(".")


def _name(repo: str, revision: str | None) -> str:
    return quote(f"{repo}@{revision}" if revision else repo)
