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
ZERO_MODEL: Final = re.compile(
    r"(?:zero_pp_rank_(?P<rank>[0-9]{1,9})_)?mp_rank_00_model_states\.pt"
)
"""Matches the names of DeepSpeed's files with the model: one of stages 1 and 2, one a process of stage 3."""
ZERO_OPTIMIZER: Final = re.compile(
    r"(?:bf16_)?zero_pp_rank_(?P<rank>[0-9]{1,9})_mp_rank_00_optim_states\.pt"
)
"""Matches the names of DeepSpeed's files with the optimizer of each process."""
ZERO_TOOLS: Final = ("zero_to_fp32.py", "zero_to_torch.py")
"""The programs that DeepSpeed saves next to its checkpoints."""
