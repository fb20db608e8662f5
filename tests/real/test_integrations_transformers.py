"""Models loaded from the store into transformers give the same results as from their folder."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers.quantizers import quantizer_finegrained_fp8
from transformers.utils import import_utils

import blobstore
from blobstore.errors import (
    BlobDamaged,
    BlobstoreError,
    ModelNotFound,
    NotTrusted,
    UsageError,
)
from blobstore.integrations.transformers import (
    _check_attention,
    config_from_store,
    from_store,
    tokenizer_from_store,
)
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.models.frameworks import ArrayTarget
from blobstore.operations.export.export import export_model
from blobstore.operations.maintenance.verify import verify_models
from blobstore.planning.grouping import ExpertForm
from blobstore.planning.plan import QuantizeOptions
from blobstore.safetensors import cuda
from blobstore.safetensors.cuda import TorchStagingBuffer
from blobstore.store.local import LocalStore
from tests.real.tiny import TEXT, changed, logits, make, with_float8, with_nvfp4
from tests.support import sandbox
from tests.support.damage import flip, truncate

needs_maps = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel in Linux's way")


def saved(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a model with reproducible random weights."""
    make(kind, dtype).save_pretrained(folder)
    return folder


def from_folder(folder: Path, **options: Any) -> Any:
    auto: Any = transformers.AutoModelForCausalLM
    if "vit" in json.loads((folder / "config.json").read_text())["model_type"]:
        auto = transformers.AutoModelForImageClassification
    return auto.from_pretrained(folder, **options)


