"""A tensor of a model that is compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from blobstore.core.digest import Digest
    from blobstore.gguf.names import Origin
    from blobstore.models.tensors import StoredTensor


class SourceTensor(NamedTuple):
    """A tensor as the source had it: a stored tensor or, for experts, one slice of a stacked one."""

    name: str
    """Its name in the source."""
    stored: StoredTensor
    place: int | None = None
    """Index in the first dimension of ``stored``, if that is a stack."""
    parts: int = 1
    """Number of source tensors in ``stored``."""
    origin: Origin | None = None
    """How llama.cpp converted it; None if it did not."""
    length: int | None = None
    """How much of the first dimension is compared; None for all."""
    scale: StoredTensor | None = None
    """Numbers that all values are multiplied with: one, or one per part."""

    @property
    def type(self) -> str:
        """The quantization type, or the element type."""
        return self.stored.type_name

    @property
    def group_size(self) -> int:
        """Elements of a row that share a scale; 0 if the tensor is not quantized."""
        return self.stored.group_size

    @property
    def blob(self) -> Digest:
        """The digest of the blob that holds it."""
        return self.stored.layer.digest

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, before quantization packed it."""
        shape = self.stored.shape if self.place is None else self.stored.shape[1:]
        return shape if self.length is None else (self.length, *shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes in the blob, including scales and biases."""
        nbytes = self.stored.nbytes // self.parts
        if self.length is None:
            return nbytes
        return nbytes * self.length // max(self.stored.shape[0], 1)

    @property
    def is_quantized(self) -> bool:
        """Whether it is stored as packed quantized values."""
        return self.stored.is_quantized
