"""What users of the Rust crate hf-hub do, by way of embed_anything: it fetches the files, and refuses the model."""

from __future__ import annotations

import contextlib
import importlib

embed_anything = importlib.import_module("embed_anything")

with contextlib.suppress(BaseException):  # a panic is no exception
    embed_anything.EmbeddingModel.from_pretrained_hf(model_id="team/chat")
