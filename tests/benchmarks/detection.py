"""What the detection of quantized weights adds to an import.

1 GiB of 8-bit floats in 300 weights with scales, input scales and markers of ComfyUI is imported, and planned with
detection and without it. All blobs are there, so that the disk does not matter.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import blobstore
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.planning.plan import plan_source
from blobstore.sources.open import open_source
from tests.benchmarks import common

_WEIGHTS = 300
_MARKER = b'{"format": "float8_e4m3fn"}'
_FIRST = "create, all present"


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

        store = blobstore.LocalStore(folder / "store")
        opened = open_source(source)
        cases = {
            _FIRST: lambda: blobstore.create(source, "m", store=store, jobs=2),
            "plan with detection": lambda: plan_source(opened),
            "plan of --as-is": lambda: plan_source(opened, as_is=True),
        }
        timed = {name: lambda case=case: common.timed(case) for name, case in cases.items()}
        print(f"{nbytes / common.GIB:.2f} GiB, {_WEIGHTS} weights with 3 neighbours each\n")
        common.table(common.rounds(timed, options.rounds, lambda: common.warm(source)), _FIRST)


if __name__ == "__main__":
    main()
