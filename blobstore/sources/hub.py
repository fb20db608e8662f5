"""Repositories of the Hugging Face Hub, fetched through its own client and proved whole.

The client decides about tokens, cache, offline mode and endpoint, as its users know them. It does not
compare what it received with what the Hub promised: a damaged body of the right length is
accepted and filed under the name of the digest that it should have. So every file is compared here with
the listing of the exact commit: sha256 for large files, git's sha1 for small ones.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from blobstore.core.escape import escape, quote
from blobstore.core.progress import Meter
from blobstore.errors import BlobstoreError, DamagedSource, SourceError, SourceNotFound, UsageError
from blobstore.sources.base import KEPT_FILES, MAX_FILE_DEPTH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from blobstore.core.progress import Progress

SCHEME = "hf://"
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_ID = re.compile(rf"(?:{SCHEME})?{_PART}/{_PART}|{SCHEME}{_PART}", re.ASCII)
# What git allows in a reference, so that a revision is no way out of the client's cache.
_REVISION = re.compile(r"(?!.*\.\.)[^\s/~^:?*\[\\-][^\s~^:?*\[\\]*")
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_DIGESTS = {"sha256": re.compile(r"[0-9a-f]{64}", re.ASCII), "sha1": _COMMIT}
_WANTED = ("*.safetensors", *KEPT_FILES)
_MAX_REPO, _DOWNLOADS, _CHECKS = 96, 4, 2  # the first is the client's own bound
_CHUNK = 1 << 20
# By name, as the client is not imported yet; the nearest base of an error decides.
_TEXTS = {
    "GatedRepoError": "{name} is gated: accept its terms on the Hub, then log in or set HF_TOKEN",
    "RepositoryNotFoundError": "no folder and no Hub repository {name}; if it is private, log in or set HF_TOKEN",
    "RevisionNotFoundError": "{name}: no such revision on the Hub",
    "LocalEntryNotFoundError": "{name}: the Hub cannot be reached and the cache does not hold it whole; check the network, HF_HUB_OFFLINE and HF_ENDPOINT",
    "HfHubHTTPError": "{name}: the Hub answered with status {status}; {advice}",
    "HFValidationError": "not a Hub id: {name}",
    "Exception": "{name}: fetching failed: {reason}; check the network and try again",
}
_KINDS: dict[str, type[BlobstoreError]] = {
    "RepositoryNotFoundError": SourceNotFound,
    "RevisionNotFoundError": SourceNotFound,
    "HFValidationError": UsageError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSnapshot:
    """A repository at one commit, in the client's cache."""

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
    """Tell whether ``text`` is ``org/name`` or ``hf://org/name``, either with ``@revision``.

    The Hub's oldest repositories have one part; they need the ``hf://``, as a bare word is a path.
    """
    name = text.partition("@")[0]
    repo = name.removeprefix(SCHEME)
    is_sound = ".." not in repo and "--" not in repo and not repo.endswith(".git")
    return is_sound and len(repo) <= _MAX_REPO and _ID.fullmatch(name) is not None


def parse_hub_id(text: str) -> tuple[str, str | None]:
    """Return the repository and the revision, None for the default branch.

    Raises:
        UsageError: ``text`` is no Hub id.
    """
    repo, at, revision = text.removeprefix(SCHEME).partition("@")
    if not is_hub_id(text) or (at and not _REVISION.fullmatch(revision)):
        raise UsageError(
            f"not a Hub id: {quote(text)}; expected hf://org/name or hf://org/name@revision"
        )
    return repo, revision or None


def download(text: str, *, progress: Progress | None = None) -> HubSnapshot:
    """Fetch the files of a repository that a store keeps, and check them against its listing.

    Files that the client's cache has are not fetched again, but they are checked. Without the Hub
    (offline mode, no network) the cached snapshot is used, compared with the listing that the client
    cached; a notice says so if there is none.

    Raises:
        UsageError: ``text`` is no Hub id.
        SourceNotFound: there is no such repository or revision.
        SourceError: access is denied, or the Hub cannot be reached and the cache does not help.
        DamagedSource: a file is not what the listing says.
    """
    repo, revision = parse_hub_id(text)
    with _client_errors(repo, revision):
        found = _list(repo, revision)
        if found is None:
            folder, listed = _cached(repo, revision)
        else:
            commit, listed = found
            folder = _fetch(repo, revision, commit, listed, progress)
    if listed is not None:
        _check(folder, repo, listed, progress)
        return HubSnapshot(folder=folder, repo=repo, revision=folder.name)
    what = f"the Hub could not be asked: {_name(repo, revision)} was taken from the cache"
    notices = (f"{what}, its files not compared with the Hub's listing",)
    return HubSnapshot(folder=folder, repo=repo, revision=folder.name, notices=notices)


