"""vLLM's OpenAI-compatible server for one model of the store.

Usage: ``python -m blobstore.integrations.vllm.server NAME``. The store is checked before vLLM is
imported. vLLM reads config and tokenizer from a temporary folder, and the weights from the blobs. The
options are those of ``vllm serve``, except the ones that name another model.
"""

from __future__ import annotations

import json
import logging
import sys
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.libraries import optional_libraries
from blobstore.errors import BlobstoreError, UsageError
from blobstore.integrations.server_main import ServerOptions, run_server
from blobstore.integrations.vllm.settings import engine_options

if TYPE_CHECKING:
    from collections.abc import Sequence

_RESERVED = ("--model", "--load-format", "--model-loader-extra-config")
_SERVED_NAME = "--served-model-name"


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a model until the process is stopped, and return its exit status."""
    module = "blobstore.integrations.vllm.server"
    return run_server(module, "vLLM's OpenAI-compatible server", "vllm serve", _serve, arguments)


def _serve(options: ServerOptions) -> None:
    """Run vLLM's own command on the model."""
    given = {option.partition("=")[0].replace("_", "-") for option in options.rest}
    if reserved := given.intersection(_RESERVED):
        raise UsageError(
            f"{min(reserved)} is not an option here: the model is NAME, and comes from the store"
        )
    logger = logging.getLogger("blobstore")  # vLLM shows its own loggers only
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)
    with engine_options(options.name, store=options.store, **options.opening) as engine:
        name = [] if _SERVED_NAME in given else [_SERVED_NAME, *engine["served_model_name"]]
        settings = json.dumps(engine["model_loader_extra_config"])
        sys.argv = ["vllm", "serve", engine["model"], *name, "--load-format", engine["load_format"]]
        sys.argv += ["--model-loader-extra-config", settings, *options.rest]
        try:
            with optional_libraries():
                from vllm.entrypoints.cli.main import main as run
            run()
        except PackageNotFoundError as error:
            raise BlobstoreError(
                f"vLLM's command cannot run: no package is installed as {quote(error.name)}"
            ) from None


if __name__ == "__main__":
    sys.exit(main())
