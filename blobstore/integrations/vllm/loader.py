"""The loader that vLLM uses for the load format ``blobstore``.

vLLM builds the model, receives its weights, and copies each into place. On a CPU, or if ranks take parts
of the tensors, the weights are views of the mapped blobs. On a GPU, they arrive through pinned memory.
vLLM's own report of what was loaded is incomplete: a fused parameter counts as loaded after one of
its parts, and vLLM may silently skip an unknown tensor. So the loader watches what is read and
written.
"""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.utils import PPMissingLayer, StageMissingLayer

from blobstore.core.escape import escape, quote
from blobstore.errors import BlobstoreError
from blobstore.integrations.small_files import check_names
from blobstore.integrations.source_names import (
    PublishedTensors,
    component_prefixes,
    gpt_oss_experts,
    quant_settings,
    stacked_names,
    why_decoded,
)
from blobstore.integrations.vllm.rank_reads import DeferredCopies, part_tensors
from blobstore.integrations.vllm.settings import Settings, check_types
from blobstore.integrations.vllm.writes import Offered, Watch
from blobstore.manifests import media_types
from blobstore.models.frameworks import ArrayTarget
from blobstore.safetensors.torch import as_tensor, with_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from blobstore.operations.open import Model

# A child of vLLM's logger, so that messages are shown.
_LOGGER = init_logger("vllm.plugins.blobstore")
_UNKNOWN = "There is no module or parameter named "
_COMPUTED = re.compile(r"rotary_(emb|pos_emb)\.(inv_freq|cos_cached|sin_cached)$")
"""Tensors that vLLM computes itself, even if a checkpoint has them."""
_EXPERT = re.compile(r"(\d+)\.(.+)", re.ASCII)
_MAX_REASON = 500


class BlobstoreLoader(BaseModelLoader):  # type: ignore[misc] # vLLM need not be installed
    """Loads models from the store; see :class:`~blobstore.integrations.vllm.settings.Settings`."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._settings = Settings.parse(load_config.model_loader_extra_config)
        self._opened: Model | None = None
        self._device = "cpu"
        self._is_published = False
        """Whether vLLM is given quantized weights as their source has them."""

    def download_model(self, model_config: Any) -> None:
        """Check that the store has the model. There is nothing to download."""
        with self._stored(model_config):
            pass

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Check the store, and only then build the model and load its weights.

        Raises:
            ModelNotFound: the store has no such name.
            BlobMissing, BlobDamaged, InvalidManifest: the model is incomplete or damaged.
            BlobstoreError: vLLM cannot take it. The message lists missing and unexpected tensors.
        """
        self._device = self._target_device(vllm_config, model_config)
        with self._stored(model_config):
            return super().load_model(vllm_config, model_config, prefix)

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load the weights of a model. Raises as :meth:`load_model`."""
        with self._stored(model_config) as stored:
            began = time.perf_counter()
            takes_parts = self._takes_parts(stored)
            tensors = part_tensors(stored) if takes_parts else stored.iter_tensors()
            weights = _weights(stored, tensors, is_published=self._is_published)
            # Views are best made before the watch begins. Other tensors need memory.
            are_views = self._device == "cpu" and (self._is_published or not stored.quantized)
            offered = Offered(list(weights) if are_views else weights)
            watch = Watch(dict(model.named_parameters()), offered)
            copies = DeferredCopies(stored) if takes_parts else contextlib.nullcontext()
            with copies, watch:
                loaded = _load(model, offered, stored)
            missing = _missing(model, watch, loaded.names, offered.names)
            unused = _unexpected(offered, model, model_config, stored)
            unexpected = list(dict.fromkeys([*loaded.refused, *unused]))
            what = f"{type(model).__name__} of vLLM cannot take the tensors of {stored.reference}"
            try:
                check_names(what, missing=missing, unexpected=unexpected)
            except BlobstoreError as error:
                if self._settings.strict:
                    raise
                _LOGGER.warning("%s; accepted, because strict is false", error)
            if loaded.error is not None:
                raise loaded.error
            _LOGGER.info(
                "Loading %d tensors of %s from the store took %.3f seconds (verify: %s)",
                len(offered.names),
                stored.reference,
                time.perf_counter() - began,
                self._settings.verify or "default",
            )

    def _target_device(self, vllm_config: Any, model_config: Any) -> str:
        """Return the device that complete tensors are copied to, or ``cpu`` if that does not pay."""
        wanted = getattr(self.load_config, "device", None)
        device = str(wanted or vllm_config.device_config.device)
        if not ArrayTarget.of("torch", device).has_stream:
            return "cpu"
        if vllm_config.parallel_config.tensor_parallel_size == 1:
            return device
        # A rank copies only its parts, but must dequantize complete tensors.
        if getattr(model_config.hf_config, "quantization_config", None):
            return "cpu"
        with replace(self._settings, verify="none").open() as stored:
            return device if stored.quantized else "cpu"

    def _takes_parts(self, stored: Model) -> bool:
        """Return whether this process reads only what it copies, of a model on a network."""
        is_one_of_many = get_current_vllm_config().parallel_config.world_size > 1
        if not is_one_of_many or self._device != "cpu" or self._is_published:
            return False
        blobs = (layer.digest for layer in stored.manifest.layers_of(media_types.TENSOR))
        return stored.reading.how == "pread" or not all(map(stored.store.is_local, blobs))

    @contextlib.contextmanager
    def _stored(self, model_config: Any) -> Iterator[Model]:
        """Give the model. The outermost block opens it and closes it."""
        if self._opened is not None:
            yield self._opened
            return
        self._is_published = False
        if getattr(model_config.hf_config, "quantization_config", None):
            with replace(self._settings, verify="none").open(dequantize=False) as opened:
                reason = why_decoded(opened, quant_settings(opened, opened.config))
            self._is_published = not reason
        with self._settings.open(dequantize=not self._is_published, device=self._device) as opened:
            check_types(opened)
            self._opened = opened
            try:
                yield opened
            finally:
                self._opened = None


class _Loaded(NamedTuple):
    """The result of offering a model's tensors to vLLM."""

    names: set[str]
    """The parameters that vLLM reports as loaded."""
    refused: list[str]
    """The tensors that vLLM has no parameter for."""
    error: BlobstoreError | None
    """The error that vLLM raised after the last tensor."""


