"""Puts the man pages and the completion files into the wheel.

pip copies them to the folder ``share`` of the environment, where ``man`` finds pages of the programs in ``bin``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SharedFiles(BuildHookInterface[Any]):
    """Called by hatchling before it writes a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the files and add them, except to an editable installation, whose commands change."""
        if version == "standard":
            root = Path(self.root)
            out = root / "build" / "share"
            shutil.rmtree(out, ignore_errors=True)
            subprocess.run([sys.executable, root / ".ci" / "release" / "share.py", out], check=True)
            build_data["shared_data"][str(out)] = "share"
