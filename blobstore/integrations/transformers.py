"""Models and tokenizers of the transformers library, from the store.

On the processor a parameter is a view of the mapped blob: nothing is copied that transformers does
not compute anew (experts that it fuses, other element types). The maps are private, so training such
a model never reaches the store, and they live as long as any parameter does.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError, UsageError
from blobstore.integrations.model_files import (
    blaming,
    check_layers,
    check_names,
    decoded,
    folder_of_files,
)
from blobstore.integrations.source_names import (
    component_prefixes,
    gpt_oss_experts,
    stacked_names,
)
from blobstore.models.files import ModelFiles
from blobstore.operations.open import open_model
from blobstore.quantization.mlx_layout import exported_config
from blobstore.safetensors.torch import empty_tensor
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from blobstore.manifests.reference import Reference
    from blobstore.models.memory import Prefetch, Read
    from blobstore.operations.open import Verify

_FEW = 1 << 20
"""Parameters that cost little if they are made up in vain."""
_FILES = ("*config.json", "*config.*.json", "*.py")
"""What is needed to build a model, of all components."""
_OTHER_CONFIGS = "configuration_files"
"""The key of configs that send other versions of transformers to other files beside them."""

_BUILT: ContextVar[tuple[Mapping[str, torch.Tensor], str]] = ContextVar("_BUILT")
"""The tensors for the model that is being built, and what cannot be done if they do not fit."""


def from_store(
    name: str | Reference,
    *,
    store: LocalStore | None = None,
    auto_class: type | str | None = None,
    dtype: torch.dtype | str | None = None,
    device: str = "cpu",
    subfolder: str = "",
    strict: bool = True,
    trust_remote_code: bool = False,
    verify: Verify = "size",
    read: Read = "mmap",
    prefetch: Prefetch | None = None,
    **options: Any,
) -> transformers.PreTrainedModel:
    """Return a model of the store, in evaluation mode.

    Args:
        name: the name, ``[host/][namespace/]model[:tag]``.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        auto_class: a class of models, an Auto class, or the name of one in transformers; by default
            the class that ``config.json`` names.
        dtype: the element type; by default that of ``config.json``, else that of the first tensor.
            Any other than the stored one costs a copy. Quantized weights become plain numbers.
        device: where the model is put; anything but ``cpu`` is a copy.
        subfolder: the component of a pipeline.
        strict: refuse a model that lacks tensors, or has others than the class takes. Otherwise
            transformers makes up what is missing, and warns.
        trust_remote_code: run the code that came with the model, if its config asks for it.
        verify: this, ``read`` and ``prefetch`` are those of :func:`blobstore.open`.
        read: see there.
        prefetch: see there.
        options: for ``from_pretrained``, such as ``attn_implementation``.

    Raises:
        ModelNotFound: the store has no such name.
        BlobMissing, BlobDamaged, InvalidManifest: the model is not whole.
        UsageError: there is no such class or device.
        BlobstoreError: transformers cannot build it; which tensors are missing or unexpected is
            listed in full.
    """
    store = store or LocalStore()
    _check_device(device)
    with open_model(
        name,
        store=store,
        framework="torch",
        verify=verify,
        dequantize=True,
        read=read,
        prefetch=prefetch,
    ) as model:
        what = f"transformers cannot build {model.reference}"
        stated = _stated(model, subfolder)
        check_layers(model, stated)
        with _files(model, subfolder, stated, trust_remote_code) as files, blaming(what):
            config = _config(files)
            if isinstance(attention := options.get("attn_implementation"), str):
                config._attn_implementation = attention  # noqa: SLF001 - of all parts of the model
            elif not trust_remote_code:
                _check_attention(config)
            chosen = _model_class(config, auto_class, files.code)
            if files.generation is not None:
                own = transformers.GenerationConfig.from_pretrained(*files.generation)
                options.setdefault("generation_config", own)
        if strict:
            options["ignore_mismatched_sizes"] = True  # they are listed below
        names = _Names(
            f"{subfolder}/" if subfolder else "",
            component_prefixes(model),
            stacked_names(store, model),
            gpt_oss_experts(store, model, stated),
        )
        if strict and model.quantized:  # which become plain numbers, of which there may be too many
            meta = torch.device("meta")
            empty = {name: empty_tensor(spec, meta) for name, spec in model.specs.items()}
            with blaming(what), meta:
                _check_parameters(chosen(copy.deepcopy(config)), _state(empty, names), what)
        state = _state(model.tensors(names.prefix), names)
        with blaming(what), _building(state, what):
            made = _checking(chosen) if strict else chosen
            built, info = made.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=dtype or "auto",
                output_loading_info=True,
                **options,
            )
    built.__class__ = chosen
    if strict:
        check_names(
            f"{chosen.__name__} cannot take the tensors of {model.reference}",
            missing=list(info["missing_keys"]),
            unexpected=list(info["unexpected_keys"]),
            misshapen=list(info["mismatched_keys"]),
        )
    built.config.name_or_path = built.name_or_path = str(model.reference)
    placed: transformers.PreTrainedModel = built if device == "cpu" else built.to(device)
    return placed


def config_from_store(
    name: str | Reference,
    *,
    store: LocalStore | None = None,
    subfolder: str = "",
    trust_remote_code: bool = False,
) -> transformers.PreTrainedConfig:
    """Return the config of a model of the store, without a word about quantization.

    Raises:
        BlobstoreError: transformers cannot make one of ``config.json``. Otherwise as
            :func:`from_store`.
    """
    model = ModelFiles.of(name, store or LocalStore())
    stated = _stated(model, subfolder)
    what = f"transformers cannot make a config of that of {model.reference}"
    with _files(model, subfolder, stated, trust_remote_code) as files, blaming(what):
        config = _config(files)
    config.name_or_path = str(model.reference)
    return config


def tokenizer_from_store(
    name: str | Reference,
    store: LocalStore | None = None,
    *,
    subfolder: str = "",
    trust_remote_code: bool = False,
    **options: Any,
) -> transformers.PreTrainedTokenizerBase:
    """Return the tokenizer of a model of the store.

    Raises:
        BlobstoreError: transformers cannot make one of the files. Otherwise as :func:`from_store`.
    """
    model = ModelFiles.of(name, store or LocalStore())
    with (
        folder_of_files(model) as folder,
        blaming(f"transformers cannot make a tokenizer of the files of {model.reference}"),
    ):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder / subfolder, trust_remote_code=trust_remote_code, **options
        )
    tokenizer.name_or_path = str(model.reference)
    return tokenizer


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(
            f"torch has no device {quote(device)} here: {str(error).splitlines()[0]}"
        ) from None


def _stated(model: ModelFiles, subfolder: str) -> dict[str, Any]:
    return decoded(model, f"{subfolder}/config.json" if subfolder else "config.json")


class _Files(NamedTuple):
    """Where transformers finds what it needs to build a component."""

    config: Path
    """The config of weights that are plain numbers: a file, or the folder that it is in."""
    generation: tuple[Path, str] | None
    """Folder and name of the config of generation, if there is one."""
    code: Path | None
    """The folder of the code that came with the model, if that is trusted."""


@contextlib.contextmanager
def _files(
    model: ModelFiles, subfolder: str, stated: dict[str, Any], trust_remote_code: bool
) -> Iterator[_Files]:
    """Give the files of a component: the blobs themselves, or a temporary folder if it must be.

    To write and remove a folder takes longer than to open a small model.
    """
    place = f"{subfolder}/" if subfolder else ""
    name, generation = f"{place}config.json", f"{place}generation_config.json"
    plain = exported_config(stated, {})
    if plain is None and not trust_remote_code and _OTHER_CONFIGS not in stated:
        found = model.file_path(generation) if generation in model.files else None
        yield _Files(model.file_path(name), (found.parent, found.name) if found else None, None)
        return
    written = {} if plain is None else {name: json.dumps(plain).encode()}
    with folder_of_files(model, _FILES, written) as root:
        folder = root / subfolder
        file = root / generation
        yield _Files(
            folder,
            (file.parent, file.name) if file.exists() else None,
            folder if trust_remote_code else None,
        )


def _config(files: _Files) -> transformers.PreTrainedConfig:
    config: transformers.PreTrainedConfig = transformers.AutoConfig.from_pretrained(
        files.config, trust_remote_code=files.code is not None
    )
    return config


def _check_attention(config: transformers.PreTrainedConfig) -> None:
    """Check that no part of a model asks for code of the Hub's, which transformers would run."""
    if "/" in str(wanted := config._attn_implementation):  # noqa: SLF001 - no other way to know
        raise BlobstoreError(
            f"config.json asks for the attention {quote(wanted)}, which is code; give another "
            "attn_implementation, such as 'eager', or trust_remote_code=True"
        )
    for part in vars(config).values():
        if isinstance(part, transformers.PreTrainedConfig):
            _check_attention(part)


