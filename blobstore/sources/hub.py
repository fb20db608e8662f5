"""Downloads repositories of the Hugging Face Hub, and verifies them.

Tokens, cache, offline mode and endpoint are those of the Hub's own library, as its users know them. It sends no
request, because it believes what servers say: so ``hub_client`` does. Each file is compared with the listing of the exact commit:
sha256 for large files, git's sha1 for small ones. Which files are needed is decided from the listing and
a few small files, before anything else is downloaded.
"""

from __future__ import annotations

import errno
import glob
import os
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from blobstore.core.digest import Digest
from blobstore.core.escape import escape, join_some, quote
from blobstore.core.files import read_regular
from blobstore.core.libraries import optional_libraries
from blobstore.core.workers import WorkerPool
from blobstore.errors import (
    BlobstoreError,
    DamagedSource,
    MissingLibrary,
    RemoteError,
    RemoteRefused,
    SourceError,
    SourceNotFound,
    UsageError,
)
from blobstore.http.retry import Patience
from blobstore.sources import hub_files
from blobstore.sources.base import DEFAULT_OPTIONS
from blobstore.sources.fetched_tree import FetchedTree
from blobstore.sources.file_tree import CACHED_REPOSITORY
from blobstore.sources.hub_client import HubClient, is_server_url
from blobstore.sources.hub_listing import (
    COMMIT,
    REVISION,
    Listing,
    cache_listing,
    cached_listing,
    cached_snapshot,
    digester_of,
    files_in_snapshot,
    listing_of,
)
from blobstore.sources.small_files import is_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from blobstore.core.files import Opener
    from blobstore.core.progress import Progress
    from blobstore.sources.base import SourceOptions
    from blobstore.sources.fetched_tree import Downloads
    from blobstore.sources.file_tree import FileTree
    from blobstore.sources.hub_listing import Entries, ListedFile

