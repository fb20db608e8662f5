"""The settings of the load format, and the arguments with which vLLM uses it. Imports nothing of vLLM."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, get_args

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.tensor import DType
from blobstore.errors import BlobstoreError, UnsupportedDType, UsageError
from blobstore.integrations.small_files import (
    log_verified,
    read_json,
    temporary_folder,
    verify_level,
)
from blobstore.integrations.source_names import is_dequantized, modelopt_settings, quant_settings
from blobstore.manifests.reference import Reference
from blobstore.models.checks import Verify
from blobstore.models.frameworks import NAMES
from blobstore.models.read_strategy import Read
from blobstore.operations.open import open_model
from blobstore.quantization.mlx_layout import exported_config
from blobstore.quantization.source_config import MODELOPT_FILE
from blobstore.remotes.addresses import is_address
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.operations.open import Model

LOAD_FORMAT = "blobstore"
_DTYPE_KEYS = ("dtype", "torch_dtype")
_UNSUPPORTED = {DType.F4, DType.F6_E2M3, DType.F6_E3M2, DType.C64}
_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Files of drivers. Asking torch would initialise CUDA, which vLLM must do in its own processes."""
_WHERE = "--model-loader-extra-config of load format blobstore"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The value of vLLM's ``--model-loader-extra-config`` for the load format."""

    name: str
    """The model, ``[host/][namespace/]model[:tag]``."""
    store: str | None = None
    """The store's folder. The default is ``$BLOBSTORE_HOME`` or ``~/.blobstore``."""
    manifest: str | None = None
    """The digest that the model's manifest must have, so that all processes load the same model."""
    verify: Verify | None = None
    """As in :func:`blobstore.open`, like ``read``; by default as :func:`verify_level` says."""
    read: Read = "auto"
    strict: bool = True
    """Fail if tensors are missing or vLLM does not use some; otherwise only log that."""

    @classmethod
    def parse(cls, value: object) -> Settings:
        """Check the settings that vLLM was given.

        Raises:
            UsageError: a key is unknown or missing, or a value is invalid.
        """
        if not isinstance(value, dict):
            raise UsageError(f"{_WHERE} must be a JSON object, got {quote(value)}")
        known = [field.name for field in fields(cls)]
        if unknown := sorted(map(str, value.keys() - set(known))):
            raise UsageError(
                f"{_WHERE} has unknown keys: {', '.join(map(quote, unknown))}; "
                f"known are {', '.join(known)}"
            )
        if "name" not in value:
            raise UsageError(f'{_WHERE} must name the model, as in {{"name": "llama-3.2:1b"}}')
        for key, given in value.items():
            if expected := _expected(key, given):
                raise UsageError(f"{_WHERE} has {key} {quote(given)}, which must be {expected}")
        return cls(**value)

    @contextlib.contextmanager
    def open(self, *, dequantize: bool = True, device: str = "cpu") -> Iterator[Model]:
        """Open the model for torch, and close it at the end.

        Args:
            dequantize: as in :func:`blobstore.open`.
            device: as in :func:`blobstore.open`.

        Raises:
            ModelNotFound: the store has no such name.
            BlobMissing, BlobDamaged, InvalidManifest: the model is incomplete or damaged.
            BlobstoreError: the name belongs to another model now.
        """
        with open_model(
            self.name,
            store=self.store,
            framework="torch",
            device=device,
            dequantize=dequantize,
            verify=verify_level(self.verify, self.name, self.store),
            read=self.read,
        ) as model:
            found = str(Digest.of(model.data))
            if self.manifest not in (None, found):
                raise BlobstoreError(
                    f"{model.reference} is another model now, {found}, than the {quote(self.manifest)} "
                    "that was to be loaded; start the server again"
                )
            yield model


_CHOICES: dict[str, tuple[Any, ...]] = {
    "verify": (None, *get_args(Verify)),
    "read": get_args(Read),
}


def _expected(key: str, value: object) -> str | None:
    """Return what the value of a key must be, or None if the value is valid."""
    if key in _CHOICES:
        allowed = _CHOICES[key]
        return None if value in allowed else f"one of {', '.join(map(json.dumps, allowed))}"
    if key == "strict":
        return None if isinstance(value, bool) else "true or false"
    if value is None and key != "name":
        return None
    # An unset variable of a script must not mean the current folder.
    return None if isinstance(value, str) and value else "a non-empty string"


