"""The table of requests that clients were seen to send, and of what they decide by.

Each row of ``tests/data/serve_requests.json`` is a request, the clients that sent it, and the parts of the response
that one of them decides by: its status, headers, and fields of its JSON, each by the keys and indexes that lead to it.
``python -m tests.real.record_requests`` adds rows.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from blobstore.operations.create.create import create
from blobstore.serve.hub import ROUTES
from blobstore.serve.library import Library
from blobstore.serve.messages import Response
from blobstore.store.local import LocalStore
from tests.support.gguf_files import TEXT, gguf_file, text
from tests.support.models import write_folder
from tests.support.recorded_clients import HOST, placeholders
from tests.support.serve import ask, json_of

TABLE: Final = Path(__file__).parents[1] / "data" / "serve_requests.json"
MODEL: Final = "team/chat"
GGUF: Final = "team/chat-gguf"
READ: Final = ("accept", "content-type", "range", "authorization")
"""The headers of a request that rows have. Those of Python's clients accept anything."""
_CARD: Final = "---\npipeline_tag: text-generation\nlibrary_name: transformers\ntags:\n- tiny\nlicense: mit\n---\n"
_CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 0,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_TOKENIZER: Final = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {
        "type": "WordLevel",
        "vocab": {f"w{one}": one for one in range(64)},
        "unk_token": "w0",
    },
}
_INFO: Final = (
    *("id", "sha", "private", "gated", "disabled", "downloads", "likes", "tags", "pipeline_tag"),
    *("library_name", "config", "safetensors", "siblings.0.rfilename"),
)
_FILE: Final = (
    "0.type",
    "0.path",
    "0.size",
    "0.oid",
    "0.lfs.oid",
    "0.lfs.size",
    "0.lfs.pointerSize",
)
_LAST: Final = ("0.lastCommit.id", "0.lastCommit.title")
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "list_models": tuple(
        f"0.{name}" for name in _INFO if name not in ("sha", "siblings.0.rfilename")
    ),
    "info": (*_INFO, "siblings.0.size", "siblings.0.blobId", "siblings.0.lfs"),
    "tree": (*_FILE, *_LAST),
    "paths_info": (*_FILE, *_LAST),
    "_refs": ("branches.0.name", "branches.0.ref", "branches.0.targetCommit", "tags", "converts"),
    "_commits": ("0.id", "0.title", "0.message", "0.authors"),
    "whoami": ("type", "name", "auth.accessToken.role", "auth.accessToken.displayName"),
    "gguf": ("ggufFile.rfilename", "ggufFile.blobId", "ggufFile.size"),
    "registry": (
        "schemaVersion",
        "mediaType",
        "config.mediaType",
        "layers.0.mediaType",
        "tags",
        "errors.0.code",
    ),
}
"""What clients decide by, by what answers. Those that a response lacks are no part of a row."""
HEADERS: Final = (
    *("Content-Type", "X-Error-Code", "X-Repo-Commit", "ETag", "X-Linked-Etag", "X-Linked-Size"),
    *(
        "Accept-Ranges",
        "Content-Range",
        "Link",
        "Docker-Content-Digest",
        "Docker-Distribution-API-Version",
    ),
    "WWW-Authenticate",
)


def served_library(folder: Path) -> Library:
    """Return a library of a model with a card and of one in a GGUF file, with equal bytes each time."""
    random = np.random.default_rng(3)
    tensors = {
        "model.embed_tokens.weight": random.standard_normal((64, 32), dtype=np.float32),
        "model.norm.weight": np.ones(32, np.float32),
    }
    files = {
        "README.md": _CARD.encode(),
        "config.json": json.dumps(_CONFIG).encode(),
        "tokenizer.json": json.dumps(_TOKENIZER).encode(),
        "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}',
    }
    store = LocalStore(folder / "store")
    create(write_folder(folder / "chat", tensors, files=files), MODEL, store=store)
    values = struct.pack("<32f", *range(32))
    data = gguf_file([("general.architecture", TEXT, text("llama"))], [("t", 0, (32,), values)])
    (folder / "chat-Q8_0.gguf").write_bytes(data)
    create(folder / "chat-Q8_0.gguf", GGUF, store=store)
    for reference in store.references():  # or lists that are sorted by time depend on the clock
        os.utime(store.manifest_path(reference), (0, 0))
    return Library(store)


def answer_to(library: Library, row: Mapping[str, Any]) -> Response:
    """Return the response that the request of a row gets now."""
    headers = {"host": HOST, **row["headers"]}
    return ask(library, row["target"], row["method"], headers=headers, body=row["body"].encode())


def decisive(row: Mapping[str, Any], response: Response) -> dict[str, Any]:
    """Return what a client decides by of a response."""
    value = json_of(response) if _is_json(response) and row["method"] != "HEAD" else None
    fields = {name: found for name in _fields(row) for found in _at(value, name.split("."))}
    headers = {name: response.headers[name] for name in HEADERS if name in response.headers}
    return {"status": response.status, "headers": headers, "fields": fields}


def _fields(row: Mapping[str, Any]) -> tuple[str, ...]:
    segments = urlsplit(row["target"]).path[1:].split("/")
    if segments[0] == "v2":
        return FIELDS["gguf" if row["headers"].get("accept") == "application/json" else "registry"]
    if segments[-1] == "whoami-v2":
        return FIELDS["whoami"]
    found = ROUTES.find(segments)
    return FIELDS.get(found[0].answer.__name__, ()) if found else ()


def _is_json(response: Response) -> bool:
    kind = response.headers.get("Content-Type", "")
    return kind.endswith("json") and response.status not in (304, 416)


def _at(value: Any, steps: list[str]) -> Iterator[Any]:
    """Yield the value at the end of some steps, if it is there."""
    for step in steps:
        if isinstance(value, list) and step.isdigit() and int(step) < len(value):
            value = value[int(step)]
        elif isinstance(value, dict) and step in value:
            value = value[step]
        else:
            return
    yield value


def load_rows(library: Library) -> list[dict[str, Any]]:
    """Return the rows, with the commits that the library has now."""
    written = TABLE.read_text(encoding="utf-8") if TABLE.exists() else "[]"
    for real, placeholder in placeholders(library).items():
        written = written.replace(placeholder, real)
    found: list[dict[str, Any]] = json.loads(written)
    return found


def save_rows(rows: list[dict[str, Any]], library: Library) -> None:
    """Write the rows: a line for each, sorted by target."""
    rows.sort(key=lambda row: (row["target"], row["method"], json.dumps(row, sort_keys=True)))
    lines = ",\n".join(json.dumps(row) for row in rows)
    written = f"[\n{lines}\n]\n"
    for real, placeholder in placeholders(library).items():
        written = written.replace(real, placeholder)
    TABLE.write_text(written, encoding="utf-8")
