from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from blobstore.errors import DamagedSource, SourceError
from blobstore.sources.meta.source import MetaFolder, is_meta_folder
from tests.support.meta_models import (
    PARAMS,
    Maker,
    MemoryShard,
    Params,
    Tensors,
    closing,
    contents,
    expected,
    hf_model,
    split,
    to_meta,
)

SHARDS = [1, 2, 4, 8]


@pytest.mark.slow
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("embedding", [0, 1])
@pytest.mark.parametrize("kv_heads", [8, 4, None])
def test_gives_the_tensors_that_transformers_has(
    maker: Maker, shards: int, embedding: int, kv_heads: int | None
) -> None:
    params = PARAMS | {"n_kv_heads": kv_heads}
    tensors = hf_model(params)
    maker.write(split(to_meta(tensors, params), shards, embedding=embedding), params)
    source = maker.open()
    assert contents(source) == expected(tensors)
    source.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gives_tensors_of_every_type_of_a_llama(maker: Maker, dtype: torch.dtype) -> None:
    tensors = hf_model(PARAMS, dtype)
    source = maker.write(split(to_meta(tensors, PARAMS), 2)).open()
    assert contents(source) == expected(tensors)
    assert source.config["torch_dtype"] == str(dtype).removeprefix("torch.")
    source.close()


def test_keeps_names_and_rows_of_several_shards(maker: Maker) -> None:
    meta = to_meta(hf_model(PARAMS), PARAMS) | {"rope.freqs": torch.ones(2)}
    (maker.folder / "config.json").write_text("{}")
    source = maker.write(split(meta, 4, embedding=1)).open(keep_names=True)
    assert contents(source) == expected(meta)
    assert source.config == {}
    kept = [(file.name, file.content) for file in source.files]
    assert kept == [("config.json", None), ("params.json", None)]
    source.close()


def test_keeps_any_tensors_of_a_single_shard(maker: Maker) -> None:
    tensors = {"vision_model.x": torch.arange(5.0), "odd": torch.ones(2, 1, dtype=torch.int8)}
    source = maker.write([tensors], "not JSON").open(keep_names=True)
    assert contents(source) == expected(tensors)
    assert source.config == {}
    source.close()


