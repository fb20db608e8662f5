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
import re
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.errors import DamagedSource, SourceError, SourceNotFound, UsageError
from blobstore.progress import Meter
from blobstore.sources.base import KEPT_FILES, MAX_FILE_DEPTH
from blobstore.text import printable, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Self

    from blobstore.progress import Progress

SCHEME = "hf://"
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_REPO = re.compile(rf"{_PART}/{_PART}", re.ASCII)
_MAX_REPO = 96  # the client's own bound
_WANTED = ("*.safetensors", *KEPT_FILES)
_DOWNLOADS = 4
_CHECKS = 2
_CHUNK = 1 << 20


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
    """Tell whether ``text`` is ``org/name`` or ``hf://org/name``, either with ``@revision``."""
    repo = text.removeprefix(SCHEME).partition("@")[0]
    is_sound = ".." not in repo and "--" not in repo and len(repo) <= _MAX_REPO
    return is_sound and _REPO.fullmatch(repo) is not None


def parse_hub_id(text: str) -> tuple[str, str | None]:
    """Return the repository and the revision, None for the default branch.

    Raises:
        UsageError: ``text`` is no Hub id.
    """
    repo, at, revision = text.removeprefix(SCHEME).partition("@")
    if not is_hub_id(text) or (at and not revision):
        message = f"not a Hub id: {quoted(text)}; expected hf://org/name or hf://org/name@revision"
        raise UsageError(message)
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
    notices: tuple[str, ...] = ()
    if listed is None:
        notice = (
            f"the Hub could not be asked: {_name(repo, revision)} was taken from the cache, "
            "its files not compared with the Hub's listing"
        )
        notices = (notice,)
    else:
        _check(folder, repo, listed, progress)
    return HubSnapshot(folder=folder, repo=repo, revision=folder.name, notices=notices)


def _list(repo: str, revision: str | None) -> tuple[str, list[_Listed]] | None:
    """Return the commit and its wanted files; None if the Hub cannot be asked."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    api = HfApi()
    try:
        commit = api.model_info(repo, revision=revision).sha
        if commit is None:
            message = f"the Hub names no commit for {_name(repo, revision)}"
            raise SourceError(message)
        tree = api.list_repo_tree(repo, recursive=True, revision=commit)
        return commit, _wanted(tree)
    except (OfflineModeIsEnabled, httpx2.ConnectError, httpx2.TimeoutException):
        return None


def _wanted(tree: Iterable[Any]) -> list[_Listed]:
    """Return the files of a listing that a store keeps; the listing has folders too."""
    from huggingface_hub import RepoFile

    return [
        _Listed(item.path, item.lfs.size, "sha256", item.lfs.sha256)
        if item.lfs is not None
        else _Listed(item.path, item.size, "sha1", item.blob_id)
        for item in tree
        if isinstance(item, RepoFile) and _is_wanted(item.path)
    ]


def _is_wanted(path: str) -> bool:
    parts = path.split("/")
    if len(parts) > MAX_FILE_DEPTH or any(part in ("", ".", "..") for part in parts):
        return False
    return any(fnmatch.fnmatchcase(parts[-1], pattern) for pattern in _WANTED)


def _fetch(
    repo: str,
    revision: str | None,
    commit: str,
    listed: Sequence[_Listed],
    progress: Progress | None,
) -> Path:
    """Bring the listed files into the client's cache; return the folder of the snapshot."""
    from huggingface_hub import hf_hub_download, snapshot_download

    if not listed:
        message = f"{_name(repo, revision)} has no files that a store keeps"
        raise SourceError(message)
    meter = Meter(progress, sum(file.size for file in listed))

    def fetch(file: _Listed) -> None:
        bar = _bar_class(meter, f"fetching {file.name}")
        hf_hub_download(repo, file.name, revision=commit, tqdm_class=bar)

    for _ in _each(fetch, listed, _DOWNLOADS):
        pass
    # All is cached by now; this leaves the branch's commit and listing there for offline use.
    first = glob.escape(listed[0].name)
    quiet = _bar_class(Meter(None, 0), "")
    snapshot_download(repo, revision=revision, allow_patterns=[first], tqdm_class=quiet)
    path = hf_hub_download(repo, listed[0].name, revision=commit, tqdm_class=quiet)
    return Path(path).parents[listed[0].name.count("/")]