def mapped(model: Any, store: LocalStore) -> set[str]:
    """Return the parameters in mapped blobs, according to the kernel's list of maps."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    spans = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in lines
        if str(store.root) in line
    ]
    return {
        name
        for name, parameter in model.named_parameters()
        if any(begin <= parameter.data_ptr() < end for begin, end in spans)
    }


def parameters(model: Any) -> set[str]:
    return {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("experts", ["packed", "stacked"])
@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "mixtral", "vit"])
def test_a_model_computes_the_same_as_its_folder(
    kind: str, experts: ExpertForm, store: LocalStore, tmp_path: Path
) -> None:
    source = saved(kind, tmp_path / "source")
    blobstore.create(source, "m", store=store, experts=experts)
    model = from_store("m", store=store)
    expected = from_folder(source)
    assert type(model) is type(expected)
    assert not model.training
    assert torch.equal(logits(model), logits(expected))
    assert model.name_or_path == model.config.name_or_path == "m:latest"
    expected.config.name_or_path = "m:latest"
    assert model.config.to_dict() == expected.config.to_dict()


@needs_maps
@pytest.mark.parametrize("kind", ["llama", "tied", "vit"])
def test_every_parameter_of_a_dense_model_is_a_view_of_a_blob(
    kind: str, store: LocalStore, tmp_path: Path
) -> None:
    blobstore.create(saved(kind, tmp_path / "source"), "m", store=store)
    model = from_store("m", store=store)
    assert mapped(model, store) == parameters(model) != set()


def test_a_small_model_needs_no_temporary_folder(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved("llama", tmp_path / "source")
    transformers.GenerationConfig(max_new_tokens=7).save_pretrained(source)
    blobstore.create(source, "m", store=store)
    monkeypatch.setattr(tempfile, "mkdtemp", None)
    model = from_store("m", store=store)
    assert model.generation_config.max_new_tokens == 7


def test_a_config_can_name_another_one_for_this_version(store: LocalStore, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.4.0.0.json").write_text(json.dumps({**config, "bos_token_id": 3}))
    config["configuration_files"] = ["config.4.0.0.json"]
    (source / "config.json").write_text(json.dumps(config))
    blobstore.create(source, "m", store=store)
    assert from_store("m", store=store).config.bos_token_id == 3
    assert from_folder(source).config.bos_token_id == 3


@needs_maps
def test_blobs_can_be_read_and_not_mapped(store: LocalStore, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    blobstore.create(source, "m", store=store)
    model = from_store("m", store=store, read="pread")
    assert mapped(model, store) == set()
    assert torch.equal(logits(model), logits(from_folder(source)))


@needs_maps
@pytest.mark.parametrize("kind", ["qwen3-moe", "mixtral"])
def test_only_fused_experts_are_new_memory(kind: str, store: LocalStore, tmp_path: Path) -> None:
    blobstore.create(saved(kind, tmp_path / "source"), "m", store=store)
    model = from_store("m", store=store)
    copied = parameters(model) - mapped(model, store)
    assert len(copied) == 4
    assert all(".experts." in name for name in copied)


def test_tied_weights_stay_tied(store: LocalStore, tmp_path: Path) -> None:
    source = saved("tied", tmp_path / "source")
    blobstore.create(source, "m", store=store)
    model: Any = from_store("m", store=store)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(model), logits(from_folder(source)))


@pytest.mark.parametrize(
    ("kind", "quant_type", "experts"),
    [
        ("llama", "int8", "packed"),
        ("qwen3-moe", "int4", "packed"),
        ("mixtral", "mxfp4", "packed"),
        ("qwen3-moe", "mxfp8", "stacked"),
    ],
)
def test_a_quantized_model_computes_the_same_as_its_dequantized_export(
    kind: str, quant_type: str, experts: ExpertForm, store: LocalStore, tmp_path: Path
) -> None:
    source = saved(kind, tmp_path / "source", torch.bfloat16)
    blobstore.create(
        source,
        "m",
        store=store,
        quantize=QuantizeOptions(quant_type, policy="uniform"),
        experts=experts,
    )
    export_model(Reference.parse("m"), tmp_path / "out", store=store, dequantize=True)
    model = from_store("m", store=store)
    assert torch.equal(logits(model), logits(from_folder(tmp_path / "out")))
    assert not torch.equal(logits(model), logits(from_folder(source)))
    assert not hasattr(model.config, "quantization_config")


def test_threads_can_load_models_at_the_same_time(store: LocalStore, tmp_path: Path) -> None:
    source = saved("tied", tmp_path / "source")
    blobstore.create(source, "m", store=store)
    expected = logits(from_folder(source))
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda _: from_store("m", store=store), range(8)))
    for model in (*models, from_store("m", store=store)):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(logits(model), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")
def test_a_forked_child_can_load_a_model_while_a_thread_of_its_parent_does(
    store: LocalStore, tmp_path: Path
) -> None:
    blobstore.create(saved("tied", tmp_path / "source"), "m", store=store)
    torch.set_num_threads(1)  # a child has none of torch's threads
    from_store(
        "m", store=store
    )  # a module that a thread is importing can never be imported by a child
    is_done = False

    def load() -> None:
        while not is_done:
            from_store("m", store=store)

    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        try:
            outcomes = [
                sandbox.call(lambda: from_store("m", store=store).name_or_path) for _ in range(3)
            ]
        finally:
            is_done = True
        loading.result()
    assert outcomes == ["m:latest"] * 3


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send tensors to the device ``cpu:0`` as if it were a GPU."""
    monkeypatch.setattr(ArrayTarget, "has_stream", property(lambda target: target.device != "cpu"))


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("read", ["mmap", "pread"])
@pytest.mark.parametrize(
    ("kind", "quant_type", "experts"),
    [
        ("tied", None, "packed"),
        ("llama", "int4", "packed"),
        ("qwen3-moe", None, "stacked"),
        ("mixtral", "mxfp4", "packed"),
    ],
)
def test_tensors_go_to_a_device_as_they_are_stored(
    kind: str,
    quant_type: str | None,
    experts: ExpertForm,
    read: Any,
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = saved(kind, tmp_path / "source", torch.bfloat16)
    options = QuantizeOptions(quant_type, policy="uniform") if quant_type else None
    blobstore.create(source, "m", store=store, quantize=options, experts=experts)
    expected = logits(from_store("m", store=store))
    sent: list[int] = []

    class Watched(TorchStagingBuffer):
        def send(self, moves: Any, after: Any) -> Any:
            sent.extend(count for *_, count in moves)
            return super().send(moves, after)

    monkeypatch.setattr(cuda, "TorchStagingBuffer", Watched)
    model = from_store("m", store=store, device="cpu:0", read=read)
    with blobstore.open("m", store=store) as stored:
        assert sum(sent) == sum(spec.nbytes for spec in stored.specs.values())
    assert torch.equal(logits(model), expected)


@pytest.mark.usefixtures("streamed")
def test_a_blob_that_is_damaged_while_a_model_is_loaded_is_named(
    store: LocalStore, tmp_path: Path
) -> None:
    source = saved("llama", tmp_path / "source")
    blobstore.create(source, "m", store=store)
    layer = store.resolve(Reference.parse("m")).layers_of(media_types.TENSOR)[-1]
    truncate(Path(store.blob_path(layer.digest)))
    for _ in range(2):
        with pytest.raises(BlobDamaged, match=f"layer '{layer.name}'"):
            from_store("m", store=store, device="cpu:0", verify="none")


def test_a_model_that_mlx_quantized_is_dequantized(store: LocalStore, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source", torch.bfloat16)
    blobstore.create(
        source, "first", store=store, quantize=QuantizeOptions("int4", policy="uniform")
    )
    export_model(Reference.parse("first"), tmp_path / "mlx", store=store)
    assert "quantization" in json.loads((tmp_path / "mlx" / "config.json").read_text())
    blobstore.create(tmp_path / "mlx", "m", store=store)
    model = from_store("m", store=store)
    assert torch.equal(logits(model), logits(from_store("first", store=store)))
    assert not hasattr(config_from_store("m", store=store), "quantization")


def write_gpt_oss(source: Path) -> Path:
    """Write a gpt-oss model with random weights and mxfp4 experts."""
    torch.manual_seed(0)
    shape = {**TEXT, "hidden_size": 64, "max_position_embeddings": 131072}
    config = transformers.GptOssConfig(
        **shape, head_dim=16, num_local_experts=3, num_experts_per_tok=2
    )
    model: Any = transformers.GptOssForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(source)
    file = source / "model.safetensors"
    tensors = load_file(file)
    for place in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, _, rows = tensors.pop(place).shape
        blocks = torch.randint(0, 256, (experts, rows, 2, 16), dtype=torch.uint8)
        tensors[f"{place}_blocks"] = blocks
        scales = torch.randint(118, 124, (experts, rows, 2), dtype=torch.uint8)
        tensors[f"{place}_scales"] = scales
    save_file(tensors, file, metadata={"format": "pt"})
    return changed(source, quantization_config={"quant_method": "mxfp4"})


def test_gpt_oss_is_transposed_as_transformers_multiplies(
    store: LocalStore, tmp_path: Path
) -> None:
    blobstore.create(write_gpt_oss(tmp_path / "source"), "m", store=store)
    export_model(Reference.parse("m"), tmp_path / "out", store=store, dequantize=True)
    found = from_store("m", store=store)
    assert torch.equal(logits(found), logits(from_folder(tmp_path / "out")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float16"])
def test_another_type_gives_the_same_as_the_folder(
    dtype: Any, store: LocalStore, tmp_path: Path
) -> None:
    source = saved("llama", tmp_path / "source")
    blobstore.create(source, "m", store=store)
    model = from_store("m", store=store, dtype=dtype)
    assert model.dtype is getattr(torch, str(dtype).removeprefix("torch."))
    assert torch.equal(logits(model), logits(from_folder(source, dtype=dtype)))


def test_training_never_reaches_the_store(store: LocalStore, tmp_path: Path) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), "m", store=store)
    model: Any = from_store("m", store=store)
    before = logits(model)
    model(torch.arange(1, 33)[None], labels=torch.arange(1, 33)[None]).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert not torch.equal(logits(model), before)
    assert verify_models(store=store).faults == ()
    assert torch.equal(logits(from_store("m", store=store)), before)


def test_a_model_outlives_its_store(store: LocalStore, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    blobstore.create(source, "m", store=store)
    model = from_store("m", store=store)
    shutil.rmtree(store.root)
    gc.collect()
    assert torch.equal(logits(model), logits(from_folder(source)))


@pytest.mark.parametrize(
    "auto_class",
    [
        "AutoModelForCausalLM",
        "LlamaForCausalLM",
        transformers.AutoModelForCausalLM,
        transformers.LlamaForCausalLM,
    ],
)
def test_a_class_can_be_named(auto_class: Any, store: LocalStore, tmp_path: Path) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), "m", store=store)
    model = from_store("m", store=store, auto_class=auto_class)
    assert type(model) is transformers.LlamaForCausalLM


@pytest.mark.parametrize("auto_class", ["NoSuchModel", "pipeline", dict])
def test_rejects_anything_but_model_classes(
    auto_class: Any, store: LocalStore, tmp_path: Path
) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), "m", store=store)
    with pytest.raises(UsageError, match="is not a model class"):
        from_store("m", store=store, auto_class=auto_class)


