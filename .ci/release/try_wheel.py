"""Try the wheel that is installed: the tutorial as it is written, with no optional library at hand.

    PYTHON -P .ci/release/try_wheel.py

PYTHON is that of an environment with the wheel and with the package of the tutorial's model.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import blobstore

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "getting-started" / "first-model.md"
ABSENT = ("torch", "mlx", "transformers", "safetensors", "huggingface_hub", "httpx2", "rich")


def main() -> None:
    """Run the commands, and fail if one prints something else than the tutorial says."""
    if not str(blobstore.__file__).startswith(sys.prefix):
        sys.exit(f"blobstore is not that of the wheel, but {blobstore.__file__}")
    if found := [name for name in ABSENT if importlib.util.find_spec(name)]:
        sys.exit(f"the environment has optional libraries: {found}")
    # The tests' own reader of transcripts, without putting the checkout on the path.
    spec = spec_from_file_location("transcripts", ROOT / "tests" / "support" / "transcripts.py")
    if spec is None or spec.loader is None:
        sys.exit("Python has no loader for its own files")
    transcripts = module_from_spec(spec)
    sys.modules[spec.name] = transcripts
    spec.loader.exec_module(transcripts)
    examples = transcripts.examples(TUTORIAL.read_text(encoding="utf-8"))
    subprocess.run([sys.executable, ROOT / "docs" / "examples" / "quickstart.py"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        printed = transcripts.outputs([item.command for item in examples], Path(folder))
    for example, output in zip(examples, printed, strict=True):
        if not transcripts.is_as_expected(example.expected, output):
            sys.exit(f"$ {example.command}\n{output}\nis not what the tutorial says")
    version = ".".join(map(str, sys.version_info[:3]))
    print(
        f"Python {version}: the quickstart and {len(examples)} commands of the tutorial did what they say"
    )


if __name__ == "__main__":
    main()
