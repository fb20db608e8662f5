"""A source that changes while it is read is refused, whichever of its files changes and however."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import blobstore
from blobstore.errors import BlobstoreError, DamagedSource
from blobstore.sources import versions
from blobstore.sources.base import SourceOptions
from blobstore.sources.open import open_source
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, write_folder

Change = Callable[[Path], object]


def rewritten(path: Path) -> None:
    """Write other bytes of the same length over a file, and restore its modification time."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"~")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    shutil.copy2(path, path.with_name("new"))
    path.with_name("new").replace(path)


@pytest.mark.parametrize("change", [rewritten, replaced, Path.unlink])
@pytest.mark.parametrize(
    "name",
    ["model-00002-of-00002.safetensors", "model.safetensors.index.json", "config.json", "LICENSE"],
)
def test_a_file_that_changes_during_an_import_is_named(
    tmp_path: Path, store: LocalStore, name: str, change: Change
) -> None:
    folder = write_folder(tmp_path / "m", dense_tensors(), shards=2, files={"LICENSE": b"MIT"})
    opened = open_source(folder)
    opened.check_unchanged()
    change(folder / name)
    with pytest.raises(DamagedSource, match=f"{name}' changed while it was read"):
        opened.check_unchanged()
    opened.close()


def test_a_change_after_the_last_byte_was_read_publishes_nothing(
    tmp_path: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "m", dense_tensors())
    real = versions.SourceVersions.check
    checks = []

    def check(self: versions.SourceVersions, opened: Any) -> None:
        real(self, opened)
        checks.append(list(store.folder("blobs").iterdir()))
        rewritten(folder / "model.safetensors")

    monkeypatch.setattr(versions.SourceVersions, "check", check)
    with pytest.raises(DamagedSource, match="changed while it was read"):
        blobstore.create(folder, "m", store=store)
    assert checks == [[]]
    assert list(store.references()) == []
    assert list(store.folder("temporary").iterdir()) == []


@pytest.mark.parametrize("name", ["params.json", "consolidated.00.pth"])
def test_the_files_of_meta_s_models_are_compared_too(tmp_path: Path, name: str) -> None:
    torch.save({"x": torch.zeros(2)}, tmp_path / "consolidated.00.pth")
    (tmp_path / "params.json").write_text('{"dim": 2}')
    opened = open_source(tmp_path, SourceOptions(keep_names=True))
    rewritten(tmp_path / name)
    with pytest.raises(DamagedSource, match=f"{name}' changed"):
        opened.check_unchanged()
    opened.close()


def test_a_file_that_was_replaced_before_it_was_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = write_folder(tmp_path / "m", dense_tensors()) / "model.safetensors"
    real = versions.SourceVersions.record

    def record(self: versions.SourceVersions, path: Path) -> None:
        real(self, path)
        replaced(path)

    monkeypatch.setattr(versions.SourceVersions, "record", record)
    with pytest.raises(DamagedSource, match="changed"):
        open_source(weights)


def test_a_file_that_has_just_changed_is_read_after_a_tick_of_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x")
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr(time, "time_ns", lambda: path.stat().st_ctime_ns)
    versions.SourceVersions().record(path)
    assert sum(waits) >= versions._TICK


def test_a_file_that_is_being_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x")
    monkeypatch.setattr(time, "sleep", lambda _: path.write_bytes(b"y" * path.stat().st_size * 2))
    monkeypatch.setattr(time, "time_ns", lambda: path.stat().st_ctime_ns)
    monkeypatch.setattr(versions, "_MAX_WAITS", 3)
    with pytest.raises(DamagedSource, match="changed"):
        versions.SourceVersions().record(path)


_TRAINER = """
import pathlib, sys, time
path, blank = pathlib.Path(sys.argv[1]), bytearray(pathlib.Path(sys.argv[1]).read_bytes())
step = 0
while True:
    step = step % 250 + 1
    with path.open("r+b") as file:
        file.seek(-int(sys.argv[2]), 2)
        for _ in range(16):
            file.write(bytes([step]) * (int(sys.argv[2]) // 16))
    time.sleep(0.02 * step)
"""


def test_no_import_of_a_checkpoint_in_use_by_a_trainer_is_mixed(
    tmp_path: Path, store: LocalStore
) -> None:
    size = 1 << 18
    tensors = {f"w{number:02}": np.zeros(size, np.uint8) for number in range(16)}
    weights = write_folder(tmp_path / "m", tensors) / "model.safetensors"
    command = [sys.executable, "-c", _TRAINER, str(weights), str(size * 16)]
    refused = published = 0
    with subprocess.Popen(command) as trainer:
        try:
            # Its pauses grow until imports are complete in them, however slow these are.
            while min(refused, published) < 5:
                try:
                    blobstore.create(weights, "m", store=store)
                except BlobstoreError as error:
                    assert "changed while it was read" in str(error)
                    refused += 1
                    continue
                with blobstore.open("m", store=store) as model:
                    found = {value for name in model for value in np.unique(model[name])}
                assert len(found) == 1
                published += 1
        finally:
            trainer.kill()
