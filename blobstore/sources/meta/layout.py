"""Plans how the shards of a Meta Llama form its tensors, by names and shapes alone.

Meta's runtime splits a model over processors. A shard has the part of one processor: some rows of a
matrix, some columns, or a copy of a small tensor. Shards do not say which. The name of a tensor
determines it, except for the embedding, and all shapes must match ``params.json``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple

from blobstore.core.escape import join_some, quote
from blobstore.core.tensor import TensorSpec
from blobstore.errors import DamagedSource, UnsupportedSource
from blobstore.sources.meta.params import DTYPE_NAMES, PARAMS_FILE, Measured

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blobstore.sources.meta.params import Params

Split = Literal["rows", "columns", "copies"]


class _Role(NamedTuple):
    """The role of a tensor in the model."""

    target: str
    """Its name in Hugging Face's form."""
    split: Split
    shape: tuple[str, ...]
    """Shape of the complete tensor, by the names of its sizes."""
    is_rotated: bool = False
    """Whether the position encoding applies to its rows, which Hugging Face's form reorders."""


_OUTPUT = "output.weight"
_EMBEDDING = "tok_embeddings.weight"
_FREQUENCIES = re.compile(
    r"(?:layers\.[0-9]{1,6}\.attention\.inner_attention\.)?rope\.freqs", re.ASCII
)
"""The position encoding of Llama 1, stored in every layer, and of Llama 2."""
_TOP = {
    _EMBEDDING: _Role("model.embed_tokens.weight", "rows", ("vocab_size", "dim")),
    "norm.weight": _Role("model.norm.weight", "copies", ("dim",)),
    _OUTPUT: _Role("lm_head.weight", "rows", ("vocab_size", "dim")),
}
_GATE = "feed_forward.w1.weight"
_IN_LAYER = {
    "attention.wq.weight": _Role("self_attn.q_proj.weight", "rows", ("dim", "dim"), True),
    "attention.wk.weight": _Role("self_attn.k_proj.weight", "rows", ("kv", "dim"), True),
    "attention.wv.weight": _Role("self_attn.v_proj.weight", "rows", ("kv", "dim")),
    "attention.wo.weight": _Role("self_attn.o_proj.weight", "columns", ("dim", "dim")),
    _GATE: _Role("mlp.gate_proj.weight", "rows", ("ffn", "dim")),
    "feed_forward.w2.weight": _Role("mlp.down_proj.weight", "columns", ("dim", "ffn")),
    "feed_forward.w3.weight": _Role("mlp.up_proj.weight", "rows", ("ffn", "dim")),
    "attention_norm.weight": _Role("input_layernorm.weight", "copies", ("dim",)),
    "ffn_norm.weight": _Role("post_attention_layernorm.weight", "copies", ("dim",)),
}
_LAYER_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,5})\.(.+)", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A complete tensor and the places of its bytes."""

    spec: TensorSpec
    source: str
    """Its name in the shards."""
    part_bytes: int
    """Its bytes in one shard."""
    parts: tuple[tuple[int, ...], ...]
    """For each part in order, its shards: one to read, and those with copies."""
    by_columns: bool = False
    """Whether each row is spread over all parts. Otherwise each part has some rows."""
    head_rows: int = 0
    """Rows of one head if heads have to be reordered (even rows first, then odd ones), or 0."""


class Layout(NamedTuple):
    """All tensors of a model, in the order of the first shard."""

    tensors: Mapping[str, Joined]
    measured: Measured
    left_out: tuple[str, ...]
    """Names of tensors that the model does not need."""


class ShardSpecs(NamedTuple):
    """The file of a shard, and its tensors."""

    file: object
    specs: Mapping[str, TensorSpec]


