"""``load``: the state of a training program, from a step of a store."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from blobstore.core.escape import quote, quote_place
from blobstore.errors import (
    BlobDamaged,
    BlobstoreError,
    InvalidReference,
    ModelNotFound,
    NotFound,
    UsageError,
)
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference, is_alias_of
from blobstore.manifests.step_record import (
    RECORD_FILE,
    StepRecord,
    is_state,
    join,
    state_of,
    stored_name,
)
from blobstore.models.source_layers import read_source_record
from blobstore.objects.address import is_address
from blobstore.operations.open import open_model
from blobstore.safetensors.header import PREFIX_SIZE, parse_header
from blobstore.store.catalog import read_entry
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from blobstore.manifests.model import Manifest
    from blobstore.manifests.plain_values import Kind
    from blobstore.models.model import Model
    from blobstore.operations.open import Framework, Verify
    from blobstore.store.catalog import CatalogEntry

_FRAMEWORKS: Mapping[str | None, Framework] = {"pt": "torch", "mlx": "mlx"}
"""By the format that the metadata of a file name."""


def load(
    reference: str | Reference,
    *,
    store: StoreLike = None,
    framework: Framework | None = None,
    device: str = "cpu",
    verify: Verify = "size",
) -> Any:
    """Return the state that :func:`save` or a ``StoreWriter`` has saved; nothing is unpickled.

    Args:
        reference: the name of the step, or one that was copied from it, such as ``run:best``. Of any other model,
            the tensors are returned by name.
        store: the store or its folder, or the address of one in object storage, such as ``s3://bucket/prefix``;
            by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        framework: the type of the tensors, as for :func:`open`; by default the one that they were saved from.
        device: the device of torch tensors.
        verify: how closely to check the blobs first, as for :func:`open`.

    Returns:
        the same dicts, lists, tuples, numbers and other values, with tensors as :func:`open` returns them.

    Raises:
        ModelNotFound: there is no such step.
        BlobDamaged, BlobMissing, InvalidManifest: it is incomplete or damaged.
        MissingLibrary: the framework is not installed.
        NotTrusted, InvalidPolicy, UsageError: as :func:`open`.
    """
    if framework is None:
        with open_step(reference, store, framework="numpy", verify="none") as model:
            framework = _framework_of(model)
    with open_step(reference, store, framework=framework, device=device, verify=verify) as model:
        record = record_of(model)
        found = model.state_dict()
    kinds: Mapping[type, tuple[str, Kind]] = {}
    if "torch" in (model.framework, _framework_of(model)):
        with contextlib.suppress(ImportError):
            from blobstore.models import plain_torch_values

            kinds = plain_torch_values.KINDS
    tensors = {key: found[stored_name(key, record.model)] for key in record.tensors}
    return join(record, tensors, kinds)


def open_step(reference: str | Reference, store: StoreLike, **options: Any) -> Model[Any]:
    """Open the name that has all of a step, or else the name that is given. Raises as :func:`open_model`."""
    reference = Reference.of(reference)
    prefix = ""
    if is_address(store):
        prefix, options["cache"] = f"{str(store).rstrip('/')}/", "none"
    else:
        options["store"] = store
    for name in (*_states(reference, store), reference):
        with contextlib.suppress(NotFound):
            model: Model[Any] = open_model(f"{prefix}{name}", **options)
            if not prefix or name == reference or _is_remote_state(model, f"{prefix}{reference}"):
                return model
            model.close()
    raise ModelNotFound(
        f"there is no step {quote(reference)}",
        advice="choose one of those that 'blobstore list' shows",
    )


def _states(reference: Reference, store: StoreLike) -> Iterator[Reference]:
    """Yield the name that has all of the step, if there is one: for an alias, that of the step that it is of.

    A state whose model has been replaced since is that of another step. Raises UsageError if steps of an alias differ.
    """
    with contextlib.suppress(InvalidReference):  # it would be too long
        if is_address(store) or _state_entry(LocalStore.of(store), reference):
            yield state_of(reference)
            return
    store = LocalStore.of(store)
    model = _data(store, reference)
    if model is None or is_state(reference):
        return
    equal = {
        name: _state_entry(store, name)
        for name in store.tags(reference)
        if not is_state(name) and is_alias_of(reference, name) and _data(store, name) == model
    }
    steps = [name for name, state in equal.items() if state]
    # The alias may be that of a step which has lost its state; other aliases never had one.
    steps += [name for name in equal if steps and not (equal[name] or is_alias_of(name, steps[0]))]
    if len({state and state.digest for state in map(equal.get, steps)}) > 1:
        names = " and ".join(map(quote, steps[:2]))
        raise UsageError(
            f"{quote(reference)} can be {names}, which have equal models; load one of them"
        )
    yield from map(state_of, steps[:1])


def _data(store: LocalStore, reference: Reference) -> bytes | None:
    with contextlib.suppress(BlobstoreError):  # reported where the model is used
        return store.read_manifest(reference)
    return None


def _state_entry(store: LocalStore, step: Reference) -> CatalogEntry | None:
    """Return the entry of the state of a step, unless its model was replaced since."""
    with contextlib.suppress(ModelNotFound):
        state = read_entry(store, state_of(step))
        with contextlib.suppress(ModelNotFound):
            model = read_entry(store, step)
            if state.modified <= model.modified and state.manifest and model.manifest:
                # The state is named first: one that is newer is of a step that is being replaced.
                return state if _has_all(state.manifest, model.manifest) else None
        return state
    return None


def _is_remote_state(state: Model[Any], address: str) -> bool:
    """Return whether a state is that of the model at an address, if there is one.

    Raises:
        UsageError: it is that of another one, which was replaced or is being saved.
    """
    with (
        contextlib.suppress(NotFound),
        open_model(address, verify="none", cache="none") as model,
    ):
        if RECORD_FILE in model.files:
            return False
        if not _has_all(state.manifest, model.manifest):
            state.close()
            raise UsageError(
                f"{quote(state.reference)} is not the state of the model {quote_place(address)}, which was replaced "
                "or is being saved"
            )
    return True


def _has_all(state: Manifest, model: Manifest) -> bool:
    """Return whether a state has the tensors of a model."""
    own, every = (
        {layer.digest for layer in its.layers_of(media_types.TENSOR)} for its in (model, state)
    )
    return own <= every


def record_of(model: Model[Any], part: str = "") -> StepRecord:
    """Return the record of a step, or for any other model one in which its tensors are a part of the state.

    Raises:
        BlobDamaged: the record is malformed, or of other tensors.
    """
    if RECORD_FILE not in model.files:
        keys = [f"{part}.{name}" if part else name for name in model.specs]
        paths = {key: ((part, key.removeprefix(f"{part}.")) if part else (key,)) for key in keys}
        return StepRecord(model=part, tensors=paths, values={})
    record = StepRecord.from_bytes(model.read_file(RECORD_FILE))
    names = {stored_name(key, record.model) for key in record.tensors}
    if names != set(model.specs):
        other = min(names ^ set(model.specs))
        raise BlobDamaged(f"{model.reference}: {RECORD_FILE} does not fit tensor {quote(other)}")
    return record


def _framework_of(model: Model) -> Framework:
    """Return the framework that a model was saved from."""
    record = read_source_record(model.store, model.manifest)
    for file in record.files if record is not None else ():
        if file.format == "safetensors":
            metadata = parse_header(file.start[PREFIX_SIZE:], file.size).metadata
            return _FRAMEWORKS.get(metadata.get("format"), "numpy")
    return "numpy"
