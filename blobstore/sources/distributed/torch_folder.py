"""Reads folders of ``torch.distributed.checkpoint``: ``.metadata`` and the ``.distcp`` files of all ranks.

A tensor becomes the same bytes however many processes saved it.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.escape import join_some, quote
from blobstore.core.files import open_regular, read_regular
from blobstore.errors import (
    BlobstoreError,
    CheckpointUnsupported,
    DamagedSource,
    SourceError,
    UnsupportedSource,
)
from blobstore.sources.base import DEFAULT_OPTIONS
from blobstore.sources.distributed.file_names import FORMAT, METADATA_FILE
from blobstore.sources.distributed.files import DataFile
from blobstore.sources.distributed.folder import Assembled, AssembledFolder, spec_of
from blobstore.sources.distributed.items import check_places, read_piece, read_value
from blobstore.sources.distributed.metadata import MAX_METADATA_SIZE, parse_metadata
from blobstore.sources.distributed.templates import Templates
from blobstore.sources.distributed.tiling import check_tiling
from blobstore.sources.file_tree import FileTree, joined
from blobstore.sources.parts import DATA_FILE
from blobstore.sources.pytorch.state_dict import (
    EVERYTHING,
    Subtree,
    Tree,
    find_state_dict,
    is_training,
    subtrees_of,
)
from blobstore.sources.pytorch.tensors import UnreadableTensor
from blobstore.sources.pytorch.values import plain_values, with_values
from blobstore.sources.selection import read_json
from blobstore.sources.small_files import files_next_to

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from blobstore.core.files import Opener
    from blobstore.sources.base import SourceOptions
    from blobstore.sources.distributed.metadata import Metadata, StoredPiece, StoredTensor
    from blobstore.sources.distributed.pieces import Piece
    from blobstore.sources.pytorch import state_dict

_SCALARS = ((), (1,))
_FIRST_KEY = re.compile(r"((?:chained_\d+\.)?[^.]*)\.(.+)", re.DOTALL)
"""Divides a name after its first key, which has a prefix if Megatron-Core chains several optimizers."""
_MAX_VALUES_SIZE = 64 * 2**20
"""Bytes of all items that are not tensors; more are left out."""
_FAILURE_COST = 2**20
"""Bytes that count for an item that cannot be read: finding that out can take a while."""
_SHOWN = 8


class TorchFolder(AssembledFolder):
    """A :class:`TensorSource` over a folder of ``torch.distributed.checkpoint``."""

    _format = "pytorch"

    def __init__(
        self, folder: Path, inner: str = "", options: SourceOptions = DEFAULT_OPTIONS
    ) -> None:
        """Read the metadata and the headers of all items, and check that all pieces are there.

        Args:
            folder: the folder of the model.
            inner: the folder of the data files, relative to it.
            options: the part to read.

        Raises:
            CheckpointRefused: the metadata or an item are damaged, or need code to be executed.
            DamagedSource: pieces overlap, leave a hole, or are not in their files.
            UnsupportedSource: the checkpoint was saved in a way that is not read.
            SourceError: it has no model, or a file cannot be read.
            UsageError: an option does not fit.
        """
        super().__init__(FileTree(folder, exclude=options.exclude), options)
        self.reopen = functools.partial(TorchFolder, folder.absolute(), inner, options)
        self._inner = inner
        self.unreadable: dict[str, str] = {}
        """Tensors of an unsupported kind, with the reason."""
        self.contents: Mapping[str, Any] = {}
        """The values besides tensors by name, as the unpickler has them."""
        self._check_finished()
        name = joined(inner, METADATA_FILE)
        path = self._tree.path(name)
        stored = read_metadata(path, self.versions.open)
        self._entries = [(_path_of(name, stored.paths), name) for name in stored.tensors]
        self._stored = stored
        # Before items are parsed: here overlapping items, and those outside their files, are refused.
        self._open_files()
        self.config = read_json(self._tree, "config.json", dict)
        self.files = files_next_to(
            self._tree, {name, *self._data_files}, options.keep, self.notices
        )
        tree = Tree(
            self._entries,
            is_module=False,
            is_scalar=lambda entry: stored.tensors[entry].shape in _SCALARS,
        )
        choice = find_state_dict(tree, options.subtree)
        self.notices += choice.notices
        self._add(self._assembled(choice.tensors))
        # After the tensors are added: what it advises depends on whether any can be read.
        self._check_readable()
        if not self.specs:
            raise SourceError(
                f"{self._tree.label()} has no tensors of a model, only "
                f"{join_some(_first_keys(self._entries), _SHOWN)}; choose a part with --subtree, or "
                "import all of it with --subtree ."
            )
        self._add_values()

    def everything(self) -> TorchFolder:
        """Open all of the checkpoint. Raises as the constructor."""
        options = replace(self._options, subtree=EVERYTHING)
        return TorchFolder(self._tree.root, self._inner, options)

    def path_of(self, name: str) -> tuple[str | int, ...]:
        """Return the keys that lead to a tensor or value of the checkpoint."""
        path = self._stored.paths.get(name, (name,))
        return tuple(key if isinstance(key, str) else int(str(key)) for key in path)

    def _check_finished(self) -> None:
        """Check that there is a ``.metadata``, which torch writes when all data are."""
        names = self._tree.entries(self._inner)
        if METADATA_FILE in names:
            return
        label = self._tree.label(self._inner)
        if any(name.endswith(METADATA_FILE) for name in names):
            raise UnsupportedSource(
                f"{label} has metadata of each rank, as {FORMAT} saves them with "
                "use_collectives=False; load it with torch and save it with collectives"
            )
        raise DamagedSource(
            f"{label} has {DATA_FILE} files but no {METADATA_FILE}, which {FORMAT} writes last: the "
            "checkpoint was not saved completely"
        )

    def _open_files(self) -> None:
        """Open every data file once, and check that it has its items."""
        items = [piece.stored for it in self._stored.tensors.values() for piece in it.pieces]
        items += self._stored.values.values()
        by_name: dict[str, DataFile] = {}
        there = set(self._tree.entries(self._inner))
        for file in sorted({item.file for item in items}):
            name = joined(self._inner, file)
            if file not in there:
                raise DamagedSource(f"data file {self._tree.label(name)} is missing")
            by_name[file] = self._data_files[name] = DataFile(
                self._tree.path(name), self.versions.open
            )
        self._by_name = by_name
        check_places(items, by_name)

    def _assembled(self, chosen: Mapping[str, str]) -> dict[str, Assembled]:
        """Return the tensors, by the names that they get."""
        wanted: list[_Wanted] = []
        for name, entry in chosen.items():
            _check_name(name)
            tensor = self._stored.tensors[entry]
            if tensor.dtype is None:
                self.unreadable[name] = (
                    f"tensors of torch.{tensor.type_name} have no type in the safetensors format"
                )
                continue
            # Before its pieces are read: a checkpoint with a hole fails without reading all items.
            if tensor.pieces or 0 not in tensor.shape:
                try:
                    check_tiling(tensor.shape, tensor.pieces)
                except DamagedSource as error:
                    raise error.at(f"{self._tree.label()}, tensor {quote(entry)}") from None
            wanted += [_Wanted(piece, name, tensor) for piece in tensor.pieces]
        pieces: dict[str, list[Piece]] = {}
        for found, piece in self._read_pieces(wanted):
            pieces.setdefault(found, []).append(piece)
        tensors = {}
        for name, entry in chosen.items():
            dtype, _, shape, _ = self._stored.tensors[entry]
            if dtype is not None and name not in self.unreadable:
                spec = spec_of(name, dtype, shape)
                tensors[name] = Assembled(spec, shape, sorted(pieces.get(name, ()), key=_box))
        return tensors

    def _read_pieces(self, wanted: list[_Wanted]) -> Iterable[tuple[str, Piece]]:
        """Yield the pieces of tensors, in the order of their bytes, with the names of the tensors."""
        templates = Templates()
        # By file and offset, so that each file is opened once and read from front to back.
        wanted.sort(key=lambda item: item.piece.stored)
        for name, here in itertools.groupby(wanted, lambda item: item.piece.stored.file):
            file = self._by_name[name]
            with file.opened() as descriptor:
                for item in here:
                    try:
                        yield (
                            item.name,
                            read_piece(descriptor, file, item.tensor, item.piece, templates),
                        )
                    except UnreadableTensor as error:
                        self.unreadable[item.name] = str(error)
                    except (DamagedSource, UnsupportedSource) as error:
                        where = f"{quote(file.path)}, byte {item.piece.stored.begin}"
                        raise error.at(f"{where}, tensor {quote(item.name)}") from None

    def _check_readable(self) -> None:
        if not self.unreadable:
            return
        (name, reason), *others = self.unreadable.items()
        if not self._options.skip_unreadable or not self.specs:
            more = f" (and {len(others)} more)" if others else ""
            raise UnsupportedSource(
                f"{self._tree.label()}, tensor {quote(name)}{more}: {reason}",
                advice="leave such tensors out with --skip-unreadable" if self.specs else "",
            )
        names = join_some([*map(quote, self.unreadable)], _SHOWN)
        self.notices.append(f"left out: tensors of types that safetensors does not have: {names}")

    def _add_values(self) -> None:
        """Keep the simple values next to the tensors, such as a step or a learning rate."""
        values: dict[str, Any] = {}
        left = _MAX_VALUES_SIZE
        # Not in the order of the files, which depends on the number of processes.
        for name, stored in sorted(self._stored.values.items()):
            # Before it is read, because the file itself states the size.
            left -= stored.size
            if left < 0:
                break
            try:
                with self._by_name[stored.file].opened() as descriptor:
                    values[name] = read_value(descriptor, stored)
            except (DamagedSource, UnsupportedSource):
                left -= _FAILURE_COST
        self.contents = values
        kept, notices = plain_values(values)
        if skipped := [quote(name) for name in self._stored.values if name not in values]:
            notices.append(
                f"left out: {join_some(skipped, _SHOWN)}: values that cannot be read, or are too large"
            )
        self.files, more = with_values(self.files, {METADATA_FILE: kept or None}, self._tree.root)
        self.notices += [*notices, *more]


class _Wanted(NamedTuple):
    """A piece to read."""

    piece: StoredPiece
    name: str
    tensor: StoredTensor


_box = attrgetter("box")


def read_metadata(path: Path, opener: Opener = open_regular) -> Metadata:
    """Read a ``.metadata`` file.

    Raises:
        CheckpointRefused, DamagedSource, UnsupportedSource: as :func:`parse_metadata`.
        SourceError: it cannot be read.
    """
    try:
        return parse_metadata(read_regular(path, MAX_METADATA_SIZE, opener))
    except OSError as error:
        raise SourceError(f"cannot read {quote(path)}: {error.strerror}") from error
    except (DamagedSource, UnsupportedSource) as error:
        raise error.at(quote(path)) from None
    except BlobstoreError as error:  # too large, or not a regular file
        raise SourceError(str(error)) from None


def _path_of(name: str, paths: Mapping[str, state_dict.Path]) -> state_dict.Path:
    """Return the keys of a tensor.

    Some writers, such as Megatron-Core, do not list them. Then names of optimizers begin with the key of
    the optimizer, and the dots in other names are not known to be between keys.
    """
    if name in paths:
        return paths[name]
    found = _FIRST_KEY.fullmatch(name)
    return (found[1], found[2]) if found and is_training(found[1]) else (name,)


def subtrees_in(metadata: Metadata) -> list[Subtree]:
    """Return the parts of a checkpoint that ``subtree`` can name, with their tensors and bytes."""
    tensors = metadata.tensors
    paths = [_path_of(name, metadata.paths) for name in tensors]
    return subtrees_of(paths, map(_nbytes, tensors.values()))


def _nbytes(tensor: StoredTensor) -> int:
    return 0 if tensor.dtype is None else spec_of("", tensor.dtype, tensor.shape).nbytes


def _first_keys(entries: Iterable[tuple[state_dict.Path, str]]) -> list[str]:
    return sorted({quote(str(path[0])) for path, _ in entries})


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CheckpointUnsupported(f"the name {quote(name)} of a tensor is not Unicode") from None
