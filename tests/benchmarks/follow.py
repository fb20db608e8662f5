"""From a step of a training to a replica that has installed it, by three ways.

    python -m tests.benchmarks.follow [--folder DIR] [--scale X] [--rounds N]

The model has 101 MB in bf16, of which each step changes 0.5 % by one unit in the last place. The replica is a
process that runs ``blobstore follow`` on this machine. Publishing begins when the weights are in memory, and
includes the save, the deltas, and the transfer. The rest is the time until the replica has printed that the
version is installed: asked for, fetched, decoded, hashed and synced.

A second table is about replicas that skipped versions: they pull the last of twelve from the registry.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import blobstore
from blobstore.store.local import LocalStore
from tests.benchmarks import common
from tests.support.registry import running_registry
from tests.support.serve_process import serving
from tests.support.training import Weights, first_weights, steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from blobstore.operations.transfer.pull import Pulled


class Way(NamedTuple):
    """A way from the trainer to its replicas."""

    source: str
    publish: Callable[[int], object]
    """Publishes the version of that number, which is saved; the one before it has a tag too."""


@contextlib.contextmanager
def by_registry(store: LocalStore, folder: Path) -> Iterator[Way]:
    """Push compressed forms to docker-registry."""
    with running_registry(folder) as registry:
        place = f"oci://{registry.host}/runs/policy:latest"

        def publish(number: int) -> None:
            base = f"policy:{number - 1}" if number else None
            blobstore.push(f"policy:{number}", place, store=store, cold=True, base=base)

        yield Way(place, publish)


@contextlib.contextmanager
def by_server(store: LocalStore, folder: Path) -> Iterator[Way]:
    """Freeze the version, and give it the name that is followed."""
    folder.mkdir()

    def publish(number: int) -> None:
        if number:
            blobstore.freeze(f"policy:{number}", store=store)
        blobstore.copy(f"policy:{number}", "policy", store=store, force=True)

    with serving(store, folder, is_new=True) as server:
        yield Way(f"{server.url}/policy", publish)


@contextlib.contextmanager
def by_folder(store: LocalStore, folder: Path) -> Iterator[Way]:
    """Write the folder that slime's receivers read."""

    def publish(number: int) -> None:
        blobstore.push_version(f"policy:{number}", folder, store=store)

    yield Way(f"slime:{folder}", publish)


WAYS = {"registry": by_registry, "blobstore serve": by_server, "slime's folder": by_folder}


class Measured(NamedTuple):
    """A step."""

    publish: float
    rest: float
    moved: int


def measure(folder: Path, versions: list[Weights], way: str) -> list[Measured]:
    """Publish the versions, and wait for each until the replica has it."""
    folder.mkdir()
    store = LocalStore(folder / "trainer")
    blobstore.save(versions[0], "policy:0", store=store)
    found = []
    with WAYS[way](store, folder / "place") as (source, publish):
        publish(0)
        command = [sys.executable, "-m", "blobstore", "follow", "policy", source, "--json"]
        command += ["--interval", "0.05", "--store", str(folder / "replica")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as replica:
            assert replica.stdout is not None
            replica.stdout.readline()
            for number, weights in enumerate(versions[1:], 1):
                begun = time.monotonic()
                blobstore.save(weights, f"policy:{number}", store=store)
                publish(number)
                published = time.monotonic()
                line: dict[str, Any] = json.loads(replica.stdout.readline())
                done = time.monotonic()
                found.append(Measured(published - begun, done - published, line["bytes_fetched"]))
            replica.terminate()
    return found


SKIPPED = (0, 1, 2, 5, 10)
"""Versions between that of a replica and the last one."""


def measure_skipped(folder: Path, versions: list[Weights]) -> Iterator[tuple[int, Pulled]]:
    """Publish the versions, and let replicas that skipped some of them pull the last one."""
    folder.mkdir()
    store = LocalStore(folder / "trainer")
    behind = {len(versions) - 2 - skipped: skipped for skipped in SKIPPED}
    with by_registry(store, folder / "place") as (source, publish):
        for number, weights in enumerate(versions):
            blobstore.save(weights, f"policy:{number}", store=store)
            publish(number)
            if number in behind:
                blobstore.pull(source, "policy", store=folder / f"replica-{number}")
        for number, skipped in sorted(behind.items(), reverse=True):
            yield skipped, blobstore.pull(source, "policy", store=folder / f"replica-{number}")


def main() -> None:
    """Print a line per way, the medians of the steps after the first; then one per number of skipped versions."""
    options = common.arguments(__doc__)
    weights = first_weights(6, int(1448 * options.scale**0.5))
    versions = [weights, *steps(weights, options.rounds + 1)]
    size = sum(array.nbytes for array in weights.values())
    print(f"a model of {size / 1e6:.0f} MB\n")
    print("| way | moved | of the model | published | installed after |")
    print("| --- | ---: | ---: | ---: | ---: |")
    with common.workspace(options.folder) as folder:
        for number, way in enumerate(WAYS):
            measured = measure(folder / str(number), versions, way)[1:]
            publish, rest, moved = (
                statistics.median(values) for values in zip(*measured, strict=True)
            )
            print(
                f"| {way} | {moved / 1e3:.0f} kB | {moved / size:.2%} | {publish:.2f} s | {rest:.2f} s |",
                flush=True,
            )
        print("\n| skipped | moved | of the model | pulled in |\n| --- | ---: | ---: | ---: |")
        many = [weights, *steps(weights, max(SKIPPED) + 1)]
        for skipped, pulled in measure_skipped(folder / "skipped", many):
            moved = pulled.bytes_fetched
            print(
                f"| {skipped} | {moved / 1e3:.0f} kB | {moved / size:.2%} | {pulled.seconds:.2f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
