"""A random Llama loaded from the store or from its folder: time to first token, and second processes.

Measures the time to the first token of a small model, in transformers and in mlx-lm, in a process that
has imported them and in a new process. Also measures the private memory of a second process that serves
the same model of 512 MiB, and the first token of one of 2 GB in new processes, in the page cache and not, and
of one of 512 MiB on a slow mount. In transformers, a state that fastsafetensors or Run:ai's streamer has
loaded from the folder is measured too, if they are installed. vLLM has an environment of its own, in which
``.ci/vllm`` installs it: ``--vllm .venv-vllm/bin/python``.
"""

from __future__ import annotations

import argparse
import gc
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import blobstore
from tests.benchmarks.common import (
    arguments,
    borrow_memory,
    rounds,
    table,
    timed,
    warm,
    workspace,
)
from tests.benchmarks.loading import Fastsafetensors, drop
from tests.support import fuse_mount

_PROMPT = "w1"
_ROOT = Path(__file__).parents[2]
_KINDS = ("transformers, folder", "transformers, store", "mlx-lm, folder", "mlx-lm, store")
_FAST, _STREAMED = "transformers, fastsafetensors", "transformers, Run:ai's streamer"
_SMALL = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512}
_LARGE = {"num_hidden_layers": 16, "hidden_size": 1024, "intermediate_size": 4096}
_HUGE = {"num_hidden_layers": 15, "hidden_size": 2048, "intermediate_size": 8192}


def make_model(folder: Path, **sizes: Any) -> Path:
    """Write a model of random weights in bf16, and a tokenizer, and put it into the store."""
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=512, num_attention_heads=4, **sizes)
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(512)}, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    tokenizer.save_pretrained(folder / "model")
    blobstore.create(folder / "model", "m", store=blobstore.LocalStore(folder / "store"))
    warm(folder)
    return folder


def first_token(kind: str, folder: Path) -> object:
    """Load a model, generate one token, and return the model."""
    model: Any
    tokenizer: Any
    store = blobstore.LocalStore(folder / "store")
    if kind.startswith("mlx-lm"):
        import mlx_lm

        if kind.endswith("folder"):
            model, tokenizer, *_ = mlx_lm.load(str(folder / "model"))
        else:
            from blobstore.integrations.mlx_lm import load

            model, tokenizer = load("m", store=store)
        mlx_lm.generate(model, tokenizer, _PROMPT, max_tokens=1)
        return model
    if not kind.endswith("store"):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if kind.endswith("folder"):
            model = AutoModelForCausalLM.from_pretrained(folder / "model")
        else:
            model = of_state(kind, folder / "model")
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    else:
        from blobstore.integrations.transformers import from_store, tokenizer_from_store

        model = from_store("m", store=store)
        tokenizer = tokenizer_from_store("m", store)
    prompt = tokenizer(_PROMPT, return_tensors="pt")["input_ids"]
    model.generate(prompt, max_new_tokens=1, do_sample=False)
    return model


def of_state(kind: str, folder: Path) -> Any:
    """Return the model whose tensors another loader reads."""
    from transformers import AutoConfig, LlamaForCausalLM

    config, file = AutoConfig.from_pretrained(folder), folder / "model.safetensors"
    nowhere: Any = None
    made = partial(LlamaForCausalLM.from_pretrained, nowhere, config=config)
    if kind == _FAST:
        tensors = Fastsafetensors(file)
        model: Any = made(state_dict=tensors)
        model.loaded = tensors  # it frees their memory
        return model
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(file))
        return made(state_dict=dict(streamer.get_tensors()))


def with_peers() -> tuple[tuple[str, ...], ...]:
    """Return the kinds that are compared with each other."""
    peers = {_FAST: "fastsafetensors", _STREAMED: "runai_model_streamer"}
    return (*_KINDS[:2], *(kind for kind, name in peers.items() if find_spec(name))), _KINDS[2:]


def serve(kind: str, small: str, folder: str) -> None:
    """Print the private memory that a model adds to a process, and keep the model until standard input closes."""
    first_token(kind, Path(small))  # for what the libraries need, whatever the model
    gc.collect()
    before = private_bytes()
    model = first_token(kind, Path(folder))
    gc.collect()
    print(private_bytes() - before, flush=True)
    sys.stdin.read()
    del model


