"""Arguments of the public functions, checked in the words of the reference library."""

from __future__ import annotations

import operator
import re

from blobstore.core.escape import escape
from blobstore.errors import SafetensorError

_FRAMEWORKS = {
    "np": "numpy",
    "numpy": "numpy",
    "pt": "torch",
    "torch": "torch",
    "pytorch": "torch",
    "mlx": "mlx",
}
FRAMEWORK_NAMES = {"numpy": "numpy", "torch": "pytorch", "mlx": "mlx"}
_DEVICE = re.compile(r"(mps|cuda|musa|npu|xpu|xla|mlu|hpu)(?::([^:]*))?")
_MAX_U64 = 2**64 - 1


def check_metadata(metadata: object) -> None:
    """Check that metadata is a map of texts, or None.

    Raises:
        TypeError: it is not.
        UnicodeEncodeError: a text has a character that UTF-8 lacks.
    """
    if metadata is None:
        return
    require(metadata, dict, "metadata")
    for pair in metadata.items():  # type: ignore[attr-defined]
        for text in pair:
            require(text, str, "metadata")
            text.encode()  # a lone surrogate


def require(value: object, kind: type, argument: str) -> None:
    """Check the type of an argument.

    Raises:
        TypeError: it is another one.
    """
    if not isinstance(value, kind):
        found = "'None'" if value is None else f"'{type(value).__name__}' object"
        raise TypeError(f"argument '{argument}': {found} is not an instance of '{kind.__name__}'")


def parse_framework(framework: str) -> str:
    """Return the module of a framework: ``numpy``, ``torch`` or ``mlx``.

    Raises:
        SafetensorError: there is none.
    """
    require(framework, str, "framework")
    module = _FRAMEWORKS.get(framework)
    if module is None:
        raise SafetensorError(f"framework {escape(framework, 200)} is invalid")
    return module


def parse_device(device: object) -> str:
    """Return the torch device that an argument means; an index of a device stays one.

    Raises:
        SafetensorError: there is no such device.
        ValueError: the number of a device is not one.
    """
    if device is None or device == "cpu":
        return "cpu"
    if isinstance(device, str):
        if found := _DEVICE.fullmatch(device):
            number = 0 if found[2] is None else _parse_number(found[2])
            if found[1] != "mps":
                return f"{found[1]}:{number}"
            if not number:
                return "mps"
            raise SafetensorError(
                f"device {escape(device, 200)} is invalid: only mps or mps:0 is supported"
            )
    elif hasattr(device, "__index__") and 0 <= operator.index(device) <= _MAX_U64:
        return str(operator.index(device))
    text = device if isinstance(device, str) else repr(device)
    raise SafetensorError(f"device {escape(text, 200)} is invalid")


def _parse_number(text: str) -> int:
    if not text:
        raise ValueError("cannot parse integer from empty string")
    digits = text.removeprefix("+")
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError("invalid digit found in string")
    number = int(digits)
    if number > _MAX_U64:
        raise ValueError("number too large to fit in target type")
    return number