@contextlib.contextmanager
def engine_options(
    name: str | Reference,
    *,
    store: StoreLike = None,
    verify: Verify | None = None,
    read: Read = "auto",
    strict: bool = True,
    dequantize: bool | None = None,
) -> Iterator[dict[str, Any]]:
    """Check a model of the store, and give the arguments of ``vllm.LLM`` for it.

    The arguments name a temporary folder with the config and the tokenizer, which is removed at the
    end of the block.

    Args:
        name: the name, ``[host/][namespace/]model[:tag]``, or an address as in :func:`blobstore.open`.
        store: the store, or its folder. The default is ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        verify: as in :func:`blobstore.open`. The check runs here, before vLLM takes any memory. The default is
            ``$BLOBSTORE_VERIFY``, or ``digest`` if the store can keep what was hashed, and else ``size``.
        read: as in :func:`blobstore.open`.
        strict: fail if tensors are missing or vLLM does not use some.
        dequantize: give vLLM plain values of FP8 weights, of NVFP4 weights with global scales and of
            symmetric integers, and not the weights for its own kernels. The default is to do so
            without a GPU, except for symmetric int4 in models without quantized experts. All other types
            are always dequantized.

    Raises:
        ModelNotFound: the store has no such name.
        BlobMissing, BlobDamaged, InvalidManifest: the model is incomplete or damaged.
        BlobstoreError: the model has no config.
        UsageError: ``dequantize`` is false, and vLLM's kernels cannot be used for the model.
    """
    store = LocalStore.of(store)
    model_name = name if is_address(name) else str(Reference.of(name))
    # Mapped, as this process needs no copy of what lies on a network.
    checked = Settings(name=model_name, store=str(store.root), verify=verify, read="mmap")
    with contextlib.ExitStack() as stack:
        with checked.open() as model:
            log_verified(model, verify_level(verify, model_name, store), verify)
            settings = replace(
                checked,
                manifest=str(Digest.of(model.data)),
                verify="size",
                read=read,
                strict=strict,
            )
            check_types(model)
            config = stated = read_json(model, "config.json")
            has_gpu = any(map(os.path.exists, _GPUS))
            with replace(checked, verify="none").open(dequantize=False) as stored:
                described = quant_settings(stored, stated)
                prefers_plain = not has_gpu and not _has_kernels_for_cpus(stored)
                is_plain = is_dequantized(stored, described, dequantize, default=prefers_plain)
            if is_plain:
                config = exported_config(stated, {}) or stated
            sections = [config, *(part for part in config.values() if isinstance(part, dict))]
            if not any(section.get(key) for section in sections for key in _DTYPE_KEYS):
                # Otherwise vLLM would look into weight files, which the folder does not have.
                found = {NAMES[spec.dtype] for spec in model.specs.values() if spec.dtype in NAMES}
                config = {**config, "dtype": found.pop() if len(found) == 1 else "float32"}
            written = {"config.json": json.dumps(config).encode()}
            omitted = [MODELOPT_FILE] if is_plain and modelopt_settings(model) else []
            folder = stack.enter_context(temporary_folder(model, written=written, omitted=omitted))
        yield {
            "model": str(folder),
            "served_model_name": list(dict.fromkeys([str(model.reference), str(name)])),
            "load_format": LOAD_FORMAT,
            "model_loader_extra_config": asdict(settings),
        }


def _has_kernels_for_cpus(model: Model) -> bool:
    """Return whether vLLM (0.32) computes with all quantized weights of a model on CPUs, too."""
    return all(
        kind == "int4-sym" and ".experts." not in name
        for name, (kind, _) in model.quantized.items()
    )


def check_types(model: Model) -> None:
    """Check that vLLM supports the element types of a model.

    Raises:
        UnsupportedDType: it does not, or a weight is quantized in an unknown way.
    """
    for name, spec in model.specs.items():
        if spec.dtype in _UNSUPPORTED:
            raise UnsupportedDType(
                f"vLLM cannot take {model.reference}: tensor {quote(name)} is of type "
                f"{spec.dtype.value}"
            )
