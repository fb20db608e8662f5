from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.errors import BlobMissing
from blobstore.models.small_files import ModelFiles
from blobstore.operations.create.create import create
from blobstore.remotes.model_metadata import model_metadata
from blobstore.store.local import LocalStore
from tests.support.damage import blob_path
from tests.support.gguf_files import gguf_file, text
from tests.support.models import dense_tensors, replace_file, write_folder

STRING = 8


@pytest.mark.parametrize("kind", ["config.json", "gguf"])
def test_names_that_no_config_can_have_are_left_out(
    kind: str, store: LocalStore, tmp_path: Path
) -> None:
    if kind == "gguf":
        source = tmp_path / "a.gguf"
        values = [("general.architecture", STRING, text(b"\xff"))]
        source.write_bytes(gguf_file(values, [("a", 0, [4], bytes(16))]))
    else:
        source = write_folder(tmp_path / "a", dense_tensors())
        config = r'{"model_type": "\ud800", "architectures": ["a\u001b[1m"]}'
        (source / "config.json").write_text(config)
    create(source, "m", store=store)
    found = model_metadata(ModelFiles.of("m", store))
    assert (found.family, found.architecture) == ("", "")


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_config_that_is_not_a_json_object_says_nothing(
    store: LocalStore, tmp_path: Path, content: bytes
) -> None:
    create(write_folder(tmp_path / "a", dense_tensors()), "m", store=store)
    replace_file(store, "m", "config.json", content)
    found = model_metadata(ModelFiles.of("m", store))
    assert (found.family, found.architecture, found.format) == ("", "", "safetensors")
    blob_path(store, "config.json").unlink()
    with pytest.raises(BlobMissing):
        model_metadata(ModelFiles.of("m", store))