def _bar_class(meter: Meter, what: str) -> Any:
    """Return what the client takes for a progress bar: it reports to ``meter``, prints nothing."""

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

        def update(self, count: float | None = 1) -> None:
            meter.add(int(count or 0), what)

    return Bar


def _check(folder: Path, repo: str, listed: Sequence[_Listed], progress: Progress | None) -> None:
    """Compare every file with the listing."""
    from huggingface_hub import constants

    meter = Meter(progress, sum(file.size for file in listed))
    cache = Path(constants.HF_HUB_CACHE).resolve()

    def check(file: _Listed) -> str | None:
        path = (folder / file.name).resolve()
        if not path.is_relative_to(cache) or not path.is_file():
            return "it is not in the cache"
        size = path.stat().st_size
        if size != file.size:
            return f"it has {size} bytes, the Hub lists {file.size}"
        digest = _digest(path, file, lambda count: meter.add(count, f"checking {file.name}"))
        if digest != file.digest:
            return f"its {file.algorithm} is {digest}, the Hub lists {printable(file.digest)}"
        return None

    for file, wrong in _each(check, listed, _CHECKS):
        if wrong is not None:
            message = (
                f"file {quoted(file.name)} of {_name(repo, folder.name)} is not what the Hub lists: "
                f"{wrong}; remove {quoted((folder / file.name).resolve())} and try again"
            )
            raise DamagedSource(message)


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
    except CachedRepoTreeNotFoundError:
        return folder, None


def _each(
    work: Callable[[_Listed], Any], files: Sequence[_Listed], threads: int
) -> Iterator[tuple[_Listed, Any]]:
    """Yield the files with the results of ``work``, as they come; stop at the first error."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="blobstore-hub")
    try:
        jobs = {pool.submit(work, file): file for file in files}
        for job in as_completed(jobs):
            yield jobs[job], job.result()
    finally:
        pool.shutdown(cancel_futures=True)


class _client_errors:  # noqa: N801 - used as a context manager only
    """Turns the client's errors into ours, each in one line."""

    def __init__(self, repo: str, revision: str | None) -> None:
        self._name = _name(repo, revision)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        import httpx2
        from huggingface_hub import errors

        name = self._name
        if isinstance(error, errors.GatedRepoError):
            message = f"{name} is gated: accept its terms on the Hub, then log in or set HF_TOKEN"
            raise SourceError(message) from error
        if isinstance(error, errors.RevisionNotFoundError):
            message = f"{name}: no such revision on the Hub"
            raise SourceNotFound(message) from error
        if isinstance(error, errors.RepositoryNotFoundError):
            message = (
                f"no folder and no Hub repository {name}; if it is private, log in or set HF_TOKEN"
            )
            raise SourceNotFound(message) from error
        if isinstance(error, errors.HFValidationError):
            message = f"not a Hub id: {name}"
            raise UsageError(message) from error
        if isinstance(error, errors.LocalEntryNotFoundError):
            message = (
                f"{name}: the Hub cannot be reached and the cache does not hold it whole; "
                "check the network, HF_HUB_OFFLINE and HF_ENDPOINT"
            )
            raise SourceError(message) from error
        if isinstance(error, errors.HfHubHTTPError):
            status = error.response.status_code
            message = f"{name}: the Hub answered with status {status}; try again later"
            raise SourceError(message) from error
        if isinstance(error, (httpx2.HTTPError, OSError)):
            message = f"{name}: fetching failed: {printable(str(error).partition(chr(10))[0], 200)}"
            raise SourceError(message) from error


def _name(repo: str, revision: str | None) -> str:
    return quoted(f"{repo}@{revision}" if revision else repo)
