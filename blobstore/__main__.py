"""The entry point of the command line, also for ``python -m blobstore``."""

from __future__ import annotations

from blobstore.core import interrupts


def main() -> None:
    """Run the command line. Signals are recorded before anything that takes time is imported."""
    interrupts.listen()
    from blobstore.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
