"""Checks the types of arguments that are easily guessed wrong, where a program calls the library."""

from __future__ import annotations

from blobstore.core.escape import quote
from blobstore.errors import UsageError


def check_type(name: str, value: object, kind: type, others: str = "") -> None:
    """Check that an argument is of a class of options; ``others`` says what else is taken. Raises UsageError."""
    if not isinstance(value, kind):
        raise UsageError(
            f"{name} is {quote(value)}, a value of type {type(value).__name__}; expected "
            f"blobstore.{kind.__name__}{others}"
        )
