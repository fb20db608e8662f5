"""The words that the servers of llama.cpp get for the files of a model, and for what Ollama adds to them."""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from blobstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore

PROGRAM: Final = "llama-server"
MODULE: Final = "llama_cpp.server"
"""The server of llama-cpp-python."""
_FILES: Final = {
    PROGRAM: {
        "model": "-m",
        "projector": "--mmproj",
        "adapter": "--lora",
        "control vector": "--control-vector",
        "draft model": "--model-draft",
    },
    MODULE: {"model": "--model", "projector": "--clip_model_path", "adapter": "--lora_path"},
}
"""The options for files, by their roles."""
_PARAMETERS: Final = {
    PROGRAM: {
        "frequency_penalty": "--frequency-penalty",
        "min_p": "--min-p",
        "num_batch": "--batch-size",
        "num_ctx": "--ctx-size",
        "num_gpu": "--gpu-layers",
        "num_keep": "--keep",
        "num_predict": "--predict",
        "num_thread": "--threads",
        "presence_penalty": "--presence-penalty",
        "repeat_last_n": "--repeat-last-n",
        "repeat_penalty": "--repeat-penalty",
        "seed": "--seed",
        "stop": "--reverse-prompt",
        "temperature": "--temp",
        "top_k": "--top-k",
        "top_p": "--top-p",
        "typical_p": "--typical",
    },
    MODULE: {
        "num_batch": "--n_batch",
        "num_ctx": "--n_ctx",
        "num_gpu": "--n_gpu_layers",
        "num_thread": "--n_threads",
        "seed": "--seed",
    },
}
"""The options for Ollama's parameters."""
FOLDER: Final = "ollama/"
_PARAMS: Final = f"{FOLDER}params.json"
_MAX_PARAMS: Final = 1 << 20
_SECONDS: Final = 10
"""For a program to print its help."""


def gguf_files(store: LocalStore, manifest: Manifest, folder: Path) -> dict[str, list[Path]]:
    """Return the GGUF files of a model by their roles: blobs of Ollama's, or files in the folder of links.

    Other models have none.
    """
    from blobstore.gguf.roles import role_of_name
    from blobstore.manifests import media_types
    from blobstore.manifests.ollama_files import ollama_files
    from blobstore.models.source_layers import gguf_roles, read_source_record

    found: dict[str, list[Path]] = {}
    if manifest.layers_of(*media_types.GGUF):
        for name, layer in ollama_files(manifest):
            if name.endswith(".gguf"):
                path = Path(store.readable_path(layer.digest))
                found.setdefault(role_of_name(name), []).append(path)
        return found
    for name, role in gguf_roles(read_source_record(store, manifest)).items():
        found.setdefault(role, []).append(folder / name)
    return found


def file_words(
    server: str, model: Reference, files: Mapping[str, Sequence[Path]], unused: list[str]
) -> Iterator[str]:
    """Yield the words for the GGUF files of a model: of one in parts, the first part.

    Roles for which ``server`` has no option are added to ``unused``.
    """
    if "model" not in files:
        (role, (path, *_)), *_ = files.items()
        raise UsageError(
            f"{model} has no model to serve: the role of {path.name} is {role}",
            advice="import it together with its model, from a folder that has both",
        )
    options = _FILES[server]
    unused += [role for role in files if role not in options]
    for role, option in options.items():
        paths = files.get(role, ())
        for path in paths if role == "adapter" and server == PROGRAM else paths[:1]:
            yield from (option, str(path))
    if server == PROGRAM and (drafts := files.get("draft model")):
        kind = "eagle3" if "eagle3" in drafts[0].name.lower() else "mtp"
        yield from ("--spec-type", f"draft-{kind}")


def ollama_words(
    server: str, store: LocalStore, manifest: Manifest, unused: list[str], program: str = ""
) -> Iterator[str]:
    """Yield the words for Ollama's parameters of a model; what ``server`` has no option for is added to ``unused``.

    ``program`` is the one that is installed, whose help says which options it has.
    """
    from blobstore.core import strict_json

    layers = _ollama_layers(manifest)
    params = layers.pop(_PARAMS, None)
    unused += [name if layers[name].name else name.removeprefix(FOLDER) for name in sorted(layers)]
    if params is None:
        return
    values = None
    if params.size <= _MAX_PARAMS:
        with contextlib.suppress(ValueError):
            values = strict_json.loads(store.read_blob(*params.id))
    if not isinstance(values, dict):
        unused.append(f"damaged {_PARAMS}")
        return
    known = _help(program) if program and server == PROGRAM else ""
    for name, value in values.items():
        option = _PARAMETERS[server].get(name)
        if option and known and not re.search(rf"{option}(?![\w-])", known):
            option = None
        words = [_word(name, one) for one in (value if isinstance(value, list) else [value])]
        if option is None or not all(words):
            unused.append(f"the parameter {name}")
            continue
        for word in words:
            yield from (option, word)


def _help(program: str) -> str:
    """Return what a program says of its options; nothing if it does not say it."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [program, "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        return done.stdout if "--ctx-size" in done.stdout else ""
    return ""


def _word(name: str, value: object) -> str:
    """Return the word for the value of a parameter, empty if no command line can have it."""
    if name == "stop":
        if not isinstance(value, str):
            return ""
        # llama-server reads these escapes.
        word = value.translate({ord(it): repr(it)[1:-1] for it in "\\\n\r\t"})
        return word if word.isprintable() else ""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else ""


def _ollama_layers(manifest: Manifest) -> dict[str, Descriptor]:
    """Return what says how a model is asked, by the names of files: its layers, or the files that they became."""
    from blobstore.manifests import media_types
    from blobstore.manifests.ollama_files import CONFIG, MANIFEST, ollama_files

    layers = {layer.name: layer for layer in manifest.layers_of(media_types.JSON, media_types.FILE)}
    if manifest.layers_of(*media_types.GGUF):
        layers |= dict(ollama_files(manifest))
    return {
        name: layer
        for name, layer in layers.items()
        if name.startswith(FOLDER) and name not in {CONFIG, MANIFEST}
    }
