"""Loads tensors in the background, with many concurrent requests and a bound on the bytes in flight."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

from blobstore.core.escape import quote
from blobstore.errors import SafetensorError
from blobstore.safetensors.arguments import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Self

    from blobstore.safetensors.cuda import CallerStream

THREADS: Final = 8
IN_FLIGHT: Final = 1 << 30
"""Bytes of tensors that are loaded, or being loaded, and were not taken yet."""
_MAX_WAIT: Final = 0.5
"""Seconds until a waiting thread looks for signals: one that arrives just before it waits does not wake it."""


class Group(Protocol):
    """Tensors that are loaded together."""

    @property
    def stream(self) -> CallerStream | None:
        """The stream of the GPU that :meth:`build` makes them on; for other devices None."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The bytes of each tensor."""

    def begin(self) -> Sequence[Callable[[], object]]:
        """Allocate memory, and return the requests that bring the bytes. Threads send them concurrently."""

    def build(self) -> Iterable[tuple[str, Any]]:
        """Return the tensors, after all requests. An exception in the place of one is raised where it is taken."""


def attempt(read: Callable[..., Any], *arguments: Any) -> Any:
    """Return a tensor, or the error of reading it, so that its neighbours are read all the same."""
    try:
        return read(*arguments)
    except Exception as error:  # noqa: BLE001 - raised where the tensor is taken
        return error


