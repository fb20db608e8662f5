"""The names of the files in folders with pieces of tensors."""

from __future__ import annotations

import re
from typing import Final

FORMAT: Final = "torch.distributed.checkpoint"
METADATA_FILE: Final = ".metadata"
SHARD: Final = re.compile(
    r"shard-(?P<rank>[0-9]{5})-model-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors"
)
"""Matches the names of the files that the Hugging Face writer saves for each process."""
