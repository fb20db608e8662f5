"""What tensors become in numpy, torch and MLX: views of memory, and plain numbers of packed weights.

The libraries are imported when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from blobstore.core.escape import quote
from blobstore.core.tensor import DType
from blobstore.errors import UsageError

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Sequence

    from blobstore.core.tensor import TensorSpec
    from blobstore.quantization.formats import QuantFormat

FloatName = Literal["bfloat16", "float16", "float32"]
NAMES: dict[DType, FloatName] = {
    DType.BF16: "bfloat16",
    DType.F16: "float16",
    DType.F32: "float32",
}
FLOATS = {name: dtype for dtype, name in NAMES.items()}
"""Element types that packed weights can become, by name."""


class Dequantize(Protocol):
    """Computes plain numbers."""

    def __call__(
        self,
        weight: Any,
        scale: Any,
        bias: Any,
        item: QuantFormat,
        group_size: int,
        dtype: FloatName,
        global_scale: float | None,
    ) -> Any:
        """Return an array of the logical shape and of ``dtype``; the inputs are a framework's."""


Move = tuple[Any, int, int, int]
"""A tensor, the offset in it of some bytes, their offset in a staging buffer, and their count."""


class StagingBuffer(Protocol):
    """Memory of the host from which a device takes bytes."""

    memory: memoryview
    """To be filled."""

    def send(self, moves: Sequence[Move], after: Any) -> Any:
        """Ask for copies to the device, not before the :meth:`DeviceStream.mark` ``after``; do not wait.

        Return what :meth:`DeviceStream.receive` takes. Called by any thread, as is :meth:`wait`.

        Raises:
            BlobstoreError: the device fails.
        """

    def wait(self) -> None:
        """Wait until what was sent last has left, so that the memory may be filled again."""


class DeviceStream(Protocol):
    """The way into the memory of a device. All but :meth:`staging` is for one thread."""

    def room(self, spec: TensorSpec) -> Any:
        """Return a tensor without content in the device's memory.

        Raises:
            BlobstoreError: there is not as much.
            UnsupportedDType: the framework has no type for it.
        """

    def mark(self) -> Any:
        """Mark the point that the current stream has got to, where all rooms may be filled."""

    def staging(self, nbytes: int) -> StagingBuffer:
        """Return a staging buffer. Called by any thread.

        Raises:
            BlobstoreError: the host has no memory for it.
        """

    def receive(self, sent: Any) -> None:
        """Have the current stream wait for what was sent."""

    def drain(self) -> None:
        """Wait until all that was sent has arrived.

        Raises:
            BlobstoreError: the device fails.
        """


def original_dtype(item: QuantFormat, scale: DType) -> FloatName:
    """Return the element type before quantization, as far as the blob tells: bfloat16 if not."""
    return NAMES.get(scale, "bfloat16") if item.has_bias else "bfloat16"


def checked_dtype(name: str) -> FloatName:
    """Return the name of an element type that packed weights can become.

    Raises:
        UsageError: it is another.
    """
    for known in get_args(FloatName):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise UsageError(f"dtype must be bfloat16, float16 or float32, got {quote(name)}")


def converter(
    framework: str, device: str
) -> Callable[[mmap.mmap | memoryview, int, TensorSpec], Any]:
    """Return what makes an array of the bytes at an offset of a map.

    Raises:
        UsageError: there is no such framework, or it has no such device.
    """
    if framework == "torch":
        from blobstore.safetensors.torch import as_tensor, check_device, copy_to

        if device == "cpu":
            return as_tensor
        check_device(device)
        return lambda memory, offset, spec: copy_to(device, as_tensor(memory, offset, spec), spec)
    if framework not in ("numpy", "mlx"):
        raise UsageError(f"framework must be numpy, torch or mlx, got {quote(framework)}")
    if device != "cpu":
        raise UsageError(f"device {quote(device)} is for torch only; {framework} takes cpu")
    if framework == "mlx":
        from blobstore.safetensors.mlx import as_mlx

        return as_mlx
    from blobstore.safetensors.numpy import as_array

    return as_array


def has_lane(framework: str, device: str) -> bool:
    """Tell whether there is a way into the memory of a device, other than plain copies."""
    return framework == "torch" and device.partition(":")[0] == "cuda"


def lane_to(framework: str, device: str) -> DeviceStream | None:
    """Return the way into the memory of a device, or None where there is none.

    Raises:
        UsageError: the device is not there.
    """
    if not has_lane(framework, device):
        return None
    from blobstore.safetensors.cuda import TorchLane

    return TorchLane(device)


def dequantizer(framework: str) -> Dequantize:
    """Return what dequantizes the arrays of ``numpy``, ``torch`` or ``mlx``, with their library."""
    if framework == "torch":
        from blobstore.quantization import torch

        return torch.dequantize
    if framework == "mlx":
        from blobstore.quantization import mlx

        return mlx.dequantize
    from blobstore.quantization import numpy as reference

    return reference.dequantize