def test_the_policy_is_asked_before_a_file_of_the_model_is_used(
    store: LocalStore, tmp_path: Path
) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), "model", store=store)
    store.policy_path.write_text(
        f'version = 1\n[[rules]]\nmatch = "*"\naction = "enforce"\npins = ["sha256:{"0" * 64}"]'
    )
    for load in (from_store, config_from_store, tokenizer_from_store):
        with pytest.raises(NotTrusted, match="is not one that rule"):
            load("model", store=store)


def test_rejects_an_auto_class_without_a_matching_class(store: LocalStore, tmp_path: Path) -> None:
    blobstore.create(saved("vit", tmp_path / "source"), "m", store=store)
    with pytest.raises(BlobstoreError, match="AutoModelForCausalLM has no class for .* 'vit'"):
        from_store("m", store=store, auto_class="AutoModelForCausalLM")


def test_a_model_without_a_head_is_an_auto_model(store: LocalStore, tmp_path: Path) -> None:
    model: Any = make("vit")
    model.vit.save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    config = json.loads(path.read_text())
    del config["architectures"]
    path.write_text(json.dumps(config))
    # It has a pooler, which the classifier does without.
    full = transformers.ViTModel.from_pretrained(tmp_path / "source")
    full.save_pretrained(tmp_path / "full")
    shutil.copy(path, tmp_path / "full" / "config.json")
    blobstore.create(tmp_path / "full", "m", store=store)
    assert type(from_store("m", store=store)) is transformers.ViTModel


