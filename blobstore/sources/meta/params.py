"""Reads Meta's ``params.json`` of a Llama, and generates the equivalent ``config.json``.

Values that the file lacks are taken from the shapes of tensors if possible, and otherwise from Meta's
published models. Each such assumption becomes a notice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blobstore.core import strict_json
from blobstore.core.escape import quote
from blobstore.core.files import open_regular, read_regular
from blobstore.errors import BlobstoreError, DamagedSource, UnsupportedSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from blobstore.core.files import Opener
    from blobstore.core.tensor import DType

PARAMS_FILE = "params.json"
_MAX_PARAMS_SIZE = 2**20
_MAX_INTEGER = 2**31 - 1
_MAX_NUMBER = 1e12

_LLAMA_3_VOCABULARY = 128256
_LLAMA_3_BEGIN = 128000
_LLAMA_3_ENDS = [128001, 128008, 128009]
"""End of text, of a message, of a turn. A base model never generates the last two."""
_LLAMA_3_THETA = 500_000.0
_USUAL_THETA = 10_000.0
_SMALL_LLAMAS = frozenset({(2048, 16), (3072, 28)})
"""Width and layers of Llama 3.2 1B and 3B, which scale positions by 32 instead of 8."""

_READ = frozenset(
    {
        "dim",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "vocab_size",
        "norm_eps",
        "rope_theta",
        "use_scaled_rope",
        "rope_scaling_factor",
        "multiple_of",
        "ffn_dim_multiplier",
    }
)
_WITHOUT_EFFECT = frozenset({"max_batch_size", "max_seq_len"})
"""Cache sizes of a runtime."""
_OTHER_MODELS = ("sliding_window", "moe", "moe_args", "lora_args", "quantization_args")
"""Keys of models that compute differently from a plain Llama."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """The checked content of ``params.json``. Missing values are None."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int | None
    norm_eps: float
    rope_theta: float | None
    use_scaled_rope: bool
    rope_scaling_factor: float | None
    multiple_of: int | None
    ffn_dim_multiplier: float | None
    unknown: tuple[str, ...] = ()
    """Unknown keys."""

    @property
    def head_dim(self) -> int:
        """Rows of one attention head."""
        return self.dim // self.n_heads

    @classmethod
    def read(cls, path: Path, opener: Opener = open_regular) -> Params:
        """Read the file.

        Raises:
            DamagedSource: the file is missing or not a JSON object, a key is missing, or a Llama
                cannot have a value.
            UnsupportedSource: the model is not a plain Llama.
        """
        try:
            value = strict_json.loads(read_regular(path, _MAX_PARAMS_SIZE, opener))
        except OSError as error:
            raise DamagedSource(f"cannot read {quote(path)}: {error.strerror}") from error
        except DamagedSource:
            raise
        except (ValueError, BlobstoreError) as error:
            raise DamagedSource(f"{quote(path)}: {error}") from None
        if isinstance(value, dict) and "model" in value:
            value = value["model"]
        if not isinstance(value, dict):
            raise DamagedSource(f"{quote(path)} is not a JSON object of parameters")
        for key in _OTHER_MODELS:
            if value.get(key):
                raise UnsupportedSource(
                    f"{quote(path)} has key {quote(key)}: this is not a plain Llama"
                )
        return _Reader(path, value).params()


