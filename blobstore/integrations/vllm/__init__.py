"""Models of the store in vLLM: a plugin that adds the load format ``blobstore``.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins``, and calls it in each of its
processes. Nothing of vLLM is imported before that.
"""

from __future__ import annotations

import functools

from blobstore.integrations.vllm.settings import LOAD_FORMAT, engine_options

__all__ = ["engine_options", "register"]


@functools.cache  # vLLM may call it more than once
def register() -> None:
    """Register the load format with vLLM."""
    from vllm.model_executor.model_loader import register_model_loader

    from blobstore.integrations.vllm.loader import BlobstoreLoader

    register_model_loader(LOAD_FORMAT)(BlobstoreLoader)
