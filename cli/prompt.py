"""Questions to the user on the terminal."""

from __future__ import annotations

import os
import sys
from functools import partial

import click

from blobstore.core import interrupts
from blobstore.errors import UsageError

_PASSPHRASE = "BLOBSTORE_KEY_PASSPHRASE"  # noqa: S105 - the name of a variable


def read_passphrase() -> str:
    """Return the passphrase of a private key, from the environment or the terminal.

    Raises:
        UsageError: there is no terminal to ask on.
    """
    given = os.environ.get(_PASSPHRASE)
    if given is not None:
        return given
    if not sys.stdin.isatty():
        raise UsageError(f"the key is encrypted; set {_PASSPHRASE} to its passphrase")
    return ask("Passphrase of the key", is_hidden=True)


def ask(what: str, *, is_hidden: bool = False) -> str:
    """Ask on the terminal; return the answer, which may be empty if it is hidden."""
    import termios

    prompt = partial(click.prompt, what, hide_input=is_hidden, err=True)
    if is_hidden:
        prompt = partial(prompt, default="", show_default=False)
    try:
        before = termios.tcgetattr(sys.stdin.fileno())
    except (OSError, termios.error):  # a test, or no terminal
        return str(prompt())
    try:
        return str(interrupts.call(prompt))
    except interrupts.Stopped:  # the question is left behind, with its characters hidden
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)
        raise