def _weights(
    stored: Model, tensors: Iterable[tuple[str, torch.Tensor]], *, is_published: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model under their names in its source."""
    stacks = stacked_names(stored)
    transposed = gpt_oss_experts(stored, stored.config)
    others = component_prefixes(stored)
    published = PublishedTensors({}, {})
    if is_published:
        published = PublishedTensors.of(stored, quant_settings(stored, stored.config))
    for name, tensor in tensors:
        if name.startswith(others):
            continue
        if name in stacks:
            yield from zip(stacks[name], tensor.unbind(0), strict=True)
        elif (spec := published.specs.get(name)) is not None:
            if spec.name not in published.left_out:
                yield spec.name, with_type(tensor, spec)
        else:
            yield name, tensor.transpose(-1, -2) if name in transposed else tensor
    for name, (spec, data) in published.left_out.items():
        yield name, as_tensor(memoryview(bytearray(data)), 0, spec)


def _load(model: Any, offered: Offered, stored: Model) -> _Loaded:
    """Let vLLM load the offered tensors, and continue after those that it has no parameter for."""
    names: set[str] = set()
    refused: list[str] = []
    what = f"{type(model).__name__} of vLLM cannot take"
    while True:
        try:
            names |= model.load_weights(offered) or set()
        except BlobstoreError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {escape(' '.join(str(error).split()), _MAX_REASON)}"
            if offered.last is None:  # vLLM had all tensors, and misses one
                message = f"{what} the tensors of {stored.reference}: {reason}"
                return _Loaded(names, refused, BlobstoreError(message))
            name, tensor = offered.last
            if not isinstance(error, KeyError) and _UNKNOWN not in str(error):
                kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                raise BlobstoreError(
                    f"{what} tensor {quote(name)} of {stored.reference}, {kind}: {reason}"
                ) from error
            refused.append(name)
        else:
            return _Loaded(names, refused, None)


def _missing(model: Any, watch: Watch, loaded: set[str], given: list[str]) -> list[str]:
    """Return the names of missing tensors, or of incomplete parameters with their extent."""
    exempt = {  # vLLM computes these, or quantizes them while it loads them
        f"{place}.{name}" if place else name
        for place, module in model.named_modules()
        if isinstance(method := getattr(module, "quant_method", None), BaseKVCacheMethod)
        or getattr(method, "uses_meta_device", False)
        for name, _ in module.named_parameters()
    }
    found: dict[str, None] = {}
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if name in exempt or not parameter.numel():
            continue
        count = watch.written(name)
        if not count and name not in loaded:
            found[name] = None
        elif count and count < parameter.numel():
            absent = _absent_parts(model, name, given)
            if absent or count < _least_written(modules[name.rpartition(".")[0]], parameter):
                whole = f"{name} ({count} of {parameter.numel()} elements)"
                found |= dict.fromkeys(absent or [whole])
    return list(found)


def _least_written(module: Any, parameter: torch.Tensor) -> int:
    """Return how many elements of a parameter a checkpoint fills at least.

    Experts may have more, because vLLM rounds their sizes up for a kernel.
    """
    if (stated := getattr(parameter, "weight_loader_numel", None)) is not None:
        return int(stated)
    config, least = getattr(module, "moe_config", None), parameter.numel()
    if getattr(config, "tp_shard_with_padding", False):
        return 0  # of the last rank, all may be padding
    for size in ("hidden_dim", "intermediate_size_per_partition"):
        padded, plain = (getattr(config, size + end, None) for end in ("", "_unpadded"))
        if padded and plain:
            least = least * min(plain, padded) // padded
    return least


def _absent_parts(model: Any, name: str, given: list[str]) -> list[str]:
    """Return the tensors that a fused parameter lacks, if their names are known."""
    have = set(given)
    for fused, members in getattr(model, "packed_modules_mapping", {}).items():
        if f".{fused}." in name:
            return _absent_if_partial(
                [name.replace(f".{fused}.", f".{member}.") for member in members], have
            )
    place, mark, _ = name.partition(".experts.")
    experts = [
        (int(match[1]), match[2])
        for match in (_EXPERT.fullmatch(other.removeprefix(place + mark)) for other in have)
        if mark and match
    ]
    numbers = range(max((number for number, _ in experts), default=-1) + 1)
    kinds = sorted({kind for _, kind in experts})
    return _absent_if_partial(
        [f"{place}{mark}{number}.{kind}" for number in numbers for kind in kinds], have
    )


def _absent_if_partial(expected: list[str], have: set[str]) -> list[str]:
    """Return the expected names that are absent, unless all are."""
    absent = [name for name in expected if name not in have]
    return absent if len(absent) < len(expected) else []


def _unexpected(offered: Offered, model: Any, model_config: Any, stored: Model) -> list[str]:
    """Return the tensors that vLLM skipped without a known reason."""
    parallel = get_current_vllm_config().parallel_config
    if parallel.enable_expert_parallel or any(
        isinstance(module, PPMissingLayer | StageMissingLayer) for module in model.modules()
    ):
        return []  # tensors of other ranks look like tensors that no rank uses
    config = model_config.hf_config
    ignored = [_COMPUTED.pattern]
    for name in config.architectures or []:
        known = getattr(transformers, name, None)
        ignored += getattr(known, "_keys_to_ignore_on_load_unexpected", None) or []
    pattern = re.compile("|".join(f"(?:{part})" for part in ignored))
    is_tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
    return [
        name
        for name in offered.unused
        if not pattern.search(name) and not (is_tied and _is_tied_head(name, stored))
    ]


def _is_tied_head(name: str, stored: Model) -> bool:
    """Return whether a tensor is the output layer and equals another tensor."""
    if not name.endswith("lm_head.weight") or name not in stored:
        return False
    specs = stored.specs
    alike = [
        other for other, spec in specs.items() if other != name and spec.shape == specs[name].shape
    ]
    return any(torch.equal(stored[name], stored[other]) for other in alike)
