"""What the detection of quantized weights adds to an import.

1 GiB of 8-bit floats in 300 weights with scales, input scales and markers of ComfyUI is imported with detection and
with ``--as-is``, which detects nothing. All blobs are there, so that the disk does not matter.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import blobstore
from blobstore.core.tensor import DTYPES, TensorSpec
from tests.benchmarks import common

_WEIGHTS = 300
_MARKER = b'{"format": "float8_e4m3fn"}'
_FIRST = "create --as-is"


def make_model(folder: Path, nbytes: int) -> Path:
    """Write a model folder of weights with their neighbours."""
    rows = nbytes // (_WEIGHTS * 2048)
    specs = []
    for number in range(_WEIGHTS):
        module = f"blocks.{number}.linear"
        specs += [
            TensorSpec(f"{module}.weight", DTYPES["F8_E4M3"], (rows, 2048)),
            TensorSpec(f"{module}.weight_scale", DTYPES["F32"], ()),
            TensorSpec(f"{module}.input_scale", DTYPES["F32"], ()),
            TensorSpec(f"{module}.comfy_quant", DTYPES["U8"], (len(_MARKER),)),
        ]
    sizes = {spec.name: spec.nbytes for spec in specs}
    random = np.random.default_rng(0)

    def values(name: str) -> list[bytes]:
        return [_MARKER if name.endswith(".comfy_quant") else random.bytes(sizes[name])]

    return common.write_model(folder, specs, values)


def main() -> None:
    """Print the table."""
    options = common.arguments(__doc__)
    with common.workspace(options.folder) as folder:
        nbytes = int(common.GIB * options.scale)
        source = make_model(folder / "model", nbytes)

        def create(name: str, *, as_is: bool) -> float:
            store = blobstore.LocalStore(folder / name)
            return common.timed(
                lambda: blobstore.create(source, "m", store=store, jobs=2, as_is=as_is)
            )

        cases = {
            _FIRST: lambda: create("plain", as_is=True),
            "create": lambda: create("detected", as_is=False),
        }
        print(f"{nbytes / common.GIB:.2f} GiB, {_WEIGHTS} weights with 3 neighbours each\n")
        common.table(
            common.rounds(cases, options.rounds, lambda: common.warm(source)), _FIRST, nbytes
        )


if __name__ == "__main__":
    main()