def private_bytes() -> int:
    """Return the bytes of memory that only this process has mapped."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return 1024 * sum(
        int(size) for size in re.findall(r"^Private_\w+:\s+(\d+)", text, re.MULTILINE)
    )


def command(function: str, *arguments: str | Path) -> dict[str, Any]:
    """Return the arguments of a process that calls a function of this module."""
    code = f"from tests.benchmarks import first_token as m; import sys; m.{function}(*sys.argv[1:])"
    args = [sys.executable, "-c", code, *map(str, arguments)]
    return {"args": args, "cwd": _ROOT, "stderr": subprocess.DEVNULL}


def run(kind: str, folder: str) -> None:
    """Generate one token, in a process of its own."""
    first_token(kind, Path(folder))


def second_process(kind: str, small: Path, folder: Path) -> int:
    """Return the private memory of a model in the second of two processes that serve it."""
    how = command("serve", kind, small, folder)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(**how, **pipes) as first:
        assert first.stdout is not None
        assert first.stdout.readline()
        with subprocess.Popen(**how, **pipes) as second:
            assert second.stdout is not None
            found = int(second.stdout.readline())
            second.communicate()
        first.communicate()
    return found


def add_large(parser: argparse.ArgumentParser) -> None:
    """Add the options that measure one thing alone."""
    parser.add_argument("--large", action="store_true", help="measure a model of 2 GB alone")
    parser.add_argument("--slow", action="store_true", help="measure a slow mount alone")
    parser.add_argument("--vllm", metavar="PYTHON", help="measure the model of 2 GB in vLLM alone")


def collected(work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` takes after a garbage collection."""
    gc.collect()
    return timed(work)


def compare(folder: Path, count: int) -> None:
    """Print the tables of the first token, in this process and as one of its own."""
    import torch

    torch.set_num_threads(1)  # two that wait for each other would measure the load of the machine
    for title, calls, times in (
        ("libraries imported", lambda kind: partial(first_token, kind, folder), 4 * count),
        (
            "whole process",
            lambda kind: partial(subprocess.run, check=True, **command("run", kind, folder)),
            count,
        ),
    ):
        for kinds in (_KINDS[:2], _KINDS[2:]):
            print(f"First token, {title}\n")
            cases = {kind: partial(collected, calls(kind)) for kind in kinds}
            table(rounds(cases, times), kinds[0])


def compare_large(folder: Path, count: int, vllm: str | None) -> None:
    """Print the tables of the first token of a large model, in processes of their own."""
    groups = with_peers() if vllm is None else (("vLLM, folder", "vLLM, store"),)

    def process(kind: str) -> dict[str, Any]:
        if vllm is None:
            return command("run", kind, folder)
        args = [vllm, "-m", "tests.benchmarks.vllm_token", kind, str(folder)]
        return {"args": args, "cwd": _ROOT, "stdout": subprocess.DEVNULL}

    weights = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1024]
    nbytes = (folder / "model" / "model.safetensors").stat().st_size

    def chill() -> None:
        drop(weights)
        borrow_memory(nbytes * 9 // 4)

    for title, before in (
        ("in the page cache", lambda: warm(folder)),
        ("not in the page cache", chill),
    ):
        for kinds in groups:
            print(f"First token of {nbytes / 1e9:.1f} GB {title}, whole process\n")
            cases = {
                kind: partial(timed, partial(subprocess.run, check=True, **process(kind)))
                for kind in kinds
            }
            table(rounds(cases, count, before), kinds[0])


def compare_slow(folder: Path, place: Path, count: int) -> None:
    """Print the tables of the first token on a mount with 1 ms per request and 200 MB/s."""
    import torch

    torch.set_num_threads(1)
    place.mkdir()

    def mounted(kind: str) -> float:
        with fuse_mount.mounted(folder, place, delay=1e-3, rate=2e8) as mount:
            return collected(partial(first_token, kind, mount.path))

    for kinds in with_peers():
        print("First token of 512 MiB on a slow mount, libraries imported\n")
        table(rounds({kind: partial(mounted, kind) for kind in kinds}, count), kinds[0])


def main() -> None:
    """Print the tables."""
    options = arguments(__doc__, add_large)
    with workspace(options.folder) as folder:
        if options.large or options.vllm:
            compare_large(make_model(folder / "huge", **_HUGE), options.rounds, options.vllm)
            return
        if options.slow:
            compare_slow(make_model(folder / "large", **_LARGE), folder / "mount", options.rounds)
            return
        small = make_model(folder / "small", **_SMALL)
        compare(small, options.rounds)
        large = make_model(folder / "large", **_LARGE)
        size = (large / "model" / "model.safetensors").stat().st_size
        print(f"Private memory of a second process, of a model of {size / 2**20:.0f} MiB\n")
        print("| case | MiB | of the model |\n| --- | --- | --- |")
        for kind in _KINDS:
            private = second_process(kind, small, large)
            print(f"| {kind} | {private / 2**20:.1f} | {private / size:.1%} |")


if __name__ == "__main__":
    main()