def renamed(folder: Path, names: dict[str, str | None]) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for old, new in names.items():
        tensor = tensors.pop(old)
        if new is not None:
            tensors[new] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def test_missing_and_unexpected_tensors_are_listed_in_full(
    store: LocalStore, tmp_path: Path
) -> None:
    norms = [f"model.layers.{number}.input_layernorm.weight" for number in range(2)]
    source = renamed(
        saved("llama", tmp_path / "source"),
        {norms[0]: "model.extra.weight", norms[1]: None, "lm_head.weight": "head.weight"},
    )
    blobstore.create(source, "m", store=store)
    with pytest.raises(BlobstoreError) as caught:
        from_store("m", store=store)
    assert str(caught.value) == (
        "LlamaForCausalLM cannot take the tensors of m:latest: "
        f"3 tensors missing: 'lm_head.weight', '{norms[0]}', '{norms[1]}'; "
        "2 tensors unexpected: 'head.weight', 'model.extra.weight'"
    )
    assert type(from_store("m", store=store, strict=False)) is transformers.LlamaForCausalLM


def test_tensors_of_another_shape_are_listed(store: LocalStore, tmp_path: Path) -> None:
    source = changed(saved("llama", tmp_path / "source"), vocab_size=80)
    blobstore.create(source, "m", store=store)
    with pytest.raises(BlobstoreError) as caught:
        from_store("m", store=store)
    assert str(caught.value).endswith(
        "2 tensors of another shape: 'lm_head.weight' [64, 64] where [80, 64] is expected, "
        "'model.embed_tokens.weight' [64, 64] where [80, 64] is expected"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 32}, r"cannot build m:latest: ValueError: Unrecognized model"),
        ({"model_type": "nothing"}, "cannot build m:latest: .*`nothing`"),
        ({"model_type": "llama", "architectures": ["NoSuchModel"]}, "class 'NoSuchModel'"),
        ({"model_type": "llama", "architectures": ["pipeline"]}, "class 'pipeline'"),
        ({"model_type": "llama", "hidden_size": "much"}, "cannot build m:latest"),
    ],
)
def test_a_config_that_cannot_be_built_is_one_line(
    config: dict[str, Any], message: str, store: LocalStore, tmp_path: Path
) -> None:
    source = saved("llama", tmp_path / "source")
    (source / "config.json").write_text(json.dumps(config))
    blobstore.create(source, "m", store=store)
    with pytest.raises(BlobstoreError, match=message) as caught:
        from_store("m", store=store)
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(("fewer", "is_accepted"), [(0, True), (1, False)])
def test_rejects_a_config_of_far_more_parameters_than_are_stored(
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fewer: int,
    *,
    is_accepted: bool,
) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), "m", store=store)
    count = sum(one.numel() for one in from_store("m", store=store).parameters())
    monkeypatch.setattr(
        "blobstore.integrations.transformers._FEW", -count - fewer
    )  # beyond twice as many
    with contextlib.ExitStack() as stack:
        if not is_accepted:
            message = f"config.json requires {count} parameters, but {count} are stored"
            stack.enter_context(pytest.raises(BlobstoreError, match=message))
        from_store("m", store=store)


