"""Torch tensors that share memory: which ones do, and which names a file can omit."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    import torch


def storage_ptr(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, a number of bytes.

    Args:
        tensor: a dense tensor; 0 is returned for one without memory.

    Raises:
        NotImplementedError: the tensor has no storage, such as a sparse one.
    """
    return tensor.untyped_storage().data_ptr()


def storage_size(tensor: torch.Tensor) -> int:
    """Return the number of bytes of a tensor's storage, which may be more than those of the tensor.

    Args:
        tensor: a dense tensor.

    Raises:
        NotImplementedError: see :func:`storage_ptr`.
    """
    return tensor.untyped_storage().nbytes()


def end_ptr(tensor: torch.Tensor) -> int:
    """Return the address after a tensor's last element."""
    if not tensor.numel():
        return tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last: int = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def is_complete(tensor: torch.Tensor) -> bool:
    """Return whether a tensor covers its whole storage."""
    nbytes = tensor.numel() * tensor.element_size()
    return tensor.data_ptr() == storage_ptr(tensor) and nbytes == storage_size(tensor)


def find_shared_tensors(state_dict: Mapping[str, torch.Tensor]) -> list[set[str]]:
    """Return the names of tensors in groups, within which they share bytes, as the reference library.

    A tensor that shares no byte is a group of its own. Those without bytes are in none.
    """
    storages: dict[tuple[object, int, int], list[str]] = defaultdict(list)
    for name, tensor in state_dict.items():
        if tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if address and size:
                storages[tensor.device, address, size].append(name)
    return [run for names in storages.values() for run in _overlapping(state_dict, names)]


def remove_duplicate_names(
    state_dict: Mapping[str, torch.Tensor],
    *,
    preferred_names: Iterable[str] | None = None,
    discard_names: Iterable[str] | None = None,
) -> dict[str, list[str]]:
    """Return, by the name that stays, the names whose tensors it contains.

    Of the names whose tensors cover their whole storage, the first one in alphabetical order stays;
    ``preferred_names`` come before all others, and ``discard_names`` after them.

    Raises:
        RuntimeError: tensors share memory, and none of them covers it.
    """
    preferred, discarded = set(preferred_names or ()), set(discard_names or ())
    removed: dict[str, list[str]] = {}
    for group in find_shared_tensors(state_dict):
        if len(group) > 1:
            complete = {name for name in group if is_complete(state_dict[name])}
            if not complete:
                raise RuntimeError(  # in the words of the reference library
                    "Error while trying to find names to remove to save state dict, but found no suitable "
                    f"name to keep for saving amongst: {group}. None is covering the entire "
                    "storage.Refusing to save/load the model since you could be storing much more memory "
                    "than needed. Please refer to "
                    "https://huggingface.co/docs/safetensors/torch_shared_tensors for more information. "
                    "Or open an issue."
                )
            kept = min(complete & preferred or complete - discarded or complete)
            removed[kept] = sorted(group - {kept})
    return removed


def _overlapping(tensors: Mapping[str, torch.Tensor], names: Collection[str]) -> Iterator[set[str]]:
    """Yield names in groups of byte ranges that overlap."""
    if len(names) == 1:  # most
        yield set(names)
        return
    ranges = [(tensors[name].data_ptr(), end_ptr(tensors[name]), name) for name in names]
    group: set[str] = set()
    group_end = 0
    for begin, end, name in sorted(ranges):
        if group and begin >= group_end:
            yield group
            group = set()
        group.add(name)
        group_end = max(group_end, end)
    yield group
