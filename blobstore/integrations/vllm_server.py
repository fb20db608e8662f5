"""vLLM's own OpenAI-compatible server for one model of the store: ``python -m`` this module.

The store is checked before vLLM is even imported. Its config and tokenizer are given to vLLM in a
temporary folder; the weights come from the blobs. The options are those of ``vllm serve``, less the ones
that name another model.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING, get_args

from blobstore.errors import BlobstoreError, UsageError
from blobstore.integrations.vllm import engine_options
from blobstore.residence import Prefetch, Read
from blobstore.store.local import LocalStore
from blobstore.text import printable, quoted
from blobstore.verification import Verify

if TYPE_CHECKING:
    from collections.abc import Sequence

_OURS = ("--model", "--load-format", "--model-loader-extra-config")
_NAMED = "--served-model-name"
_INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a model until the process is told to end, and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m blobstore.integrations.vllm_server",
        usage="%(prog)s NAME [--store DIR] [--verify LEVEL] [--read HOW] [--prefetch HOW] [options of vllm serve]",
        description="Serve a model of the store with vLLM's OpenAI-compatible server.",
        epilog="Other options are those of vLLM: see vllm serve --help.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="the model, [host/][namespace/]model[:tag]")
    parser.add_argument("--store", metavar="DIR", help="folder of the store")
    parser.add_argument(
        "--verify",
        choices=get_args(Verify),
        default="size",
        help="what of the blobs is checked before they are used (default: size)",
    )
    parser.add_argument(
        "--read",
        choices=get_args(Read),
        default="mmap",
        help="how blobs are read; pread suits network file systems (default: mmap)",
    )
    parser.add_argument(
        "--prefetch",
        choices=get_args(Prefetch),
        help="bring mapped blobs into memory before they are used",
    )
    options, rest = parser.parse_known_args(arguments)
    try:
        _serve(options, rest)
    except BlobstoreError as error:
        sys.stderr.write(f"blobstore: error: {printable(str(error))}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _serve(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Run vLLM's own program on the model."""
    given = {option.partition("=")[0].replace("_", "-") for option in rest}
    if taken := given.intersection(_OURS):
        message = f"{min(taken)} is not given here: the model is NAME, and comes from the store"
        raise UsageError(message)
    if options.store == "":  # an unset variable of a script must not mean the current folder
        message = "the store's folder is empty text"
        raise UsageError(message)
    with engine_options(
        options.name,
        store=LocalStore(options.store),
        verify=options.verify,
        read=options.read,
        prefetch=options.prefetch,
    ) as engine:
        name = [] if _NAMED in given else [_NAMED, *engine["served_model_name"]]
        settings = json.dumps(engine["model_loader_extra_config"])
        sys.argv = ["vllm", "serve", engine["model"], *name, "--load-format", engine["load_format"]]
        sys.argv += ["--model-loader-extra-config", settings, *rest]
        _run()


def _run() -> None:
    try:
        from vllm.entrypoints.cli.main import main as run

        run()
    except PackageNotFoundError as error:
        message = f"vLLM's command cannot run: no package is installed as {quoted(error.name)}"
        raise BlobstoreError(message) from None
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        message = "vLLM is not installed for this Python"
        raise BlobstoreError(message) from None


if __name__ == "__main__":
    sys.exit(main())