def _list(repo: str, revision: str | None) -> tuple[str, list[_Listed]] | None:
    """Return the commit and its wanted files; None if the Hub cannot be asked."""
    import httpx2
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    api = HfApi()
    # Without a timeout of ours, the client waits for ever on a Hub that takes the connection only.
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
        raise  # some are ValueErrors, and all say more than the next clause
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SourceError(
            f"{_name(repo, revision)}: what answered is not the Hub, or its listing is malformed; "
            "check HF_ENDPOINT, HF_TOKEN and the network"
        ) from error


def _wanted(tree: Iterable[Any]) -> list[_Listed]:
    """Return the files of a listing that a store keeps: checkpoints where nothing better is."""
    from huggingface_hub import RepoFile

    files = [item for item in tree if isinstance(item, RepoFile)]
    safe = {os.path.dirname(it.path) for it in files if it.path.endswith(".safetensors")}  # noqa: PTH120
    return [_listed(item) for item in files if _is_wanted(item.path, safe)]


def _listed(item: Any) -> _Listed:
    """Return a listed file, checked (ValueError): the client takes any JSON for size and digest."""
    large = item.lfs
    size, algorithm, digest = (
        (large.size, "sha256", large.sha256) if large else (item.size, "sha1", item.blob_id)
    )
    if type(size) is not int or size < 0 or not _DIGESTS[algorithm].fullmatch(digest):
        raise ValueError(f"no size or digest of {quote(item.path)}")
    return _Listed(item.path, size, algorithm, digest)


def _is_wanted(path: str, safe: set[str]) -> bool:
    *folders, name = path.split("/")
    if len(folders) >= MAX_FILE_DEPTH or not {"", ".", ".."}.isdisjoint((*folders, name)):
        return False
    wanted = _WANTED if "/".join(folders) in safe else (*_WANTED, "*pytorch_model*.bin")
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)


