"""Processes that start at once: one interpreter that has all imported forks a child for each command.

A fresh interpreter takes longer to start than most commands take to run, so that a signal at a random
instant would nearly always hit imports. A child here begins with the command itself. It is a real
process in a group of its own, with the command line's own ``main``.

The other half, :mod:`tests.faults.processes`, talks to this one in lines of JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import math
import os
import resource
import runpy
import select
import signal
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any, cast

_NOBODY = 65534
_SET_PTRACER, _ANYONE = 0x59616D61, ctypes.c_ulong(-1)
_PAUSE = 0.0005
_LIBRARY = ctypes.CDLL(None)


def main() -> None:
    """Serve requests until the other side ends; take along what still runs.

    The arguments are modules to import; without any, the process warms up for commands.
    """
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if not sys.argv[1:]:
        warm_up()
    gc.freeze()  # what is imported is never garbage, and children share its pages longer
    living: dict[int, float] = {}
    _answer({"ready": True})
    try:
        for line in sys.stdin:
            request = json.loads(line)
            if request["do"] == "start":
                answer: dict[str, Any] = {"pid": _start(request, living)}
            elif request["do"] == "look":
                found = os.waitid(os.P_PID, request["pid"], os.WEXITED | os.WNOHANG | os.WNOWAIT)
                answer = {"has_ended": found is not None}
            else:
                answer = _wait(request["pid"], request["seconds"], living)
            _answer(answer | {"number": request["number"]})
    finally:
        for pid in living:
            os.killpg(pid, signal.SIGKILL)


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def warm_up() -> None:
    """Run the commands once, so that all is imported that they import when they are used."""
    importlib.import_module("tests.faults.hooks")
    for package, command in (("transfer", "pull"), ("transfer", "push"), ("export", "link")):
        importlib.import_module(f"blobstore.cli.{command}")
        importlib.import_module(f"blobstore.operations.{package}.{command}")
    # A command says one line, however slow the machine.
    vars(importlib.import_module("blobstore.cli.progress"))["_LINE_SECONDS"] = math.inf
    importlib.import_module("h11")  # which the HTTP client imports when it connects
    if importlib.util.find_spec("aiohttp") is not None:
        for name in ("aiohttp", "blobstore.cli.serve", "blobstore.serve.serve"):
            importlib.import_module(name)
    workloads = importlib.import_module("tests.faults.workloads")
    with tempfile.TemporaryDirectory(prefix="blobstore-faults-") as folder:
        workloads.try_all(Path(folder))


def _start(request: dict[str, Any], living: dict[int, float]) -> int:
    began = time.monotonic()
    pid = os.fork()
    if pid:
        # Parent and child both do it, so it is done whichever runs first.
        os.setpgid(pid, pid)
        living[pid] = began
        return pid
    code = 70
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
        code = _run(request)
    finally:
        os._exit(code)


def _wait(pid: int, seconds: float, living: dict[int, float]) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    if hasattr(os, "pidfd_open"):  # Linux has it, and tells at once
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(seconds * 1000)
        finally:
            os.close(descriptor)
    took = time.monotonic() - living[pid]
    while True:  # who is traced is ours only when its tracer has seen its end
        found, status, used = os.wait4(pid, os.WNOHANG)
        if found:
            del living[pid]
            code = os.waitstatus_to_exitcode(status)
            return {"code": code, "peak": used.ru_maxrss, "seconds": took}
        if time.monotonic() > deadline:
            return {"code": None, "peak": 0, "seconds": took}
        time.sleep(_PAUSE)


def _run(request: dict[str, Any]) -> int:
    """Be the child: where and restricted as asked, with its output in files."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    for path, number in ((os.devnull, 0), (request["stdout"], 1), (request["stderr"], 2)):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = os.open(path, flags, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)
    open_streams()
    for name, value in request["limits"].items():
        limit = getattr(resource, name)
        resource.setrlimit(limit, (value, value))
    if request["unprivileged"] and os.geteuid() == 0:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    from tests.faults import hooks

    hooks.install(request["hooks"])
    if request["stopped"]:
        # The security module Yama lets a process be traced by its parents only, if it does not say so.
        _LIBRARY.prctl(_SET_PTRACER, _ANYONE, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        return call(request["call"])
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def open_streams() -> None:
    """Let Python use the descriptors that this process has now for its input, output and errors."""
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the child's life
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - as above
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - as above


def call(words: list[str]) -> int:
    """Run what a request names; return the exit code of a process that ends as it does."""
    what, *arguments = words
    try:
        if what == "blobstore":
            from blobstore.__main__ import main as command_line

            sys.argv = words
            command_line()
        elif what == "python":
            _be_interpreter(arguments)
        elif what == "commands":
            from tests.support import commands

            commands.serve(*arguments)
        else:
            from tests.faults import workloads

            getattr(workloads, what)(*arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:  # noqa: BLE001 - as the interpreter does with it
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _be_interpreter(words: list[str]) -> None:
    """Do as ``python`` with these arguments: ``-c`` and a program, ``-m`` and a module, or a file."""
    warnings.simplefilter(cast("Any", os.environ.get("PYTHONWARNINGS", "ignore")))
    try:
        first, *rest = words
        if first == "-c":
            program, *sys.argv[1:] = rest
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        elif first == "-m":
            module, *sys.argv[1:] = rest
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(first, run_name="__main__")
    finally:
        # A child ends without what an interpreter does at its end, which would be that of its parent too.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


if __name__ == "__main__":
    main()
