from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import DamagedSource
from blobstore.manifests import media_types
from blobstore.operations.create.files import config_bytes, small_layers
from blobstore.operations.create.plan import plan_source
from blobstore.sources.open import open_source
from tests.support.models import dense_tensors, moe_tensors, write_folder

if TYPE_CHECKING:
    from pathlib import Path


def test_gives_stacks_then_files_with_their_types(tmp_path: Path) -> None:
    files = {"merges.txt": b"a b\n", "tokenizer.json": b"{"}
    source = open_source(write_folder(tmp_path, moe_tensors(), files=files))
    stacked = plan_source(source, experts="stacked").blobs
    packed = plan_source(source).blobs

    (stacks, *others) = small_layers(source, stacked)

    assert stacks[:2] == (media_types.STACKS, "")
    assert json.loads(stacks[2])["model.layers.0.mlp.experts.up_proj.weight"][11].endswith(
        "experts.11.up_proj.weight"
    )
    assert others == [
        (media_types.JSON, "config.json", b'{"model_type": "tiny"}\n'),
        (media_types.FILE, "merges.txt", b"a b\n"),
        (media_types.JSON, "tokenizer.json", b"{"),
    ]
    assert list(small_layers(source, packed)) == others
    source.close()


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    source = open_source(write_folder(tmp_path, dense_tensors(), files={"merges.txt": b""}))
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(DamagedSource, match="merges.txt"):
        list(small_layers(source, ()))
    source.close()


@pytest.mark.parametrize(
    ("config", "capabilities"),
    [
        ("{}", ["completion"]),
        ('{"vision_config": {}, "audio_config": {}}', ["completion", "vision", "audio"]),
        ('{"has_vision": true, "sound_config": {}}', ["completion", "vision", "audio"]),
        ('{"has_vision": false}', ["completion"]),
    ],
)
def test_the_config_tells_type_and_capabilities(
    config: str, capabilities: list[str], tmp_path: Path
) -> None:
    files = {"config.json": config.encode()}
    source = open_source(write_folder(tmp_path, dense_tensors(), files=files))
    found = json.loads(config_bytes(source, "int4", None))
    assert found["capabilities"] == capabilities
    assert found["file_type"] == "int4"
    assert "layers_digest" not in found
    layers = Digest("a" * 64)
    known = json.loads(config_bytes(source, "int4", layers))
    assert known == found | {"layers_digest": str(layers)}
    source.close()
