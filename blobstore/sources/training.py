"""All of the state that a training program saved: its model, and its optimizer, schedulers and other values.

Nothing is unpickled. A file next to the model that has more than tensors and plain values is kept as it is.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blobstore.core.escape import quote
from blobstore.core.files import read_regular
from blobstore.core.globs import any_glob_matches
from blobstore.errors import DamagedSource, UnsupportedSource, UsageError
from blobstore.manifests.step_record import RECORD_FILE, encode_state, nested, take_tensors
from blobstore.sources.distributed.layout import zero_steps
from blobstore.sources.distributed.torch_folder import TorchFolder
from blobstore.sources.distributed.zero_folder import NO_STATE, ZeroFolder
from blobstore.sources.huggingface import HuggingFaceFolder
from blobstore.sources.pytorch.checkpoint import Checkpoint
from blobstore.sources.pytorch.state_dict import EVERYTHING
from blobstore.sources.pytorch.training_values import WRITERS, PlainParts
from blobstore.sources.pytorch.values import VALUES_FILE, PlainValues
from blobstore.sources.small_files import MAX_SMALL_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from blobstore.core.tensor import TensorSpec
    from blobstore.sources.base import TensorSource

TRAINER_STATE: Final = ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*.pth")
"""Patterns of the files that the Trainer of transformers has next to the model."""
TRAINER_FILES: Final = (*TRAINER_STATE, "training_args.bin")
_MODEL = "model"
"""The part of the state that the model of a folder is."""
_BUFFER_SIZE = 1 << 20


class SavedTensor(NamedTuple):
    """A tensor of a state, and how to read it."""

    spec: TensorSpec
    read: Callable[[], bytes]


class _StateFile(Checkpoint):
    """All of a checkpoint, which may have no tensors."""

    _may_be_empty = True

    def _values_of(self, value: Any) -> PlainValues:
        self.content = value
        return PlainValues(None, [])


class TrainingState:
    """The state of a training, around the source of its model, which stays open, and checks whether files change."""

    def __init__(self, model: TensorSource, path: Path) -> None:
        """Open what there is besides the model in the folder or file ``path``.

        Raises:
            UnsupportedSource: such a source has no state that is read.
            DamagedSource, SourceError: a file is damaged, or cannot be read.
        """
        self._model = model
        self.notices = list(model.notices)
        self.files = {
            file.name: self._content(file.path) if file.content is None else file.content
            for file in model.files
            if file.name not in (VALUES_FILE, RECORD_FILE)
        }
        """The small files of the model, and those that are kept as they are."""
        self.part = _MODEL
        """The part of the state that the model is; may be empty."""
        with contextlib.ExitStack() as opened:
            self._opened = opened
            if isinstance(model, TorchFolder):
                state = self._open_distributed(model, path)
            elif isinstance(model, ZeroFolder):
                state = self._open_zero(model, path)
            elif isinstance(model, HuggingFaceFolder):
                state = self._open_files(model, path)
            else:
                raise UnsupportedSource(f"{quote(path)} has no state of a training that is read")
            state, tensors = take_tensors(
                state, lambda one: isinstance(one, SavedTensor), self.part
            )
            self.tensors: Mapping[str, SavedTensor] = tensors
            """The tensors by key."""
            self.record = encode_state(state, WRITERS)
            """The content of the file with the state."""
            self.close = opened.pop_all().close

    def _content(self, path: Path) -> bytes:
        self._model.versions.record(path)
        return read_regular(path, MAX_SMALL_FILE, self._model.versions.open)

    def _open_distributed(self, model: TorchFolder, path: Path) -> dict[str, Any]:
        everything = model.everything()
        self._opened.callback(everything.close)
        files = [found for found in path.iterdir() if any_glob_matches(found.name, TRAINER_FILES)]
        self.notices = [*everything.notices, *(f"left out: {quote(it)}" for it in sorted(files))]
        self.part = _part_of(model.specs, everything.specs)
        values = _tensors(everything) | self._plain_parts(everything.contents, {})
        try:
            state = nested([(everything.path_of(key), one) for key, one in values.items()])
        except UsageError as error:
            raise DamagedSource(f"{quote(path)}: {error.message}") from None
        if type(state) is not dict:
            raise DamagedSource(f"{quote(path)} has a list, and not a state")
        return state

    def _open_files(self, model: HuggingFaceFolder, path: Path) -> dict[str, Any]:
        if path.is_dir():
            if steps := zero_steps(path):
                raise UnsupportedSource(
                    f"{quote(path)} has complete weights, and an optimizer of DeepSpeed that goes with its own",
                    advice=f"import {quote(path / steps[0])}, which has both",
                )
            return self._with_files(path, {_MODEL: _tensors(model)})
        file = self._open(path)
        if type(file.content) is not dict:
            raise UnsupportedSource(f"{quote(path)} is a model without a training's state")
        self.notices = list(file.notices)
        self.part = _part_of(model.specs, file.specs)
        return self._plain_parts(file.content, _tensors(file))

    def _open_zero(self, model: ZeroFolder, path: Path) -> dict[str, Any]:
        self.notices = [notice.removesuffix(NO_STATE) for notice in model.notices]
        moments, groups = model.optimizer()
        state = self._plain_parts(model.values(), {})
        state |= {
            _MODEL: _tensors(model),
            "optimizer": {
                "state": {
                    name: {
                        key: one
                        if isinstance(one, int | float)
                        else SavedTensor(one.spec, partial(_read, model.read_tensor, one))
                        for key, one in its.items()
                    }
                    for name, its in moments.items()
                },
                **self._plain_parts({"param_groups": groups}, {}),
            },
        }
        return self._with_files(path, state)

    def _with_files(self, folder: Path, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with what the files of the Trainer have; keep others as they are."""
        for path in sorted(folder.iterdir()):
            if any_glob_matches(path.name, TRAINER_STATE):
                try:
                    file = self._open(path)
                    state[path.stem] = PlainParts(_tensors(file)).of(file.content)
                    continue
                except UnsupportedSource as error:
                    self.notices.append(f"kept as a file: {error.message}")
            if any_glob_matches(
                path.name, TRAINER_FILES
            ):  # also options, which only their own code can read
                self.files[path.name] = self._content(path)
        return state

    def _open(self, path: Path) -> _StateFile:
        self._model.versions.record(path)
        file = _StateFile(path, subtree=EVERYTHING, opener=self._model.versions.open)
        self._opened.callback(file.close)
        file.check_readable()
        return file

    def _plain_parts(
        self, parts: Mapping[Any, Any], tensors: Mapping[str, SavedTensor]
    ) -> dict[str, Any]:
        """Return the plain parts of a state; leave out others."""
        plain = PlainParts(tensors)
        found: dict[str, Any] = {}
        for key, value in parts.items():
            try:
                found |= plain.of({key: value})
            except UnsupportedSource as error:
                self.notices.append(f"left out: {error.message}")
        return found


def _tensors(source: TensorSource | Checkpoint) -> dict[str, SavedTensor]:
    return {
        name: SavedTensor(spec, partial(_read, source.read, name))
        for name, spec in source.specs.items()
    }


def _read(read: Callable[[Any, memoryview], Iterator[memoryview]], tensor: Any) -> bytes:
    return b"".join(map(bytes, read(tensor, memoryview(bytearray(_BUFFER_SIZE)))))


def _part_of(model: Collection[str], everything: Collection[str]) -> str:
    """Return the part of a state that the tensors of the model are; empty if they are not in a part.

    Raises:
        UnsupportedSource: they have other names in the state.
    """
    first = min(model)
    for key in everything:
        prefix = key.removesuffix(first)
        is_part = prefix.endswith(".") or key == first
        if is_part and all(f"{prefix}{name}" in everything for name in model):
            return prefix.removesuffix(".")
    raise UnsupportedSource("the tensors of the model have other names in the state")