def check_same(shards: Sequence[ShardSpecs]) -> None:
    """Check that all shards have the same names, types and shapes.

    Raises:
        DamagedSource: they differ.
    """
    first = shards[0]
    for shard in shards[1:]:
        for here, there in ((shard, first), (first, shard)):
            missing = sorted(there.specs.keys() - here.specs.keys())
            if missing:
                raise DamagedSource(
                    f"{quote(here.file)} has no tensor {quote(missing[0])}, which "
                    f"{quote(there.file)} has: these are not the shards of one model"
                )
        for name, spec in first.specs.items():
            other = shard.specs[name]
            if (other.dtype, other.shape) != (spec.dtype, spec.shape):
                raise DamagedSource(
                    f"tensor {quote(name)} is {_shown(other)} in {quote(shard.file)} and "
                    f"{_shown(spec)} in {quote(first.file)}: these are not the shards of one model"
                )


def lay_out(shards: Sequence[ShardSpecs], params: Params, *, keep_names: bool) -> Layout:
    """Return how the shards form the tensors of a Llama.

    With ``keep_names``, names and row order stay unchanged.

    Raises:
        DamagedSource: names or shapes contradict ``params.json``, or each other.
        UnsupportedSource: the model is not a plain Llama.
    """
    return _Planner(shards, params, keep_names=keep_names).plan()


