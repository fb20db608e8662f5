"""``blobstore run``: starts the server that is installed, with a model of the store."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import click

from blobstore.cli import arguments, llama_cpp, options, output, render
from blobstore.cli.progress import progress_bar
from blobstore.core.escape import cli_command, escape
from blobstore.errors import MissingLibrary, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.cli.output import Output
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore


class _Server(NamedTuple):
    """A way to start an inference server."""

    name: str
    modules: tuple[str, ...]
    """The modules that this Python must have; none if a program on the path starts it."""
    start: tuple[str, ...]
    """The module or the program, and the words before the model."""
    port: int
    """By default."""
    reads: Literal["store", "folder", "gguf"]


_SERVERS = (
    _Server("vllm", ("vllm",), ("blobstore.integrations.vllm.server",), 8000, "store"),
    _Server("vllm", (), ("vllm", "serve"), 8000, "folder"),
    _Server("mlx-lm", ("mlx_lm",), ("blobstore.integrations.mlx_lm.server",), 8080, "store"),
    _Server("mlx-lm", (), ("mlx_lm.server", "--model"), 8080, "folder"),
    _Server(
        "transformers",
        ("transformers", "fastapi", "openai", "pydantic", "uvicorn"),
        ("transformers.cli.transformers", "serve"),
        8000,
        "folder",
    ),
    _Server("transformers", (), ("transformers", "serve"), 8000, "folder"),
    _Server("llama.cpp", (), (llama_cpp.PROGRAM,), 8080, "gguf"),
    _Server(
        "llama.cpp",
        ("llama_cpp", "sse_starlette", "starlette_context"),
        (llama_cpp.MODULE,),
        8000,
        "gguf",
    ),
)
"""The first that is installed is started; llama.cpp for models from GGUF files, and no other for these."""
_ENCODER = re.compile(r"((?<!LMHead)Model|ForMaskedLM|Classification)$")
"""The ends of names of classes that generate no text."""


@click.command(
    "run",
    short_help="Start the inference server that is installed with a model.",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("name", type=arguments.MODEL)
@click.argument("rest", metavar="[-- ARGUMENT...]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--with",
    "chosen",
    type=click.Choice(list(dict.fromkeys(server.name for server in _SERVERS))),
    help="The server; by default the first of these that is installed.",
)
@click.option("--dry-run", is_flag=True, help="Start nothing; print the command.")
@options.shared("store", "json")
def command(
    name: str,
    rest: tuple[str, ...],
    chosen: str | None,
    dry_run: bool,
    store: LocalStore,
    out: Output,
) -> None:
    """Start an inference server with the model NAME, in place of this process.

    vLLM and mlx-lm that are installed with blobstore read the store itself. Other servers, and for
    models from GGUF files those of llama.cpp, read a folder as "blobstore link" makes it, in
    ~/.cache/blobstore/run; for these, a frozen model is thawed first, unless its files are GGUF. The
    server gets each ARGUMENT after "--", such as --port 9000.
    """
    from blobstore.operations.sign.require_trust import require_trust
    from blobstore.store.local import LocalStore

    if out.is_json and not dry_run:
        raise click.UsageError(
            "--json needs --dry-run: without it, the output is that of the server"
        )
    model, store = arguments.model(store, name), LocalStore.to_read(store)
    # Read once: another user may give the name to a model that the policy refuses.
    data, manifest = store.parse(model)
    store.check_manifest(data, manifest)  # an error of ours is clearer than one of the server
    require_trust(store, model, data)
    folder = _folder(store, data)
    gguf = llama_cpp.gguf_files(store, manifest, folder or Path())
    if chosen is None and not gguf:
        _check_generates(store, model)
    server, words = _server(chosen, is_gguf=bool(gguf))
    if folder is None and server.reads != "store":
        raise UsageError("there is no home folder; set XDG_CACHE_HOME")
    unused: list[str] = []
    if server.reads == "gguf":
        words += llama_cpp.file_words(server.start[0], model, gguf, unused)
        words += llama_cpp.ollama_words(server.start[0], store, manifest, unused, words[0])
    elif server.reads == "folder":
        words.append(str(folder))
    else:
        words += [str(model), "--store", str(store.root)]
    needs_folder = str(folder) in " ".join(words)
    words += rest
    address = (
        f"http://{_option(rest, '--host', '127.0.0.1')}:{_option(rest, '--port', server.port)}"
    )
    # A server that reads a folder knows the model by this.
    shown = str(folder) if server.reads == "folder" else str(model)
    body = json.dumps({"model": shown, "messages": [{"role": "user", "content": "Hello"}]})
    curl = [
        *("curl", f"{address}/v1/chat/completions"),
        *("-H", "Content-Type: application/json", "-d", body),
    ]
    if unused:
        files = [it for it in unused if it.startswith(llama_cpp.FOLDER)]
        advice = f"; {cli_command('cat', model, files[0])} prints that file" if files else ""
        output.show_note(f"{server.name} has no option for {', '.join(unused)}{advice}")
    if dry_run:
        out.result({"command": words, "address": address}, shlex.join(words))
        return
    if folder is not None and needs_folder:
        _link_if_needed(store, model, manifest, folder, server.name, is_gguf=bool(gguf))
    output.show_note(f"{server.name} will serve {model} at {address}; ask it with:")
    output.show_note(shlex.join(curl))
    os.execv(words[0], words)  # noqa: S606 - the words are no shell's


def _check_generates(store: LocalStore, model: Reference) -> None:
    """Fail if the class of a model says that it generates no text, as that of an encoder."""
    from blobstore.models.small_files import ModelFiles

    name = ModelFiles.of(model, store).architecture
    if _ENCODER.search(name):
        raise UsageError(
            f"{model} is a {escape(name)}, which generates no text",
            advice="--with NAME starts a server all the same",
        )


def _folder(store: LocalStore, manifest: bytes) -> Path | None:
    """Return the folder of links for a server that cannot read the store; None without a home folder."""
    from blobstore.core.digest import Digest
    from blobstore.store.copies import copies_folder

    folder = copies_folder(store.root)
    return folder and folder / Digest.of(manifest).hex[:32]


def _link_if_needed(
    store: LocalStore,
    model: Reference,
    manifest: Manifest,
    folder: Path,
    server: str,
    *,
    is_gguf: bool,
) -> None:
    """Make the folder of links, unless an earlier run has made it and all of its files are there."""
    from blobstore.cli.thaw import thaw_whole
    from blobstore.operations.export.link import is_linked, link_manifest
    from blobstore.store.copies import hold_copies

    hold_copies(folder.parent)
    if is_linked(manifest, folder, store=store):
        return
    with progress_bar() as progress:
        # GGUF files are copies in any case, so their blobs may stay frozen.
        thawed = None if is_gguf else thaw_whole(model, store, progress)
        linked = link_manifest(manifest, model, folder, store=store, force=True, progress=progress)
    if thawed is not None and thawed.blobs:
        output.show_note(
            f"{model} was frozen, and {server} reads files: it is thawed now; "
            f"{cli_command('freeze', model)} compresses it again"
        )
    if linked.copied:
        size = render.human_bytes(linked.bytes_copied)
        output.show_note(
            f"{server} reads files: a copy of {size} is in {escape(str(folder))}; "
            "'blobstore gc' removes it when no server uses it"
        )


def _server(chosen: str | None, *, is_gguf: bool) -> tuple[_Server, list[str]]:
    """Return the server to start, and the words that start it."""
    for server in _SERVERS:
        is_asked = chosen in {None, server.name} and (server.reads == "gguf") == is_gguf
        if is_asked and (words := _words(server)):
            return server, words
    if chosen is not None and (chosen == "llama.cpp") != is_gguf:
        raise UsageError(
            "llama.cpp serves models from GGUF files, and the other servers all others"
        )
    wanted = chosen or ("llama.cpp" if is_gguf else "vllm, mlx-lm or transformers")
    raise MissingLibrary(
        f"no inference server is installed: {wanted}",
        advice="install llama-server, which is part of llama.cpp, or 'llama-cpp-python[server]'"
        if is_gguf
        else "install 'vllm' for GPUs, 'tensor-blobstore[mlx] mlx-lm', or 'transformers[serving]'; "
        "docs/guides/serving has others",
    )


def _words(server: _Server) -> list[str]:
    """Return the words that start a server, none if it is not installed."""
    first, *rest = server.start
    if server.modules:
        return [sys.executable, "-m", first, *rest] if all(map(find_spec, server.modules)) else []
    program = shutil.which(first)
    # The modules of this Python have a program next to it, also if what the server needs is missing.
    if program is None:
        return []
    is_own = server.reads == "folder" and Path(program).parent == Path(sys.executable).parent
    return [] if is_own else [program, *rest]


def _option(words: Sequence[str], name: str, default: object) -> object:
    """Return the value of an option that the server gets."""
    for at, word in enumerate(words):
        if word == name and at + 1 < len(words):
            return words[at + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return default
