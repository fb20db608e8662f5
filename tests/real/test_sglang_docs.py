"""All commands on the page about SGLang work; SGLang's own commands are not run."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.support.clients import run_python
from tests.support.pages import ROOT, commands, in_python, program

PAGE = ROOT / "docs" / "guides" / "serving" / "sglang.md"
WORDS = 128


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    tokenizer.save_pretrained(folder)


def test_the_page_on_sglang_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "llama-3.2-1b")
    environment = {
        **os.environ,
        "BLOBSTORE_HOME": str(tmp_path / "store"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error",
    }

    def run(command: list[str]) -> str:
        done = run_python(command, environment)
        assert done.code == 0, done.stdout + done.stderr
        return done.stdout

    ours = [line for line in commands(PAGE) if not line.startswith("sglang serve ")]
    shown = [run(in_python(line)) for line in ours]
    source = program(PAGE).replace("./llama-files", "./llama-3.2-1b")
    both = run([sys.executable, "-c", f"{program(PAGE)}\n{source}"])
    linked, original = both.splitlines()

    assert "created llama-3.2:1b" in shown[0]
    assert len(linked.split()) >= 8
    assert linked == original
    # The commands of SGLang name the folders that the others made, and the second is plain.
    served = [shlex.split(line) for line in commands(PAGE) if line.startswith("sglang serve ")]
    folders = [tmp_path / line[line.index("--model-path") + 1] for line in served]
    # SGLang refuses a colon, which its syntax model:adapter has.
    assert [line[line.index("--served-model-name") + 1] for line in served] == [
        "llama-3.2-1b",
        "llama-3.2-1b-int4",
    ]
    assert [len(list(folder.glob("*.safetensors"))) for folder in folders] == [21, 1]
    tensors = load_file(folders[1] / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors.keys() == load_file(tmp_path / "llama-3.2-1b" / "model.safetensors").keys()
