"""How stored bytes become arrays of numpy, torch and MLX, on the CPU or on another device.

The libraries are imported on first use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from blobstore.core.escape import quote
from blobstore.core.libraries import optional_libraries
from blobstore.core.tensor import DType
from blobstore.errors import UsageError

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Sequence

    from blobstore.core.tensor import TensorSpec
    from blobstore.quantization.formats import QuantFormat
    from blobstore.safetensors.cuda import CallerStream

    Convert = Callable[[mmap.mmap | memoryview, int, TensorSpec], Any]

Framework = Literal["numpy", "np", "torch", "pt", "mlx"]
"""``np`` and ``pt`` are the names that safetensors has for numpy and torch."""
_SHORT_NAMES = {"np": "numpy", "pt": "torch"}
FloatName = Literal["bfloat16", "float16", "float32"]
NAMES: dict[DType, FloatName] = {DType.BF16: "bfloat16", DType.F16: "float16", DType.F32: "float32"}
FLOATS = {name: dtype for dtype, name in NAMES.items()}
"""Element types that weights can be dequantized to, by name."""


class Dequantize(Protocol):
    """Dequantizes a weight."""

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
        """Return an array of the logical shape and of ``dtype``; all arrays are of one framework."""


Move = tuple[Any, int, int, int]
"""A tensor, the offset of some bytes in it, their offset in a staging buffer, and their number."""


class StagingBuffer(Protocol):
    """Host memory from which a device copies bytes."""

    memory: memoryview
    """The memory to fill."""

    def send(self, moves: Sequence[Move], after: Any) -> Any:
        """Request copies to the device, and return without waiting for them.

        The copies start no earlier than the :meth:`DeviceStream.mark` ``after``. Any thread may
        call this, and :meth:`wait`. Returns the argument for :meth:`DeviceStream.receive`.

        Raises:
            BlobstoreError: the device fails.
        """

    def wait(self) -> None:
        """Wait until the copies that were last requested are done, so that the memory is free."""


class DeviceStream(Protocol):
    """Copies bytes into a device's memory. One thread calls all methods but :meth:`staging`."""

    def empty(self, spec: TensorSpec) -> Any:
        """Return an uninitialised tensor in the device's memory.

        Raises:
            BlobstoreError: the device is out of memory.
            UnsupportedDType: the framework has no such type.
        """

    def mark(self) -> Any:
        """Record a point in the current stream, after which all empty tensors may be filled."""

    def staging(self, nbytes: int) -> StagingBuffer:
        """Return a new staging buffer. Any thread may call this.

        Raises:
            BlobstoreError: the host is out of memory.
        """

    def receive(self, sent: Any) -> None:
        """Make the current stream wait for copies that were requested."""

    def drain(self) -> None:
        """Wait until all copies that were requested are done.

        Raises:
            BlobstoreError: the device fails.
        """


@dataclass(frozen=True, slots=True)
class ArrayTarget:
    """The framework and device of the arrays that a model returns."""

    framework: str
    device: str
    convert: Convert
    """Makes an array of the bytes at an offset in memory."""

    @classmethod
    def of(cls, framework: str, device: str) -> ArrayTarget:
        """Check the names of a framework and a device.

        Raises:
            UsageError: there is no such framework, or it has no such device.
            MissingLibrary: the framework is not installed.
        """
        if framework not in get_args(Framework):
            raise UsageError(f"framework must be numpy, torch or mlx, got {quote(framework)}")
        framework = _SHORT_NAMES.get(framework, framework)
        if framework == "torch":
            with optional_libraries():
                from blobstore.safetensors.torch import as_tensor, check_device, copy_to

            if device == "cpu":
                return cls(framework, device, as_tensor)
            check_device(device)

            def convert(memory: mmap.mmap | memoryview, offset: int, spec: TensorSpec) -> Any:
                return copy_to(device, as_tensor(memory, offset, spec), spec)

            return cls(framework, device, convert)
        if device != "cpu":
            raise UsageError(
                f"device {quote(device)} requires framework torch; {framework} takes cpu"
            )
        if framework == "mlx":
            with optional_libraries():
                from blobstore.safetensors.mlx import as_mlx

            return cls(framework, device, as_mlx)
        from blobstore.safetensors.numpy import as_array

        return cls(framework, device, as_array)

    @property
    def has_views(self) -> bool:
        """Whether arrays are views of the memory that they are made of, and not copies."""
        return self.framework != "mlx" and self.device == "cpu"

    @property
    def is_writable(self) -> bool:
        """Whether the memory must be writable, as torch demands."""
        return self.framework == "torch"

    @property
    def has_stream(self) -> bool:
        """Whether tensors reach the device by a :class:`DeviceStream`, and not by plain copies."""
        return self.framework == "torch" and self.device.partition(":")[0] == "cuda"

    def stream(self) -> DeviceStream | None:
        """Return a stream to the device, or None if there is none.

        Raises:
            UsageError: the device does not exist.
        """
        if not self.has_stream:
            return None
        from blobstore.safetensors.cuda import TorchDeviceStream

        return TorchDeviceStream(self.device)

    def caller_stream(self) -> CallerStream | None:
        """Return the current stream of the device, for threads that make arrays; None if it has no streams."""
        if not self.has_stream:
            return None
        from blobstore.safetensors.cuda import CallerStream

        return CallerStream.of(self.device)


def original_dtype(item: QuantFormat, scale: DType | None) -> FloatName:
    """Return a weight's element type before quantization: that of float scales, else bfloat16.

    The values of GGUF's blocks, which have no tensor of scales, are float32.
    """
    if scale is None:
        return "float32"
    return NAMES.get(scale, "bfloat16") if item.has_float_scales else "bfloat16"


def checked_dtype(name: str) -> FloatName:
    """Return the name of an element type that weights can be dequantized to.

    Raises:
        UsageError: it is not one of these types.
    """
    for known in get_args(FloatName):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise UsageError(f"dtype must be bfloat16, float16 or float32, got {quote(name)}")


def dequantizer(framework: str) -> Dequantize:
    """Return the function that dequantizes arrays of ``numpy``, ``torch`` or ``mlx``."""
    if framework == "torch":
        from blobstore.quantization import dequantize_torch

        return dequantize_torch.dequantize
    if framework == "mlx":
        from blobstore.quantization import dequantize_mlx

        return dequantize_mlx.dequantize
    from blobstore.quantization import quantize_numpy

    return quantize_numpy.dequantize
