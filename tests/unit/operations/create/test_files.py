from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import DamagedSource
from blobstore.manifests import media_types
from blobstore.operations.create.files import config_json, file_layers, stacks_layer
from blobstore.planning.plan import ModelPlan, plan_source
from blobstore.sources.base import SourceFile
from blobstore.sources.open import open_source
from tests.support.models import dense_tensors, moe_tensors, write_folder


def test_lists_the_sources_of_stacked_tensors(tmp_path: Path) -> None:
    source = open_source(write_folder(tmp_path, moe_tensors()))
    (stacks,) = stacks_layer(plan_source(source, experts="stacked").blobs)
    assert (stacks.media_type, stacks.name) == (media_types.STACKS, "")
    assert json.loads(stacks.data)["model.layers.0.mlp.experts.up_proj.weight"][11].endswith(
        "experts.11.up_proj.weight"
    )
    assert stacks_layer(plan_source(source).blobs) == []
    source.close()


def test_gives_the_small_files_with_their_types(tmp_path: Path) -> None:
    files = {"merges.txt": b"a b\n", "tokenizer.json": b"{"}
    source = open_source(write_folder(tmp_path, dense_tensors(), files=files))
    layers = file_layers(source)
    assert [(it.media_type, it.name, b"".join(map(bytes, it.buffers()))) for it in layers] == [
        (media_types.JSON, "config.json", b'{"model_type": "tiny"}\n'),
        (media_types.FILE, "merges.txt", b"a b\n"),
        (media_types.JSON, "tokenizer.json", b"{"),
    ]
    source.close()


def test_rejects_a_file_that_has_disappeared(tmp_path: Path) -> None:
    source = open_source(write_folder(tmp_path, dense_tensors(), files={"merges.txt": b""}))
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(DamagedSource, match="merges.txt"):
        list(file_layers(source))
    source.close()


@pytest.mark.parametrize("change", [b"", b"longer than before"])
def test_rejects_a_file_whose_size_changes(tmp_path: Path, change: bytes) -> None:
    source = open_source(write_folder(tmp_path, dense_tensors(), files={"merges.txt": b"a b"}))
    (_, layer) = file_layers(source)
    (tmp_path / "merges.txt").write_bytes(change)
    with pytest.raises(DamagedSource, match=r"merges\.txt' changed while it was read"):
        list(layer.buffers())
    source.close()


def test_large_json_is_not_stored_as_json(tmp_path: Path) -> None:
    source = open_source(write_folder(tmp_path, dense_tensors()))
    path = tmp_path / "x.json"
    path.write_text("{}")
    os.truncate(path, 64 * 2**20 + 1)
    source.versions.record(path)
    # As in a repository that is kept whole.
    vars(source)["files"] = [SourceFile("x.json", path)]
    (layer,) = file_layers(source)
    assert layer.media_type == media_types.FILE
    source.close()


def test_the_config_states_the_type_and_the_digest_of_the_layers(tmp_path: Path) -> None:
    source = open_source(write_folder(tmp_path, dense_tensors()))
    plan = ModelPlan((), None, "int4", (), ())
    found = json.loads(config_json(source, plan, None))
    assert found["file_type"] == "int4"
    assert {"layers_digest", "published_scheme"}.isdisjoint(found)
    layers = Digest("a" * 64)
    known = json.loads(config_json(source, plan, layers))
    assert known == found | {"layers_digest": str(layers)}
    published = json.loads(config_json(source, replace(plan, scheme="awq"), None))
    assert published == found | {"published_scheme": "awq"}
    source.close()
