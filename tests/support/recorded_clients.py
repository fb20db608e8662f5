"""What clients ask a server for, recorded, and what it answers.

A log is a file of ``tests/data/serve`` that is named after a client and its version. Each entry is a request, with
the headers that a server reads, and the status and headers of the response. ``python -m tests.real.record_clients``
records the clients that are installed, and keeps the logs of other versions.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from blobstore.core.digest import Digest
from blobstore.operations.create.create import create
from blobstore.planning.plan import QuantizeOptions
from blobstore.serve.library import Library
from blobstore.serve.names import IMAGE
from blobstore.serve.unprepared import prepared
from blobstore.store.local import LocalStore
from tests.support.models import write_folder
from tests.support.ollama_store import GGUF_FILE, add_gguf_model
from tests.support.serve import ask, body_of

LOGS = Path(__file__).parents[1] / "data" / "serve"
MODEL = "org/Model"
HOST = "cache:8080"
"""What the server is called in logs."""
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 80,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {
        "type": "WordLevel",
        "vocab": {f"w{number}": number for number in range(64)},
        "unk_token": "w0",
    },
}
_READ = (
    "accept",
    "content-type",
    "if-none-match",
    "if-range",
    "range",
    "user-agent",
    "x-forwarded-proto",
)
"""The headers that logs have."""
_SELDOM = "/api/agent-harnesses"
"""What the Hub's client asks for once in a while."""


def recorded_library(folder: Path) -> Library:
    """Return a library of models that have equal bytes each time: one with two tags, and one of Ollama's."""
    random = np.random.default_rng(7)
    layer = "model.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (64, 64),
        f"{layer}.self_attn.q_proj.weight": (320, 64),
        f"{layer}.self_attn.k_proj.weight": (160, 64),
        f"{layer}.self_attn.v_proj.weight": (160, 64),
        f"{layer}.self_attn.o_proj.weight": (64, 320),
        f"{layer}.mlp.gate_proj.weight": (96, 64),
        f"{layer}.mlp.up_proj.weight": (96, 64),
        f"{layer}.mlp.down_proj.weight": (64, 96),
        f"{layer}.input_layernorm.weight": (64,),
        f"{layer}.post_attention_layernorm.weight": (64,),
        "model.norm.weight": (64,),
        "lm_head.weight": (64, 64),
    }
    source = write_folder(
        folder / "source",
        {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()},
        shards=2,
        files={
            "config.json": json.dumps(_CONFIG).encode(),
            "tokenizer.json": json.dumps(_TOKENIZER).encode(),
            "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}',
        },
    )
    store = LocalStore(folder / "store")
    create(source, MODEL, store=store)
    create(source, f"{MODEL}:int8", store=store, quantize=QuantizeOptions("int8"))
    add_gguf_model(store, "ollama", GGUF_FILE)
    return Library(store)


def load_log(path: Path, library: Library) -> list[dict[str, Any]]:
    """Return the entries of a log, with the commits and manifests that the library has now."""
    text = path.read_text(encoding="utf-8")
    for real, placeholder in placeholders(library).items():
        text = text.replace(placeholder, real)
    found: list[dict[str, Any]] = json.loads(text)
    return found


def save_log(name: str, entries: list[dict[str, Any]], library: Library) -> None:
    """Write a log. Equal requests are in it once."""
    lines = sorted({json.dumps(entry, sort_keys=True) for entry in entries})
    text = "[\n" + ",\n".join(lines) + "\n]\n"
    for real, placeholder in placeholders(library).items():
        text = text.replace(real, placeholder)
    (LOGS / f"{name}.json").write_text(text, encoding="utf-8")


def answered(library: Library, entry: dict[str, Any]) -> dict[str, Any]:
    """Return a request with the status and the headers of the response that it gets now."""
    headers = {"host": HOST, **entry["headers"]}
    response = ask(
        library, entry["target"], entry["method"], headers=headers, body=entry["body"].encode()
    )
    return entry | {"status": response.status, "answer": dict(response.headers)}


def placeholders(library: Library) -> dict[str, str]:
    """Return what stands in logs for digests of what this project writes, which may change."""
    found: dict[str, str] = {}
    for reference in sorted(library.store.references()):
        model = prepared(partial(library.model, reference))
        assert model is not None
        assert model.manifest is not None
        blobs = {blob.digest for blob in model.manifest.blobs}
        found[model.commit] = f"{{commit {reference}}}"
        for tag in (reference, type(reference)(*reference.parts[:3], reference.tag + IMAGE)):
            if "ollama" in str(tag):
                continue
            artifact = prepared(partial(library.artifact, tag))
            assert artifact is not None
            made = [digest for digest in artifact.blobs if digest not in blobs]
            for kind, digests in (("manifest", artifact.manifests), ("blob", made)):
                for number, digest in enumerate(digests):
                    found[digest.hex] = f"{{{kind} {number} {tag}}}"
    return found


@contextlib.contextmanager
def recording(library: Library) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve a library by another HTTP server than ours; return its host, and the entries of what is asked."""
    entries: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _exchange(self) -> None:
            host = self.headers["host"]
            body = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
            headers = {name: text for name in _READ if (text := self._header(name))}
            entry = {"method": self.command, "target": self.path, "headers": headers, "body": body}
            response = ask(
                library,
                self.path,
                self.command,
                headers={"host": host, **headers},
                body=body.encode(),
            )
            if not self.path.startswith(_SELDOM):
                entries.append(answered(library, entry))
            self.send_response(response.status)
            for name, text in response.headers.items():
                self.send_header(name, text)
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # Ollama leaves most responses
                self.wfile.write(body_of(library.store, response))

        def do_GET(self) -> None:
            self._exchange()

        def do_HEAD(self) -> None:
            self._exchange()

        def do_POST(self) -> None:
            self._exchange()

        def _header(self, name: str) -> str:
            return ", ".join(self.headers.get_all(name, ()))

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", entries
        finally:
            server.shutdown()
            thread.join()


def blob_of_ollama() -> Digest:
    """Return the digest of the weights of the model of Ollama's."""
    return Digest.of(GGUF_FILE)