def test_makes_the_same_config_for_any_number_of_shards(maker: Maker) -> None:
    tensors = to_meta(hf_model(PARAMS | {"n_kv_heads": 8}), PARAMS)
    made = set()
    for count, embedding in ((1, 0), (2, 0), (4, 1), (8, 0), (8, 1)):
        maker.write(split(tensors, count, embedding=embedding), PARAMS | {"n_kv_heads": None})
        source = closing(maker.open())
        made.add(next(file.content for file in source.files if file.name == "config.json"))
    assert len(made) == 1


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_calculates_what_meta_s_model_calculates(
    maker: Maker, tmp_path: Path, scaled: bool, kv_heads: int
) -> None:
    params = PARAMS | {"use_scaled_rope": scaled, "n_kv_heads": kv_heads, "rope_theta": 20000.0}
    meta = to_meta(hf_model(params, torch.float32), params)
    source = maker.write(split(meta, 2), params).open()
    tensors = {
        name: torch.from_numpy(np.frombuffer(data, np.float32).reshape(shape).copy())
        for name, ((_, shape), data) in contents(source).items()
    }
    source.close()
    model = LlamaForCausalLM(LlamaConfig(**source.config))
    model.load_state_dict(tensors)
    tokens = torch.randint(0, 48, (40,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        logits = model(tokens[None]).logits[0]
        wanted = meta_logits(meta, params, tokens)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


def meta_logits(tensors: Tensors, params: Params, tokens: torch.Tensor) -> torch.Tensor:
    """Calculate a Llama in Meta's form, positions as turns of complex numbers."""
    size = params["dim"] // params["n_heads"]
    turns = meta_turns(size, len(tokens), params)

    def weight(name: str) -> torch.Tensor:
        return tensors[f"{name}.weight"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + params["norm_eps"])
        return x * scale * weight(name)

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:
        rows: torch.Tensor = x @ weight(name).T
        return rows.reshape(len(tokens), -1, size).transpose(0, 1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)

    state = weight("tok_embeddings")[tokens]
    for layer in range(params["n_layers"]):
        at = f"layers.{layer}.attention"
        x = norm(state, f"{at}_norm")
        query = turned(heads(x, f"{at}.wq"))
        repeats = len(query) // params["n_kv_heads"]
        key = turned(heads(x, f"{at}.wk")).repeat_interleave(repeats, 0)
        value = heads(x, f"{at}.wv").repeat_interleave(repeats, 0)
        scores = query @ key.transpose(1, 2) / math.sqrt(size)
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        state = state + mixed @ weight(f"{at}.wo").T
        at = f"layers.{layer}.feed_forward"
        x = norm(state, f"layers.{layer}.ffn_norm")
        gate = torch.nn.functional.silu(x @ weight(f"{at}.w1").T)
        state = state + (gate * (x @ weight(f"{at}.w3").T)) @ weight(f"{at}.w2").T
    return norm(state, "norm") @ weight("output").T


def meta_turns(size: int, length: int, params: Params) -> torch.Tensor:
    rates = params["rope_theta"] ** -(torch.arange(0, size, 2) / size)
    if params["use_scaled_rope"]:
        # Slow turns are slowed by 8, fast ones not; between 1 and 4 in 8192 positions, partly.
        kept = ((8192 * rates / (2 * math.pi) - 1) / 3).clamp(0, 1)
        rates = rates * (kept + (1 - kept) / 8)
    angles = torch.outer(torch.arange(length).float(), rates)
    return torch.polar(torch.ones_like(angles), angles)


def test_keeps_the_tokenizer_and_the_generated_config(maker: Maker, tmp_path: Path) -> None:
    for name in ("tokenizer.model", "checklist.chk", "LICENSE", "config.json", "sp ace.txt"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "other.safetensors").touch()
    (tmp_path / "folder").mkdir()
    source = closing(maker.write([to_meta(hf_model(PARAMS), PARAMS)]).open())
    assert {file.name: file.content is None for file in source.files} == {
        "LICENSE": True,
        "config.json": False,
        "params.json": True,
        "tokenizer.model": True,
    }
    assert list(source.files) == sorted(source.files, key=lambda file: file.name)
    generated, unusable, others = [it for it in source.notices if it.startswith("left out")]
    assert "config.json" in generated
    assert "sp ace.txt" in unusable
    files = f"2 files ('{tmp_path}/checklist.chk', '{tmp_path}/other.safetensors')"
    assert f"1 folder ('{tmp_path}/folder') and {files}" in others


def test_is_recognised_by_its_shards_and_params(tmp_path: Path) -> None:
    assert not is_meta_folder(tmp_path)
    (tmp_path / "params.json").touch()
    assert not is_meta_folder(tmp_path)
    (tmp_path / "consolidated.pth").touch()
    assert not is_meta_folder(tmp_path)
    (tmp_path / "consolidated.01.pth").touch()
    assert is_meta_folder(tmp_path)
    (tmp_path / "params.json").unlink()
    assert not is_meta_folder(tmp_path)


@pytest.mark.parametrize(
    ("renamed", "to", "missing"),
    [("01", "04", "01"), ("00", "04", "00"), ("01", "1", "01"), ("03", "003", "03")],
)
def test_rejects_gaps_in_the_numbers(
    maker: Maker, tmp_path: Path, renamed: str, to: str, missing: str
) -> None:
    maker.write(split(to_meta(hf_model(PARAMS), PARAMS), 4))
    shard = tmp_path / f"consolidated.{renamed}.pth"
    shard.rename(tmp_path / f"consolidated.{to}.pth")
    with pytest.raises(DamagedSource, match=rf"consolidated\.{missing}\.pth' is missing"):
        maker.open()


def test_rejects_a_folder_without_shards(tmp_path: Path) -> None:
    with pytest.raises(DamagedSource, match=r"consolidated\.00\.pth' is missing; download"):
        MetaFolder(tmp_path, MemoryShard)  # type: ignore[arg-type]


def test_closes_what_is_open_when_a_shard_cannot_be_opened(maker: Maker) -> None:
    maker.write(split(to_meta(hf_model(PARAMS), PARAMS), 2))

    def open_shard(path: Path, _: object) -> MemoryShard:
        if path.name == "consolidated.01.pth":
            message = "no"
            raise SourceError(message)
        return maker.open_shard(path)

    with pytest.raises(SourceError, match="^no$"):
        MetaFolder(maker.folder, open_shard)
    assert not maker.shards["consolidated.00.pth"].is_open


def test_passes_on_the_notices_of_shards(maker: Maker) -> None:
    source = closing(maker.write(split(to_meta(hf_model(PARAMS), PARAMS), 2)).open())
    said = [notice for notice in source.notices if notice.endswith("a notice")]
    assert [Path(notice.split("'")[1]).name for notice in said] == sorted(maker.shards)
