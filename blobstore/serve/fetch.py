"""Fetches files of one version of a model from an upstream, on a thread of its own."""

from __future__ import annotations

import errno
import shutil
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from blobstore.core.files import make_folders
from blobstore.core.limits import Crowded
from blobstore.core.workers import Cancelled
from blobstore.errors import BlobstoreError, DamagedSource, RemoteError, StoreError
from blobstore.serve.refusal import Refusal

if TYPE_CHECKING:
    from blobstore.serve.arriving_file import ArrivingFile, Claim
    from blobstore.serve.find_upstream import FoundAt
    from blobstore.store.local import LocalStore


class Fetch(ABC):
    """A thread, and the files that it fetches into the folder of a claim.

    If the upstream goes away or the server is stopped, they stay there for the next attempt.
    """

    def __init__(self, store: LocalStore, repository: str, found: FoundAt, claim: Claim) -> None:
        """Fetch nothing yet.

        Args:
            store: gets the files.
            repository: its name at the upstream.
            found: the version, and the server that has it.
            claim: the folder of its files, and the space for them. It is released in the end.
        """
        self.repository, self.commit = repository, found.commit
        self.error: BlobstoreError | Refusal | None = None
        self.files: dict[str, ArrivingFile] = {}
        self.listed = threading.Event()
        """Set when the files can be served, or the fetch has failed."""
        self.ended = threading.Event()
        self._store, self._client = store, found.client()
        self._claim, self._folder = claim, claim.folder
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="fetch")

    @abstractmethod
    def work(self) -> None:
        """Fetch the files, and add them to the store. Called on the thread."""

    @abstractmethod
    def report(self) -> None:
        """Report the end, while the files can still be read. Called on the thread."""

    @property
    def fetched(self) -> int:
        """Bytes of files that the upstream has sent."""
        return sum(file.received for file in list(self.files.values()))

    @property
    def wrong_etags(self) -> list[str]:
        """The validators of the files of which readers may have got wrong bytes."""
        return [file.etag for file in list(self.files.values()) if file.is_wrong]

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait until it has ended. Call it from another thread."""
        self._is_stopped = True
        self._client.abort()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._client:
                self.work()
        except (BlobstoreError, Refusal) as error:
            self.error = error
        except OSError as error:
            self.error = StoreError(f"{self.repository} cannot be fetched: {error.strerror}")
            self.error.__cause__ = error
        except Exception as error:  # noqa: BLE001 - nobody else would end the wait of the clients
            self.error = BlobstoreError(f"{self.repository} cannot be fetched: {error!r}")
        if lacks_files(self.error):  # the upstream is not at fault
            self.error = Crowded(
                f"{self.repository}: this process has too many open files", advice="try again later"
            )
        if not isinstance(self.error, RemoteError | Cancelled):
            # While it is claimed, so that nothing else counts or removes the folder.
            shutil.rmtree(self._folder, ignore_errors=True)
        # Before the end is reported: the next attempt needs the same space at once.
        self._claim.release()
        self.report()
        failed = DamagedSource(f"{self.repository} cannot be fetched")
        for file in self.files.values():
            # After the report: a reader that fails here and asks again must find the outcome.
            file.fail(failed)
        # Circles of references and tracebacks would keep the files open.
        self.files = {}
        if self.error is not None:
            self.error.with_traceback(None)
        # Last, because clients that wait for these ask again at once.
        self.listed.set()
        self.ended.set()

    def make_folder(self) -> None:
        """Make the folder of the files. Raises StoreError."""
        with self._store.writing():
            make_folders(self._folder, self._store.root)

    def fetch(self, file: ArrivingFile) -> None:
        """Fetch a file, and verify it. Raises BlobstoreError or Refusal."""
        with self._store.writing():
            file.open()
            for attempt in self._client.retry():
                with attempt:
                    if file.written < file.size:
                        for piece in self._client.pieces(
                            self.repository, self.commit, file.name, file.written, file.size
                        ):
                            file.append(piece)
                            attempt.progress()
                    file.finish()
                    return

    def check_stopped(self, *_: object) -> None:
        """Raise Cancelled if the thread was asked to stop."""
        if self._is_stopped:
            raise Cancelled("stopped")


def lacks_files(error: BaseException | None) -> bool:
    """Return whether the cause of an error is that this process, or the machine, has too many open files."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__
    return False
