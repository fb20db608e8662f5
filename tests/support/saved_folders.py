"""Folders that Lightning and Megatron-Core saved, and the complete tensors that they have."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parents[1] / "data" / "lightning_megatron"
COMPLETE: dict[str, dict[str, list[Any]]] = json.loads((_DATA / "tensors.json").read_bytes())
"""Types, shapes and digests of the tensors of each folder."""


def saved_folder(name: str, folder: Path) -> Path:
    """Extract a folder."""
    with zipfile.ZipFile(_DATA / "folders.zip") as archive:
        archive.extractall(folder, [it for it in archive.namelist() if it.startswith(f"{name}/")])
    return folder / name
