"""What this package needs where it takes the place of safetensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_only_numpy_is_needed(tmp_path: Path) -> None:
    program = """
import sys
import numpy as np
from blobstore.safetensors import SafetensorError, TensorSpec, deserialize, safe_open, serialize
from blobstore.safetensors.numpy import load, load_file, save, save_file
array = np.arange(6, dtype=np.float32).reshape(2, 3)
path = sys.argv[1]
save_file({"a": array.T}, path, {"b": "c"})
assert np.array_equal(load_file(path)["a"], array.T)
assert np.array_equal(load(save({"a": array}))["a"], array)
for backend in ("mmap", "pread"):
    with safe_open(path, "np", backend=backend) as file:
        assert np.array_equal(file.get_slice("a")[::-1], array.T[::-1])
assert deserialize(serialize({}))[:] == []
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""

    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "a"],
        capture_output=True,
        check=True,
        cwd=ROOT,
        text=True,
    )

    loaded = set(done.stdout.split())
    installed = loaded - sys.stdlib_module_names - {"__main__", "__mp_main__"}
    assert {"blobstore", "numpy"} <= installed
    unwanted = {"click", "httpx2", "huggingface_hub", "ml_dtypes", "mlx", "rich", "torch"}
    assert not installed & (unwanted | {"safetensors", "zlib_ng", "zstandard"})
