"""Programs of clients in processes that start at once.

Each has a process of its own, whose environment its libraries read when they are imported. What these
libraries import themselves, such as PyTorch, takes longest and does not depend on the environment. It is
imported once, and children are forked.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence

from tests.faults.processes import Ended, Nursery, stays

HUB = (
    *("asyncio", "argparse", "concurrent.futures", "email.message", "fsspec", "filelock", "h11"),
    *("http.cookies", "httpcore2", "httpx2", "importlib.metadata", "mimetypes", "netrc"),
    *("blobstore.sources.hub", "packaging.version", "queue", "ssl", "tqdm.auto", "typer", "uuid"),
    *("yaml", "zipfile"),
)
"""What ``huggingface_hub`` imports."""
FRAMEWORKS = (*HUB, "torch", "numpy", "regex", "jinja2", "tokenizers", "safetensors.torch")
"""What libraries import that use both it and PyTorch."""

OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""What ``huggingface_hub`` reads when it is imported."""
TORCH = (
    *(name for name in FRAMEWORKS if name != "safetensors.torch"),
    *("torch._dynamo", "torch.distributed.checkpoint"),
)
"""What libraries import that use PyTorch, but neither of them nor their files."""
TRANSFORMERS = (
    *FRAMEWORKS,
    *("starlette.applications", "transformers", "transformers.modeling_utils", "uvicorn"),
    *(f"transformers.models.auto.{kind}_auto" for kind in ("modeling", "tokenization")),
    "transformers.models.llama.modeling_llama",
)
"""What takes seconds to import of programs that use transformers, which never ask the Hub then."""

_SECONDS = 280
"""What a program may take on a busy machine: less than a test."""


def run_client(
    program: str,
    *arguments: object,
    environment: Mapping[str, str],
    modules: tuple[str, ...] = HUB,
) -> Ended:
    """Run a program as ``python -W ignore -c`` does, in a process that has imported some modules."""
    return run_python((sys.executable, "-c", program, *arguments), environment, modules)


def run_python(
    command: Sequence[object],
    environment: Mapping[str, str],
    modules: tuple[str, ...] = TRANSFORMERS,
) -> Ended:
    """Run a command of this interpreter in a process that has imported some modules."""
    assert command[0] == sys.executable
    child = forking(modules).start("python", *command[1:], environment=environment)
    return child.wait_among_others(_SECONDS)


@functools.cache
def forking(modules: tuple[str, ...] = TRANSFORMERS) -> Nursery:
    """Return what forks processes that have imported some modules."""
    return stays(Nursery(modules, OFFLINE))
