"""One token of vLLM, from a folder or from the store: a program for ``first_token --vllm``, in vLLM's environment."""

from __future__ import annotations

import contextlib
import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    """Generate a token."""
    import_module("tests.vllm.conftest")  # sets what vLLM reads on import
    from vllm import LLM, SamplingParams

    from blobstore.integrations.vllm import engine_options
    from tests.vllm.models import FAST, PROMPTS

    kind, folder = sys.argv[1], Path(sys.argv[2])
    options = (
        contextlib.nullcontext({"model": str(folder / "model")})
        if kind.endswith("folder")
        else engine_options("m", store=folder / "store")
    )
    with options as engine:
        LLM(**FAST, **engine).generate(PROMPTS[:1], SamplingParams(max_tokens=1), use_tqdm=False)


if __name__ == "__main__":
    main()
