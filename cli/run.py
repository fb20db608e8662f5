"""``blobstore run``: starts the server that is installed, with a model of the store."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar
from blobstore.core.escape import cli_command, escape
from blobstore.errors import MissingLibrary, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from blobstore.cli.output import Output
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore


class _Server(NamedTuple):
    needs: tuple[str, ...]
    """The modules that must be installed."""
    program: str
    """The module that starts it, or the name of a program."""
    port: int
    """By default."""


_LLAMA_CPP = "llama.cpp"
_SERVERS = {
    "vllm": _Server(("vllm",), "blobstore.integrations.vllm.server", 8000),
    "mlx-lm": _Server(("mlx_lm",), "blobstore.integrations.mlx_lm.server", 8080),
    "transformers": _Server(
        ("transformers", "fastapi", "openai", "pydantic", "uvicorn"),
        "transformers.cli.transformers",
        8000,
    ),
    _LLAMA_CPP: _Server((), "llama-server", 8080),
}
"""The first that is installed is started; llama.cpp for models from GGUF files, and no other for these."""
_GGUF_OPTIONS = {
    "model": "-m",
    "projector": "--mmproj",
    "adapter": "--lora",
    "control vector": "--control-vector",
    "draft model": "--model-draft",
}
"""The options of llama-server for files by their roles."""
_OLLAMA_ROLES = {
    "application/vnd.ollama.image.model": "model",
    "application/vnd.ollama.image.projector": "projector",
    "application/vnd.ollama.image.adapter": "adapter",
}
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
    type=click.Choice(list(_SERVERS)),
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

    vLLM and mlx-lm read the store itself. "transformers serve", and the llama-server of llama.cpp for
    models from GGUF files, read a folder as "blobstore link" makes it, in ~/.cache/blobstore/run; for
    these, a frozen model is thawed first. The server gets each ARGUMENT after "--", such as --port 9000.
    """
    if out.is_json and not dry_run:
        raise click.UsageError(
            "--json needs --dry-run: without it, the output is that of the server"
        )
    model = arguments.model(store, name)
    gguf = _gguf_files(store, model)
    if chosen is None and not gguf:
        _check_generates(store, model)
    name, server = _server(chosen, is_gguf=bool(gguf))
    words = [sys.executable, "-m", server.program]
    folder = None
    if name == _LLAMA_CPP:
        folder = _folder(store, model)
        words = [shutil.which(server.program) or server.program, *_gguf_words(model, gguf)]
    elif name == "transformers":
        folder = _folder(store, model)
        words += ["serve", str(folder)]
    else:
        words += [str(model), "--store", str(store.root)]
    words += rest
    address = (
        f"http://{_option(rest, '--host', '127.0.0.1')}:{_option(rest, '--port', server.port)}"
    )
    # A server that reads a folder knows the model by this.
    shown = str(folder) if name == "transformers" else str(model)
    body = json.dumps({"model": shown, "messages": [{"role": "user", "content": "Hello"}]})
    curl = [
        *("curl", f"{address}/v1/chat/completions"),
        *("-H", "Content-Type: application/json", "-d", body),
    ]
    if dry_run:
        out.result({"command": words, "address": address}, shlex.join(words))
        return
    if folder is not None and str(folder) in " ".join(words):
        _link_if_needed(store, model, folder, name, is_gguf=bool(gguf))
    output.show_note(f"{name} will serve {model} at {address}; ask it with:")
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


def _folder(store: LocalStore, model: Reference) -> Path:
    """Return the folder of links for a server that cannot read the store."""
    from blobstore.core.digest import Digest
    from blobstore.store.copies import copies_folder

    if (folder := copies_folder(store.root)) is None:
        raise UsageError("there is no home folder; set XDG_CACHE_HOME")
    return folder / Digest.of(store.read_manifest(model)).hex[:32]


def _link_if_needed(
    store: LocalStore, model: Reference, folder: Path, server: str, *, is_gguf: bool
) -> None:
    """Make the folder of links, unless an earlier run has made it and all of its files are there."""
    from blobstore.cli.thaw import thaw_whole
    from blobstore.operations.export.link import is_linked, link_model
    from blobstore.store.copies import hold_copies

    hold_copies(folder.parent)
    if is_linked(model, folder, store=store):
        os.utime(folder)  # gc removes what was used longest ago
        return
    with progress_bar() as progress:
        # GGUF files are copies in any case, so their blobs may stay frozen.
        thawed = None if is_gguf else thaw_whole(model, store, progress)
        linked = link_model(model, folder, store=store, force=True, progress=progress)
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


def _gguf_files(store: LocalStore, model: Reference) -> dict[str, list[Path]]:
    """Return the GGUF files of a model by their roles: blobs of Ollama's, or files in the folder of links.

    Other models have none.
    """
    from pathlib import Path

    from blobstore.manifests import media_types
    from blobstore.models.source_layers import gguf_roles, read_source_record

    found: dict[str, list[Path]] = {}
    manifest = store.resolve(model)  # an error of ours is clearer than one of the server
    for layer in manifest.layers_of(*media_types.GGUF):
        role = _OLLAMA_ROLES[layer.media_type]
        found.setdefault(role, []).append(Path(store.blob_path(layer.digest)))
    if not found:
        for name, role in gguf_roles(read_source_record(store, manifest)).items():
            found.setdefault(role, []).append(_folder(store, model) / name)
    return found


def _gguf_words(model: Reference, files: Mapping[str, Sequence[Path]]) -> Iterator[str]:
    """Yield the words for the GGUF files of a model: of one in parts, the first part."""
    if "model" not in files:
        (role, (path, *_)), *_ = files.items()
        raise UsageError(
            f"{model} has no model to serve: the role of {path.name} is {role}",
            advice="import it together with its model, from a folder that has both",
        )
    for role, option in _GGUF_OPTIONS.items():
        paths = files.get(role, ())
        for path in paths if role == "adapter" else paths[:1]:
            yield from (option, str(path))
    if drafts := files.get("draft model"):
        kind = "eagle3" if "eagle3" in drafts[0].name.lower() else "mtp"
        yield from ("--spec-type", f"draft-{kind}")


def _server(chosen: str | None, *, is_gguf: bool) -> tuple[str, _Server]:
    for name, server in _SERVERS.items():
        if chosen not in {None, name} or (name == _LLAMA_CPP) != is_gguf:
            continue
        is_there = all(map(find_spec, server.needs)) and (
            server.needs or shutil.which(server.program)
        )
        if is_there:
            return name, server
    if chosen is not None and (chosen == _LLAMA_CPP) != is_gguf:
        raise UsageError(
            "llama.cpp serves models from GGUF files, and the other servers all others"
        )
    wanted = chosen or (_LLAMA_CPP if is_gguf else "vllm, mlx-lm or transformers")
    raise MissingLibrary(
        f"no inference server is installed: {wanted}",
        advice="install llama-server, which is part of llama.cpp"
        if is_gguf
        else "install 'vllm' for GPUs, 'tensor-blobstore[mlx] mlx-lm', or 'transformers[serving]'; "
        "docs/guides/serving has others",
    )


def _option(words: Sequence[str], name: str, default: object) -> object:
    """Return the value of an option that the server gets."""
    for at, word in enumerate(words):
        if word == name and at + 1 < len(words):
            return words[at + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return default
