"""Runs a fuzzer with its seeds, as the docstring of each fuzzer says."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

_DEFAULTS = ["-max_total_time=300", "-timeout=30", "-rss_limit_mb=1024", "-max_len=20000"]
# A seed may reach no new line, because the target reads intact files in any case.
_DEFAULTS.append("-keep_seed=1")


def run(
    read_one: Callable[[bytes], object], write_seeds: Callable[[Path], object], *options: str
) -> None:
    """Run libFuzzer, which ends the process, or run the one input that is the only argument.

    Args:
        read_one: the target.
        write_seeds: writes the first inputs into a folder.
        options: of libFuzzer, before those of the command line.
    """
    given = sys.argv[1:]
    paths = [item for item in given if not item.startswith("-")]
    if len(given) == len(paths) == 1 and Path(paths[0]).is_file():
        read_one(Path(paths[0]).read_bytes())
        return
    with tempfile.TemporaryDirectory() as name:
        seeds, new = Path(name, "seeds"), Path(name, "new")
        seeds.mkdir()
        new.mkdir()
        write_seeds(seeds)
        flags = [*_DEFAULTS, *options, *(set(given) - set(paths))]
        atheris.Setup([sys.argv[0], *flags, *(paths or [str(new)]), str(seeds)], read_one)
        atheris.Fuzz()
