"""The notebooks of the documentation, run in a folder of their own.

    python -m tests.support.notebooks docs/getting-started/tutorial.ipynb

runs a notebook, and keeps the outputs in it, which the site shows.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

from tests.support.ports import free_port


def executed(path: Path, folder: str | Path) -> nbformat.NotebookNode:
    """Return a notebook with the outputs of its cells; an error in a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    # Jupyter takes ports that are free when it looks for them, and may not be when the kernel begins.
    ports = {f"{name}_port": free_port() for name in ("shell", "iopub", "stdin", "hb", "control")}
    client = NotebookClient(
        notebook,
        timeout=240,
        startup_timeout=240,
        config=Config({"ConnectionFileMixin": ports, "KernelManager": {"cache_ports": False}}),
        kernel_name="python3",
        resources=resources,
        record_timing=False,
        coalesce_streams=True,
    )
    return client.execute()


if __name__ == "__main__":
    for document in map(Path, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as scratch:
            text = nbformat.writes(executed(document, scratch))
        document.write_text(text.replace(f"{scratch}/", "") + "\n", encoding="utf-8")
