"""Requests to end the process, which signals make and work obeys at points that it chooses.

A handler of signals only records the request: an exception that it raised would strike between any two
instructions, also while a lock is taken or a module is imported. The main thread calls :func:`check` where
work is divided and where it waits, and stops the threads that work for it as after any other error. Calls
that block for an unknown time are made by :func:`call`, on a thread that can be left behind.

The request is raised once: the clean-up after it runs to its end. A command checks for it before its last
rename and not afterwards, so that a command that is complete reports success.

Only a program calls :func:`listen`, and a worker process :func:`recorded`. In a process that does not, nothing here has an effect, and Ctrl-C is
Python's KeyboardInterrupt.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from types import FrameType

POLL = 0.1
"""Seconds between two looks for a request, where something else is waited for."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask a program to end."""

Result = TypeVar("Result")


class Unwanted(BaseException):
    """Work on a thread gives way, because nobody waits for its result any more; see :func:`looking`."""


class Stopped(BaseException):
    """A signal, such as that of Ctrl-C, asks the process to end.

    This is not a KeyboardInterrupt, because click turns those into "Aborted!" and exit code 1.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.exit_code = 128 + signal_number
        self.is_noted = False
        """Whether something else than the last line of the program reports it."""


class _State:
    """The record of the handler."""

    number = 0
    """The first signal; 0 if there was none."""
    count = 0
    patience: float = 2
    """Requests that are recorded; the next one ends the process at once."""
    error: BaseException | None = None
    """The exception that the main thread was handling when the signal came."""
    is_listening = False


class _Thread(threading.local):
    """The state of a thread with regard to the request."""

    obeys = False
    """Whether it stops as the main thread does."""
    is_raised = False
    deferred = 0
    """The number of blocks of :func:`deferred` that it is in."""
    look: Callable[[], object] | None = None
    turn: Callable[[], object] | None = None
    """See :func:`looking`."""


_thread = _Thread()


def listen() -> None:
    """Record SIGINT, SIGTERM and SIGHUP from now on, unless the caller of the process ignores them."""
    import atexit

    _State.is_listening = True
    atexit.register(_ignore)
    for number in _SIGNALS:
        # A signal that the caller ignores stays ignored: nohup does that with SIGHUP.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _record)


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Record SIGTERM in a block, however often it comes. It kills the process after the block, or outside of one.

    That is for the main thread of a worker process, whose parent may send it several times.
    """
    _State.is_listening, _State.patience = True, math.inf
    signal.signal(signal.SIGTERM, _record)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if _State.number:
            signal.raise_signal(signal.SIGTERM)


def _record(number: int, frame: FrameType | None) -> None:
    # The second request is ignored, so that an impatient user does not interrupt the clean-up. The third
    # ends the process as SIGKILL does.
    del frame
    if not _State.number:
        _State.number, _State.error = number, sys.exception()
    _State.count += 1
    if _State.count > _State.patience:
        os._exit(128 + number)


def _ignore() -> None:
    """Ignore what is recorded: the interpreter is about to restore the defaults, which kill it."""
    for number in _SIGNALS:
        if signal.getsignal(number) is _record:
            signal.signal(number, signal.SIG_IGN)


def is_requested() -> bool:
    """Return whether the process is to end."""
    return _State.number != 0


def signal_name() -> str:
    """Return the name of the signal that asks the process to end; empty if none does."""
    return signal.Signals(_State.number).name if _State.number else ""


def exit_after(seconds: float) -> None:
    """End the process as SIGKILL does so many seconds after a request, unless it has ended by then.

    Call it before the request: the main thread of a program may be blocked by a disk, a lock or a pipe when that comes.
    """

    def wait() -> None:
        while not _State.number:
            time.sleep(POLL)
        time.sleep(seconds)
        os._exit(128 + _State.number)

    if _State.is_listening:
        threading.Thread(target=wait, name="blobstore-exit", daemon=True).start()


def cause(error: BaseException) -> Stopped | None:
    """Return the request if ``error`` happened after it, which is a consequence then, and None otherwise.

    :func:`check` does not raise it any more.
    """
    if not _State.number:
        return None
    found: BaseException | None = error
    while found is not None:
        if found is _State.error:
            return None
        found = found.__cause__ or found.__context__
    return _stopped()


def check() -> None:
    """Stop the main thread if the process is to end. Call this wherever an error may be raised.

    Raises:
        Stopped: the first time after the request. In other threads it is not raised, unless they called
            :func:`obey`.
    """
    if _thread.look is not None and not _thread.deferred:
        _thread.look()
    if _State.number and not (_thread.is_raised or _thread.deferred) and _obeys():
        raise _stopped()


def obey() -> None:
    """Let this thread stop as the main thread does: for threads that run operations of their own."""
    _thread.obeys = True


def take_turns() -> None:
    """Let other work go on first. Call this where many bytes are read, and nothing is held that others wait for."""
    if _thread.turn is not None:
        _thread.turn()


@contextlib.contextmanager
def looking(look: Callable[[], object], turn: Callable[[], object]) -> Iterator[None]:
    """Let :func:`check` call ``look`` on this thread, too, and :func:`take_turns` ``turn``, until the block ends.

    ``look`` raises Unwanted to end the work, and ``turn`` returns when it may go on.
    """
    _look_as(look, turn)
    try:
        yield
    finally:
        _look_as(None, None)


def inherited() -> tuple[Callable[..., None], tuple[object, ...]]:
    """Return a function, and its arguments, that lets another thread look and take turns as this one does."""
    return _look_as, (_thread.look, _thread.turn)


def _look_as(look: Callable[[], object] | None, turn: Callable[[], object] | None) -> None:
    _thread.look, _thread.turn = look, turn


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let a request wait until the block ends: for the last rename of a command and all that follows."""
    _thread.deferred += 1
    try:
        yield
    finally:
        _thread.deferred -= 1


def sleep(seconds: float) -> None:
    """Sleep; a thread that obeys wakes up if the process is to end. Raises as :func:`check`."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        check()
        time.sleep(min(left, POLL) if _obeys() else left)


def call(function: Callable[[], Result], *, patience: float = 0.0) -> Result:
    """Call ``function``, which may block for long, so that a request ends the wait for it.

    The main thread of a program that listens, or another that obeys, calls it on a daemon thread, and
    leaves that behind. So the function must change nothing that the clean-up needs.

    Args:
        function: the call.
        patience: seconds that it may still take after the request.

    Raises:
        Stopped: the process is to end. The function was not called, or has not returned.
    """
    if not _State.is_listening or _thread.is_raised or not _obeys():
        return function()
    if not patience:
        check()
    from concurrent.futures import Future

    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            future.set_exception(error)

    threading.Thread(target=run, name="blobstore-call", daemon=True).start()
    return result(future, patience=patience)


def result(future: Future[Result], *, patience: float = 0.0) -> Result:
    """Return the result of a job of another thread; a request ends the wait. Args and raises as :func:`call`."""
    from concurrent.futures import wait

    end = 0.0
    while not wait([future], POLL).done:
        if is_requested():
            end = end or time.monotonic() + patience
            if time.monotonic() >= end:
                check()
    return future.result()


def _obeys() -> bool:
    return _thread.obeys or threading.current_thread() is threading.main_thread()


def _stopped() -> Stopped:
    _thread.is_raised = True
    return Stopped(_State.number)
