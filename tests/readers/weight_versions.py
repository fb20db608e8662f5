"""A trainer and a receiver of weight versions, written from what slime and SGLang do, without code of blobstore.

The trainer keeps the last weights and publishes what changes. The receiver has a folder of its own, which it
changes in place, as engines do before they load it again.
"""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import xxhash
import zstandard
from safetensors.numpy import load_file, save_file

INDEX = "model.safetensors.index.json"


def checksum(kind: str, data: bytes) -> str:
    if kind == "adler32":
        return f"{zlib.adler32(data):08x}"
    made = blake3.blake3(data) if kind == "blake3" else xxhash.xxh3_128(data)
    return str(made.hexdigest())


def as_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


class Trainer:
    """Writes versions into a folder; version 0 is what it started from."""

    def __init__(
        self,
        folder: Path,
        weights: dict[str, Any],
        *,
        encoding: str = "xor",
        checksums: str = "xxh3-128",
        ranks: int = 2,
    ) -> None:
        self.folder = folder
        self.encoding = encoding
        self.checksums = checksums
        self.version = 0
        self._ranks = ranks
        self._snapshot = {name: as_bytes(array) for name, array in weights.items()}
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()

    def publish(self, weights: dict[str, Any]) -> Path:
        """Write the next version, and return its folder."""
        self.version += 1
        folder = self.folder / f"weight_v{self.version:06d}"
        folder.mkdir()
        parts: list[dict[str, Any]] = [{} for _ in range(self._ranks)]
        texts: list[dict[str, str]] = [{} for _ in range(self._ranks)]
        for number, (name, array) in enumerate(weights.items()):
            new, old = as_bytes(array), self._snapshot[name]
            self._snapshot[name] = new
            if (new == old).all():
                continue
            if self.encoding == "xor":
                change = new ^ old
            else:
                at = np.flatnonzero(new != old).astype("<u4")
                pieces = (np.array([at.size], "<u4").view(np.uint8), at.view(np.uint8), new[at])
                change = np.concatenate(pieces)
            frame = zstandard.ZstdCompressor(level=1).compress(change.tobytes())
            parts[number % self._ranks][name] = np.frombuffer(frame, np.uint8)
            texts[number % self._ranks][name] = checksum(self.checksums, new.tobytes())
        files = [(part, text) for part, text in zip(parts, texts, strict=True) if part]
        weight_map = {}
        for number, (part, text) in enumerate(files):
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            save_file(part, folder / file, metadata=text)
            weight_map.update(dict.fromkeys(part, file))
        metadata = {
            "version": f"{self.version:06d}",
            "base_version": f"{self.version - 1:06d}",
            "delta_encoding": self.encoding,
            "compression_format": "zstd",
            "checksum_format": self.checksums,
        }
        temporary = folder / f"{INDEX}.tmp"
        temporary.write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
        temporary.replace(folder / INDEX)
        return folder


class Receiver:
    """The folder of an engine, which pulls versions into it."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.folder = folder
        self._base = base
        self.applied: int | None = None

    def pull(self, source: Path, target: int) -> None:
        """Bring the folder to a version: from what it is, or from the newest full version before."""
        floor = self.applied or 0
        start = target
        while start > floor and self._is_change(source / f"weight_v{start:06d}"):
            start -= 1
        if self.applied is None or start > self.applied:
            seed = self._base if start == 0 else source / f"weight_v{start:06d}"
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.copytree(seed, self.folder)
            self.applied = start
        for version in range(self.applied + 1, target + 1):
            self._apply(source / f"weight_v{version:06d}", version)

    @staticmethod
    def _is_change(folder: Path) -> bool:
        try:
            index = json.loads((folder / INDEX).read_text())
        except FileNotFoundError:
            names = [path.name for path in folder.glob("*.safetensors")]
            assert names == ["model.safetensors"], names
            return False
        return "delta_encoding" in index.get("metadata", {})

    def _apply(self, folder: Path, version: int) -> None:
        index = json.loads((folder / INDEX).read_text())
        metadata = index["metadata"]
        assert int(metadata["version"]) == version
        assert int(metadata["base_version"]) == self.applied
        assert metadata["compression_format"] == "zstd"
        changes: dict[str, tuple[bytes, str]] = {}
        for file in set(index["weight_map"].values()):
            data = (folder / file).read_bytes()
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            checksums = header.pop("__metadata__", {})
            assert set(header) == {k for k, v in index["weight_map"].items() if v == file}
            for name, entry in header.items():
                assert entry["dtype"] == "U8"
                begin, end = entry["data_offsets"]
                changes[name] = data[8 + length + begin : 8 + length + end], checksums[name]
        for path in self.folder.glob("*.safetensors"):
            self._change_file(path, changes, metadata)
        assert not changes, f"tensors that no file has: {sorted(changes)}"
        self.applied = version

    @staticmethod
    def _change_file(
        path: Path, changes: dict[str, tuple[bytes, str]], metadata: dict[str, str]
    ) -> None:
        data = bytearray(path.read_bytes())
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        for name in header.keys() & changes.keys():
            begin, end = (8 + length + at for at in header[name]["data_offsets"])
            frame, expected = changes.pop(name)
            change = zstandard.ZstdDecompressor().decompress(frame)
            region = np.frombuffer(data, np.uint8)[begin:end]
            if metadata["delta_encoding"] == "xor":
                region ^= np.frombuffer(change, np.uint8)
            else:
                count = int.from_bytes(change[:4], "little")
                at = np.frombuffer(change[4 : 4 + 4 * count], "<u4")
                region[at] = np.frombuffer(change[4 + 4 * count :], np.uint8)
            assert checksum(metadata["checksum_format"], bytes(region)) == expected, name
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(data)
        temporary.replace(path)

    def weights(self) -> dict[str, Any]:
        """Return the tensors that the folder has."""
        found: dict[str, Any] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            found |= load_file(path)
        return found
