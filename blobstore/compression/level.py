"""The compression level, the only setting that users have. This module imports nothing heavy."""

from typing import Literal

Level = Literal["fast", "small"]
"""``fast`` prefers quick encoding and decoding; ``small`` prefers the smallest result."""
