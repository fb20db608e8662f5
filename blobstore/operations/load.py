"""``load``: the state of a training program, from a step of a store."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from blobstore.core.escape import quote
from blobstore.errors import InvalidReference, ModelNotFound, NotFound, UsageError
from blobstore.manifests.reference import Reference
from blobstore.manifests.step_record import RECORD_FILE, decode_state, is_state_of, state_of
from blobstore.models.source_layers import read_source_record
from blobstore.objects.address import is_address
from blobstore.operations.open import open_model
from blobstore.safetensors.header import PREFIX_SIZE, parse_header
from blobstore.store.catalog import read_entry
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blobstore.manifests.model import Manifest
    from blobstore.models.model import Model
    from blobstore.operations.open import Framework, Verify

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
        return read_state(model)


def read_state(model: Model[Any], tensors: Mapping[str, Any] | None = None) -> Any:
    """Return the state that a model has, with its tensors or others in their place; of any model but a step these alone.

    Raises:
        BlobDamaged: the file with the state is malformed, or has other tensors.
    """
    tensors = model.state_dict() if tensors is None else tensors
    if RECORD_FILE not in model.files:
        return tensors
    return decode_state(model.read_file(RECORD_FILE), tensors)


def open_step(reference: str | Reference, store: StoreLike, **options: Any) -> Model[Any]:
    """Open the name that has all of a step, or else the name that is given. Raises as :func:`open_model`."""
    reference = Reference.of(reference)
    prefix = ""
    if is_address(store):
        prefix, options["cache"] = f"{str(store).rstrip('/')}/", "none"
    else:
        options["store"] = store
    names = [reference]
    with contextlib.suppress(InvalidReference):  # it would be too long
        if prefix or _has_state(LocalStore.to_read(store), reference):
            names.insert(0, state_of(reference))
    for name in names:
        with contextlib.suppress(NotFound):
            model: Model[Any] = open_model(f"{prefix}{name}", **options)
            if not prefix or name == reference or _is_remote_state(model, f"{prefix}{reference}"):
                return model
            model.close()
    raise ModelNotFound(
        f"there is no step {quote(reference)}",
        advice="choose one of those that 'blobstore list' shows",
    )


def _has_state(store: LocalStore, step: Reference) -> bool:
    """Return whether a step has its state: not if its model was replaced since."""
    with contextlib.suppress(ModelNotFound):
        state = read_entry(store, state_of(step))
        with contextlib.suppress(ModelNotFound):
            model = read_entry(store, step)
            if state.modified <= model.modified and state.manifest and model.manifest:
                # The state is named first: one that is newer is of a step that is being replaced.
                return is_state_of(state.manifest, model.manifest)
        return True
    return False


def _is_remote_state(state: Model[Any], address: str) -> bool:
    """Return whether a state is that of the model at an address, if there is one. Raises as :func:`check_is_state_of`."""
    with (
        contextlib.suppress(NotFound),
        open_model(address, verify="none", cache="none") as model,
    ):
        if RECORD_FILE in model.files:
            return False
        try:
            check_is_state_of(state.manifest, model)
        except UsageError:
            state.close()
            raise
    return True


def check_is_state_of(state: Manifest, model: Model[Any]) -> None:
    """Check that a state and a model are of one step. Raises UsageError."""
    if not is_state_of(state, model.manifest):
        raise UsageError(
            f"the model {quote(model.reference)} is not that of its state: one was replaced, or is being saved",
            advice="load the name of the state, which has everything, or save the step again",
        )


def _framework_of(model: Model) -> Framework:
    """Return the framework that a model was saved from."""
    record = read_source_record(model.store, model.manifest)
    for file in record.files if record is not None else ():
        if file.format == "safetensors":
            metadata = parse_header(file.start[PREFIX_SIZE:], file.size).metadata
            return _FRAMEWORKS.get(metadata.get("format"), "numpy")
    return "numpy"
