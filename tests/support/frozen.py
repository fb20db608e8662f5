"""Models that are worth freezing: weights of which a codec makes something, and what a store has of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from typing_extensions import Buffer

from blobstore.cold_blobs.blob_encoder import BlobEncoder
from blobstore.compression.encoder import Encoded
from blobstore.core.digest import Digest
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, blob

COUNT = 40_000


def weights(seed: int, count: int = COUNT) -> bytes:
    """Return bf16 numbers as weights are; coding saves a third of them."""
    numbers = np.random.default_rng(seed).standard_normal(count, dtype=np.float32) * 0.02
    return numbers.astype(ml_dtypes.bfloat16).tobytes()


def tuned(seed: int, of: int, count: int = COUNT, step: float = 2e-5) -> bytes:
    """Return what :func:`weights` are after a little training."""
    base = np.frombuffer(weights(of, count), ml_dtypes.bfloat16).astype(np.float32)
    steps = np.random.default_rng(seed).standard_normal(count, dtype=np.float32) * step
    return (base + steps).astype(ml_dtypes.bfloat16).tobytes()


def steps(seed: int, of: int, many: int, count: int = COUNT) -> list[bytes]:
    """Return what :func:`weights` are after each of several steps; a step changes about 1 % of them."""
    masters = np.random.default_rng(of).standard_normal(count, dtype=np.float32) * np.float32(0.02)
    random = np.random.default_rng(seed)
    found = []
    for _ in range(many):
        masters += random.standard_normal(count, dtype=np.float32) * np.float32(5e-7)
        found.append(masters.astype(ml_dtypes.bfloat16).tobytes())
    return found


def mixed_steps() -> list[bytes]:
    """Return three blobs of four tensors: a step changes one of these densely, another one few elements."""
    base, one, two = steps(5, 1, 3, 1 << 19)
    quarter = len(base) // 4
    dense = tuned(6, 1, 1 << 19)[2 * quarter : 3 * quarter]
    return [
        blob(
            *(
                (str(n), "BF16", (quarter // 2,), whole[n * quarter : (n + 1) * quarter])
                for n in range(4)
            )
        )
        for whole in (
            base,
            one[: 2 * quarter] + dense + one[3 * quarter :],
            two[: 2 * quarter] + dense + two[3 * quarter :],
        )
    ]


def layer(name: str, data: bytes) -> bytes:
    """Return a blob of bf16 numbers."""
    return blob((name, "BF16", (len(data) // 2,), data))


def put(store: LocalStore, name: str, seeds: Mapping[str, int], count: int = COUNT) -> None:
    """Give a store a model of weights, by the names of their layers.

    Layers of one name and one seed are one blob, in whatever model.
    """
    add_blobs(store, name, {key: layer(key, weights(seed, count)) for key, seed in seeds.items()})


def layers(store: LocalStore, name: str) -> dict[str, Descriptor]:
    """Return the layers of a model by their names."""
    return {item.name: item for item in store.resolve(Reference.parse(name)).layers}


def forms(store: LocalStore, digest: Digest) -> str:
    """Return ``hot``, ``cold``, ``both`` or ``neither``."""
    hot = store.has_hot(digest)
    cold = store.has_cold(digest)
    return "both" if hot and cold else "hot" if hot else "cold" if cold else "neither"


def forms_of(store: LocalStore, name: str) -> dict[str, str]:
    """Return the forms of a model's blobs, by their layers."""
    return {key: forms(store, item.digest) for key, item in layers(store, name).items()}


def spoil_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every delta be written with a wrong byte, as a faulty encoder would."""
    real = BlobEncoder.write

    def spoiled(
        self: BlobEncoder, write: Callable[..., object], report: Callable[[int], None]
    ) -> Encoded:
        def other(data: Buffer) -> None:
            write(bytes(byte ^ (place == 5) for place, byte in enumerate(bytes(data))))

        return real(self, other if self.has_base else write, report)

    monkeypatch.setattr(BlobEncoder, "write", spoiled)


def flip(path: str, place: int = -100) -> None:
    """Flip a bit of a file, as a new file."""
    file = Path(path)
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.unlink()
    file.write_bytes(data)


def flip_in_place(path: str, place: int = -100) -> None:
    """Flip a bit of a file, whatever other names it has."""
    file = Path(path)
    file.chmod(0o600)
    with file.open("r+b") as opened:
        opened.seek(place, 2)
        byte = opened.read(1)
        opened.seek(place, 2)
        opened.write(bytes([byte[0] ^ 1]))