class PrefetchLoader:
    """Tensors that are loaded in the background. Each is handed out once, by :meth:`take` or by iteration.

    Args:
        groups: what to load, in this order.
        threads: how many load.
        bytes_in_flight: bytes that are loaded, or being loaded, and were not taken yet; more if one
            group has more.

    Raises:
        TypeError: ``threads`` or ``bytes_in_flight`` is no integer.
        SafetensorError: one of them is below 1, or two tensors have one name.
    """

    def __init__(
        self, groups: Iterable[Group], *, threads: int = THREADS, bytes_in_flight: int = IN_FLIGHT
    ) -> None:
        require(threads, int, "threads")
        require(bytes_in_flight, int, "bytes_in_flight")
        if threads < 1 or bytes_in_flight < 1:
            raise SafetensorError("threads and bytes_in_flight must be at least 1")
        self._work = work = _Work([_Loading(group) for group in groups], bytes_in_flight)
        self._names = list(work.owners)
        weakref.finalize(self, work.close)  # threads would wait for ever
        for number in range(min(threads, len(self._names))):
            threading.Thread(
                target=work.run, name=f"blobstore-prefetch-{number}", daemon=True
            ).start()

    def names(self) -> list[str]:
        """Return the names of the tensors, in the order in which they are loaded."""
        return list(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def take(self, name: str) -> Any:
        """Return a tensor, or the part that the plan asks for, after waiting for it.

        Args:
            name: the tensor.

        Raises:
            SafetensorError: it is not in the plan, was taken before, or the loader is closed; or it cannot be
                loaded.
            OSError: the file cannot be read.
        """
        return self._work.take(name)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield names and tensors as they arrive, but those that were taken. Raises as :meth:`take`."""
        while (found := self._work.take_any()) is not None:
            yield found

    def close(self) -> None:
        """Stop, and forget the tensors that were not taken."""
        self._work.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Loading:
    """A group, and how far it is."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.stream = group.stream
        self.sizes = group.sizes
        self.nbytes = sum(self.sizes.values())
        self.is_waiting = True
        self.left = 0
        """Requests that were not answered yet."""
        self.error: BaseException | None = None


class _Work:
    """The state that the threads share, so that none of them keeps an unused loader alive."""

    def __init__(self, loadings: Sequence[_Loading], limit: int) -> None:
        self.owners: dict[str, _Loading] = {}
        """By the name of each tensor."""
        for loading in loadings:
            for name in loading.sizes:
                if self.owners.setdefault(name, loading) is not loading:
                    raise SafetensorError(f"tensor {quote(name)} is in two files")
        self._limit = limit
        self._waiting = deque(loadings)
        self._wanted: set[_Loading] = set()
        """Groups that a caller waits for, whatever else is in flight."""
        self._requests: deque[tuple[_Loading, Callable[[], object]]] = deque()
        self._in_flight = 0
        self._untaken = dict.fromkeys(self.owners)
        self._arrived: dict[str, Any] = {}
        self._is_closed = False
        self._changed = threading.Condition()

    def run(self) -> None:
        """Send requests until there are none left."""
        while (following := self._next()) is not None:
            loading, request = following
            try:
                if loading.stream is not None:
                    loading.stream.enter()
                if loading.error is None:
                    request()
            except BaseException as error:  # noqa: BLE001 - raised where the tensor is taken
                loading.error = error
            with self._changed:
                loading.left -= 1
                is_complete = not loading.left
            if is_complete:
                self._publish(loading)
            del loading, request, following  # they hold memory

    def _next(self) -> tuple[_Loading, Callable[[], object]] | None:
        """Return a request, after waiting until one may be sent; None after the last."""
        with self._changed:
            while not self._is_closed:
                if self._requests:
                    return self._requests.popleft()
                if not self._waiting:
                    return None
                if self._wanted or not self._in_flight or self._may_begin():
                    self._begin()
                else:
                    self._changed.wait()
            return None

    def _may_begin(self) -> bool:
        return self._in_flight + self._waiting[0].nbytes <= self._limit

    def _begin(self) -> None:
        """Begin the next group, or the one that a caller waits for."""
        loading = next(iter(self._wanted), self._waiting[0])
        self._waiting.remove(loading)
        self._wanted.discard(loading)
        loading.is_waiting = False
        self._in_flight += loading.nbytes
        try:
            requests = list(loading.group.begin()) or [_do_nothing]
        except BaseException as error:  # noqa: BLE001 - raised where the tensor is taken
            loading.error, requests = error, [_do_nothing]
        loading.left = len(requests)
        self._requests.extend((loading, request) for request in requests)
        self._changed.notify_all()

    def _publish(self, loading: _Loading) -> None:
        found: dict[str, Any] = {}
        if loading.error is None:
            try:
                found.update(loading.group.build())
            except BaseException as error:  # noqa: BLE001 - raised where the tensor is taken
                loading.error = error
        del loading.group
        with self._changed:
            if not self._is_closed:
                self._arrived |= dict.fromkeys(loading.sizes, loading.error) | found
            self._changed.notify_all()

    def take(self, name: str) -> Any:
        with self._changed:
            if name not in self.owners:
                raise SafetensorError(f"tensor {quote(name)} is not in the plan")
            if not self._is_closed and name not in self._untaken:
                raise SafetensorError(f"tensor {quote(name)} was taken before")
            loading = self.owners[name]
            if loading.is_waiting:
                self._wanted.add(loading)
                self._changed.notify_all()
            while not self._is_closed and name not in self._arrived:
                self._changed.wait(_MAX_WAIT)
            return self._handed_out(name)

    def take_any(self) -> tuple[str, Any] | None:
        with self._changed:
            while not self._is_closed and self._untaken and not self._arrived:
                self._changed.wait(_MAX_WAIT)
            if not self._untaken and not self._is_closed:
                return None
            name = next(iter(self._arrived), "")
            return name, self._handed_out(name)

    def _handed_out(self, name: str) -> Any:
        if self._is_closed:
            raise SafetensorError("the loader is closed")
        tensor, loading = self._arrived.pop(name), self.owners[name]
        del self._untaken[name]
        self._in_flight -= loading.sizes[name]
        self._changed.notify_all()
        if isinstance(tensor, BaseException):
            raise tensor
        if loading.stream is not None:
            loading.stream.hand_over(tensor)
        return tensor

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._arrived.clear()
            self._requests.clear()
            self._waiting.clear()
            self._changed.notify_all()


def _do_nothing() -> None:
    pass