SCHEME = "hf://"
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_ID = re.compile(rf"(?:{SCHEME})?{_PART}/{_PART}|{SCHEME}{_PART}", re.ASCII)
_URL = re.compile(r"(https?://)?(www\.)?(huggingface\.co|hf\.co)/")
_FILE = re.compile(r"([^/]+/[^/]+)/(?:resolve|blob)/([^/]+)/([^?#]+)")
"""What follows in the URL of a file: the repository, the revision and the name."""
_MAX_REPO = 96
"""The client's own limit."""
_DOWNLOADS = 8
"""Threads that download."""
_CHECKS = 2
"""Threads that hash files."""
_CHUNK = 1 << 20
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without symbolic links, on which the client moves its files to their names."""
_TEXTS = {
    "GatedRepo": "{name} is gated: accept its terms on the Hub, then log in or set HF_TOKEN",
    "RepoNotFound": "no folder and no Hub repository {name}; if it is private, log in or set HF_TOKEN",
    "RevisionNotFound": "{name}: no such revision on the Hub",
}
"""Messages by the Hub's codes of errors."""
_ATTEMPTS = 5
_MAX_TOKEN = 64 << 10
_MAX_WAIT = 120
"""Seconds to wait for a busy Hub between two attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSnapshot:
    """A repository at one commit, in the client's cache or a folder of downloads."""

    folder: Path
    repo: str
    revision: str
    """The commit's hash."""
    tree: FileTree
    """The files of the repository. Those that the options select are in ``folder``, and verified."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """The SHA-256 of large files by name, in hexadecimal digits."""
    notices: tuple[str, ...] = ()


def is_hub_id(text: str) -> bool:
    """Return whether ``text`` is ``org/name`` or ``hf://org/name``, either with ``@revision``, or a URL.

    The Hub's oldest repositories have a name of one part. They need ``hf://``: a bare word is a path.
    """
    name = _without_url(text).partition("@")[0]
    repo = name.removeprefix(SCHEME)
    is_sound = ".." not in repo and "--" not in repo and not repo.endswith(".git")
    return is_sound and len(repo) <= _MAX_REPO and _ID.fullmatch(name) is not None


def is_hub_url(text: str) -> bool:
    """Return whether ``text`` is a URL of the Hub."""
    return _URL.match(text) is not None


def _has_scheme(text: str) -> bool:
    """Return whether a Hub id cannot be a folder."""
    return text.startswith(SCHEME) or is_hub_url(text)


def parse_hub_id(text: str) -> tuple[str, str | None]:
    """Return the repository and the revision, None for the default branch.

    Raises:
        UsageError: ``text`` is not a Hub id.
    """
    repo, at, revision = _without_url(text).removeprefix(SCHEME).partition("@")
    if not is_hub_id(text) or (at and not REVISION.fullmatch(revision)):
        raise UsageError(
            f"not a Hub id: {quote(text)}; expected hf://org/name, hf://org/name@revision or the URL "
            "of a model's page"
        )
    return repo, revision or None


def with_quantization(text: str, options: SourceOptions) -> tuple[str, SourceOptions]:
    """Return the Hub id and the options of ``hf://org/name:Q4_K_M``, as llama.cpp and Ollama spell it.

    The URL of a weight file of the Hub chooses that file. Other sources stay as they are.

    Raises:
        UsageError: the options choose weights too.
    """
    if (url := _URL.match(text)) and (file := _FILE.match(text, url.end())):
        repo, revision, weights = file[1], unquote(file[2]), glob.escape(unquote(file[3]))
        start = f"{SCHEME}{repo}" + (f"@{revision}" if revision != "main" else "")
    else:
        start, _, weights = text.rpartition(":")
        if not (is_hub_id(start) or is_hub_url(start)) or Path(text).exists():
            return text, options
    if weights == "latest":
        return start, options
    if options.weights is not None:
        raise UsageError(f"{quote(text)} names the weights, and --weights others")
    return start, replace(options, weights=weights)


def _without_url(text: str) -> str:
    """Return the Hub id of a URL, and other text unchanged."""
    url = _URL.match(text)
    if url is None:
        return text
    page = urlsplit(text[url.end() :]).path.strip("/")
    repo, tree, revision = page.partition("/tree/")
    # The slashes of a revision are quoted; others would lead to a folder of the repository.
    return f"{SCHEME}{repo}@{unquote(revision.replace('/', ' '))}" if tree else f"{SCHEME}{repo}"


def download(
    text: str,
    options: SourceOptions = DEFAULT_OPTIONS,
    *,
    downloads: Downloads | None = None,
    progress: Progress | None = None,
) -> HubSnapshot:
    """Download the files of a repository that ``options`` select, and verify them.

    Files in the client's cache are verified, but not downloaded again. Others are downloaded to a folder of
    ``downloads``, or else to the cache. If the Hub cannot be asked, the cache is used only if the client is
    offline on purpose or ``text`` names a commit.

    Raises:
        UsageError: ``text`` is not a Hub id.
        SourceNotFound: the repository or the revision does not exist.
        SourceError: access is denied, the Hub cannot be reached, or there is nothing to select.
        DamagedSource: a file does not match the listing.
        MissingLibrary: the extra ``hub`` is not installed.
    """
    with _listed(text, options, downloads, is_cached=downloads is None) as (repository, notices):
        return repository.snapshot(progress, notices)


def list_files(text: str) -> FileTree:
    """Return the files of a repository; each is fetched when its path is asked for. Raises as :func:`download`."""
    with _listed(text, DEFAULT_OPTIONS) as (repository, _):
        return repository


@contextmanager
def _listed(
    text: str,
    options: SourceOptions,
    downloads: Downloads | None = None,
    *,
    is_cached: bool = False,
) -> Iterator[tuple[_Repository, list[str]]]:
    """Yield a repository and notices; ``is_cached`` says to cache the listing. Raises as :func:`download`."""
    repo, revision = parse_hub_id(text)
    try:
        with optional_libraries():
            from huggingface_hub import constants
            from huggingface_hub.file_download import repo_folder_name
    except MissingLibrary as error:
        if _has_scheme(text):
            raise
        raise error.at(f"there is no folder {quote(text)}, and for the Hub") from None
    cache = Path(constants.HF_HUB_CACHE)
    storage = cache / repo_folder_name(repo_id=repo, repo_type="model")
    with _hub_errors(repo, revision):
        client = None if constants.is_offline_mode() else _client()
        try:
            commit, entries = _ask(client, repo, revision)
        except RemoteError as error:
            is_offline = client is None
            if client is not None and client.has_answered:
                raise
            cached = cached_snapshot(storage, revision)
            if cached is None or not (is_offline or COMMIT.fullmatch(revision or "")):
                raise _unreachable(text, cached, is_offline=is_offline) from error
            reason = "offline" if is_offline else "the Hub cannot be reached"
            commit = f"commit {cached.name} of the cache"
            notices = [f"{reason}: {_name(repo, revision)} is {commit}"]
            listed = cached_listing(cached)
            if listed is None:
                listed = files_in_snapshot(cached)
                notices.append("the Hub's listing is not in the cache, so files may be missing")
            yield _Repository(repo, storage, cached, listed, options, boundary=cache), notices
            return
        snapshot = folder = storage / "snapshots" / commit
        listing = listing_of(entries.items())
        if downloads is not None:
            # Downloads of other weights do not wait for this one.
            folder = downloads.folder(f"{SCHEME}{repo}", commit, options.weights or "") / commit
        repository = _Repository(
            repo, storage, folder, listing, options, downloads, boundary=cache, client=client
        )
        yield repository, []
        if is_cached:
            with suppress(OSError):  # the model is complete without it
                cache_listing(snapshot, revision, entries)


def _ask(client: HubClient | None, repo: str, revision: str | None) -> tuple[str, Entries]:
    """Return the commit of a revision and its files. Raises RemoteError, also without a client."""
    if client is None:
        raise RemoteError("offline")
    commit = client.commit(repo, revision)
    return commit, client.entries(repo, commit)


def _client() -> HubClient:
    """Return a client with the settings of the Hub's own library."""
    from huggingface_hub import constants

    token = _token()
    if not is_server_url(constants.ENDPOINT):
        raise SourceError(f"HF_ENDPOINT is not the URL of a server: {quote(constants.ENDPOINT)}")
    if not (token.isascii() and token.isprintable()):
        raise SourceError("HF_TOKEN, or the token of your login, has characters that no token has")
    stall = max(constants.HF_HUB_ETAG_TIMEOUT, constants.HF_HUB_DOWNLOAD_TIMEOUT)
    patience = Patience(attempts=_ATTEMPTS, longest=_MAX_WAIT, stall=stall)
    return HubClient(constants.ENDPOINT, f"Bearer {token}" if token else "", patience)


