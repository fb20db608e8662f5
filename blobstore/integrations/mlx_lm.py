"""Models of mlx-lm from the store, with quantized layers as they are.

mlx-lm builds the model, as from a folder; only its weights come from the store, when it asks its
class to convert them (``sanitize``). MLX cannot adopt memory, so each tensor is copied once.

Importing mlx-lm lowers the number of files that the process may have open; the store needs none once
the model is open.
"""

from __future__ import annotations

import contextlib
import json
from itertools import chain
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import utils

from blobstore.contents import COMPANIONS, read_contents
from blobstore.errors import BlobstoreError
from blobstore.integrations.mlx_names import Naming, mlx_config, mlx_naming
from blobstore.integrations.model_files import blaming, check_names, decoded, folder_of_files
from blobstore.integrations.source_names import (
    component_prefixes,
    gpt_oss_experts,
    stacked_names,
)
from blobstore.loader import open_model
from blobstore.quantize import gpt_oss
from blobstore.quantize.mlx_form import exported_config, mlx_name
from blobstore.quantize.recipes import SCALE
from blobstore.safetensors.mlx import as_mlx
from blobstore.store.local import LocalStore
from blobstore.tensor import DType, TensorSpec
from blobstore.text import quoted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Unpack

    from blobstore.integrations.model_files import Opening
    from blobstore.loader import Model
    from blobstore.manifests.reference import Reference


def load(
    name: str | Reference,
    *,
    store: LocalStore | None = None,
    lazy: bool = False,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    **opening: Unpack[Opening],
) -> tuple[Any, Any]:
    """Return a model of the store and its tokenizer, as ``mlx_lm.load`` returns those of a folder.

    Args:
        name: the name, ``[host/][namespace/]model[:tag]``.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        lazy: leave what mlx-lm computes of the weights to their first use.
        tokenizer_config: settings of the tokenizer.
        model_config: what the config shall say instead.
        opening: ``verify``, ``read``, ``prefetch`` and ``progress`` of :func:`blobstore.open`.

    Raises:
        ModelNotFound: the store has no such name.
        BlobMissing, BlobDamaged, InvalidManifest: the model is not whole.
        UnsupportedDType: MLX has no type for a tensor.
        BlobstoreError: mlx-lm cannot build it; which tensors are missing or unexpected is listed in
            full.
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
    store: LocalStore | None = None,
    lazy: bool = False,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    **opening: Unpack[Opening],
) -> tuple[Any, Any, dict[str, Any]]:
    """Return a model, its tokenizer and its config; otherwise as :func:`load`."""
    with (
        _opened(name, store, opening) as (stored, weights, config),
        _folder(stored, config) as folder,
    ):
        with blaming(f"mlx-lm cannot make a tokenizer of the files of {stored.reference}"):
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
    store: LocalStore | None = None,
    lazy: bool = False,
    model_config: Mapping[str, Any] | None = None,
    **opening: Unpack[Opening],
) -> tuple[Any, dict[str, Any]]:
    """Return a model and its config, which needs no tokenizer; otherwise as :func:`load`."""
    with (
        _opened(name, store, opening) as (stored, weights, config),
        _folder(stored, config, ("*config.json",)) as folder,
    ):
        return _build(stored.reference, folder, weights, model_config, lazy=lazy)


@contextlib.contextmanager
def _opened(
    name: str | Reference, store: LocalStore | None, opening: Opening
) -> Iterator[tuple[Model, Iterator[tuple[str, Any]], dict[str, Any]]]:
    """Give a model, its weights as mlx-lm takes them, not read yet, and its config likewise."""
    store = store or LocalStore()
    with open_model(name, store=store, framework="mlx", **opening) as stored:
        config = decoded(stored, "config.json")
        if "model_file" in config:
            message = (
                f"config.json of {stored.reference} asks for code of its own, "
                f"{quoted(config['model_file'])}, which is not run"
            )
            raise BlobstoreError(message)
        experts = gpt_oss_experts(store, stored, config)
        naming = _naming(store, stored)
        weights = chain(_weights(stored, naming, experts), _gpt_oss_weights(stored, experts))
        if not experts:  # whose config mlx-lm reads as it is
            config = exported_config(config, naming.types) or config
        yield stored, weights, mlx_config(config)


def _folder(
    stored: Model, config: dict[str, Any], patterns: Sequence[str] = ("*",)
) -> AbstractContextManager[Path]:
    written = {"config.json": json.dumps(config).encode()}
    return folder_of_files(stored, patterns, written)


def _naming(store: LocalStore, stored: Model) -> Naming:
    others = component_prefixes(stored)
    stacks = stacked_names(store, stored)
    specs = {name: spec for name, spec in stored.specs.items() if not name.startswith(others)}
    if any(spec.dtype is DType.U32 and f"{name}_scale" in specs for name, spec in specs.items()):
        tensors = read_contents(store, stored.manifest).tensors.values()
        return mlx_naming((item for item in tensors if item.name in specs), stacks)
    # Nothing is packed, and the headers of the blobs need not be read.
    split = {name: stacks[name] for name in specs if name in stacks}
    return Naming({name: name for name in specs if name not in stacks}, split, {}, {})


def _weights(stored: Model, naming: Naming, others: Collection[str]) -> Iterator[tuple[str, Any]]:
    hidden = {name + end for name in others for end in ("", *COMPANIONS.values())}
    for runtime, name in naming.single.items():
        if runtime not in hidden:
            yield name, stored[runtime]
    for runtime, names in naming.split.items():
        array = stored[runtime]
        yield from zip(names, array, strict=True)
    for name, members in naming.joined.items():
        # Joined before MLX sees them: its stack() would wait for other threads at every one.
        views = [stored.view(member) for member in members]
        shape = (len(views), *views[0].spec.shape)
        joined = memoryview(b"".join(view.data for view in views))
        yield name, as_mlx(joined, 0, TensorSpec(name, views[0].spec.dtype, shape))


def _gpt_oss_weights(stored: Model, experts: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield quantized experts in the form that mlx-lm expects of gpt-oss."""
    for name in experts:
        for suffix in ("", SCALE):
            runtime = f"{name}{COMPANIONS.get(suffix, '')}"
            spec = stored.specs[runtime]._replace(name=mlx_name(name, suffix))
            spec = gpt_oss.folder_spec(spec)
            yield spec.name, stored[runtime].view(mx.uint8).reshape(spec.shape)


