"""``python -m tests.faults``: inject faults of every kind, and print a table of the results.

The table is Markdown on standard output, for docs/concepts/durability.md. Progress, and every violation
with the data that reproduces it, goes to standard error. The exit code is 1 if there was a violation.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import signal
import sys
import time
from importlib import import_module
from typing import NamedTuple

from tests.faults.outcomes import Effort, Outcome, table

_UNITS = {"s": 1, "m": 60, "h": 3600}


class Kind(NamedTuple):
    """A kind of fault: its module, how often it is injected, and its share of the time."""

    module: str
    times: int
    share: int


KINDS = {
    "flips": Kind("flips", 1000, 2),
    "stress": Kind("stress", 60, 3),
    "model": Kind("protocol", 500, 4),
    "full": Kind("full", 100, 5),
    "power": Kind("power", 100, 6),
    "pull": Kind("pulls", 300, 6),
    "fetch": Kind("arrivals", 100, 4),
    "edit": Kind("edits", 300, 3),
    "push": Kind("pushes", 300, 6),
    "objects": Kind("objects", 100, 6),
    "kill": Kind("kill", 300, 16),
    "signals": Kind("signals", 200, 16),
    "inject": Kind("inject", 100_000, 24),
}


def main() -> int:
    """Run what is asked for, within the time; what one kind leaves of it, the next ones have."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, _stop)
    deadline = time.monotonic() + arguments.budget
    rows: list[Outcome] = []
    chosen = {name: KINDS[name] for name in KINDS if name in arguments.only}
    shares = sum(kind.share for kind in chosen.values())
    for name, kind in chosen.items():
        seconds = max(0.0, deadline - time.monotonic()) * kind.share / shares
        shares -= kind.share
        effort = Effort(kind.times, seconds, arguments.seed)
        if arguments.times is not None:
            effort = Effort(arguments.times, seed=arguments.seed)
        _tell(f"{name}: at most {effort.seconds:.0f} s")
        for row in import_module(f"tests.faults.{kind.module}").run(effort):
            rows.append(row)
            _tell(table([row]).splitlines()[-1], *row.notes, *row.violations)
    as_json = json.dumps([dataclasses.asdict(row) for row in rows], indent=1)
    sys.stdout.write((as_json if arguments.json else table(rows)) + "\n")
    return int(not all(row.is_clean for row in rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument(
        "--budget", type=_seconds, default="60m", metavar="TIME", help="at most, such as 90s or 60m"
    )
    parser.add_argument(
        "--times",
        type=int,
        metavar="N",
        help="inject each fault N times, each command's too, however long it takes",
    )
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, default=[*KINDS], metavar="KIND", help=", ".join(KINDS)
    )
    parser.add_argument("--seed", type=int, default=0, help="of all that is random; 0 by default")
    parser.add_argument("--json", action="store_true", help="print JSON, the violations with it")
    return parser.parse_args()


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s or 60m")
    return float(match[1]) * _UNITS[match[2]]


def _stop(number: int, _: object) -> None:
    sys.exit(128 + number)  # so that disks are unmounted and folders removed


def _tell(*lines: str) -> None:
    sys.stderr.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
