"""Texts that begin with ``scheme://``. No path of this machine begins so: such a path would make a folder ``s3:``.

An address is refused if a path is expected; the error names the command that takes it.
"""

from __future__ import annotations

import os
import re
from typing import Final, Literal

from blobstore.core.escape import cli_command, escape, quote, quote_url, without_secrets
from blobstore.errors import UsageError

Role = Literal["source", "store", "target"]
"""What a path is for: something to read, the folder of a store, or something to write."""
BUCKETS: Final = ("s3", "gs", "az")
"""The schemes of object storage."""
OBJECTS: Final = (*BUCKETS, "file")
"""The schemes of stores in object storage, and of stores in folders that are used as if they were there."""
REGISTRY: Final = "oci"
HUB: Final = "hf"
OLLAMA: Final = "ollama"
_HUB_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/")
WEB: Final = ("http", "https")
"""The schemes of servers that only read, such as ``blobstore serve``."""
_REGISTRIES: Final = (REGISTRY, "docker", *WEB)
# A path object has lost one of the slashes.
_SCHEME = re.compile(rf"([A-Za-z][A-Za-z0-9+.-]*)://|({'|'.join((*OBJECTS, REGISTRY, HUB))}):/")
_RESPELLED = re.compile(rf"({'|'.join((*OBJECTS, REGISTRY, *WEB))}):/+(?=[^/])", re.IGNORECASE)
_SHORT = re.compile(rf"({HUB}|{OLLAMA}):(?!/)(.+)", re.DOTALL)
"""Matches what other programs write for addresses of the Hub and of Ollama."""
_PUSH: Final = "'blobstore push' sends models there"
_PULL: Final = "'blobstore pull' fetches models from there"
_STORE: Final = (
    "the own store is a folder; push, pull, list, du and verify take others by their address"
)


def scheme_of(text: object) -> str | None:
    """Return the scheme that a text or path begins with, in lower case; None if it has none."""
    if not isinstance(text, str | os.PathLike):
        return None
    found = _SCHEME.match(str(os.fspath(text)))
    return (found[1] or found[2]).lower() if found else None


def respelled(text: str) -> str:
    """Return the address that a text means whose scheme has capitals or another number of slashes; else nothing."""
    found = _RESPELLED.match(text)
    if found is None:
        return ""
    scheme = found[1].lower()
    root = "/" if scheme == "file" else ""  # no host
    address = f"{scheme}://{root}{text[found.end() :]}"
    return "" if address == text else address


def advice_for(text: str, role: Role) -> str:
    """Return the command for a user who gave an address instead of a path; empty if unknown."""
    if short := _SHORT.match(text):
        what = "the Hub's repository" if short[1] == HUB else "Ollama's model"
        return f"for {what}, say {short[1]}://{short[2]}" if role == "source" else ""
    scheme, shown = scheme_of(text), without_secrets(text)
    if scheme == "file":
        return "write the path without file://"
    if role == "source" and (scheme in (HUB, OLLAMA) or _HUB_PAGE.match(text)):
        return f"{cli_command('create', shown, 'NAME')} imports it"
    if scheme not in (*OBJECTS, *_REGISTRIES, HUB):
        return ""
    if role == "store":
        return _STORE
    if scheme == HUB:
        return "'blobstore export' writes a folder, and 'hf upload' sends it there"
    rest = shown.partition("://")[2]
    if role == "target":
        return _PUSH if scheme in (*OBJECTS, REGISTRY) else f"'blobstore push' takes {escape(rest)}"
    if scheme in (*OBJECTS, REGISTRY):
        return _PULL
    if scheme in WEB:
        return (
            f"{cli_command('pull', shown)} fetches a model of a server; for a file, give the URL of a "
            ".safetensors or .gguf file"
        )
    return f"{cli_command('pull', rest)} fetches a model of a registry"


def check_path(path: str | os.PathLike[str], role: Role) -> None:
    """Check that a text may be a path of this machine.

    Raises:
        UsageError: it begins with ``scheme://``, is ``-`` where something is written, has characters that no path
            can have, or is neither a text nor a path.
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"a path is a text or a Path, got {quote(type(path).__name__)}")
    try:
        is_impossible = b"\0" in os.fsencode(path)
    except UnicodeEncodeError:
        is_impossible = True
    if is_impossible:
        raise UsageError(f"{quote(path)} has a character that no path can have")
    if role == "target" and os.fspath(path) == "-":
        raise UsageError(
            "'-' is no path: nothing of this is written to standard output",
            advice="give a path; './-' is a file of that name",
        )
    if scheme_of(path) is not None:
        text = str(os.fspath(path))
        raise UsageError(
            f"{quote_url(text)} is an address, not the path of a file or folder",
            advice=advice_for(text, role),
        )
