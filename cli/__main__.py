"""``python -m blobstore.cli``: the same as ``python -m blobstore``."""

from __future__ import annotations

from blobstore.cli.main import main

main()