def _model_class(
    config: transformers.PreTrainedConfig, wanted: type | str | None, code: Path | None
) -> Any:
    """Return the class to build; one that came with the model only if its folder is given."""
    if wanted is None and config.architectures:
        return _named_class(config, config.architectures[0], code)
    chosen: Any = transformers.AutoModel if wanted is None else wanted
    if isinstance(chosen, str):
        chosen = getattr(transformers, chosen, None)
    if (mapping := getattr(chosen, "_model_mapping", None)) is not None:
        return _mapped_class(config, chosen, mapping)
    if not _is_model_class(chosen):
        raise UsageError(f"{quote(wanted)} is no class of models of transformers")
    return chosen


def _named_class(config: transformers.PreTrainedConfig, name: str, code: Path | None) -> Any:
    for reference in (getattr(config, "auto_map", None) or {}).values():
        if code is not None and str(reference).endswith(f".{name}"):
            return get_class_from_dynamic_module(reference, code)
    found = getattr(transformers, name, None)
    if not _is_model_class(found):
        raise BlobstoreError(
            f"config.json names the class {quote(name)}, which transformers "
            f"{transformers.__version__} has not"
        )
    return found


def _mapped_class(config: transformers.PreTrainedConfig, auto_class: Any, mapping: Any) -> Any:
    try:
        found = mapping[type(config)]
    except KeyError:
        raise BlobstoreError(
            f"{auto_class.__name__} has no class for models of type {quote(config.model_type)}"
        ) from None
    classes = found if isinstance(found, tuple) else (found,)
    names = config.architectures or []
    return next((item for item in classes if item.__name__ in names), classes[0])


