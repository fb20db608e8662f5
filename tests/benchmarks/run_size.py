"""Space that the steps of a training with AdamW take in a store: as saved, and frozen.

    python -m tests.benchmarks.run_size --folder DIR

A small Llama in float32 is trained on the documents of this repository, and its state saved every 50 steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import blobstore
from tests.benchmarks.common import arguments, workspace
from tests.support.transcripts import ROOT

STEPS, EVERY = 400, 50
PARTS = {"exp_avg": "first moments", "exp_avg_sq": "second moments"}


def train(store: blobstore.LocalStore, after: Callable[[list[str]], object]) -> list[str]:
    """Save the states of a training, and call ``after`` with the names so far; return their names."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    pages = sorted((ROOT / "docs").rglob("*.md"))
    data = torch.tensor(list(b"".join(page.read_bytes() for page in pages)))
    names = []
    for step in range(1, STEPS + 1):
        starts = torch.randint(0, len(data) - 65, (4,))
        batch = torch.stack([data[start : start + 64] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
            names.append(f"run:{step}")
            blobstore.save(state, names[-1], store=store, model="model")
            after(names)
    return names


def shares(frozen: blobstore.Frozen) -> str:
    """Return the shares of each part and of all, as cells of a row."""
    size: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    for blob in frozen.blobs:
        part = PARTS.get(blob.name.rpartition(".")[2], "weights")
        for key in (part, "all"):
            size[key] += blob.size
            stored[key] += blob.stored
    columns = ("weights", *PARTS.values(), "all")
    return " | ".join(f"{stored[key] / size[key]:.3f}" for key in columns)


def main() -> None:
    """Print the table."""
    options = arguments(__doc__)
    with workspace(options.folder) as scratch:
        store = blobstore.LocalStore(scratch / "store")
        names = train(store, len)
        print("| frozen, of the bytes as saved | weights | first moments | second moments | all |")
        print("| --- | --- | --- | --- | --- |")
        first, last, before = names[0], names[-1], list(pairwise(names))[-1][0]
        for title, base in (("first", first), ("step before", before)):
            found = blobstore.freeze(
                [last, f"{last}.state"], store=store, base=f"{base}.state", dry_run=True
            )
            print(f"| the last step, against the {title} | {shares(found)} |")
        found = blobstore.freeze([*store.references()], store=store)
        print(f"| the run | {shares(found)} |")
        other = blobstore.LocalStore(scratch / "other")

        def freeze_earlier(names: list[str]) -> blobstore.Frozen | None:
            earlier = [one for name in names[:-1] for one in (name, f"{name}.state")]
            return blobstore.freeze(earlier, store=other) if earlier else None

        frozen = freeze_earlier(train(other, freeze_earlier))
        assert frozen is not None
        print(f"| all but the last step, each when the next one was saved | {shares(frozen)} |")


if __name__ == "__main__":
    main()
