"""Models of the store in vLLM: the plugin that knows the load format ``blobstore``, and its settings.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins`` and calls it in each of its
processes. Nothing of vLLM is imported before.
"""

from __future__ import annotations

import contextlib
import functools
import json
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, get_args

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.tensor import DType
from blobstore.errors import BlobstoreError, UnsupportedDType, UsageError
from blobstore.integrations.model_files import decoded, folder_of_files
from blobstore.manifests.reference import Reference
from blobstore.models.checks import Verify
from blobstore.models.frameworks import NAMES
from blobstore.models.memory import Prefetch, Read
from blobstore.operations.open import open_model
from blobstore.quantization.mlx_layout import exported_config
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.operations.open import Model

LOAD_FORMAT = "blobstore"
_TYPES = ("dtype", "torch_dtype")
_NEVER_TAKEN = {DType.F4, DType.F6_E2M3, DType.F6_E3M2, DType.C64}


@functools.cache  # vLLM may call it more than once
def register() -> None:
    """Make the load format known to vLLM."""
    from vllm.model_executor.model_loader import register_model_loader

    from blobstore.integrations.vllm.loader import BlobstoreLoader

    register_model_loader(LOAD_FORMAT)(BlobstoreLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What vLLM's ``--model-loader-extra-config`` says to the load format."""

    name: str
    """The model, ``[host/][namespace/]model[:tag]``."""
    store: str | None = None
    """The store's folder; by default that of ``$BLOBSTORE_HOME``, else ``~/.blobstore``."""
    manifest: str | None = None
    """The digest that the name's manifest must have, so that all processes load the same model."""
    verify: Verify = "size"
    """This, ``read`` and ``prefetch`` are those of :func:`blobstore.open`."""
    read: Read = "mmap"
    prefetch: Prefetch | None = None
    strict: bool = True
    """Refuse a model that lacks tensors or has some that vLLM does not use; otherwise only tell."""

    @classmethod
    def parse(cls, value: object) -> Settings:
        """Check what vLLM was given.

        Raises:
            UsageError: a key is unknown or missing, or a value is none that it can have.
        """
        where = "--model-loader-extra-config of load format blobstore"
        if not isinstance(value, dict):
            raise UsageError(f"{where} must be a JSON object, got {quote(value)}")
        known = [field.name for field in fields(cls)]
        if unknown := sorted(map(str, value.keys() - set(known))):
            raise UsageError(
                f"{where} has unknown keys: {', '.join(map(quote, unknown))}; "
                f"known are {', '.join(known)}"
            )
        if "name" not in value:
            raise UsageError(f'{where} must name the model, as in {{"name": "llama-3.2:1b"}}')
        for key, given in value.items():
            if expected := _expected(key, given):
                raise UsageError(f"{where} has {key} {quote(given)}, which must be {expected}")
        return cls(**value)

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[LocalStore, Model]]:
        """Give the store and the open model, for torch and with plain numbers.

        Raises:
            ModelNotFound: the store has no such name.
            BlobMissing, BlobDamaged, InvalidManifest: the model is not whole.
            BlobstoreError: it is another model now than the one that was named.
        """
        reference = Reference.parse(self.name)
        store = LocalStore(self.store)
        with open_model(
            reference,
            store=store,
            framework="torch",
            dequantize=True,
            verify=self.verify,
            read=self.read,
            prefetch=self.prefetch,
        ) as model:
            found = str(Digest.of(store.read_manifest(reference)))
            if self.manifest not in (None, found):
                raise BlobstoreError(
                    f"{reference} is another model now, {found}, than the {quote(self.manifest)} "
                    "that was to be loaded; start the server again"
                )
            yield store, model


_CHOICES: dict[str, tuple[Any, ...]] = {
    "verify": get_args(Verify),
    "read": get_args(Read),
    "prefetch": (None, *get_args(Prefetch)),
}


def _expected(key: str, value: object) -> str | None:
    """Return what the value of a key must be, if it is not."""
    if key in _CHOICES:
        allowed = _CHOICES[key]
        return None if value in allowed else f"one of {', '.join(map(json.dumps, allowed))}"
    if key == "strict":
        return None if isinstance(value, bool) else "true or false"
    if value is None and key != "name":
        return None
    # An unset variable of a script must not mean the current folder.
    return None if isinstance(value, str) and value else "a text that is not empty"


@contextlib.contextmanager
def engine_options(
    name: str | Reference,
    *,
    store: LocalStore | None = None,
    verify: Verify = "size",
    read: Read = "mmap",
    prefetch: Prefetch | None = None,
    strict: bool = True,
) -> Iterator[dict[str, Any]]:
    """Give the arguments of ``vllm.LLM`` for a model of the store, after it was checked.

    Among them is a temporary folder with the config and the tokenizer, which is removed at the end.

    Args:
        name: the name, ``[host/][namespace/]model[:tag]``.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        verify: of :func:`blobstore.open`; it is done here, before vLLM takes any memory.
        read: this and ``prefetch`` are those of :func:`blobstore.open`.
        prefetch: see there.
        strict: refuse a model that lacks tensors or has some that vLLM does not use.

    Raises:
        ModelNotFound: the store has no such name.
        BlobMissing, BlobDamaged, InvalidManifest: the model is not whole.
        BlobstoreError: it has no config.
    """
    reference = Reference.parse(name) if isinstance(name, str) else name
    store = store or LocalStore()
    checked = Settings(name=str(reference), store=str(store.root), verify=verify)
    settings = replace(
        checked,
        manifest=str(Digest.of(store.read_manifest(reference))),
        verify="size",
        read=read,
        prefetch=prefetch,
        strict=strict,
    )
    with contextlib.ExitStack() as stack:
        with checked.opened() as (_, model):
            check_types(model)
            written = {"config.json": json.dumps(_config(model)).encode()}
            folder = stack.enter_context(folder_of_files(model, written=written))
        yield {
            "model": str(folder),
            "served_model_name": list(dict.fromkeys([str(reference), str(name)])),
            "load_format": LOAD_FORMAT,
            "model_loader_extra_config": asdict(settings),
        }


def check_types(model: Model) -> None:
    """Check that vLLM can take the tensors of a model.

    Raises:
        UnsupportedDType: there is one of a type that it has not, or one is quantized in a way that
            is not known.
    """
    for name, spec in model.specs.items():
        if spec.dtype in _NEVER_TAKEN:
            raise UnsupportedDType(
                f"vLLM cannot take {model.reference}: tensor {quote(name)} is of type "
                f"{spec.dtype.value}"
            )


def _config(model: Model) -> dict[str, Any]:
    """Return ``config.json`` without a word about quantization, and with the type of the weights."""
    stated = decoded(model, "config.json")
    plain = exported_config(stated, {}) or stated
    sections = [plain, *(part for part in plain.values() if isinstance(part, dict))]
    if any(section.get(key) for section in sections for key in _TYPES):
        return plain
    # vLLM would look into the weight files, of which the folder has none.
    found = {NAMES[spec.dtype] for spec in model.specs.values() if spec.dtype in NAMES}
    return {**plain, "dtype": found.pop() if len(found) == 1 else "float32"}
