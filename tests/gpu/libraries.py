"""What must hold on a GPU in transformers and vLLM, and what NVIDIA's tool finds. The slowest check comes last."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import blobstore
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from tests.gpu.checks import CHECKS, busy, check_equal, register, run
from tests.gpu.lane import Lane

__all__ = ["CHECKS"]


def saved(folder: Path, kind: str) -> Path:
    from tests.real.tiny import make

    make(kind, torch.bfloat16).save_pretrained(folder)
    return folder


@register("transformers has the same parameters as on the processor", "transformers")
def transformers_parameters(lane: Lane) -> None:
    from blobstore.integrations.transformers import from_store

    store = LocalStore(lane.folder / "store")
    for kind, quantize in itertools.product(("llama", "tied", "qwen3-moe"), (None, "int4")):
        name = f"{kind}-{quantize}"
        options = QuantizeOptions(quantize, policy="uniform") if quantize else None
        source = saved(lane.folder / name, kind)
        blobstore.create(source, name, store=store, quantize=options)
        expected = from_store(name, store=store).state_dict()
        found: Any = from_store(name, store=store, device=lane.device)
        assert {one.device.type for one in found.parameters()} == {torch.device(lane.device).type}
        check_equal(found.state_dict(), expected)


@register("transformers loads onto the current device and stream", "a GPU", "transformers")
def transformers_stream(lane: Lane) -> None:
    from blobstore.integrations.transformers import from_store

    store = LocalStore(lane.folder / "store")
    options = QuantizeOptions("int4", policy="uniform")
    blobstore.create(saved(lane.folder / "source", "llama"), "m", store=store, quantize=options)
    expected = from_store("m", store=store).state_dict()
    last = torch.cuda.device_count() - 1
    stream: Any = torch.cuda.Stream(last)
    with torch.cuda.stream(stream), busy(lane):
        model = from_store("m", store=store, device="cuda")
        found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stream.synchronize()
    assert {tensor.device.index for tensor in found.values()} == {last}
    check_equal(found, expected)


@register("transformers loads tied models from four threads", "transformers")
def transformers_threads(lane: Lane) -> None:
    from blobstore.integrations.transformers import from_store

    store = LocalStore(lane.folder / "store")
    blobstore.create(saved(lane.folder / "source", "tied"), "m", store=store)
    expected = from_store("m", store=store).state_dict()
    with ThreadPoolExecutor(4) as pool:
        models = list(
            pool.map(lambda _: from_store("m", store=store, device=lane.device), range(8))
        )
    for model in models:
        check_equal(model.state_dict(), expected)


@register("a quantized model needs little memory of the host", "a GPU", "transformers")
def host_memory(lane: Lane) -> None:
    import transformers

    from blobstore.integrations.transformers import from_store

    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=8, vocab_size=32000
    )
    with torch.device("cuda"):
        model: Any = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    nbytes = sum(one.numel() * one.element_size() for one in model.parameters())
    model.save_pretrained(lane.folder / "source")
    del model
    torch.cuda.empty_cache()
    store = LocalStore(lane.folder / "store")
    blobstore.create(lane.folder / "source", "m", store=store, quantize=QuantizeOptions("int4"))
    shutil.rmtree(lane.folder / "source")
    from_store("m", store=store, device=lane.device)  # starts CUDA, and makes the pinned buffers
    with anonymous_growth() as growth:
        from_store("m", store=store, device=lane.device)
    assert max(growth) < nbytes / 8, f"{max(growth) >> 20} MiB for a model of {nbytes >> 20} MiB"


@contextlib.contextmanager
def anonymous_growth() -> Iterator[list[int]]:
    """Collect how much anonymous memory this process uses more than at the beginning."""

    def used() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

    before, growth, is_done = used(), [0], threading.Event()

    def sample() -> None:
        while not is_done.wait(0.005):
            growth.append(used() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield growth
    finally:
        is_done.set()
        thread.join()


@register("transformers spreads a model over two devices", "two GPUs", "transformers", "accelerate")
def device_map(lane: Lane) -> None:
    from blobstore.integrations.transformers import from_store

    store = LocalStore(lane.folder / "store")
    source = saved(lane.folder / "source", "llama")
    for quantize in (None, "int4"):
        options = QuantizeOptions(quantize, policy="uniform") if quantize else None
        name = f"m-{quantize}"
        blobstore.create(source, name, store=store, quantize=options)
        expected = from_store(name, store=store).state_dict()
        found = from_store(name, store=store, device_map="balanced").state_dict()
        assert len({tensor.device for tensor in found.values()}) == 2
        check_equal(found, expected)


@register("vLLM answers as from a folder, with FP8, NVFP4 and gpt-oss too", "a GPU", "vLLM")
def vllm_answers(lane: Lane) -> None:
    base = f"--basetemp={lane.folder / 'pytest'}"
    # The others need no GPU, and all of them take longer than this command may.
    chosen = ("-k", "answers_the_same or are_served", "tests/vllm")
    run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", base, *chosen)


@register("vLLM answers the same from two ranks", "two GPUs", "vLLM")
def vllm_ranks(lane: Lane) -> None:
    options = (
        "{'tensor_parallel_size': 2}",
        "{'tensor_parallel_size': 2, 'enable_expert_parallel': True}",
    )
    for kind, given in zip(("llama", "qwen3-moe"), options, strict=True):
        run("-c", _VLLM, str(lane.folder / kind), kind, given)


@register("vLLM answers the same after it slept", "a GPU", "vLLM")
def vllm_sleep(lane: Lane) -> None:
    run("-c", _VLLM, str(lane.folder), "llama", "{'enable_sleep_mode': True}")


_VLLM = """
import ast, pathlib, sys
from tests.vllm.models import FAST, PROMPTS, saved
from vllm import LLM, SamplingParams
import blobstore
from blobstore.integrations.vllm import engine_options
if __name__ == "__main__":
    folder, kind, options = pathlib.Path(sys.argv[1]), sys.argv[2], ast.literal_eval(sys.argv[3])
    source = saved(kind, folder / "source")
    blobstore.create(source, "m", store=str(folder / "store"))
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    answer = lambda llm: [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, greedy)]
    expected = answer(LLM(model=str(source), gpu_memory_utilization=0.3, **FAST))
    with engine_options("m", store=str(folder / "store")) as given:
        llm = LLM(**given, gpu_memory_utilization=0.3, **FAST, **options)
    assert answer(llm) == expected
    if options.get("enable_sleep_mode"):
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            if level == 2:
                llm.collective_rpc("reload_weights")
            assert answer(llm) == expected, level
"""


@register("compute-sanitizer finds no invalid access", "a GPU", "compute-sanitizer")
def sanitizer(lane: Lane) -> None:
    tool = shutil.which("compute-sanitizer") or ""
    command = ["--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "tests.gpu"]
    command += ["--only", "types", "dequantization", "--scale", "0.01"]
    code = f"import os, sys; os.execv({tool!r}, [{tool!r}, *sys.argv[1:]])"
    run("-c", code, *command)
