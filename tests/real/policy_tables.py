"""The decisions of the quantization policy for architectures as transformers builds and saves them.

``python -m tests.real.policy_tables`` writes them to ``tests/data/policies``, to be reviewed line by line.
Models are built on the meta device: names and shapes are those of real checkpoints, and there are no weights.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from blobstore.core.tensor import DType, TensorSpec
from blobstore.planning.plan import QuantizeOptions, plan_source

FOLDER = Path(__file__).parents[1] / "data" / "policies"
_FOUR = {"num_hidden_layers": 4}
_TEXT_FOUR = {"text_config": _FOUR}
MODELS: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": _FOUR,
    "AriaForConditionalGeneration": _TEXT_FOUR,
    "BartForConditionalGeneration": {"encoder_layers": 2, "decoder_layers": 2},
    "Cohere2MoeForCausalLM": _FOUR,
    "DeepseekV3ForCausalLM": _FOUR,
    "Ernie4_5_VLMoeForConditionalGeneration": _TEXT_FOUR,
    "FalconForCausalLM": _FOUR,
    "GPT2LMHeadModel": {"n_layer": 4},
    "GPTBigCodeForCausalLM": {"n_layer": 4},
    "GPTNeoXForCausalLM": _FOUR,
    "Gemma3ForConditionalGeneration": _TEXT_FOUR,
    "Gemma4ForConditionalGeneration": {"text_config": {}, "vision_config": {}, "audio_config": {}},
    "Glm4MoeForCausalLM": _FOUR,
    "GptOssForCausalLM": _FOUR,
    "GraniteMoeForCausalLM": _FOUR,
    "InternVLForConditionalGeneration": _TEXT_FOUR,
    "JambaForCausalLM": {"num_hidden_layers": 8},
    "KimiLinearForCausalLM": _FOUR,
    "Llama4ForConditionalGeneration": {
        "text_config": {**_FOUR, "pad_token_id": 0},
        "vision_config": _FOUR,
    },
    "LlamaForCausalLM": _FOUR,
    "LlavaForConditionalGeneration": _TEXT_FOUR,
    "LongcatFlashForCausalLM": {"num_layers": 2},
    "Mamba2ForCausalLM": _FOUR,
    "MixtralForCausalLM": _FOUR,
    "MllamaForConditionalGeneration": {"text_config": {"num_hidden_layers": 5}},
    "NemotronHForCausalLM": {},
    "OlmoeForCausalLM": _FOUR,
    "PhimoeForCausalLM": _FOUR,
    "Qwen2AudioForConditionalGeneration": _TEXT_FOUR,
    "Qwen2_5_VLForConditionalGeneration": _TEXT_FOUR,
    "Qwen3MoeForCausalLM": _FOUR,
    "Qwen3NextForCausalLM": _FOUR,
    "Qwen3VLMoeForConditionalGeneration": _TEXT_FOUR,
    "Qwen3_5MoeForConditionalGeneration": _TEXT_FOUR,
    "SwitchTransformersForConditionalGeneration": {},
    "T5ForConditionalGeneration": {"num_layers": 2},
}
"""Classes of transformers, with what differs from their default sizes: fewer layers."""


def source_of(name: str) -> Any:
    """Return a source with the tensors that ``save_pretrained`` writes for a model, and its config."""
    model_class = getattr(transformers, name)
    config = model_class.config_class(**MODELS[name])
    with torch.device("meta"):
        model = model_class._from_config(config)
    tied = set(model.all_tied_weights_keys)
    tensors = revert_weight_conversion(model, model.state_dict())
    specs = {
        key: TensorSpec(key, DType.BF16, tuple(tensor.shape))
        for key, tensor in tensors.items()
        if key not in tied
    }
    values = json.loads(model.config.to_json_string())
    return SimpleNamespace(
        specs=specs,
        config={**values, "architectures": [name]},
        notices=(),
        metadata={},
        block_types={},
        files=(),
    )


def table_of(source: Any) -> str:
    """Return the decisions for int4, with the tensors of equal names and shapes on one line.

    The columns are the type, the reason, the number of tensors, their shape and their name, with an
    asterisk for each number. Vectors are left out.
    """
    plan = plan_source(source, quantize=QuantizeOptions(quant_type="int4"))
    counts: dict[tuple[str, str, str, str], int] = {}
    for row in plan.decisions():
        if len(row.shape) > 1:
            kind = row.type if row.group_size else "kept"
            pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", row.name)
            key = (pattern, str(list(row.shape)), kind, row.reason)
            counts[key] = counts.get(key, 0) + 1
    lines = [
        f"{kind:5} {reason:42} {count:5} {shape:21} {pattern}".rstrip()
        for (pattern, shape, kind, reason), count in sorted(counts.items())
    ]
    notices = [f"note: {notice}" for notice in plan.notices]
    return "\n".join([*notices, *lines, ""])


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in MODELS:
        (FOLDER / f"{name}.txt").write_text(table_of(source_of(name)))