def _token() -> str:
    """Return the user's token, or an empty text. The library's functions for that send requests of their own."""
    from huggingface_hub import constants

    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return ""
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or ""
    if not token:
        with suppress(OSError, ValueError, BlobstoreError):
            token = read_regular(constants.HF_TOKEN_PATH, _MAX_TOKEN).decode()
    return token.strip()


def commit_of(text: str) -> str:
    """Return the commit that a repository is at now, as the Hub says.

    Raises:
        UsageError: ``text`` is not a Hub id.
        SourceNotFound: the repository or the revision does not exist.
        SourceError: access is denied, or the Hub cannot be reached.
    """
    repo, revision = parse_hub_id(text)
    with _hub_errors(repo, revision):
        return _client().commit(repo, revision)


def cached_repository(path: Path) -> str | None:
    """Return the repository that a folder of a cache has; None if ``path`` is no such folder."""
    inside = ("snapshots", "refs", "blobs")
    if not path.name.startswith(CACHED_REPOSITORY) or not any(
        (path / it).is_dir() for it in inside
    ):
        return None
    return path.name.removeprefix(CACHED_REPOSITORY).replace("--", "/", 1)


def open_cached(
    path: Path, options: SourceOptions = DEFAULT_OPTIONS, *, progress: Progress | None = None
) -> HubSnapshot | None:
    """Return the snapshot of a repository's folder in a cache; None if ``path`` is no such folder.

    ``path`` is ``models--org--name``, or the folder of a commit in its ``snapshots``. Only files that
    are there are selected. They are verified by the digests in their names.

    Raises:
        SourceError: there are several snapshots and none belongs to ``main``; or as :func:`download`.
        DamagedSource: a file does not have its digest; or as :func:`download`.
    """
    path = path.absolute()
    is_snapshot = COMMIT.fullmatch(path.name) is not None
    storage = path.parent.parent if is_snapshot else path
    repo = cached_repository(storage)
    if repo is None:
        return None
    there = [it for it in (storage / "snapshots").glob("*") if COMMIT.fullmatch(it.name)]
    if not there:
        raise DamagedSource(f"{quote(path)} has no snapshot of {quote(repo)}")
    folder = path if is_snapshot else cached_snapshot(storage, None)
    if folder is None and len(there) != 1:
        names = ", ".join(sorted(map(quote, there)))
        raise SourceError(
            f"{quote(path)} has no snapshot of the branch main; choose one of its snapshots: {names}"
        )
    folder = folder or there[0]
    found = files_in_snapshot(folder)
    listed = cached_listing(folder) or {}
    folders = {name.rpartition("/")[0] for name in found}
    missing = [
        quote(name)
        for name in sorted(listed.keys() - found.keys())
        if is_kept(name) and name.rpartition("/")[0] in folders
    ]
    notices = []
    if missing:
        notices.append(f"left out: {join_some(missing, 5)} of {repo}, not in the cache")
    repository = _Repository(repo, storage, folder, found, options, boundary=storage)
    return repository.snapshot(progress, notices)


