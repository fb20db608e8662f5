"""The options in the record of a source: one spelling for each import, and no others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.errors import BlobDamaged, UsageError
from blobstore.manifests import media_types
from blobstore.models.source_layers import read_source_record
from blobstore.operations.create.create import create
from blobstore.operations.describe.show import model_source
from blobstore.operations.maintenance.repair import repair_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.planning.import_options import ImportOptions
from blobstore.planning.plan import QuantizeOptions
from blobstore.sources.base import SourceOptions
from blobstore.store.local import LocalStore
from tests.support.damage import blob_path
from tests.support.options import grouped
from tests.unit.folders.test_original import single
from tests.unit.operations.export.folders import NAME, add_layers, remove_layers

EVERY: dict[str, Any] = {
    "weights": "*.bin",
    "ignore_unindexed": True,
    "subtree": "model",
    "keep_names": True,
    "skip_unreadable": True,
    "exclude": ["a", "b"],
    "keep": ["*.onnx"],
    "quantize": "int4",
    "group_size": 64,
    "policy": "uniform",
    "overrides": ["*.v_proj=int8", "x=none"],
    "experts": "stacked",
    "decode": True,
}
FORGED: list[dict[str, Any]] = [
    {"quantize": "nope"},
    {"quantize": "INT4"},  # another spelling
    {"quantize": "q4"},
    {"quantize": "int2"},  # only sources have it
    {"quantize": None},
    {"quantize": "int4", "group_size": -64},
    {"quantize": "int4", "group_size": 10**30},
    {"quantize": "int4", "group_size": 64.0},
    {"quantize": "int8", "group_size": True},
    {"quantize": "int4", "group_size": 32},  # the default is not recorded
    {"group_size": 64},
    {"quantize": "int4", "policy": "both"},
    {"quantize": "int4", "policy": "recommended"},
    {"quantize": "int4", "overrides": ["x"]},
    {"quantize": "int4", "overrides": "x=int4"},
    {"quantize": "int4", "overrides": []},
    {"overrides": ["x=int4"]},
    {"keep": [5]},
    {"keep": "*"},
    {"exclude": []},
    {"weights": 5},
    {"ignore_unindexed": 1},
    {"ignore_unindexed": False},
    {"experts": "loose"},
    {"experts": ["stacked"]},
    {"experts": "packed"},
    {"decode": 1},
    {"decode": False},
    {"jobs": 5},
    {"\x1b[2J": {}},
]


def test_options_are_read_as_they_were_recorded() -> None:
    options = ImportOptions.from_json(EVERY)
    assert options.to_json() == EVERY
    assert options == ImportOptions(
        SourceOptions(
            weights="*.bin",
            ignore_unindexed=True,
            subtree="model",
            keep_names=True,
            skip_unreadable=True,
            exclude=("a", "b"),
            keep=("*.onnx",),
        ),
        QuantizeOptions(
            quant_type="int4",
            group_size=64,
            policy="uniform",
            overrides=("*.v_proj=int8", "x=none"),
        ),
        "stacked",
        decode=True,
    )


def test_no_options_are_the_defaults() -> None:
    assert ImportOptions().to_json() == {}
    assert ImportOptions.from_json({}) == ImportOptions()


def test_options_are_recorded_in_one_spelling() -> None:
    options = ImportOptions(quantize=QuantizeOptions(quant_type="Q4", group_size=32))
    assert options.to_json() == {"quantize": "int4"}


def test_truth_values_and_numbers_of_other_types_have_the_same_spelling() -> None:
    options = ImportOptions(
        SourceOptions(ignore_unindexed=1, keep_names=None),  # type: ignore[arg-type]
        QuantizeOptions(quant_type="int4", group_size=np.int64(64)),  # type: ignore[arg-type]
    )
    recorded = options.to_json()
    assert json.dumps(recorded, sort_keys=True) == (
        '{"group_size": 64, "ignore_unindexed": true, "quantize": "int4"}'
    )
    assert ImportOptions.from_json(recorded).to_json() == recorded


@pytest.mark.parametrize("options", FORGED, ids=str)
def test_options_that_create_does_not_record_are_damage(options: Mapping[str, Any]) -> None:
    with pytest.raises(BlobDamaged, match="options that create") as caught:
        ImportOptions.from_json(options)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("options", [{"quantize": "nope"}, {"keep": 5}, {"jobs": 5}], ids=str)
def test_forged_options_are_reported_by_verify_show_and_repair(
    options: dict[str, Any], store: LocalStore, tmp_path: Path
) -> None:
    path = single(tmp_path)
    create(path, NAME, store=store)
    manifest = store.resolve(NAME)
    record = read_source_record(store, manifest)
    assert record is not None
    remove_layers(store, media_types.SOURCE)
    forged = replace(record, options=options).to_bytes()
    add_layers(store, (media_types.SOURCE, "", forged))
    (fault,) = verify_models(store=store).faults
    assert fault.layer == media_types.SOURCE
    assert "options that create" in fault.message
    with pytest.raises(BlobDamaged, match="options that create"):
        model_source(NAME, store=store)
    blob_path(store, manifest.layers[0].name).unlink()
    repaired = repair_models([NAME], path, store=store)
    assert [blob.digest for blob in repaired.repaired] == [manifest.layers[0].digest]
    (left,) = repaired.faults
    assert (left.layer, left.message) == (fault.layer, fault.message)


@pytest.mark.parametrize("option", ["exclude", "keep"])
def test_patterns_of_other_bytes_than_text_are_refused(
    option: str, store: LocalStore, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="not valid Unicode"):
        create(single(tmp_path).parent, NAME, store=store, **grouped({option: ["\udcff*"]}))  # type: ignore[call-overload]
    assert list(store.references()) == []
