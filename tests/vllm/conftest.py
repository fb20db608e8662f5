"""Sets the environment variables that vLLM reads on import. Run these tests with .ci/vllm."""

from __future__ import annotations

import os
from importlib.util import find_spec

if find_spec("vllm") is not None:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # everything in this process
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }

    # vLLM 0.32 chooses kernels for AMX by this, but does not ask the system for it; those of 4-bit weights
    # need a scale per group besides.
    import torch

    setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)  # noqa: B010 - private
