"""vLLM's own OpenAI-compatible server for one model of the store: ``python -m`` this module.

The store is checked before vLLM is even imported. Its config and tokenizer are given to vLLM in a
temporary folder; the weights come from the blobs. The options are those of ``vllm serve``, less the ones
that name another model.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError, UsageError
from blobstore.integrations.server_command import Asked, run_server
from blobstore.integrations.vllm import engine_options

if TYPE_CHECKING:
    from collections.abc import Sequence

_OURS = ("--model", "--load-format", "--model-loader-extra-config")
_NAMED = "--served-model-name"


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a model until the process is told to end, and return its exit code."""
    name = "blobstore.integrations.vllm.server"
    server = "vLLM's OpenAI-compatible server"
    return run_server(name, server, "vllm serve", _serve, arguments)


def _serve(asked: Asked) -> None:
    """Run vLLM's own program on the model."""
    given = {option.partition("=")[0].replace("_", "-") for option in asked.rest}
    if taken := given.intersection(_OURS):
        raise UsageError(
            f"{min(taken)} is not given here: the model is NAME, and comes from the store"
        )
    with engine_options(asked.name, store=asked.store, **asked.opening) as engine:
        name = [] if _NAMED in given else [_NAMED, *engine["served_model_name"]]
        settings = json.dumps(engine["model_loader_extra_config"])
        sys.argv = ["vllm", "serve", engine["model"], *name, "--load-format", engine["load_format"]]
        sys.argv += ["--model-loader-extra-config", settings, *asked.rest]
        _run()


def _run() -> None:
    try:
        from vllm.entrypoints.cli.main import main as run

        run()
    except PackageNotFoundError as error:
        raise BlobstoreError(
            f"vLLM's command cannot run: no package is installed as {quote(error.name)}"
        ) from None
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise BlobstoreError("vLLM is not installed for this Python") from None


if __name__ == "__main__":
    sys.exit(main())