class _Reader:
    """Reads checked values of the decoded file."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values

    def params(self) -> Params:
        scaled = self._values.get("use_scaled_rope", False)
        if type(scaled) is not bool:
            raise self._wrong("use_scaled_rope", "true or false")
        vocabulary = self._values.get("vocab_size")
        if type(vocabulary) is int and vocabulary == -1:
            vocabulary = None  # Llama 1 and 2 leave it to the tokenizer
        n_heads = self._integer("n_heads")
        params = Params(
            dim=self._integer("dim"),
            n_layers=self._integer("n_layers"),
            n_heads=n_heads,
            n_kv_heads=self._integer("n_kv_heads") if self._states("n_kv_heads") else n_heads,
            vocab_size=None if vocabulary is None else self._integer("vocab_size"),
            norm_eps=self._number("norm_eps"),
            rope_theta=self._optional("rope_theta"),
            use_scaled_rope=scaled,
            rope_scaling_factor=self._optional("rope_scaling_factor"),
            multiple_of=self._integer("multiple_of") if self._states("multiple_of") else None,
            ffn_dim_multiplier=self._optional("ffn_dim_multiplier"),
            unknown=tuple(sorted(self._values.keys() - _READ - _WITHOUT_EFFECT)),
        )
        if params.dim % n_heads or params.head_dim % 2:
            raise self._damaged(f"dim {params.dim} is not n_heads {n_heads} times an even number")
        if n_heads % params.n_kv_heads:
            raise self._damaged(
                f"n_heads {n_heads} is not a multiple of n_kv_heads {params.n_kv_heads}"
            )
        return params

    def _states(self, key: str) -> bool:
        return self._values.get(key) is not None

    def _integer(self, key: str) -> int:
        value = self._value(key)
        if type(value) is not int or not 1 <= value <= _MAX_INTEGER:
            raise self._wrong(key, f"an integer of 1 to {_MAX_INTEGER}")
        return value

    def _number(self, key: str) -> float:
        value = self._value(key)
        if type(value) not in (int, float) or not 0 < value <= _MAX_NUMBER:
            raise self._wrong(key, f"a number above 0, up to {_MAX_NUMBER:g}")
        return float(value)

    def _optional(self, key: str) -> float | None:
        return self._number(key) if self._states(key) else None

    def _value(self, key: str) -> Any:
        if key not in self._values:
            raise self._damaged(f"key {quote(key)} is missing")
        return self._values[key]

    def _wrong(self, key: str, expected: str) -> DamagedSource:
        found = quote(repr(self._values[key])[:100])
        return self._damaged(f"{quote(key)} is {found}, expected {expected}")

    def _damaged(self, problem: str) -> DamagedSource:
        return DamagedSource(f"{quote(self._path)}: {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Properties of a model that the shapes of its tensors determine."""

    vocab_size: int
    intermediate_size: int
    is_tied: bool
    """Whether the embedding is the output matrix too."""
    dtype: DType


def make_config(params: Params, measured: Measured) -> Mapping[str, Any]:
    """Return the content of ``config.json`` in the form that every runtime reads."""
    scaling = {
        "factor": _factor(params),
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": params.head_dim,
        "hidden_act": "silu",
        "hidden_size": params.dim,
        "intermediate_size": measured.intermediate_size,
        "max_position_embeddings": _positions(params),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": params.n_heads,
        "num_hidden_layers": params.n_layers,
        "num_key_value_heads": params.n_kv_heads,
        "rms_norm_eps": params.norm_eps,
        "rope_scaling": scaling if params.use_scaled_rope else None,
        "rope_theta": _theta(params),
        "tie_word_embeddings": measured.is_tied,
        "torch_dtype": DTYPE_NAMES[measured.dtype.value],
        "vocab_size": measured.vocab_size,
    }
    if measured.vocab_size == _LLAMA_3_VOCABULARY:
        config |= {"bos_token_id": _LLAMA_3_BEGIN, "eos_token_id": _LLAMA_3_ENDS}
    return config


DTYPE_NAMES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Element types of a plain Llama, with their names in a config."""


def notices(params: Params, measured: Measured) -> Iterator[str]:
    """Yield the assumptions of the config, and the values of ``params.json`` that it lacks."""
    yield f"config.json: assumed max_position_embeddings {_positions(params)}"
    if params.rope_theta is None:
        yield f"config.json: assumed rope_theta {_USUAL_THETA:g}"
    if params.use_scaled_rope and params.rope_scaling_factor is None:
        yield f"config.json: assumed rope scaling by {_factor(params):g}, as in Meta's models"
    if measured.vocab_size == _LLAMA_3_VOCABULARY:
        yield "config.json: assumed the special tokens of Llama 3, because the vocabulary has its size"
    if params.multiple_of is not None:  # Meta's code computes the size as follows
        usual = 8 * params.dim // 3
        if params.ffn_dim_multiplier is not None:
            usual = int(params.ffn_dim_multiplier * usual)
        usual = params.multiple_of * math.ceil(usual / params.multiple_of)
        if usual != measured.intermediate_size:
            yield (
                f"config.json: intermediate_size is {measured.intermediate_size}, as in the "
                f"tensors; by {PARAMS_FILE} it would be {usual}"
            )
    for key in params.unknown:
        yield f"{PARAMS_FILE}: key {quote(key)} is unknown and was ignored"


def _theta(params: Params) -> float:
    return _USUAL_THETA if params.rope_theta is None else params.rope_theta


def _positions(params: Params) -> int:
    if params.use_scaled_rope:
        return 131072
    theta = _theta(params)
    if theta == _LLAMA_3_THETA:
        return 8192
    return 16384 if theta > _USUAL_THETA else 4096  # Code Llama; Llama 2


def _factor(params: Params) -> float:
    if params.rope_scaling_factor is not None:
        return params.rope_scaling_factor
    return 32.0 if (params.dim, params.n_layers) in _SMALL_LLAMAS else 8.0