def test_rejects_a_model_without_a_config(store: LocalStore, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    blobstore.create(source / "model.safetensors", "m", store=store)
    with pytest.raises(BlobstoreError, match="m:latest has no config.json"):
        from_store("m", store=store)


def test_distinguishes_a_missing_model_from_a_damaged_blob(
    store: LocalStore, tmp_path: Path
) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), "m", store=store)
    with pytest.raises(ModelNotFound, match="'other:latest'"):
        from_store("other", store=store)
    layer = next(item for item in store.resolve(Reference.parse("m")).layers if item.name)
    path = Path(store.blob_path(layer.digest))
    for change in (flip, truncate):
        change(path)
        with pytest.raises(BlobDamaged, match=f"m:latest.*'{layer.name}'"):
            from_store("m", store=store)


def test_rejects_a_device_before_anything_is_read(store: LocalStore) -> None:
    with pytest.raises(UsageError, match="torch has no device 'nothing' here"):
        from_store("missing", store=store, device="nothing")


def test_the_finished_model_is_moved_to_a_device(store: LocalStore, tmp_path: Path) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), "m", store=store)
    model = from_store("m", store=store, device="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_uses_the_generation_config(store: LocalStore, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    settings = {"eos_token_id": [7, 9], "max_new_tokens": 5, "repetition_penalty": 1.5}
    (source / "generation_config.json").write_text(json.dumps(settings))
    blobstore.create(source, "m", store=store)
    model: Any = from_store("m", store=store)
    expected = from_folder(source).generation_config.to_dict()
    assert model.generation_config.to_dict() == expected
    assert expected["eos_token_id"] == [7, 9]


def test_options_reach_transformers(store: LocalStore, tmp_path: Path) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), "m", store=store)
    model = from_store("m", store=store, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


def test_a_component_of_a_pipeline_is_a_model(store: LocalStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    saved("llama", source / "text_encoder")
    index = {"_class_name": "P", "text_encoder": ["transformers", "LlamaForCausalLM"]}
    (source / "model_index.json").write_text(json.dumps(index))
    blobstore.create(source, "m", store=store)
    model = from_store("m", store=store, subfolder="text_encoder")
    assert torch.equal(logits(model), logits(from_folder(source / "text_encoder")))
    config = config_from_store("m", store=store, subfolder="text_encoder")
    assert config.to_dict() == model.config.to_dict()
    with pytest.raises(BlobstoreError, match="has no vae/config.json"):
        from_store("m", store=store, subfolder="vae")


def test_tensors_of_other_components_are_left_out(store: LocalStore, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    (source / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "2_Dense"}]))
    (source / "2_Dense").mkdir()
    (source / "2_Dense" / "config.json").write_text("{}")
    save_file({"linear.weight": torch.ones(2, 2)}, source / "2_Dense" / "model.safetensors")
    blobstore.create(source, "m", store=store)
    with blobstore.open("m", store=store) as stored:
        assert "2_Dense/linear.weight" in stored
    assert torch.equal(logits(from_store("m", store=store)), logits(from_folder(source)))