def _fetch(
    repo: str,
    revision: str | None,
    commit: str,
    listed: Sequence[_Listed],
    progress: Progress | None,
) -> Path:
    """Bring the listed files into the client's cache; return the folder of the snapshot."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub import try_to_load_from_cache as cached
    from huggingface_hub.errors import RemoteEntryNotFoundError

    if not listed:
        raise SourceError(f"{_name(repo, revision)} has no files that a store keeps")
    missing = [it for it in listed if not isinstance(cached(repo, it.name, revision=commit), str)]
    meter = Meter(progress, sum(file.size for file in missing))

    def fetch(file: _Listed, stop: threading.Event) -> None:
        count = _FileCount(meter, file, stop)
        try:
            hf_hub_download(repo, file.name, revision=commit, tqdm_class=_bar_class(count))
        except RemoteEntryNotFoundError as error:
            wrong = "the Hub lists it, but does not serve it; name another revision"
            raise DamagedSource(
                f"file {quote(file.name)} of {_name(repo, commit)}: {wrong}"
            ) from error
        count.add(file.size)

    for _ in _each(fetch, missing, _DOWNLOADS):
        pass
    # All is cached by now; this leaves the branch's commit and listing there for offline use.
    first, quiet = listed[0].name, _bar_class(None)
    snapshot_download(
        repo, revision=revision, allow_patterns=[glob.escape(first)], tqdm_class=quiet
    )
    path = hf_hub_download(repo, first, revision=commit, tqdm_class=quiet)
    return Path(path).parents[first.count("/")]


class _Stopped(Exception):
    """Ends a thread whose result nobody waits for."""


class _FileCount:
    """Counts the bytes of one file towards a meter, and never more than it has.

    The client reports no bytes that are cached under another name, and some twice after a retry.
    """

    def __init__(self, meter: Meter, file: _Listed, stop: threading.Event) -> None:
        self._meter = meter
        self._size = file.size
        self._what = f"fetching {escape(file.name)}"
        self._stop = stop
        self._seen = 0

    def add(self, count: int) -> None:
        if self._stop.is_set():
            raise _Stopped
        seen = min(max(self._seen + count, 0), self._size)
        self._meter.add(seen - self._seen, self._what)
        self._seen = seen


def _bar_class(count: _FileCount | None) -> Any:
    """Return what the client takes for a progress bar: it reports to ``count``, prints nothing."""

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
            """Count nothing: a class without this gets a second bar for the bytes on the wire."""

    return Bar


def _check(folder: Path, repo: str, listed: Sequence[_Listed], progress: Progress | None) -> None:
    """Compare every file with the listing."""
    from huggingface_hub import constants

    meter = Meter(progress, sum(file.size for file in listed))
    cache = os.path.realpath(constants.HF_HUB_CACHE)

    def check(file: _Listed, stop: threading.Event) -> str | None:
        def advance(count: int) -> None:
            if stop.is_set():
                raise _Stopped
            meter.add(count, f"checking {escape(file.name)}")

        link = folder / file.name
        try:
            return _compare(link, file, cache, advance)
        except (OSError, ValueError) as error:
            return f"it cannot be read: {_reason(error)}; check {quote(link)}"

    for file, wrong in _each(check, listed, _CHECKS):
        if wrong is not None:
            what = f"file {quote(file.name)} of {_name(repo, folder.name)}"
            raise DamagedSource(f"{what} is not what the Hub lists: {wrong}")


def _compare(link: Path, file: _Listed, cache: str, advance: Callable[[int], None]) -> str | None:
    """Return what is wrong with a cached file and what to do, None if nothing is."""
    path = Path(os.path.realpath(link))  # unlike resolve(), it survives a loop of links
    if not path.is_relative_to(cache):
        # The advice names the link: what it leads to is not the cache's to lose.
        return f"it is a link out of the cache; remove {quote(link)} and try again"
    if not path.is_file():
        return "it is not in the cache; try again with the Hub in reach"
    again = f"remove {quote(path)} and try again"
    size = path.stat().st_size
    if size != file.size:
        return f"it has {size} bytes, the Hub lists {file.size}; {again}"
    digest = _digest(path, file, advance)
    if digest != file.digest:
        return f"its {file.algorithm} is {digest}, the Hub lists {file.digest}; {again}"
    return None


def _digest(path: Path, file: _Listed, advance: Callable[[int], None]) -> str:
    digester = hashlib.new(file.algorithm, usedforsecurity=False)
    if file.algorithm == "sha1":
        digester.update(b"blob %d\0" % file.size)  # git hashes its header too
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digester.update(buffer[:count])
            advance(count)
    return digester.hexdigest()


def _cached(repo: str, revision: str | None) -> tuple[Path, list[_Listed] | None]:
    """Return the cached snapshot and its cached listing, None if there is none."""
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    # What is wanted and missing is found by the check; the client's own would count all files.
    path = snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[])
    folder = Path(path)
    try:
        return folder, _wanted(get_cached_repo_tree(repo, revision=folder.name))
    except (CachedRepoTreeNotFoundError, AttributeError, KeyError, TypeError, ValueError):
        return folder, None  # none, or one that cannot be read: nothing is proved by it


def _each(
    work: Callable[[_Listed, threading.Event], Any], files: Sequence[_Listed], threads: int
) -> Iterator[tuple[_Listed, Any]]:
    """Yield the files with the results of ``work``, as they come; stop at the first error.

    The event tells ``work`` that it is not waited for: an interrupt must not sit out a download.
    """
    stop = threading.Event()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="blobstore-hub")
    try:
        jobs = {pool.submit(work, file, stop): file for file in files}
        for job in as_completed(jobs):
            yield jobs[job], job.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _client_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Turn the client's errors into ours, each in one line."""
    import httpx2

    try:
        yield
    except BlobstoreError:
        raise
    # RuntimeError is what the client's Xet library raises; ValueError, its refusals.
    except (httpx2.HTTPError, OSError, RuntimeError, ValueError) as error:
        found = next(base for kind in type(error).__mro__ if (base := kind.__name__) in _TEXTS)
        status = getattr(getattr(error, "response", None), "status_code", 0)
        advice = "log in, or set HF_TOKEN" if status in (401, 403) else "try again later"
        name, reason = _name(repo, revision), _reason(error)
        raise _KINDS.get(found, SourceError)(
            _TEXTS[found].format(name=name, status=status, advice=advice, reason=reason)
        ) from error


def _reason(error: BaseException) -> str:
    """Return the first line of an error, or only its kind where that would show the token."""
    from huggingface_hub import get_token

    line = str(error).partition("\n")[0]
    token = get_token()
    if not line or (token and token in line):
        return type(error).__name__
    return escape(line, 200).rstrip(".")


def _name(repo: str, revision: str | None) -> str:
    return quote(f"{repo}@{revision}" if revision else repo)
