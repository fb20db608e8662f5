"""Models and tokenizers of the transformers library, from the store.

On the CPU, parameters are views of mapped blobs. The only copies are tensors that transformers
computes itself: fused experts, and other element types. The maps are private, so training such a
model never changes the store. They live as long as any parameter. On another device, each tensor is
copied there and dequantized there when transformers takes it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.escape import quote
from blobstore.core.libraries import optional_libraries
from blobstore.errors import BlobstoreError, UsageError
from blobstore.integrations.adapters import find_base, is_adapter, with_adapter
from blobstore.integrations.small_files import (
    check_layers,
    check_names,
    library_errors,
    log_verified,
    read_json,
    temporary_folder,
    verify_level,
)
from blobstore.integrations.source_names import (
    PublishedTensors,
    component_prefixes,
    gpt_oss_experts,
    is_dequantized,
    is_published,
    quant_settings,
    stacked_names,
)
from blobstore.operations.open import open_files, open_model
from blobstore.quantization.mlx_layout import exported_config
from blobstore.quantization.source_config import SourceQuantConfig

with optional_libraries():
    import torch
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    from blobstore.integrations.lazy_tensors import TensorQueue
    from blobstore.safetensors.cuda import CallerStream
    from blobstore.safetensors.torch import as_tensor, check_device, empty_tensor, with_type

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from blobstore.core.tensor import TensorSpec
    from blobstore.manifests.reference import Reference
    from blobstore.models.read_strategy import Read
    from blobstore.models.small_files import ModelFiles
    from blobstore.operations.open import Model, Verify
    from blobstore.store.local import StoreLike

_FEW = 1 << 20
"""Numbers of parameters that are not questioned, because they cost little."""
_FILES = ("*config.json", "*config.*.json", "*.py")
"""The files that are needed to build a model, of all components."""
_OTHER_CONFIGS = "configuration_files"
"""The key of configs that name other config files for other versions of transformers."""

_BUILT: ContextVar[tuple[Mapping[str, torch.Tensor], str]] = ContextVar("_BUILT")
"""The tensors of the model that is being built, and the beginning of error messages."""
_BUILDING = threading.RLock()
"""Held while transformers builds a model. While it does, functions of its classes are replaced, and a second
thread would take the replacements for the originals."""
# A child process would inherit the replacements, and the lock of a thread that it does not have.
os.register_at_fork(
    before=_BUILDING.acquire, after_in_parent=_BUILDING.release, after_in_child=_BUILDING.release
)


def from_store(
    name: str | Reference,
    *,
    store: StoreLike = None,
    base: str | Reference | None = None,
    auto_class: type | str | None = None,
    dtype: torch.dtype | str | None = None,
    device: str = "cpu",
    subfolder: str = "",
    strict: bool = True,
    dequantize: bool | None = None,
    trust_remote_code: bool = False,
    verify: Verify | None = None,
    read: Read = "auto",
    **options: Any,
) -> transformers.PreTrainedModel:
    """Return a model of the store, in evaluation mode.

    An adapter, such as a LoRA, is returned as the ``PeftModel`` of its base, which is loaded too with the
    same options.

    Args:
        name: the name, ``[host/][namespace/]model[:tag]``, or an address as in :func:`blobstore.open`.
        store: the store, or its folder. The default is ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        base: the base model of an adapter; by default the model of the store that has the name which
            ``adapter_config.json`` states, or came from the repository of this name.
        auto_class: a model class, an Auto class, or the name of one in transformers. The default is
            the class that ``config.json`` names.
        dtype: the element type. The default is that of ``config.json``, else that of the first
            tensor. Another type than the stored one requires a copy. Quantized weights are
            dequantized.
        device: the device of the model. Any device but ``cpu`` requires a copy. Weights are
            dequantized on the device.
        subfolder: the component of a pipeline.
        strict: fail if tensors are missing or the class does not take some. Otherwise transformers
            initialises missing tensors, and warns.
        dequantize: give transformers plain values of FP8 weights and of NVFP4 weights of
            compressed-tensors, and not the weights as published. FP8 kernels then need the package
            ``accelerate``, and others ``compressed-tensors``. The default is to do so on a CPU, and
            where transformers has no quantizer. All other types are always dequantized.
        trust_remote_code: run the code that came with the model, if its config names some.
        verify: as in :func:`blobstore.open`. The default is ``$BLOBSTORE_VERIFY``, or ``digest`` if the store
            can keep what was hashed, and else ``size``.
        read: as in :func:`blobstore.open`.
        options: passed to ``from_pretrained``, such as ``attn_implementation``.

    Raises:
        ModelNotFound: the store has no such name.
        BlobMissing, BlobDamaged, InvalidManifest: the model is incomplete or damaged.
        MissingLibrary: the model is an adapter, and PEFT is not installed.
        UsageError: there is no such class or device, ``base`` is given and the model is not an adapter, or
            ``dequantize`` is false for a model that must be dequantized.
        BlobstoreError: transformers cannot build the model. The message lists all missing and
            unexpected tensors.
    """
    check_device(device)
    given, verify = verify, verify_level(verify, name, store)
    is_plain = device == "cpu" if dequantize is None else dequantize
    if not is_plain:
        with open_model(name, store=store, verify="none") as model:
            if not is_adapter(model):
                stated = quant_settings(model, _stated_config(model, subfolder))
                unsupported = _why_unsupported(stated)
                is_plain = is_dequantized(
                    model, stated, dequantize, default=False, unsupported=unsupported
                )
    with open_model(
        name,
        store=store,
        framework="torch",
        device="cpu" if device == "meta" else device,
        verify=verify,
        dequantize=is_plain,
        read=read,
    ) as model:
        log_verified(model, verify, given)
        if is_adapter(model):
            loaded = from_store(
                find_base(model, store) if base is None else base,
                store=store,
                auto_class=auto_class,
                dtype=dtype,
                device=device,
                subfolder=subfolder,
                strict=strict,
                dequantize=dequantize,
                trust_remote_code=trust_remote_code,
                verify=verify,
                read=read,
                **options,
            )
            adapted: transformers.PreTrainedModel = with_adapter(
                loaded, model, device, strict=strict
            )
            return adapted
        if base is not None:
            raise UsageError(f"base is for adapters, and {model.reference} is not an adapter")
        # Nothing of it is quantized in the store's sense, so that opening it did not dequantize it.
        is_plain = is_plain and not is_published(model, dequantize)
        config, model_class = _config_and_class(
            model,
            subfolder,
            auto_class,
            options,
            is_plain=is_plain,
            trust_remote_code=trust_remote_code,
        )
        with _source_state(model, subfolder, device, is_plain=is_plain) as (state, spare):
            built = _build(
                model, config, model_class, state, dtype, options, strict=strict, spare=spare
            )
    # What transformers computes itself, such as buffers, is not there yet.
    placed: transformers.PreTrainedModel = built if device == "cpu" else built.to(device)
    return placed


def _config_and_class(
    model: Model,
    subfolder: str,
    auto_class: type | str | None,
    options: dict[str, Any],
    *,
    is_plain: bool,
    trust_remote_code: bool,
) -> tuple[transformers.PreTrainedConfig, Any]:
    """Return the config and the class to build; set the generation config in ``options``."""
    stated = _stated_config(model, subfolder)
    check_layers(model, stated)
    with (
        _config_files(
            model, subfolder, stated, is_plain=is_plain, trust_remote_code=trust_remote_code
        ) as files,
        library_errors(f"transformers cannot build {model.reference}"),
    ):
        config = _load_config(files)
        if isinstance(attention := options.get("attn_implementation"), str):
            config._attn_implementation = attention  # noqa: SLF001 - sets it for all parts
        elif not trust_remote_code:
            _check_attention(config)
        model_class = _model_class(config, auto_class, files.code)
        if files.generation is not None:
            generation = transformers.GenerationConfig.from_pretrained(*files.generation)
            options.setdefault("generation_config", generation)
    return config, model_class


def _why_unsupported(config: Mapping[str, Any]) -> str:
    """Return why transformers cannot use weights that are quantized as a config says; mostly empty."""
    # Tokenizers and configs are loaded without these modules.
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
    from transformers.utils.import_utils import is_compressed_tensors_available

    method = SourceQuantConfig(config).method or ""
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return f"transformers {transformers.__version__} has no quantizer for {quote(method)}"
    if method == "compressed-tensors" and not is_compressed_tensors_available():
        return "transformers needs the package compressed-tensors for its weights"
    return ""


@contextlib.contextmanager
def _source_state(
    model: Model, subfolder: str, device: str, *, is_plain: bool
) -> Iterator[tuple[dict[str, torch.Tensor], Collection[str]]]:
    """Give the tensors of a component under the names of its source.

    Also gives the names of those that transformers need not take: it decodes quantized experts that it
    fuses, and then does not use the scales of their activations.
    """
    stated = _stated_config(model, subfolder)
    published = PublishedTensors({}, {})
    if not is_plain:
        published = PublishedTensors.of(model, quant_settings(model, stated))
    names = _SourceNames(
        f"{subfolder}/" if subfolder else "",
        component_prefixes(model),
        stacked_names(model),
        gpt_oss_experts(model, stated),
        published.specs,
    )
    others = names.rename(
        {
            name: as_tensor(memoryview(bytearray(data)), 0, spec)
            for name, (spec, data) in published.left_out.items()
        }
    )
    if device in ("cpu", "meta") and not model.quantized:
        yield names.rename(model.tensors(names.prefix)), ()
        return
    meta = torch.device("meta")
    empty = {name: empty_tensor(spec, meta) for name, spec in model.specs.items()}
    stream = CallerStream.of(device)
    queue = TensorQueue(model.iter_tensors(names.prefix), names.rename, stream)
    with contextlib.closing(queue):
        yield queue.lazy(names.rename(empty)) | others, others.keys()


def _build(
    model: Model,
    config: transformers.PreTrainedConfig,
    model_class: Any,
    state: dict[str, torch.Tensor],
    dtype: torch.dtype | str | None,
    options: dict[str, Any],
    *,
    strict: bool,
    spare: Collection[str],
) -> Any:
    """Let transformers build a model, and check that its tensors fit."""
    if strict:
        options["ignore_mismatched_sizes"] = True  # check_names() lists all of them
    what = f"transformers cannot build {model.reference}"
    with _BUILDING, library_errors(what), contextlib.ExitStack() as block:
        block.callback(_BUILT.reset, _BUILT.set((state, what)))
        used_class = _checking(model_class) if strict else model_class
        built, info = used_class.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype or "auto",
            output_loading_info=True,
            **options,
        )
    built.__class__ = model_class
    if strict:
        check_names(
            f"{model_class.__name__} cannot take the tensors of {model.reference}",
            missing=list(info["missing_keys"]),
            unexpected=[name for name in info["unexpected_keys"] if name not in spare],
            misshapen=list(info["mismatched_keys"]),
        )
    built.config.name_or_path = built.name_or_path = str(model.reference)
    return built


def config_from_store(
    name: str | Reference,
    *,
    store: StoreLike = None,
    subfolder: str = "",
    trust_remote_code: bool = False,
) -> transformers.PreTrainedConfig:
    """Return the config of a model of the store, without quantization.

    Raises:
        BlobstoreError: transformers cannot read ``config.json``. Otherwise as :func:`from_store`.
    """
    with open_files(name, store) as model:
        stated = _stated_config(model, subfolder)
        what = f"transformers cannot make a config of that of {model.reference}"
        with (
            _config_files(
                model, subfolder, stated, is_plain=True, trust_remote_code=trust_remote_code
            ) as files,
            library_errors(what),
        ):
            config = _load_config(files)
    config.name_or_path = str(model.reference)
    return config


def tokenizer_from_store(
    name: str | Reference,
    store: StoreLike = None,
    *,
    subfolder: str = "",
    trust_remote_code: bool = False,
    **options: Any,
) -> transformers.PreTrainedTokenizerBase:
    """Return the tokenizer of a model of the store.

    Raises:
        BlobstoreError: transformers cannot make a tokenizer of the files. Otherwise as :func:`from_store`.
    """
    with (
        open_files(name, store) as model,
        temporary_folder(model) as folder,
        library_errors(f"transformers cannot make a tokenizer of the files of {model.reference}"),
    ):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder / subfolder, trust_remote_code=trust_remote_code, **options
        )
    tokenizer.name_or_path = str(model.reference)
    return tokenizer


def _stated_config(model: ModelFiles, subfolder: str) -> dict[str, Any]:
    return read_json(model, f"{subfolder}/config.json" if subfolder else "config.json")


class _ConfigFiles(NamedTuple):
    """The paths that transformers needs to build a component."""

    config: Path
    """The config without quantization: a file, or its folder."""
    generation: tuple[Path, str] | None
    """Folder and name of the generation config, if there is one."""
    code: Path | None
    """The folder of the code that came with the model, if it is trusted."""


@contextlib.contextmanager
def _config_files(
    model: ModelFiles,
    subfolder: str,
    stated: dict[str, Any],
    *,
    is_plain: bool,
    trust_remote_code: bool,
) -> Iterator[_ConfigFiles]:
    """Give the config files of a component: the blobs themselves, or a temporary folder if needed."""
    # To write and remove a folder takes longer than to open a small model.
    place = f"{subfolder}/" if subfolder else ""
    name, generation = f"{place}config.json", f"{place}generation_config.json"
    plain = exported_config(stated, {}) if is_plain else None
    needed = [model.files[one] for one in (name, generation) if one in model.files]
    are_local = all(model.store.is_local(file.digest) for file in needed)
    if are_local and plain is None and not trust_remote_code and _OTHER_CONFIGS not in stated:
        found = model.file_path(generation) if generation in model.files else None
        yield _ConfigFiles(
            model.file_path(name), (found.parent, found.name) if found else None, None
        )
        return
    written = {} if plain is None else {name: json.dumps(plain).encode()}
    with temporary_folder(model, _FILES, written) as root:
        folder = root / subfolder
        file = root / generation
        yield _ConfigFiles(
            folder,
            (file.parent, file.name) if file.exists() else None,
            folder if trust_remote_code else None,
        )


def _load_config(files: _ConfigFiles) -> transformers.PreTrainedConfig:
    config: transformers.PreTrainedConfig = transformers.AutoConfig.from_pretrained(
        files.config, trust_remote_code=files.code is not None
    )
    return config


def _check_attention(config: transformers.PreTrainedConfig) -> None:
    """Check that no part of a model names code on the Hub, which transformers would run."""
    if "/" in str(wanted := config._attn_implementation):  # noqa: SLF001 - no other way to know
        raise BlobstoreError(
            f"config.json requests the attention {quote(wanted)}, which is code; give another "
            "attn_implementation, such as 'eager', or trust_remote_code=True"
        )
    for part in vars(config).values():
        if isinstance(part, transformers.PreTrainedConfig):
            _check_attention(part)


def _model_class(
    config: transformers.PreTrainedConfig, wanted: type | str | None, code: Path | None
) -> Any:
    """Return the class to build. Classes that came with the model require ``code``, their folder."""
    names = config.architectures or []
    if wanted is None and names:
        for reference in (getattr(config, "auto_map", None) or {}).values():
            if code is not None and str(reference).endswith(f".{names[0]}"):
                return get_class_from_dynamic_module(reference, code)
        found: Any = getattr(transformers, names[0], None)
        if not _is_model_class(found):
            raise BlobstoreError(
                f"config.json names the class {quote(names[0])}, which transformers "
                f"{transformers.__version__} does not have"
            )
        return found
    chosen: Any = transformers.AutoModel if wanted is None else wanted
    if isinstance(chosen, str):
        chosen = getattr(transformers, chosen, None)
    if (mapping := getattr(chosen, "_model_mapping", None)) is not None:
        try:
            found = mapping[type(config)]
        except KeyError:
            raise BlobstoreError(
                f"{chosen.__name__} has no class for models of type {quote(config.model_type)}"
            ) from None
        classes = found if isinstance(found, tuple) else (found,)
        return next((item for item in classes if item.__name__ in names), classes[0])
    if not _is_model_class(chosen):
        raise UsageError(f"{quote(wanted)} is not a model class of transformers")
    return chosen


def _is_model_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, transformers.PreTrainedModel)


@functools.lru_cache(maxsize=8)  # making a class takes longer than opening a small model
def _checking(base: Any) -> Any:
    """Return a subclass that checks each new model before memory is allocated for it."""

    def begin(self: Any, *arguments: Any, **options: Any) -> None:
        base.__init__(self, *arguments, **options)
        _check_parameters(self, *_BUILT.get())

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base)(base.__name__, (base,), {"__init__": begin, **names})


def _check_parameters(
    model: transformers.PreTrainedModel, state: Mapping[str, torch.Tensor], what: str
) -> None:
    """Check what transformers checks too late or never: the number of parameters, and types."""
    # It initialises parameters that are missing or have another shape, however large they are, and
    # reports them afterwards.
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
            f"{what}: config.json requires {count} parameters, but {stored} are stored"
        )


class _SourceNames(NamedTuple):
    """How the tensors of a component were named in its source."""

    prefix: str
    """The prefix of their names in the model."""
    others: tuple[str, ...]
    """The prefixes of other components."""
    stacks: Mapping[str, Sequence[str]]
    """The source names of stacked tensors."""
    transposed: Collection[str]
    """Tensors whose matrices are transposed in the source."""
    published: Mapping[str, TensorSpec]
    """The tensors that have other names and types there; see :class:`PublishedTensors`."""

    def rename(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the component's tensors among ``tensors`` by their source names."""
        prefix, others, stacks, transposed, published = self
        state = {name: one for name, one in tensors.items() if name.startswith(prefix)}
        for name in transposed:
            if name in state:
                state[name] = state[name].transpose(-1, -2).contiguous()
        for name in published.keys() & state.keys():
            spec, tensor = published[name], state.pop(name)
            state[spec.name] = with_type(tensor, spec)
        for name, sources in stacks.items():
            if name in state:
                state.update(zip(sources, state.pop(name).unbind(0), strict=True))
        if prefix:
            return {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        return {name: state[name] for name in state if not name.startswith(others)}
