"""``python -m blobstore``: the command line where no script is installed."""

from __future__ import annotations

from blobstore.cli.main import main

main()
