"""Requests to end a program: recorded by a handler, raised where the program looks."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blobstore.core import interrupts
from blobstore.core.interrupts import Stopped
from blobstore.core.workers import WorkerPool

_ROOT = Path(__file__).parents[3]
_START = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
from blobstore.core import interrupts
from blobstore.core.interrupts import Stopped
interrupts.listen()
def send(number=signal.SIGINT):
    os.kill(os.getpid(), number)
"""


def _run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _START + program],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def _output(program: str) -> str:
    done = _run(program)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_is_raised_until_the_program_looks() -> None:
    program = """
with threading.Condition():
    send()
import numpy
try:
    interrupts.check()
except Stopped as stopped:
    print(stopped.exit_code)
"""
    assert _output(program) == "130\n"


def test_the_request_is_raised_once() -> None:
    program = """
send(signal.SIGTERM)
try:
    interrupts.check()
except Stopped as stopped:
    send()  # the impatient user's
    interrupts.check()
    interrupts.sleep(0.01)
    print(interrupts.call(lambda: "cleaned up"), stopped.exit_code)
"""
    assert _output(program) == "cleaned up 143\n"


def test_the_third_request_ends_the_process_at_once() -> None:
    done = _run("send()\nsend()\nprint('here', flush=True)\nsend()\nprint('not here', flush=True)")
    assert (done.returncode, done.stdout) == (130, "here\n")


def test_a_signal_while_the_interpreter_ends_does_not_kill_it() -> None:
    # An object that is freed last sends the signal: handlers have their defaults again by then.
    program = """
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)
sys.modules['last'] = Last()
"""
    assert _run(program).returncode == 0


def test_a_signal_that_the_caller_ignores_stays_ignored() -> None:
    program = """
import subprocess
code = "import signal; from blobstore.core import interrupts; interrupts.listen(); signal.raise_signal(1); print(interrupts.is_requested())"
signal.signal(signal.SIGHUP, signal.SIG_IGN)
subprocess.run([sys.executable, "-c", code], check=True)
"""
    assert _output(program) == "False\n"


def test_a_call_that_blocks_is_left_behind() -> None:
    program = """
threading.Timer(0.05, send).start()
try:
    interrupts.call(threading.Event().wait)
except Stopped as stopped:
    print(stopped.exit_code, flush=True)
"""
    assert _output(program) == "130\n"


def test_a_call_gives_its_result_or_its_error() -> None:
    program = """
print(interrupts.call(lambda: 7))
try:
    interrupts.call(lambda: 1 / 0)
except ZeroDivisionError as error:
    print(error)
send()
print(interrupts.call(lambda: 8, patience=60))
"""
    assert _output(program) == "7\ndivision by zero\n8\n"


@pytest.mark.usefixtures("requested")
def test_other_threads_do_not_raise_it() -> None:
    ended = threading.Event()

    def check() -> None:
        interrupts.check()
        ended.set()

    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
    assert ended.is_set()
    with pytest.raises(Stopped):
        interrupts.check()


@pytest.mark.usefixtures("requested")
def test_a_request_waits_for_the_end_of_a_last_step() -> None:
    with interrupts.deferred():
        interrupts.check()
    with pytest.raises(Stopped):
        interrupts.check()


@pytest.mark.usefixtures("requested")
def test_a_sleep_ends() -> None:
    with pytest.raises(Stopped):
        interrupts.sleep(3600)


@pytest.mark.usefixtures("requested")
def test_no_job_is_submitted_after_a_request() -> None:
    pool, ran = WorkerPool(2, None, 0), list[int]()
    with pytest.raises(Stopped):
        pool.run(range(3), ran.append)
    assert ran == []
    assert pool.stopping.is_set()


def test_a_request_stops_jobs_that_run() -> None:
    program = """
from blobstore.core.workers import Cancelled, WorkerPool
pool = WorkerPool(2, None, 0)
def job(number):
    send()
    pool.stopping.wait()
    pool.report(1, "")
try:
    pool.run([1], job)
except Stopped:
    print("stopped")
"""
    assert _output(program) == "stopped\n"


def test_without_a_listener_ctrl_c_is_pythons_own() -> None:
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import blobstore.cli.main\n"
        "from blobstore.core import interrupts\n"
        "try:\n    interrupts.call(lambda: signal.raise_signal(signal.SIGINT))\n"
        "except KeyboardInterrupt:\n    print('KeyboardInterrupt')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "KeyboardInterrupt\n"


@pytest.mark.usefixtures("requested")
def test_threads_that_run_operations_stop_too() -> None:
    def work() -> None:
        interrupts.obey()
        interrupts.check()

    with ThreadPoolExecutor(1) as executor, pytest.raises(Stopped):
        executor.submit(work).result()
    with pytest.raises(Stopped):
        interrupts.check()


def test_an_error_of_a_job_that_came_before_the_request_is_no_consequence() -> None:
    program = """
from blobstore.core.workers import WorkerPool
failed = threading.Event()
def work(item):
    if item:
        failed.set()
        raise ValueError("before")
    failed.wait()
    pool.stopping.wait()  # so the main thread is cleaning up
    send()
    raise ValueError("after")
pool = WorkerPool(2, None, 0)
try:
    pool.run([0, 1], work)
except ValueError as error:
    print(interrupts.is_requested(), error, interrupts.cause(error))
    print(interrupts.cause(ValueError("after")).exit_code)
"""
    assert _output(program) == "True before None\n130\n"


def test_the_wait_for_a_job_of_another_thread_ends() -> None:
    program = """
from concurrent.futures import Future
send()
try:
    interrupts.result(Future())
except Stopped as stopped:
    print(stopped.exit_code)
"""
    assert _output(program) == "130\n"


def test_a_worker_process_ends_after_the_block_in_which_it_is_asked_to_however_often() -> None:
    program = """
import os, signal
from blobstore.core import interrupts
with interrupts.recorded():
    print("begins", flush=True)
with interrupts.recorded():
    try:
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGTERM)
        interrupts.check()
    finally:
        print("cleans up", flush=True)
print("goes on", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert ended.returncode == -signal.SIGTERM
    assert ended.stdout == b"begins\ncleans up\n"


def test_a_clean_up_that_is_blocked_does_not_keep_a_program_from_ending() -> None:
    result = _run(
        """
interrupts.exit_after(0.01)
assert interrupts.signal_name() == ""
send(signal.SIGTERM)
assert interrupts.signal_name() == "SIGTERM"
threading.Event().wait()
"""
    )
    assert (result.returncode, result.stderr) == (143, "")
