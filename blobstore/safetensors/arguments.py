"""Arguments of the public functions, checked in the words of the reference library."""

from __future__ import annotations

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
_DEVICE = re.compile(r"(cuda|musa|npu|xpu|xla|mlu|hpu)(?::(.*))?", re.DOTALL)


def check_metadata(metadata: object) -> None:
    """Check that metadata is a map of texts, or None.

    Raises:
        TypeError: it is not.
    """
    if metadata is None:
        return
    require(metadata, dict, "metadata")
    for pair in metadata.items():  # type: ignore[attr-defined]
        for text in pair:
            require(text, str, "metadata")


def require(value: object, kind: type, argument: str) -> None:
    """Check the type of an argument.

    Raises:
        TypeError: it is another one.
    """
    if not isinstance(value, kind):
        raise TypeError(
            f"argument '{argument}': '{type(value).__name__}' object is not an instance of "
            f"'{kind.__name__}'"
        )


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
    if type(device) is int and device >= 0:
        return str(device)
    if isinstance(device, str):
        if device in ("mps", "mps:0"):
            return "mps"
        if device.startswith("mps:"):
            raise SafetensorError(
                f"device {escape(device, 200)} is invalid: only mps or mps:0 is supported"
            )
        found = _DEVICE.fullmatch(device)
        if found:
            if found[2] is not None and not (found[2].isascii() and found[2].isdigit()):
                raise ValueError("invalid digit found in string")
            return f"{found[1]}:{found[2] or 0}"
    text = device if isinstance(device, str) else repr(device)
    raise SafetensorError(f"device {escape(text, 200)} is invalid")
