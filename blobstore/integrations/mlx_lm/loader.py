"""Loads models of the store with mlx-lm, which builds the model and converts names as from a folder."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import TYPE_CHECKING, Any

from blobstore.core.escape import escape, quote
from blobstore.core.libraries import optional_libraries
from blobstore.errors import BlobstoreError
from blobstore.integrations.small_files import (
    check_layers,
    check_names,
    library_errors,
    log_verified,
    read_json,
    temporary_folder,
    verify_level,
)
from blobstore.integrations.source_names import gpt_oss_experts
from blobstore.models.published import published_scheme
from blobstore.operations.open import open_model
from blobstore.quantization.mlx_layout import exported_config
from blobstore.quantization.old_config_keys import with_old_keys

with optional_libraries():
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm import utils

    from blobstore.integrations.mlx_lm.weights import DECODED, Weights, naming_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Unpack

    from blobstore.integrations.small_files import OpenOptions
    from blobstore.manifests.reference import Reference
    from blobstore.operations.open import Model
    from blobstore.store.local import StoreLike


def load(
    name: str | Reference,
    *,
    store: StoreLike = None,
    lazy: bool = False,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    **opening: Unpack[OpenOptions],
) -> tuple[Any, Any]:
    """Return a model of the store and its tokenizer, as ``mlx_lm.load`` returns those of a folder.

    Args:
        name: the name, ``[host/][namespace/]model[:tag]``, or an address as in :func:`blobstore.open`.
        store: the store, or its folder. The default is ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        lazy: let mlx-lm compute converted weights on first use.
        tokenizer_config: settings of the tokenizer.
        model_config: values that replace those of the config.
        opening: ``verify``, ``read`` and ``progress`` of :func:`blobstore.open`. The default of ``verify`` is
            ``$BLOBSTORE_VERIFY``, or ``digest`` if the store can keep what was hashed, and else ``size``.

    Raises:
        ModelNotFound: the store has no such name.
        BlobMissing, BlobDamaged, InvalidManifest: the model is incomplete or damaged.
        UnsupportedDType: MLX does not have the type of a tensor.
        BlobstoreError: mlx-lm cannot build the model. The message lists all missing and unexpected
            tensors.
    """
    model, tokenizer, _ = load_all(
        name,
        store=store,
        lazy=lazy,
        tokenizer_config=tokenizer_config,
        model_config=model_config,
        **opening,
    )
    return model, tokenizer


def load_all(
    name: str | Reference,
    *,
    store: StoreLike = None,
    lazy: bool = False,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    **opening: Unpack[OpenOptions],
) -> tuple[Any, Any, dict[str, Any]]:
    """Return a model, its tokenizer and its config; otherwise the same as :func:`load`."""
    with _opened(name, store, opening) as (stored, weights, folder):
        with library_errors(f"mlx-lm cannot make a tokenizer of the files of {stored.reference}"):
            tokenizer = utils.load_tokenizer(
                folder,
                {"trust_remote_code": False, **(tokenizer_config or {})},
                eos_token_ids=utils.load_config(folder).get("eos_token_id"),
            )
        tokenizer.name_or_path = str(stored.reference)
        model, used = _build(stored.reference, folder, weights, model_config, lazy=lazy)
    return model, tokenizer, used


def load_model(
    name: str | Reference,
    *,
    store: StoreLike = None,
    lazy: bool = False,
    model_config: Mapping[str, Any] | None = None,
    **opening: Unpack[OpenOptions],
) -> tuple[Any, dict[str, Any]]:
    """Return a model and its config, without a tokenizer; otherwise the same as :func:`load`."""
    with _opened(name, store, opening, ("*config.json",)) as (stored, weights, folder):
        return _build(stored.reference, folder, weights, model_config, lazy=lazy)


@contextlib.contextmanager
def _opened(
    name: str | Reference,
    store: StoreLike,
    opening: OpenOptions,
    patterns: Sequence[str] = ("*",),
) -> Iterator[tuple[Model, Weights, Path]]:
    """Give a model, its weights (not read yet), and a folder with its files as mlx-lm expects them."""
    given = opening.get("verify")
    opening["verify"] = verify = verify_level(given, name, store)
    with open_model(name, store=store, framework="numpy", dequantize=DECODED, **opening) as stored:
        log_verified(stored, verify, given)
        config = read_json(stored, "config.json")
        if "model_file" in config:
            raise BlobstoreError(
                f"config.json of {stored.reference} requires code of its own, "
                f"{quote(config['model_file'])}, which is not run"
            )
        check_layers(stored, config)
        if scheme := published_scheme(stored.store, stored.manifest):
            raise BlobstoreError(
                f"the weights of {stored.reference} ({escape(scheme)}) are kept as published, and not "
                "read; link the model to a folder, and load that if mlx-lm supports the quantization"
            )
        experts = gpt_oss_experts(stored, config)
        specs = stored.specs
        naming = naming_of(stored, specs)
        weights = Weights(stored, specs, naming, experts)
        if not experts:  # mlx-lm reads the config of gpt-oss unchanged
            config = exported_config(config, naming.types) or config
        written = {"config.json": json.dumps(with_old_keys(config)).encode()}
        with temporary_folder(stored, patterns, written) as folder:
            yield stored, weights, folder


def _build(
    reference: Reference | str,
    folder: Path,
    weights: Weights,
    model_config: Mapping[str, Any] | None,
    *,
    lazy: bool,
) -> tuple[Any, dict[str, Any]]:
    bases: list[Any] = []

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        base, arguments = utils._get_classes(config)  # noqa: SLF001 - like load_model() itself
        bases.append(base)
        return _from_store(base, weights, str(reference)), arguments

    with library_errors(f"mlx-lm cannot build {reference}"):
        model, config = utils.load_model(
            folder,
            lazy=lazy,
            strict=False,  # the folder has no weight files; names are checked below
            model_config=None if model_config is None else dict(model_config),
            get_model_classes=classes,
        )
    model.__class__ = bases[0]  # which releases the store
    return model, config


def _from_store(base: Any, weights: Weights, reference: str) -> Any:
    """Return a subclass of ``base`` that takes its weights from the store."""
    what = f"{base.__module__.rpartition('.')[2]} of mlx-lm cannot take the tensors of {reference}"

    class FromStore(base):  # type: ignore[misc]
        def sanitize(self, _: dict[str, Any]) -> dict[str, Any]:
            # First with stand-ins, so that weights that do not fit take no memory. This uses a copy,
            # since some models change themselves by what they find. Some inspect values and fail.
            tried = copy.copy(self)
            with contextlib.suppress(ValueError):
                _check(what, tried, _sanitized(tried, weights.stand_ins()))
            return _sanitized(self, dict(weights.arrays()))

        def load_weights(self, found: list[tuple[str, Any]], *, strict: bool) -> Any:
            del strict
            _check(what, self, dict(found))
            return super().load_weights(found, strict=True)

    def _sanitized(model: Any, arrays: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = (
            base.sanitize(model, arrays) if hasattr(base, "sanitize") else arrays
        )
        return found

    return FromStore


def _check(what: str, model: Any, found: Mapping[str, Any]) -> None:
    """Check that a model, whose layers may not be quantized yet, gets exactly the tensors it needs."""
    parameters: Any = tree_flatten(model.parameters())
    expected = dict(parameters)
    given = dict(found)
    packed = {
        name.removesuffix("scales")
        for name in found
        if name.endswith(".scales") and name not in expected
    }
    for module in packed:
        weight = f"{module}weight"
        if weight in expected and weight in given:
            # The layer will be quantized, and take all three.
            for kind in ("scales", "biases"):
                given.pop(module + kind, None)
            rows = expected[weight].shape[:-1]
            expected[weight] = mx.zeros((*rows, given[weight].shape[-1]), given[weight].dtype)
    pairs = [(name, given[name], expected[name]) for name in given.keys() & expected.keys()]
    check_names(
        what,
        missing=list(expected.keys() - given.keys()),
        unexpected=list(given.keys() - expected.keys()),
        misshapen=[
            (name, array.shape, wanted.shape)
            for name, array, wanted in pairs
            if array.shape != wanted.shape
        ],
        mistyped=[
            (name, str(array.dtype).rpartition(".")[2], str(wanted.dtype).rpartition(".")[2])
            for name, array, wanted in pairs
            if mx.issubdtype(wanted.dtype, mx.floating)
            and not mx.issubdtype(array.dtype, mx.floating)
        ],
    )