def _is_model_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, transformers.PreTrainedModel)


@contextlib.contextmanager
def _building(state: Mapping[str, torch.Tensor], what: str) -> Iterator[None]:
    """Say which tensors the models that are made meanwhile are for."""
    token = _BUILT.set((state, what))
    try:
        yield
    finally:
        _BUILT.reset(token)


@functools.lru_cache(maxsize=8)  # to make a class takes longer than to open a small model
def _checking(base: Any) -> Any:
    """Return the class with a look at each new model, before there is memory for it."""

    def begin(self: Any, *arguments: Any, **options: Any) -> None:
        base.__init__(self, *arguments, **options)
        _check_parameters(self, *_BUILT.get())

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base)(base.__name__, (base,), {"__init__": begin, **names})


def _check_parameters(
    model: transformers.PreTrainedModel, state: Mapping[str, torch.Tensor], what: str
) -> None:
    """Check what transformers finds only when it has taken the memory, or never.

    It makes up what is missing or has another shape, however large that is, and tells afterwards.

    Raises:
        BlobstoreError: the model is far larger than what is stored of it, or a tensor is of a type
            that becomes no parameter.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    wanted = {name: one for name, one in model.named_parameters() if name not in tied}
    both = [(name, state[name], one) for name, one in wanted.items() if name in state]
    mistyped = [
        (name, str(found.dtype).removeprefix("torch."), "a floating-point type")
        for name, found, one in both
        if one.is_floating_point() and not found.is_floating_point()
    ]
    check_names(what, mistyped=mistyped)
    count, stored = (sum(one.numel() for one in of.values()) for of in (wanted, state))
    if count > 2 * stored + _FEW:
        misshapen = [(name, found.shape, one.shape) for name, found, one in both]
        check_names(what, misshapen=[item for item in misshapen if item[1] != item[2]])
        raise BlobstoreError(
            f"{what}: config.json asks for {count} parameters, and {stored} are stored"
        )


class _Names(NamedTuple):
    """What the tensors of a component were called in its source."""

    prefix: str
    """What their names begin with in the model."""
    others: tuple[str, ...]
    """What those of other components begin with."""
    stacks: Mapping[str, Sequence[str]]
    """The names of what is stacked."""
    transposed: Collection[str]
    """Those whose matrices lay the other way."""


def _state(tensors: Mapping[str, torch.Tensor], names: _Names) -> dict[str, torch.Tensor]:
    """Return the tensors of a component under the names of its source."""
    prefix, others, stacks, transposed = names
    state = {name: one for name, one in tensors.items() if name.startswith(prefix)}
    for name in transposed:
        state[name] = state[name].transpose(-1, -2).contiguous()
    for name, sources in stacks.items():
        if name in state:
            state.update(zip(sources, state.pop(name).unbind(0), strict=True))
    if prefix:
        return {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return {name: state[name] for name in state if not name.startswith(others)}