class _Planner:
    def __init__(self, shards: Sequence[ShardSpecs], params: Params, *, keep_names: bool) -> None:
        self._file = shards[0].file
        self._specs = shards[0].specs
        self._count = len(shards)
        self._params = params
        self._keep_names = keep_names

    def plan(self) -> Layout:
        known = self._known_roles()
        self._check_complete()
        embedding, vocabulary = self._embedding()
        gate = self._matrix(f"layers.0.{_GATE}")
        sizes = {
            "dim": self._params.dim,
            "kv": self._params.n_kv_heads * self._params.head_dim,
            "ffn": gate.shape[0] * self._count,
            "vocab_size": vocabulary,
        }
        tensors: dict[str, Joined] = {}
        target, role = known[_EMBEDDING]
        known[_EMBEDDING] = (target, role._replace(split=embedding))
        for name, (target, role) in known.items():
            wanted = tuple(sizes[size] for size in role.shape)
            joined = self._join(self._specs[name], target, role, wanted)
            tensors[joined.spec.name] = joined
        encodings = {}
        for name, spec in self._specs.items():
            if name not in known:  # a position encoding; every shard has all of them
                self._check_dtype(spec)
                parts = (tuple(range(self._count)),)
                encodings[name] = Joined(
                    spec=spec, source=name, part_bytes=spec.nbytes, parts=parts
                )
        if self._keep_names:
            tensors |= encodings
        measured = Measured(
            vocab_size=vocabulary,
            intermediate_size=sizes["ffn"],
            is_tied=_OUTPUT not in self._specs,
            dtype=self._specs[_EMBEDDING].dtype,
        )
        return Layout(tensors, measured, () if self._keep_names else tuple(encodings))

    def _known_roles(self) -> dict[str, tuple[str, _Role]]:
        """Return the Hugging Face name and the role of every tensor except position encodings."""
        known = {}
        unknown = []
        for name in self._specs:
            match = _LAYER_NAME.fullmatch(name)
            role = _IN_LAYER.get(match[2]) if match else _TOP.get(name)
            if role is not None:
                layer = f"model.layers.{match[1]}." if match else ""
                known[name] = (layer + role.target, role)
            elif not _FREQUENCIES.fullmatch(name):
                unknown.append(name)
        if not unknown:
            return known
        hint = (
            "--keep-names imports all tensors unchanged"
            if self._count == 1
            else f"how its {self._count} shards fit together is unknown, even with --keep-names"
        )
        raise UnsupportedSource(
            f"{quote(self._file)} has tensors that a plain Llama does not have: "
            f"{join_some([*map(quote, unknown)], 3)}; {hint}"
        )

    def _check_complete(self) -> None:
        found = {int(match[1]) for match in map(_LAYER_NAME.fullmatch, self._specs) if match}
        layers = self._params.n_layers
        if max(found, default=0) >= layers:
            raise DamagedSource(
                f"{quote(self._file)} has tensors of layer {max(found)}, but {PARAMS_FILE} says "
                f"n_layers {layers}"
            )
        in_layers = (f"layers.{layer}.{name}" for layer in range(layers) for name in _IN_LAYER)
        for name in chain(_TOP, in_layers):
            if name not in self._specs and name != _OUTPUT:
                raise DamagedSource(
                    f"{quote(self._file)} has no tensor {quote(name)}, which a Llama with "
                    f"n_layers {layers} needs"
                )

    def _matrix(self, name: str) -> TensorSpec:
        spec = self._specs[name]
        if len(spec.shape) != 2 or 0 in spec.shape:
            raise DamagedSource(
                f"{quote(self._file)}: tensor {quote(name)} is {_shown(spec)}, not a matrix"
            )
        return spec

    def _embedding(self) -> tuple[Split, int]:
        """Return how the embedding is split, and the size of the vocabulary.

        Llama 1 and 2 split its columns, later models its rows.
        """
        rows, columns = self._matrix(_EMBEDDING).shape
        dim, shards, stated = self._params.dim, self._count, self._params.vocab_size
        split: Split = "columns" if columns * shards == dim else "rows"
        if split == "rows":
            rows *= shards
            if columns != dim:
                raise self._contradiction(_EMBEDDING, f"{PARAMS_FILE} says dim {dim}")
            if stated is None and _OUTPUT not in self._specs:
                problem = f"{PARAMS_FILE} has no vocab_size, so these may be parts or copies"
                raise self._contradiction(_EMBEDDING, problem)
        if stated not in (None, rows):
            raise self._contradiction(_EMBEDDING, f"{PARAMS_FILE} says vocab_size {stated}")
        return split, rows

    def _join(self, spec: TensorSpec, target: str, role: _Role, wanted: tuple[int, ...]) -> Joined:
        self._check_dtype(spec)
        parts: tuple[tuple[int, ...], ...] = tuple((shard,) for shard in range(self._count))
        if role.split == "copies":
            parts = (tuple(range(self._count)),)
        elif role.shape[0] == "kv" and len(spec.shape) == 2:
            copies, rest = divmod(self._count, self._params.n_kv_heads)
            # With more shards than heads, several shards have copies of each head.
            if copies > 1 and not rest and spec.shape[0] == self._params.head_dim:
                parts = tuple(tuple(range(at, at + copies)) for at in range(0, self._count, copies))
        sizes = list(spec.shape)
        if sizes:
            sizes[-1 if role.split == "columns" else 0] *= len(parts)
        shape = tuple(sizes)
        if shape != wanted:
            problem = f"by {PARAMS_FILE} and other tensors, the complete shape is {list(wanted)}"
            raise self._contradiction(spec.name, problem)
        name = spec.name if self._keep_names else target
        return Joined(
            spec=TensorSpec(name, spec.dtype, shape),
            source=spec.name,
            part_bytes=spec.nbytes,
            parts=parts,
            by_columns=role.split == "columns" and self._count > 1,
            head_rows=self._params.head_dim if role.is_rotated and not self._keep_names else 0,
        )

    def _check_dtype(self, spec: TensorSpec) -> None:
        if spec.dtype.value not in DTYPE_NAMES and not (
            self._keep_names and not spec.dtype.is_packed
        ):
            raise UnsupportedSource(
                f"{quote(self._file)}: tensor {quote(spec.name)} has type {spec.dtype.value}; a "
                f"plain Llama has {', '.join(DTYPE_NAMES)}"
            )

    def _contradiction(self, name: str, problem: str) -> DamagedSource:
        shards = "in one shard" if self._count == 1 else f"in each of {self._count} shards"
        return DamagedSource(
            f"{quote(self._file)}: tensor {quote(name)} is {_shown(self._specs[name])} {shards}, "
            f"but {problem}"
        )


def _shown(spec: TensorSpec) -> str:
    return f"{spec.dtype.value} {list(spec.shape)}"