def _unreachable(text: str, cached: Path | None, *, is_offline: bool) -> SourceError:
    repo, revision = parse_hub_id(text)
    name = _name(repo, revision)
    if not _has_scheme(text):
        name = f"there is no folder {quote(text)}, and as a Hub id {name}"
    if is_offline:
        return SourceError(f"{name}: it is not in the cache; unset HF_HUB_OFFLINE to download it")
    advice = "check the network and HF_ENDPOINT"
    if cached is not None:
        advice += f", or set HF_HUB_OFFLINE=1 to use commit {cached.name} of the cache"
    return SourceError(f"{name}: the Hub cannot be reached; {advice}")


class _Repository(FetchedTree):
    """The files of a repository at one commit."""

    def __init__(
        self,
        repo: str,
        storage: Path,
        folder: Path,
        listing: Listing,
        options: SourceOptions,
        downloads: Downloads | None = None,
        *,
        boundary: Path,
        client: HubClient | None = None,
    ) -> None:
        """Store the arguments.

        Args:
            repo: the repository.
            storage: its folder in the cache.
            folder: its snapshot in the cache, or a folder of downloads; it need not exist yet. It has the
                name of the commit.
            listing: its files.
            options: what to select.
            downloads: what has ``folder``; None for the cache.
            boundary: the folder that links must not leave.
            client: downloads files that are not in the cache; None to download none.
        """
        listed = {file.name: file.size for file in listing.values()}
        super().__init__(folder, listed, options, f"{SCHEME}{repo}", downloads)
        self._repo = repo
        self._storage = storage
        self._listing = listing
        self._client = client
        self._boundary = os.path.realpath(boundary)
        self._new = set[str]()
        """Files that were downloaded to the cache now."""

    def first_bytes(self, name: str) -> bytes | None:
        """See :class:`FetchedTree`."""
        size = self._listing[name].size
        with suppress(RemoteError):  # fetching the file reports it
            if self._client is not None and size:
                return self._client.first_bytes(self._repo, self.root.name, name, size)
        return None

    def snapshot(self, progress: Progress | None, notices: Sequence[str]) -> HubSnapshot:
        """Select files, fetch and verify them."""
        tree, names = self.take(progress)
        files = [self._listing[name] for name in names]
        return HubSnapshot(
            folder=self.root,
            repo=self._repo,
            revision=self.root.name,
            tree=tree,
            digests={file.name: file.digest for file in files if file.algorithm == "sha256"},
            notices=tuple(notices),
        )

    def left_of(self, name: str) -> int:
        """See :class:`FetchedTree`."""
        file = self._listing[name]
        is_there = self._cached(file) is not None or (self.root / name).exists()
        return 0 if is_there else file.size

    def fetch(self, names: Sequence[str], progress: Progress | None) -> None:
        """See :class:`FetchedTree`."""
        files = [self._listing[name] for name in names]
        if self._client is not None:
            self._download(self._client, files, progress)
        pool = WorkerPool(_CHECKS, progress, sum(file.size for file in files))
        pool.run(files, partial(self._check, pool))

    def _cached(self, file: ListedFile) -> Path | None:
        """Return the path of a file in the client's cache; None if it has not been downloaded to it."""
        places = [self._storage / "snapshots" / self.root.name / file.name]
        # The client looks itself whether another commit has the same file.
        if self._downloads is not None:
            places.append(self._storage / "blobs" / file.digest)
        return next((place for place in places if place.is_file()), None)

    def _download(
        self, client: HubClient, files: Sequence[ListedFile], progress: Progress | None
    ) -> None:
        """Download files that the client's cache lacks; a folder of downloads gets links to the others."""
        missing = []
        for file in files:
            if (path := self._cached(file)) is None:
                missing.append(file)
            elif self._downloads is not None:
                hub_files.link(path, self.root / file.name)
        pool = WorkerPool(_DOWNLOADS, progress, sum(file.size for file in missing))

        def fetch(file: ListedFile) -> None:
            try:
                if self._downloads is None:
                    self._fetch_to_cache(client, file, pool)
                elif not (path := self.root / file.name).exists():
                    # Outside the folder of the commit, whose files have any name.
                    part = self.root.with_name(f"{Digest.of(file.name.encode()).hex}.incomplete")
                    hub_files.fetch(client, self._repo, self.root.name, file, part, path, pool)
            except DamagedSource as error:
                raise error.at(_name(self._repo, self.root.name)) from error
            except RemoteRefused as error:
                if error.code != "EntryNotFound":
                    raise
                raise DamagedSource(
                    f"file {quote(file.name)} of {_name(self._repo, self.root.name)}: the Hub lists it, "
                    "but does not serve it; choose another revision"
                ) from error

        pool.run(missing, fetch, client.abort)

    def _fetch_to_cache(self, client: HubClient, file: ListedFile, pool: WorkerPool) -> None:
        """Download a file as the Hub's library does, with its lock, and under its names: the digest that is listed."""
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # not in __all__

        blob = self._storage / "blobs" / file.digest
        lock = self._storage.parent / ".locks" / self._storage.name / f"{file.digest}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if blob.exists():
                pool.report(file.size, f"fetching {escape(file.name)}")
            else:
                part = blob.with_name(f"{file.digest}.incomplete")
                hub_files.fetch(client, self._repo, self.root.name, file, part, blob, pool)
                self._new.add(file.name)
            place = self.root / file.name
            try:
                hub_files.link(Path(os.path.relpath(blob, place.parent)), place)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                blob.replace(place)

    def _check(self, pool: WorkerPool, file: ListedFile) -> None:
        """Compare a file with the listing: a job of ``pool``."""
        what = f"checking {escape(file.name)}"
        link = self.root / file.name
        self.versions.record(link)
        opener = partial(self.versions.open, looks=False)
        # A folder of downloads has files of its own, and links to the cache.
        is_own = file.name in self._new or (self._downloads is not None and not link.is_symlink())
        try:
            cache = "" if is_own else self._boundary
            fault = _fault_of(link, file, cache, opener, lambda count: pool.report(count, what))
        except (OSError, ValueError) as error:
            fault = f"it cannot be read: {_line(error)}; check {quote(link)}"
        if fault is not None:
            if file.name in self._new:  # other programs would take it for the file
                (self._storage / "blobs" / file.digest).unlink(missing_ok=True)
                link.unlink(missing_ok=True)
            raise DamagedSource(
                f"file {quote(file.name)} of {_name(self._repo, self.root.name)} does not match the "
                f"Hub's listing: {fault}"
            )


