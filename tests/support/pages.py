"""The examples of a page of the documentation, to be run as they stand there."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Return what is set off on a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [Block(match["language"], match["text"]) for match in _BLOCK.finditer(text)]


def commands(page: Path) -> list[str]:
    """Return the commands of a page that do not install anything."""
    lines = [
        line for block in blocks(page) if block.language == "sh" for line in block.text.splitlines()
    ]
    return [line for line in lines if not line.startswith("pip install ")]


def program(page: Path) -> str:
    """Return the examples of a page as one program, for later ones build on earlier ones."""
    return "\n".join(block.text for block in blocks(page) if block.language == "python")


def in_python(command: str) -> list[str]:
    """Return a command for this interpreter and this checkout."""
    first, *rest = shlex.split(command)
    if first == "blobstore":
        return [sys.executable, "-m", "blobstore.cli", *rest]
    return [sys.executable, *rest] if first == "python" else [first, *rest]