def test_a_tokenizer_is_made_of_the_small_files_which_are_removed(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved("llama", tmp_path / "source")
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(source)
    blobstore.create(source, "m", store=store)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    found: Any = tokenizer_from_store("m", store)
    assert found("b")["input_ids"] == tokenizer("b")["input_ids"] == [1]
    assert found.chat_template == "{{ messages }}"
    assert found.name_or_path == "m:latest"
    assert list((tmp_path / "temporary").iterdir()) == []


def test_reports_a_model_without_a_tokenizer(store: LocalStore, tmp_path: Path) -> None:
    blobstore.create(saved("llama", tmp_path / "source"), "m", store=store)
    with pytest.raises(BlobstoreError, match="cannot make a tokenizer of the files of m:latest"):
        tokenizer_from_store("m", store)


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_requests_no_code_from_the_hub(key: str, store: LocalStore, tmp_path: Path) -> None:
    source = changed(saved("llama", tmp_path / "source"), **{key: "kernels-community/x@main"})
    blobstore.create(source, "m", store=store)
    with pytest.raises(BlobstoreError, match="the attention 'kernels-community/x@main', which is"):
        from_store("m", store=store)
    model = from_store("m", store=store, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


def test_no_part_of_a_model_may_name_code_on_the_hub() -> None:
    config: Any = transformers.LlavaConfig()
    _check_attention(config)
    config.text_config._attn_implementation = "someone/kernel"
    with pytest.raises(BlobstoreError, match="the attention 'someone/kernel', which is code"):
        _check_attention(config)


def test_code_of_a_model_runs_only_if_it_is_trusted(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "modules"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(cache))
    monkeypatch.syspath_prepend(str(cache))
    source = saved("llama", tmp_path / "source")
    marker = tmp_path / "it-ran"
    (source / "own.py").write_text(CODE.format(marker=str(marker)))
    path = source / "config.json"
    own = {
        "model_type": "own",
        "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    plain = json.loads(path.read_text())
    path.write_text(json.dumps(plain | own))
    blobstore.create(source, "m", store=store)

    with pytest.raises(BlobstoreError, match="trust_remote_code"):
        from_store("m", store=store)
    with pytest.raises(BlobstoreError, match="trust_remote_code"):
        config_from_store("m", store=store)
    assert not marker.exists()

    model = from_store("m", store=store, trust_remote_code=True)
    assert marker.exists()
    assert type(model).__name__ == "OwnModel"
    path.write_text(json.dumps(plain))
    assert torch.equal(logits(model), logits(from_folder(source)))


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_8_bit_floats_are_decoded_on_a_processor(
    kind: str, store: LocalStore, tmp_path: Path
) -> None:
    source = saved(kind, tmp_path / "source", torch.bfloat16)
    with_float8(source)
    blobstore.create(source, "m", store=store)
    blobstore.create(source, "decoded", store=store, decode=True)
    model = from_store("m", store=store)
    assert torch.equal(logits(model), logits(from_store("decoded", store=store)))
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize(
    ("kind", "is_static"), [("llama", False), ("llama", True), ("qwen3-moe", False)]
)
def test_kernels_of_transformers_get_8_bit_floats_as_they_are(
    kind: str,
    is_static: bool,
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without a GPU, transformers would decode them.
    quantizer = quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer
    monkeypatch.setattr(quantizer, "validate_environment", lambda *_, **__: None)
    source = saved(kind, tmp_path / "source", torch.bfloat16)
    tensors = with_float8(source, is_static=is_static)
    blobstore.create(source, "m", store=store)
    model = from_store("m", store=store, dequantize=False)
    assert model.config.quantization_config.quant_method == "fp8"
    found = model.state_dict()
    same = {name for name in tensors if name in found}  # transformers fuses experts
    assert is_static == any(name.endswith(".activation_scale") for name in same)
    assert kind != "llama" or same == set(tensors)
    assert any(found[name].dtype == torch.float8_e4m3fn for name in same)
    for name in same:
        assert found[name].dtype == tensors[name].dtype
        assert torch.equal(found[name].float(), tensors[name].float())
    floats = sum(one.numel() for one in tensors.values() if one.dtype == torch.float8_e4m3fn)
    assert floats == sum(one.numel() for one in found.values() if one.dtype == torch.float8_e4m3fn)


def test_weights_without_kernels_cannot_be_given_as_they_are(
    store: LocalStore, tmp_path: Path
) -> None:
    source = saved("llama", tmp_path / "source", torch.bfloat16)
    blobstore.create(source, "int4", store=store, quantize=QuantizeOptions("int4"))
    with_float8(source)
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    changed(source, quantization_config=section | {"activation_scheme": "static"})
    blobstore.create(source, "static", store=store)
    reasons = {"int4": "not all of its quantized weights are fp8", "static": "scales of its act"}
    for name, reason in reasons.items():
        with pytest.raises(UsageError, match=f"{name}:latest must be dequantized: .*{reason}"):
            from_store(name, store=store, dequantize=False)


@pytest.mark.parametrize("maker", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_nvfp4_is_decoded_where_transformers_does_not_support_it(
    kind: str, maker: str, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_utils, "is_compressed_tensors_available", lambda: False)
    source = saved(kind, tmp_path / "source", torch.bfloat16)
    with_nvfp4(source, maker)
    blobstore.create(source, "m", store=store)
    export_model("m", tmp_path / "plain", store=store, dequantize=True)
    model = from_store("m", store=store)
    assert not hasattr(model.config, "quantization_config")
    assert torch.equal(logits(model), logits(from_folder(tmp_path / "plain")))
    on_meta = from_store("m", store=store, device="meta")  # as on any device but the CPU
    assert not hasattr(on_meta.config, "quantization_config")
    reason = "has no quantizer for 'modelopt'"
    if maker != "modelopt":
        reason = "needs the package compressed-tensors"
    with pytest.raises(UsageError, match=f"^m:latest must be dequantized: .* {reason}"):
        from_store("m", store=store, dequantize=False)