def _fault_of(
    link: Path, file: ListedFile, cache: str, opener: Opener, report: Callable[[int], None]
) -> str | None:
    """Return what is wrong with a file and what to do about it; None if it is intact. ``cache`` may be empty."""
    path = Path(os.path.realpath(link))  # unlike resolve(), it survives a loop of links
    if cache and not path.is_relative_to(cache):
        # The advice is to remove the link: its target is not part of the cache.
        return f"it is a link out of the cache; remove {quote(link)} and try again"
    if not path.is_file():
        return "it is not in the cache; try again with the Hub in reach"
    again = f"remove {quote(path)} and try again" if cache else "try again"
    size = path.stat().st_size
    if size != file.size:
        return f"it has {size} bytes, the Hub lists {file.size}; {again}"
    if not file.algorithm:
        return None
    digester = digester_of(file)
    buffer = memoryview(bytearray(_CHUNK))
    with open(opener(link)[0], "rb", buffering=0) as stream:  # noqa: PTH123 - a descriptor
        while count := stream.readinto(buffer):
            digester.update(buffer[:count])
            report(count)
    digest = digester.hexdigest()
    if digest != file.digest:
        return f"its {file.algorithm} is {digest}, the Hub lists {file.digest}; {again}"
    return None


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Convert errors of the network and the disk to one that names the repository."""
    name = _name(repo, revision)
    try:
        yield
    except RemoteError as error:
        status, is_refused = error.status, error.status in (401, 403)
        if text := _TEXTS.get(error.code or ("RepoNotFound" if status == 401 else "")):
            kind = SourceError if error.code == "GatedRepo" else SourceNotFound
            raise kind(text.format(name=name)) from error
        message = f"the Hub answered with status {status}" if status else error.message
        later = "try again later" if status else "check the network and try again"
        advice = "log in, or set HF_TOKEN" if is_refused else error.advice or later
        raise SourceError(f"{name}: {message}", advice=advice) from error
    except OSError as error:
        raise SourceError(f"{name}: the download failed: {_line(error)}") from error


def _line(error: BaseException) -> str:
    line = str(error).partition("\n")[0]
    return escape(line, 200).rstrip(".") or type(error).__name__


def _name(repo: str, revision: str | None) -> str:
    return quote(f"{repo}@{revision}" if revision else repo)
