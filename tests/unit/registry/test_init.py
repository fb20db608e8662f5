from __future__ import annotations

import subprocess
import sys


def test_shapes_are_planned_and_read_without_a_network_library() -> None:
    program = (
        "import sys, blobstore.registry.layouts.oci, blobstore.registry.layouts.read\n"
        "assert not {'httpx2', 'socket', 'ssl', 'urllib'} & set(sys.modules), sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
