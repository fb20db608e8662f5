"""Runs a fuzzer with its seeds, as the docstring of each fuzzer says."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from unittest import mock

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

_DEFAULTS = ["-max_total_time=300", "-timeout=30", "-rss_limit_mb=1024", "-max_len=20000"]
# A seed may reach no new line, because the target reads intact files in any case.
_DEFAULTS.append("-keep_seed=1")


def run(
    read_one: Callable[[bytes], object],
    write_seeds: Callable[[Path], object],
    *options: str,
    words: Collection[str] = (),
) -> None:
    """Run libFuzzer, which ends the process, or run the one input that is the only argument.

    Args:
        read_one: the target.
        write_seeds: writes the first inputs into a folder.
        options: of libFuzzer, before those of the command line.
        words: its dictionary, of which inputs are made.
    """
    given = sys.argv[1:]
    paths = [item for item in given if not item.startswith("-")]
    if len(given) == len(paths) == 1 and Path(paths[0]).is_file():
        read_one(Path(paths[0]).read_bytes())
        return
    with tempfile.TemporaryDirectory() as name:
        seeds, new, dictionary = Path(name, "seeds"), Path(name, "new"), Path(name, "words")
        seeds.mkdir()
        new.mkdir()
        write_seeds(seeds)
        escaped = ("".join(f"\\x{byte:02x}" for byte in word.encode()) for word in words)
        dictionary.write_text("".join(f'"{word}"\n' for word in escaped))
        if words:  # libFuzzer ends if the file is empty
            options += (f"-dict={dictionary}",)
        flags = [*_DEFAULTS, *options, *(set(given) - set(paths))]
        atheris.Setup([sys.argv[0], *flags, *(paths or [str(new)]), str(seeds)], read_one)
        atheris.Fuzz()


def run_in_folder(
    write_originals: Callable[[Path], object],
    read_one: Callable[[bytes, Path], object],
    write_seeds: Callable[[Path], object],
    words: Collection[str],
) -> None:
    """Run libFuzzer as :func:`run` does, for a reader of folders.

    Args:
        write_originals: writes the files of which an input replaces one.
        read_one: the target, which gets the folder too, and leaves the files as they were.
        write_seeds: writes the first inputs into a folder, after the originals.
        words: as for :func:`run`.
    """
    from blobstore.sources import versions  # the fuzzer has instrumented it by now

    # No input waits until the clock has moved on from a change.
    with tempfile.TemporaryDirectory() as name, mock.patch.object(versions, "_TICK", 0):
        folder = Path(name)
        write_originals(folder)
        run(lambda data: read_one(data, folder), write_seeds, "-rss_limit_mb=2048", words=words)
