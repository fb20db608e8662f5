"""Adapters such as LoRA, which PEFT adds to the model of the store that is their base."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError, MissingLibrary, ModelNotFound
from blobstore.integrations.small_files import (
    ADAPTER_CONFIG,
    check_names,
    library_errors,
    temporary_folder,
)
from blobstore.manifests.reference import Reference
from blobstore.models.small_files import first_text
from blobstore.operations.describe.list import list_models
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    import transformers

    from blobstore.models.small_files import ModelFiles
    from blobstore.operations.open import Model

_MODULES = ("megatron_config", "megatron_core")
"""Keys with which PEFT imports a module that the config names."""


def is_adapter(model: ModelFiles) -> bool:
    """Return whether a model is an adapter of another one."""
    return ADAPTER_CONFIG in model.files and "config.json" not in model.files


def find_base(model: ModelFiles, store: StoreLike) -> Reference:
    """Return the model of a store that an adapter names: by its name, or by the repository that it came from.

    Raises:
        ModelNotFound: the store does not have it.
    """
    wanted = first_text(model.read_json(ADAPTER_CONFIG), "base_model_name_or_path")
    local = LocalStore.to_read(store)
    try:
        if local.has_model(wanted):
            return Reference.of(wanted)
    except BlobstoreError:  # it is a path, or no name at all
        pass
    for found in list_models(store=local, read_sources=True, on_error=lambda _: None):
        if wanted and found.source is not None and found.source.repository == wanted:
            return found.reference
    raise ModelNotFound(
        f"{model.reference} is an adapter of {quote(wanted or 'another model')}, which the store does not "
        "have under this name or from this repository",
        advice="name it with base=…",
    )


def with_adapter(
    base: transformers.PreTrainedModel, model: Model, device: str, *, strict: bool
) -> Any:
    """Return a base model with the adapter ``model``, as PEFT loads it from a folder.

    Raises:
        MissingLibrary: PEFT is not installed.
        BlobstoreError: PEFT cannot load the adapter, or tensors are missing or unexpected.
    """
    try:
        import peft
    except ImportError:
        raise MissingLibrary(
            f"{model.reference} is an adapter, which the package peft loads",
            advice="install 'peft'",
        ) from None
    from blobstore.safetensors.torch import save_file

    # An adapter must not decide what PEFT imports, or where it looks for the base.
    stated = {
        key: value for key, value in model.read_json(ADAPTER_CONFIG).items() if key not in _MODULES
    }
    stated["base_model_name_or_path"] = base.name_or_path
    written = {ADAPTER_CONFIG: json.dumps(stated).encode()}
    with (
        temporary_folder(model, (ADAPTER_CONFIG,), written) as folder,
        library_errors(f"PEFT cannot load {model.reference}"),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Found missing adapter keys")  # reported below
        save_file(model.tensors(), folder / "adapter_model.safetensors")
        # Memory is allocated when weights are read, so that a wrong rank costs nothing.
        options: dict[str, Any] = {"torch_device": device, "low_cpu_mem_usage": True}
        adapted = peft.PeftModel.from_pretrained(base, folder, **options)
        result = adapted.load_adapter(folder, "default", **options)
    if strict:
        check_names(
            f"{type(base).__name__} cannot take the tensors of {model.reference}",
            missing=list(result.missing_keys),
            unexpected=list(result.unexpected_keys),
        )
    return adapted
