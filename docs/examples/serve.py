"""Serve text from models of the store over HTTP, and swap them while requests are answered.

    pip install -e '.[torch]' transformers starlette uvicorn
    python docs/examples/serve.py llama-3.2:1b llama-3.2:1b-tuned --port 8000

The first model is loaded before the port is opened; ``PUT /model`` swaps to another one of the names.
docs/guides/serving/example.md describes the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import json
import re
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from blobstore import BlobstoreError, LocalStore, Reference
from blobstore.errors import NotFound, StoreError, UsageError
from blobstore.integrations.transformers import from_store, tokenizer_from_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

MAX_BODY = 1 << 20
MAX_TOKENS = 4096  # of prompt and continuation; fewer if the model supports fewer
MAX_CONNECTIONS = 64
THREADS = 2  # for generation; other requests wait
GRACE = 10  # seconds for requests to finish when the server stops
COMPLETION = {"model": "", "prompt": "", "max_tokens": 16, "stream": False}
STATUSES: dict[Any, int] = {
    HTTPException: 500,  # each has its own status
    ClientDisconnect: 499,  # the client is gone
    NotFound: 404,
    UsageError: 400,
    StoreError: 503,
    BlobstoreError: 422,  # the model is damaged, or cannot be built
    MemoryError: 503,
    RuntimeError: 503,  # raised by torch when it is out of memory
}


class Serving(NamedTuple):
    """A model in use. It is freed, with its maps, after the last request that uses it."""

    name: str
    model: Any
    tokenizer: Any
    load_seconds: float


def load(name: str, options: argparse.Namespace) -> Serving:
    """Load a model, including its blobs, so that no request waits for the disk."""
    started = time.perf_counter()
    store = LocalStore(options.store)
    how = {"device": options.device, "verify": options.verify, "read": "populate"}
    model = from_store(name, store=store, **how)
    serving = Serving(name, model, tokenizer_from_store(name, store), time.perf_counter() - started)
    gc.collect()  # cycles from transformers' first imports would keep the model alive
    return serving


class Completion:
    """The continuation of a prompt, generated in a thread."""

    def __init__(self, serving: Serving, asked: dict[str, Any]) -> None:
        self.serving = serving
        self.prompt = serving.tokenizer(asked["prompt"], return_tensors="pt")["input_ids"].long()
        self.max_tokens = asked["max_tokens"]
        self.tokens: list[int] = []
        self.is_unwanted = threading.Event()
        count, config = self.prompt.shape[1], serving.model.config
        limit = min(getattr(config, "max_position_embeddings", None) or MAX_TOKENS, MAX_TOKENS)
        if not count or self.max_tokens < 1 or count + self.max_tokens > limit:
            detail = f"{count} tokens and {self.max_tokens} more are not 1 and 1 to {limit} in all"
            raise HTTPException(400, detail)

    def generate(self, streamer: transformers.AsyncTextIteratorStreamer) -> None:
        """Generate until the model stops, the limit is reached, or the client disconnects."""
        prompt = self.prompt.to(self.serving.model.device)
        try:
            generated = self.serving.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=self.max_tokens,
                do_sample=False,
                streamer=streamer,
                stopping_criteria=transformers.StoppingCriteriaList([self._is_stopped]),
            )
            self.tokens = generated[0, prompt.shape[1] :].tolist()
        finally:
            streamer.on_finalized_text("", stream_end=True)

    def _is_stopped(self, ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.full(ids.shape[:1], self.is_unwanted.is_set(), device=ids.device)

    def answer(self, text: str, *, is_last: bool = True) -> dict[str, Any]:
        """Return a text, or a piece of it, in the format of OpenAI."""
        reason = "length" if len(self.tokens) == self.max_tokens else "stop"
        choice = {"index": 0, "text": text, "finish_reason": reason if is_last else None}
        answer = {"object": "text_completion", "model": self.serving.name, "choices": [choice]}
        usage = {"prompt_tokens": self.prompt.shape[1], "completion_tokens": len(self.tokens)}
        return {**answer, "usage": usage} if is_last else answer


class Server:
    """The current model, and the request handlers."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.names = [str(Reference.parse(name)) for name in options.names]
        self.serving = load(self.names[0], options)
        self.load_seconds = {self.serving.name: self.serving.load_seconds}
        self.failed_loads: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.swapping = asyncio.Lock()
        self.threads = ThreadPoolExecutor(THREADS)

    async def complete(self, request: Request) -> Response:
        """Answer ``POST /v1/completions``."""
        asked = await decoded(request, COMPLETION)
        serving = self.serving  # kept for this request, even if a swap follows
        if asked["model"] and str(Reference.parse(asked["model"])) != serving.name:
            raise HTTPException(404, f"the model served now is {serving.name}")
        self.requests[serving.name] += 1
        completion = await asyncio.to_thread(Completion, serving, asked)
        if asked["stream"]:
            return StreamingResponse(self.events(completion), media_type="text/event-stream")
        async for _ in self.pieces(completion):
            if await request.is_disconnected():
                return Response(status_code=499)
        text = serving.tokenizer.decode(completion.tokens, skip_special_tokens=True)
        return JSONResponse(completion.answer(text))

    async def events(self, completion: Completion) -> AsyncIterator[str]:
        """Yield the server-sent events of a completion."""
        async for piece in self.pieces(completion):
            yield f"data: {json.dumps(completion.answer(piece, is_last=False))}\n\n"
        yield f"data: {json.dumps(completion.answer(''))}\n\ndata: [DONE]\n\n"

    async def pieces(self, completion: Completion) -> AsyncIterator[str]:
        """Yield the text as it is generated. Closing the iterator stops the thread."""
        serving, loop = completion.serving, asyncio.get_running_loop()
        streamer = transformers.AsyncTextIteratorStreamer(
            serving.tokenizer, skip_prompt=True, skip_special_tokens=True
        )
        work = loop.run_in_executor(self.threads, completion.generate, streamer)
        try:
            async for piece in streamer:
                yield piece
            await work  # raises the errors of the thread
        finally:
            completion.is_unwanted.set()
            work.cancel()
            self.tokens[serving.name] += len(completion.tokens)
            if serving is not self.serving:
                loop.call_later(1, gc.collect)  # the traceback of a cut-off request keeps the model

    async def swap(self, request: Request) -> Response:
        """Answer ``PUT /model``: load a model while the current one answers, then switch."""
        name = str(Reference.parse((await decoded(request, {"name": ""}))["name"]))
        if name not in self.names:
            raise HTTPException(404, f"{name} is not among {', '.join(self.names)}")
        async with self.swapping:
            try:
                serving = await asyncio.to_thread(load, name, self.options)
            except Exception:
                self.failed_loads[name] += 1
                raise
            self.serving, self.load_seconds[name] = serving, serving.load_seconds
        return JSONResponse({"model": name, "load_seconds": serving.load_seconds})

    async def models(self, _: Request) -> Response:
        """Answer ``GET /v1/models``: the model that is served, then those that can be put."""
        names = dict.fromkeys((self.serving.name, *self.names))
        models = [{"id": name, "object": "model", "owned_by": "blobstore"} for name in names]
        return JSONResponse({"object": "list", "data": models})

    async def health(self, _: Request) -> Response:
        """Answer ``GET /health``."""
        return JSONResponse({"status": "ok", "model": self.serving.name})

    async def metrics(self, _: Request) -> Response:
        """Answer ``GET /metrics``, in the text format of Prometheus."""
        current, model = self.serving.name, self.serving.model
        families: dict[str, Mapping[str, float]] = {
            "load_seconds": self.load_seconds,
            "failed_loads_total": self.failed_loads,
            "requests_total": self.requests,
            "generated_tokens_total": self.tokens,
            "is_served": {name: int(name == current) for name in self.names},
            "ready_bytes": {current: sum(tensor.nbytes for tensor in model.parameters())},
        }
        lines = [f"process_private_bytes {private_memory()}"]
        for family, values in families.items():
            lines += [f'model_{family}{{model="{name}"}} {n}' for name, n in values.items()]
        return PlainTextResponse("".join(f"blobstore_{line}\n" for line in lines))

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/model", self.swap, methods=["PUT"]),
            Route("/metrics", self.metrics),
            Route("/health", self.health),
        ]
        handlers = {kind: partial(refused, code) for kind, code in STATUSES.items()}
        return Starlette(routes=routes, exception_handlers=handlers)


