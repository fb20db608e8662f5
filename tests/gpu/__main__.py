"""``python -m tests.gpu``: check on a GPU what the test suite cannot check without one.

Prints each check as it ends: passed, FAILED with the reason, or not run with what it needs. Without a GPU,
the checks that can run on a processor do.

Exit status: 0 if all checks that ran passed on a GPU, 1 if one failed or time ran out, 3 if none failed but
there is no GPU, so that nothing is known about GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.gpu.checks import Registered
from tests.gpu.lane import Lane, gpu_count, processor_as_gpu
from tests.gpu.libraries import CHECKS

NO_GPU = 3
_BUDGET = 480
"""Seconds after which no check begins."""
_LIMIT = 590
"""Seconds after which a check that hangs is ended, with a traceback."""


def main(arguments: list[str] | None = None) -> int:
    """Run the checks, and print a line for each."""
    options = _parser().parse_args(arguments)
    has_gpu = gpu_count() > 0
    scale = options.scale or (1.0 if has_gpu else 0.01)
    deadline = time.monotonic() + _BUDGET
    _tell(_machine())
    outcomes: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        device = "cuda" if has_gpu else stack.enter_context(processor_as_gpu())
        for name in options.only or CHECKS:
            registered = CHECKS[name]
            if missing := [need for need in registered.needs if not _HAS[need]()]:
                _tell(f"not run           {registered.title}: needs {', '.join(missing)}")
                outcomes["not run"] += 1
            elif time.monotonic() > deadline:
                _tell(f"FAILED            {registered.title}: no time was left")
                outcomes["failed"] += 1
            else:
                with _folder(options.folder) as folder:
                    outcomes[_run(registered, Lane(device, has_gpu, folder, scale))] += 1
    _tell(", ".join(f"{outcomes[kind]} {kind}" for kind in ("passed", "failed", "not run")))
    if outcomes["failed"]:
        return 1
    if not has_gpu:
        _tell("NOTHING WAS CHECKED ON A GPU: run this on a machine that has one")
        return NO_GPU
    return 0


def _run(registered: Registered, lane: Lane) -> str:
    began = time.monotonic()
    try:
        registered.check(lane)
        outcome = "passed"
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - the other checks run nevertheless
        outcome = "failed"
        _tell(traceback.format_exc())
    gc.collect()
    word = outcome if outcome == "passed" else "FAILED"
    _tell(f"{word} {time.monotonic() - began:8.1f} s  {registered.title}")
    return outcome


_HAS = {
    "a GPU": lambda: gpu_count() > 0,
    "two GPUs": lambda: gpu_count() > 1,
    "vLLM": lambda: find_spec("vllm") is not None,
    "compute-sanitizer": lambda: shutil.which("compute-sanitizer") is not None,
    "transformers": lambda: find_spec("transformers") is not None,
    "accelerate": lambda: find_spec("accelerate") is not None,
}
"""Whether this machine has what a check needs."""


@contextlib.contextmanager
def _folder(place: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="blobstore-gpu-", dir=place) as name:
        yield Path(name)


def _machine() -> str:
    if not gpu_count():
        return f"no GPU: torch {torch.__version__} has no CUDA device here"
    names = [torch.cuda.get_device_name(number) for number in range(gpu_count())]
    return f"{', '.join(names)}; torch {torch.__version__}, CUDA {torch.version.cuda}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", choices=CHECKS, metavar="CHECK", help=", ".join(CHECKS)
    )
    parser.add_argument("--scale", type=float, help="size of the inputs; 1 on a GPU by default")
    parser.add_argument("--folder", type=Path, help="folder for the files; needs 10 GB on a GPU")
    return parser


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(_LIMIT, exit=True)
    sys.exit(main())
