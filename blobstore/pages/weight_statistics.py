"""Reads the weights of a model: histograms of values, and errors against the model's base.

The results are kept in the store as a cache. Its key is made of the digests of both manifests, so an
entry is never out of date; ``gc`` removes it.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blobstore.core.digest import Digest
from blobstore.core.workers import WorkerPool
from blobstore.errors import BlobstoreError
from blobstore.operations.compare.compare import compare_models, tensor_blocks
from blobstore.operations.compare.pairs import Pair, pair_tensors, source_tensors
from blobstore.pages.text import shown
from blobstore.quantization.formats import type_name
from blobstore.store.notes import NoteKind, parsed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    from blobstore.core.progress import Progress
    from blobstore.manifests.reference import Reference
    from blobstore.operations.compare.compare import TensorError
    from blobstore.operations.compare.source_tensor import SourceTensor
    from blobstore.store.local import LocalStore

    Array = np.ndarray[Any, Any]

Measurement = dict[str, Any]
"""What :func:`error_of` returns, and ``values`` and ``errors``: histograms, each the least value, the
greatest, and the number of values in bins of equal width between them."""
_BINS = 40
_SAMPLE = 1 << 18
"""Values of a tensor that a histogram counts: all, or evenly spaced ones."""
_KIND = NoteKind("measurement 3")


def error_of(tensor: TensorError) -> Measurement:
    """Return the error of a tensor as JSON values. Infinite numbers are text, as Python spells them.

    They are ``relative_error``, ``snr_db``, ``max_abs_error``, ``nonfinite``, ``worst`` (error, row and column
    of the worst group) and ``base_type``. Those that would say nothing are left out.
    """
    base_type = type_name(tensor.base_type, tensor.base_group_size)
    found = {
        "relative_error": plain(tensor.relative_error),
        "snr_db": None if tensor.is_equal else plain(tensor.snr_db),
        "max_abs_error": tensor.max_abs_error or None,
        "nonfinite": tensor.nonfinite or None,
        "worst": tensor.worst and [plain(tensor.worst[0]), *tensor.worst[1:3]],
        "base_type": None if base_type == type_name(tensor.type, tensor.group_size) else base_type,
    }
    return {kind: value for kind, value in found.items() if value is not None}


def plain(value: float | None) -> float | str | None:
    """Return a number that JSON has, or the text of an infinite one."""
    return value if value is None or math.isfinite(value) else str(value)


def measure_model(
    store: LocalStore,
    reference: Reference,
    base: Reference | None,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Measurement]:
    """Return the measurement of each tensor by name, from the cache if it has been made before.

    Raises:
        ModelNotFound: a model does not exist.
        BlobMissing, BlobDamaged, InvalidManifest: a model is damaged.
        UnsupportedDType: numpy has no type for a tensor's elements.
    """
    names = (reference,) if base is None else (reference, base)
    key = Digest.of("\n".join(str(Digest.of(store.read_manifest(name))) for name in names).encode())
    known = _read(store, key)
    if known is not None:
        return known
    found = _measure(store, reference, base, jobs, progress)
    store.write_note(_KIND, key, json.dumps(found, separators=(",", ":")).encode())
    return found


def _read(store: LocalStore, key: Digest) -> dict[str, Measurement] | None:
    """Return an entry of the cache; None if there is none, or it was altered."""
    return parsed(
        store.read_note(_KIND, key),
        lambda found: {
            name: {kind: _CHECKS[kind](value) for kind, value in item.items()}
            for name, item in found.items()
        },
    )


def _checked_number(value: Any) -> float | str:
    if isinstance(value, str) and value in _INFINITE:
        return value
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError
    return float(value)


def _checked_histogram(value: Any) -> list[Any]:
    low, high, counts = value
    if len(counts) != _BINS or not all(type(count) is int for count in counts):
        raise ValueError
    return [_checked_number(low), _checked_number(high), counts]


def _checked_worst(value: Any) -> list[Any]:
    error, row, column = map(_checked_number, value)
    return [error, row, column]


_INFINITE = ("inf", "-inf")
_CHECKS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("values", "errors"), _checked_histogram),
    **dict.fromkeys(("relative_error", "snr_db", "max_abs_error", "nonfinite"), _checked_number),
    "worst": _checked_worst,
    "base_type": shown,
}


def _measure(
    store: LocalStore,
    reference: Reference,
    base: Reference | None,
    jobs: int | None,
    progress: Progress | None,
) -> dict[str, Measurement]:
    manifest = store.resolve(reference)
    other = (reference, manifest) if base is None else (base, store.resolve(base))
    ours, theirs = source_tensors(store, (reference, manifest), other)
    found: dict[str, Measurement] = {name: {} for name in ours}
    if base is not None:
        try:
            errors = _errors(store, reference, base, jobs, progress)
        except BlobstoreError:  # such as tensors of another shape: there is no error to measure
            theirs = {}
        else:
            for name, error in errors.items():
                if name in found:  # a head that is the embedding has no name of its own
                    found[name] |= error_of(error)
    total = sum(tensor.nbytes for tensor in ours.values())
    pool = WorkerPool(jobs, progress, total)

    def work(name: str) -> tuple[str, Measurement]:
        tensor, before = ours[name], theirs.get(name) if base is not None else None
        if before is not None and (before.shape != tensor.shape or Pair(tensor, before).is_shared):
            before = None
        made = _histograms(store, tensor, before)
        pool.report(tensor.nbytes, name)
        return name, made

    for name, made in pool.run(list(ours), work):
        found[name] |= made
    return found


def _errors(
    store: LocalStore,
    reference: Reference,
    base: Reference,
    jobs: int | None,
    progress: Progress | None,
) -> dict[str, TensorError]:
    """Return the errors of tensors by their names in the model, which for GGUF are not those of the base.

    A stack of experts is compared expert by expert, and has the error of all.
    """
    # Names of GGUF are compared under those of the base.
    own = {pair.ours.name: pair.ours for pair in pair_tensors(store, reference, base, ()).pairs}
    compared = compare_models(reference, base, store=store, jobs=jobs, progress=progress)
    found: dict[str, list[TensorError]] = defaultdict(list)
    for error in compared.tensors:
        tensor = own[error.name]
        found[error.name if tensor.origin is None else tensor.stored.name].append(error)
    return {name: _joined(errors) for name, errors in found.items()}


def _joined(errors: list[TensorError]) -> TensorError:
    """Return the error of tensors as if they were one; the worst group has its place in its own tensor."""
    worst = [error.worst for error in errors if error.worst is not None]
    return replace(
        errors[0],
        shape=(len(errors), *errors[0].shape) if len(errors) > 1 else errors[0].shape,
        squared_error=math.fsum(error.squared_error for error in errors),
        squared_base=math.fsum(error.squared_base for error in errors),
        max_abs_error=max(error.max_abs_error for error in errors),
        nonfinite=sum(error.nonfinite for error in errors),
        worst=max(worst, key=lambda group: group.relative_error or 0.0, default=None),
    )


def _histograms(store: LocalStore, tensor: SourceTensor, base: SourceTensor | None) -> Measurement:
    elements = math.prod(tensor.shape)
    if not elements or (tensor.is_quantized and tensor.stored.item is None):
        return {}
    step = max(elements // _SAMPLE, 1)
    values = _sample(store, tensor, step)
    found: Measurement = {"values": histogram(values)}
    if base is not None:
        found["errors"] = histogram(values - _sample(store, base, step))
    return {kind: made for kind, made in found.items() if made is not None}


def _sample(store: LocalStore, tensor: SourceTensor, step: int) -> Array:
    import numpy as np

    def chosen() -> Iterator[Array]:
        for _, _, block in tensor_blocks(store, tensor):
            # Every step-th value of each block, so that both sides of a pair take the same ones.
            yield block.reshape(-1)[::step].astype(np.float64)

    return np.concatenate(list(chosen()))


def histogram(values: Array) -> list[Any] | None:
    """Return the least finite value, the greatest, and the counts of the bins; None without values."""
    import numpy as np

    finite = values[np.isfinite(values)]
    if not finite.size:
        return None
    low, high = float(finite.min()), float(finite.max())
    if not math.isfinite(high - low):
        return None
    counts, _ = np.histogram(finite, bins=_BINS, range=(low, high))
    return [low, high, [int(count) for count in counts]]