def refused(code: int, _: Request, error: Exception) -> Response:
    """Answer with an error of one line."""
    code, line = getattr(error, "status_code", code), getattr(error, "detail", error)
    return JSONResponse({"error": {"message": str(line), "code": code}}, code)


async def decoded(request: Request, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON object of a request, with its fields checked and defaults added."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"a request has at most {MAX_BODY} bytes")
    try:
        asked = json.loads(body)
        json.dumps(asked, ensure_ascii=False).encode()  # rejects lone surrogates
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the request is not JSON: {error}") from None
    kinds = {name: type(value) for name, value in defaults.items()}
    if not isinstance(asked, dict) or any(kinds.get(k) is not type(v) for k, v in asked.items()):
        fields = ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
        raise HTTPException(400, f"expected a JSON object with at most {fields}")
    return defaults | asked


def private_memory() -> int:
    """Return the size of the memory that only this process uses, without mapped blobs."""
    status = Path("/proc/self/status")
    found = status.exists() and re.search(r"RssAnon:\s+(\d+)", status.read_text(encoding="ascii"))
    return int(found[1]) * 1024 if found else 0


def main() -> None:
    """Serve until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(description="Serve text from models of the store.")
    parser.add_argument("names", nargs="+", metavar="NAME", help="a model; the first is loaded")
    parser.add_argument("--store", metavar="DIR", help="folder of the store")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 for a free one")
    parser.add_argument("--device", default="cpu", help="a torch device, such as cuda")
    parser.add_argument("--verify", choices=("size", "digest"), default="size")
    parser.add_argument(
        "--grace", type=int, default=GRACE, help="seconds for requests to finish at the end"
    )
    options = parser.parse_args()
    if options.port not in range(1 << 16):
        parser.error(f"port {options.port} is not one of 0 to 65535")
    faulthandler.enable()  # a mapped blob that another program truncates kills the process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        server = Server(options)
    except BlobstoreError as error:
        print(f"serve: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    uvicorn.run(
        server.app(),
        host=options.host,
        port=options.port,
        access_log=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=options.grace,
    )


if __name__ == "__main__":
    main()
