"""Checkpoints as programs for training write them, with classes that are not there when they are read."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from blobstore.errors import CheckpointRefused
from blobstore.sources.base import SourceOptions, TensorSource
from blobstore.sources.open import open_source
from blobstore.sources.pytorch.inspect import inspect_checkpoint
from tests.support.torch_files import raw

Weights = dict[str, torch.Tensor]
WEIGHTS: Weights = {"layer.weight": torch.arange(6.0).reshape(3, 2), "layer.bias": torch.ones(3)}
Define = Callable[..., Any]


@pytest.fixture
def define(monkeypatch: pytest.MonkeyPatch) -> Define:
    """Return a function that makes a class of a program, and puts it where pickles look for it."""

    def made(path: str, base: type = object) -> Any:
        *parts, name = path.split(".")
        for count in range(1, len(parts) + 1):  # the packages above the module too
            module = ".".join(parts[:count])
            home = ModuleType(module)
            monkeypatch.setitem(sys.modules, module, home)
        setattr(home, name, found := type(name, (base,), {"__module__": module}))
        return found

    return made


def opened(path: Path, content: Any, **options: Any) -> TensorSource:
    torch.save(content, path)
    return open_source(path, SourceOptions(**options))


def contents(source: TensorSource) -> dict[str, bytes]:
    buffer = memoryview(bytearray(1 << 16))
    return {name: b"".join(map(bytes, source.read(name, buffer))) for name in source.specs}


def bytes_of(tensors: Weights) -> dict[str, bytes]:
    return {name: raw(tensor) for name, tensor in tensors.items()}


def test_a_compiled_model_keeps_its_prefix_unless_it_is_stripped(tmp_path: Path) -> None:
    prefix = "_orig_mod.module."
    content = {
        "model": {f"{prefix}{name}": tensor for name, tensor in WEIGHTS.items()},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []},
        "iter_num": 3,
    }
    source = opened(tmp_path / "ckpt.pt", content)
    assert set(source.specs) == {f"{prefix}{name}" for name in WEIGHTS}
    assert any("left out: 'optimizer'" in notice for notice in source.notices)
    note = f"all names begin with '{prefix}'; --strip-prefix {prefix} removes it"
    assert note in source.notices
    source = opened(tmp_path / "ckpt.pt", content, strip_prefix=prefix)
    assert contents(source) == bytes_of(WEIGHTS)
    assert note not in source.notices


def test_configs_of_omegaconf_and_lightning_are_left_out(tmp_path: Path, define: Define) -> None:
    node, metadata = (define(f"omegaconf.{it}")() for it in ("nodes.AnyNode", "base.Metadata"))
    node._val, node._metadata, metadata.key = 3, metadata, "lr"
    mapping = define("omegaconf.dictconfig.DictConfig")()
    mapping._content, mapping._parent = {"lr": node}, None
    values = define("omegaconf.listconfig.ListConfig")()
    values._content = [node]
    attributes = define("pytorch_lightning.utilities.parsing.AttributeDict", dict)
    content = {
        "state_dict": WEIGHTS,
        "hyper_parameters": attributes(hidden=1, config=mapping, list=values),
        "pytorch-lightning_version": "1.9.0",
    }
    source = opened(tmp_path / "last.ckpt", content)
    assert contents(source) == bytes_of(WEIGHTS)
    (notice,) = source.notices
    assert notice.endswith(
        "left out: 2 values that are neither a tensor nor simple, in 'hyper_parameters'"
    )


def test_a_class_of_a_callback_can_be_a_key(tmp_path: Path, define: Define) -> None:
    callback = define("pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint")
    content = {
        "state_dict": WEIGHTS,
        "callbacks": {callback: {"monitor": "loss", "best_model_score": torch.tensor(0.5)}},
        "global_step": 470_000,
    }
    source = opened(tmp_path / "sd.ckpt", content)
    assert contents(source) == bytes_of(WEIGHTS)
    assert any("left out: 'callbacks' (1 tensor)" in notice for notice in source.notices)


class Mode(enum.Enum):
    FAST = 1


@pytest.mark.parametrize("kind", ["a callback", "an enumeration", "an optimizer"])
def test_unknown_classes_next_to_the_model_need_a_choice(
    kind: str, tmp_path: Path, define: Define
) -> None:
    objects: dict[str, dict[str, Any]] = {
        "a callback": {
            "callbacks": {define("lightning.callbacks.early_stopping.EarlyStopping"): {"wait": 1}}
        },
        "an enumeration": {"hyper_parameters": {"mode": Mode.FAST}},
        "an optimizer": {"hyper_parameters": {"o": define("own.optimizer.Optimizer")()}},
    }
    content = {"state_dict": WEIGHTS, **objects[kind]}
    path = tmp_path / "last.ckpt"
    with pytest.raises(CheckpointRefused, match="choose a part without them: --subtree ") as it:
        opened(path, content)
    assert it.value.exit_code == 1
    assert "--subtree state_dict, or" in str(it.value)
    assert [part.path for part in inspect_checkpoint(path).subtrees] == ["state_dict"]
    assert contents(opened(path, content, subtree="state_dict")) == bytes_of(WEIGHTS)


def test_a_pickled_detector_is_read_without_its_classes(tmp_path: Path, define: Define) -> None:
    layer = define("ultralytics.nn.modules.conv.Conv", nn.Module)()
    layer.conv, layer.bn, layer.act = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.SiLU()
    model = define("ultralytics.nn.tasks.DetectionModel", nn.Module)()
    model.model, model.names, model.stride = nn.Sequential(layer), {0: "face"}, torch.tensor([8.0])
    content = {
        "model": None,
        "ema": model.half(),
        "optimizer": None,
        "train_metrics": {"fitness": np.float64(0.7)},
    }
    source = opened(tmp_path / "face.pt", content)
    assert contents(source) == bytes_of(model.state_dict())
    (notice,) = source.notices
    assert notice.endswith(
        "left out: 1 value that is neither a tensor nor simple, in 'train_metrics'"
    )


@pytest.mark.parametrize("is_module", [False, True])
def test_an_embedding_of_textual_inversion_is_read(tmp_path: Path, is_module: bool) -> None:
    vectors = torch.randn(2, 768)
    params: Any = {"*": vectors}
    if is_module:
        params = nn.ParameterDict({"*": nn.Parameter(vectors)})
    content = {"string_to_token": {"*": 265}, "string_to_param": params, "name": "style"}
    source = opened(tmp_path / "style.pt", content)
    assert contents(source) == {"string_to_param.*": raw(vectors)}
