"""PEFT's adapters and pipelines of diffusers load after a turn through a store."""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from blobstore.operations.create.create import create
from blobstore.operations.export.export import export_model
from blobstore.operations.export.link import link_model
from blobstore.store.local import LocalStore
from tests.real.tiny import logits, make


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below a folder, by its relative name."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


# Adapters of PEFT


def save_adapter(peft: Any, folder: Path) -> Any:
    """Save a LoRA of a tiny model with random weights, and return the adapted model."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(make("llama"), config).eval()
    adapted.save_pretrained(folder)
    return adapted


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT uses it
@pytest.mark.parametrize("written", ["exported", "sharded", "linked"])
def test_peft_loads_an_adapter(written: str, store: LocalStore, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    adapted = save_adapter(peft, tmp_path / "source")
    create(tmp_path / "source", "lora", store=store)
    folder = tmp_path / written
    if written == "linked":
        link_model("lora", folder, store=store)
    else:
        shard_size = 1 if written == "sharded" else None
        export_model("lora", folder, store=store, shard_size=shard_size)
    if written == "exported":
        assert digests(folder) == digests(tmp_path / "source")
    again = peft.PeftModel.from_pretrained(make("llama"), folder).eval()
    assert torch.equal(logits(again), logits(adapted))
    assert not torch.equal(logits(make("llama")), logits(adapted))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT uses it
def test_peft_loads_a_dora_adapter_with_a_trained_head(store: LocalStore, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
        use_dora=True,
        modules_to_save=["lm_head"],
    )
    adapted = peft.get_peft_model(make("llama"), config).eval()
    source = tmp_path / "source"
    adapted.save_pretrained(source / "checkpoint-10")
    adapted.save_pretrained(source)
    created = create(source, "dora", store=store)
    assert f"1 folder ('{source}/checkpoint-10');" in created.notices[0]
    assert f"'blobstore create {source}/checkpoint-10' imports it" in created.notices[1]
    shutil.rmtree(source / "checkpoint-10")
    export_model("dora", tmp_path / "exported", store=store)
    assert digests(tmp_path / "exported") == digests(source)
    saved = load_file(source / "adapter_model.safetensors")
    assert {name.rpartition(".")[2] for name in saved} == {"lora_magnitude_vector", "weight"}
    again = peft.PeftModel.from_pretrained(make("llama"), tmp_path / "exported").eval()
    assert torch.equal(logits(again), logits(adapted))


# Pipelines of diffusers


def save_pipeline(folder: Path) -> dict[str, torch.Tensor]:
    """Write a pipeline with a component of each library; return the tensors of that of diffusers."""
    text_encoder = make("llama")
    text_encoder.save_pretrained(folder / "text_encoder")
    torch.manual_seed(0)
    unet = {f"blocks.{number}.weight": torch.randn(4, 4) for number in range(12)}
    (folder / "unet").mkdir()
    (folder / "scheduler").mkdir()
    save_file(
        unet, folder / "unet/diffusion_pytorch_model.safetensors", {"format": "pt", "title": "x"}
    )
    configs = {
        "model_index.json": {
            "_class_name": "TinyPipeline",
            "_diffusers_version": "0.36.0",
            "text_encoder": ["transformers", type(text_encoder).__name__],
            "unet": ["diffusers", "UNet2DModel"],
            "scheduler": ["diffusers", "DDIMScheduler"],
        },
        "unet/config.json": {"_class_name": "UNet2DModel", "_diffusers_version": "0.36.0"},
        "scheduler/scheduler_config.json": {"_class_name": "DDIMScheduler"},
    }
    for name, value in configs.items():
        (folder / name).write_text(json.dumps(value))
    return unet


def test_a_pipeline_is_exported_file_by_file(store: LocalStore, tmp_path: Path) -> None:
    save_pipeline(tmp_path / "source")
    create(tmp_path / "source", "pipeline", store=store)
    export_model("pipeline", tmp_path / "exported", store=store)
    assert digests(tmp_path / "exported") == digests(tmp_path / "source")


@pytest.mark.parametrize("written", ["sharded", "linked"])
def test_the_components_of_a_pipeline_load(written: str, store: LocalStore, tmp_path: Path) -> None:
    unet = save_pipeline(tmp_path / "source")
    create(tmp_path / "source", "pipeline", store=store)
    folder = tmp_path / written
    if written == "linked":
        link_model("pipeline", folder, store=store)
    else:
        export_model("pipeline", folder, store=store, shard_size=256)
    encoder = transformers.AutoModelForCausalLM.from_pretrained(folder, subfolder="text_encoder")
    assert torch.equal(logits(encoder.eval()), logits(make("llama")))
    index = json.loads(
        (folder / "unet/diffusion_pytorch_model.safetensors.index.json").read_bytes()
    )
    files = {name: load_file(folder / "unet" / name) for name in {*index["weight_map"].values()}}
    assert index["weight_map"].keys() == unet.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(files[file][name], unet[name])
    source, found = digests(tmp_path / "source"), digests(folder)
    small = [name for name in source if not name.endswith(".safetensors")]
    assert {name: found[name] for name in small} == {name: source[name] for name in small}


# diffusers itself


@pytest.fixture(scope="module")
def diffusers() -> Any:
    """The library, without progress bars."""
    library = pytest.importorskip("diffusers", reason="diffusers is not installed")
    library.utils.logging.disable_progress_bar()
    return library


def tiny_pipeline(diffusers: Any, folder: Path) -> Any:
    """Return a Stable Diffusion with random weights and components of both libraries."""
    torch.manual_seed(0)
    widths = {"block_out_channels": (4, 8), "norm_num_groups": 4}
    unet = diffusers.UNet2DConditionModel(
        **widths,
        layers_per_block=1,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=2,
    )
    vae = diffusers.AutoencoderKL(
        **widths,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    config = transformers.CLIPTextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    words = ["<unk>", "<|startoftext|>", "<|endoftext|>", "a", "b", "a</w>", "b</w>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    files = (str(folder / "vocab.json"), str(folder / "merges.txt"))
    return diffusers.StableDiffusionPipeline(
        unet=unet,
        vae=vae,
        text_encoder=transformers.CLIPTextModel(config),
        tokenizer=transformers.CLIPTokenizer(*files, model_max_length=16, unk_token="<unk>"),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def tensors_of(pipeline: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of all components."""
    parts = {name: getattr(pipeline, name) for name in ("unet", "vae", "text_encoder")}
    return {
        f"{part}/{name}": tensor
        for part, component in parts.items()
        for name, tensor in component.state_dict().items()
    }