def _build(
    reference: Reference,
    folder: Path,
    weights: Iterator[tuple[str, Any]],
    model_config: Mapping[str, Any] | None,
    *,
    lazy: bool,
) -> tuple[Any, dict[str, Any]]:
    bases: list[Any] = []

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        base, arguments = utils._get_classes(config)  # noqa: SLF001 - as load_model() itself does
        bases.append(base)
        return _reading(base, weights, str(reference)), arguments

    with blaming(f"mlx-lm cannot build {reference}"):
        model, config = utils.load_model(
            folder,
            lazy=lazy,
            strict=False,  # there are no files of weights in the folder; names are checked below
            model_config=None if model_config is None else dict(model_config),
            get_model_classes=classes,
        )
    model.__class__ = bases[0]  # which lets go of the store, too
    return model, config


def _reading(base: Any, weights: Iterator[tuple[str, Any]], reference: str) -> Any:
    """Return a class of models that take their weights from the store."""

    class FromStore(base):  # type: ignore[misc]
        def sanitize(self, _: dict[str, Any]) -> dict[str, Any]:
            found = dict(weights)
            return super().sanitize(found) if hasattr(base, "sanitize") else found

        def load_weights(self, found: list[tuple[str, Any]], *, strict: bool) -> Any:
            del strict
            parameters: Any = tree_flatten(self.parameters())
            expected = {name: array.shape for name, array in parameters}
            given = {name: array.shape for name, array in found}
            check_names(
                f"{base.__module__.rpartition('.')[2]} of mlx-lm cannot take the tensors of {reference}",
                missing=list(expected.keys() - given.keys()),
                unexpected=list(given.keys() - expected.keys()),
                misshapen=[
                    (name, shape, expected[name])
                    for name, shape in given.items()
                    if name in expected and shape != expected[name]
                ],
            )
            return super().load_weights(found, strict=True)

    return FromStore