def align(*modules: Any) -> None:
    """Move the parameters of modules to aligned memory, since kernels round by alignment."""
    for module in modules:
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()


def image(pipeline: Any) -> torch.Tensor:
    """Return what the pipeline draws."""
    align(pipeline.unet, pipeline.vae, pipeline.text_encoder)
    pipeline.set_progress_bar_config(disable=True)
    options = {"height": 16, "width": 16, "generator": torch.manual_seed(1), "output_type": "np"}
    return torch.from_numpy(pipeline("a b", num_inference_steps=1, **options).images)


def write_all(name: str, folder: Path, store: LocalStore) -> dict[str, Path]:
    """Write a model in every way; return the folders."""
    export_model(name, folder / "exported", store=store)
    export_model(name, folder / "sharded", store=store, shard_size=30_000)
    link_model(name, folder / "linked", store=store)
    link_model(name, folder / "hard", store=store, hard=True)
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize(("variant", "shard_size"), [(None, "1GB"), ("fp16", "20KB")])
def test_diffusers_loads_a_pipeline_and_draws_the_same(
    diffusers: Any, variant: str | None, shard_size: str, store: LocalStore, tmp_path: Path
) -> None:
    source, dtype = tmp_path / "source", torch.float16 if variant else torch.float32
    load = partial(diffusers.DiffusionPipeline.from_pretrained, variant=variant, dtype=dtype)
    pipeline = tiny_pipeline(diffusers, tmp_path).to(dtype)
    pipeline.save_pretrained(source, variant=variant, max_shard_size=shard_size)
    is_sharded = len(list(source.glob("unet/*.safetensors"))) > 1
    assert is_sharded == (shard_size == "20KB")
    original = load(source)
    expected, files = tensors_of(original), digests(source)
    drawn = image(original)
    create(source, "pipeline", store=store)
    shutil.rmtree(source)
    for written, folder in write_all("pipeline", tmp_path / "written", store).items():
        assert (digests(folder) == files) == (written == "exported")
        again = load(folder)
        found = tensors_of(again)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), written
        assert torch.equal(image(again), drawn), written


def flux(diffusers: Any) -> Any:
    """Return a transformer of Flux with reproducible random weights."""
    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    ).eval()


def denoised(transformer: Any) -> torch.Tensor:
    """Return the output of a transformer of Flux for a fixed input."""
    align(transformer)
    torch.manual_seed(1)
    with torch.no_grad():
        return transformer(  # type: ignore[no-any-return]
            hidden_states=torch.randn(1, 4, 4),
            encoder_hidden_states=torch.randn(1, 3, 32),
            pooled_projections=torch.randn(1, 32),
            timestep=torch.tensor([1.0]),
            img_ids=torch.zeros(4, 3),
            txt_ids=torch.zeros(3, 3),
        ).sample


@pytest.mark.parametrize(("variant", "safe"), [(None, True), ("fp16", True), ("fp16", False)])
def test_diffusers_loads_a_sharded_transformer(
    diffusers: Any, variant: str | None, safe: bool, store: LocalStore, tmp_path: Path
) -> None:
    source, load = tmp_path / "source", diffusers.FluxTransformer2DModel.from_pretrained
    options = {"max_shard_size": "20KB", "safe_serialization": safe}
    flux(diffusers).save_pretrained(source, variant=variant, **options)
    expected = denoised(load(source, variant=variant, use_safetensors=safe))
    create(source, "flux", store=store)
    shutil.rmtree(source)
    for folder in write_all("flux", tmp_path / "written", store).values():
        again = load(folder, variant=variant, use_safetensors=True)
        assert torch.equal(denoised(again), expected), folder.name


def test_diffusers_loads_a_lora_with_its_scale(
    diffusers: Any, store: LocalStore, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    adapted, source = flux(diffusers), tmp_path / "source"
    # A scale that is not the rank is only in the metadata of the file's header.
    config = peft.LoraConfig(
        r=4, lora_alpha=32, init_lora_weights=False, target_modules=["to_q", "to_k"]
    )
    adapted.add_adapter(config)
    diffusers.FluxPipeline.save_lora_weights(
        source,
        peft.get_peft_model_state_dict(adapted),
        transformer_lora_adapter_metadata=adapted.peft_config["default"].to_dict(),
    )
    files = digests(source)
    create(source, "lora", store=store)
    shutil.rmtree(source)
    for folder in write_all("lora", tmp_path / "written", store).values():
        assert digests(folder) == files
        transformer = flux(diffusers)
        names = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        pipeline = diffusers.FluxPipeline(
            scheduler, transformer=transformer, **dict.fromkeys(names)
        )
        pipeline.load_lora_weights(folder)
        assert torch.equal(denoised(transformer), denoised(adapted)), folder.name
