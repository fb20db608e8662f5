"""Reads several weight files as one source, by an index of their tensors."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blobstore.core import strict_json
from blobstore.core.escape import join_some, quote, shell_word
from blobstore.core.file_kinds import kind_of_name
from blobstore.core.files import open_regular, read_regular
from blobstore.core.tensor import TensorSpec
from blobstore.errors import (
    BlobstoreError,
    DamagedSource,
    SourceNotFound,
    UnsupportedSource,
    UsageError,
)
from blobstore.gguf.file import is_gguf
from blobstore.gguf.roles import COMPANIONS
from blobstore.manifests.file_names import is_valid_name
from blobstore.manifests.source_record import RecordedFile
from blobstore.sources.base import DEFAULT_OPTIONS
from blobstore.sources.file_shard import FileShard
from blobstore.sources.gguf import GgufShard, check_complete
from blobstore.sources.parts import check_content
from blobstore.sources.safetensors import SAFETENSORS, SafetensorsShard
from blobstore.sources.versions import SourceVersions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from blobstore.core.files import Opener
    from blobstore.sources.base import Shard, SourceOptions
    from blobstore.sources.pytorch.checkpoint import Checkpoint

_MAX_INDEX_SIZE = 256 * 2**20
_WRAPPERS = re.compile(r"(?:(?:module|_orig_mod)\.)+")
"""Prefixes that DistributedDataParallel and torch.compile put in front of all names."""
_HEAD = "lm_head.weight"
CHECKPOINTS = (".bin", ".pt", ".pth", ".ckpt")
"""Endings of PyTorch checkpoints."""
FORMATS: Final[tuple[type[FileShard], ...]] = (SafetensorsShard, GgufShard)
"""The formats whose files are written again by exports; a new one goes to the end."""
_BY_ENDING: Final = {kind.ending: kind for kind in FORMATS}
ENDINGS: Final = ((SAFETENSORS,), CHECKPOINTS, *((kind.ending,) for kind in FORMATS[1:]))
"""Endings of files of weights. In a folder, only those of the first ending are read that occurs there."""
WEIGHTS: Final = tuple(ending for endings in ENDINGS for ending in endings)
"""Endings of all files of weights that are read."""


def has_ending(name: str, endings: str | tuple[str, ...] = WEIGHTS) -> bool:
    """Return whether a name has one of some endings, in letters of any case."""
    return name.lower().endswith(endings)


class _Place(NamedTuple):
    shard: Shard
    name: str


class ShardSet:
    """The tensors of some weight files, under their own names or with a prefix.

    ``options`` say what to read of PyTorch checkpoints.
    """

    def __init__(self, options: SourceOptions = DEFAULT_OPTIONS) -> None:
        self.specs: dict[str, TensorSpec] = {}
        self.notices: list[str] = []
        self.is_partial = False
        """Whether a file has tensors that were not added."""
        self.versions = SourceVersions()
        self.metadata: dict[Path, Mapping[str, str]] = {}
        self.values: dict[str, Any] = {}
        """The simple values of PyTorch checkpoints, by their names relative to the source."""
        self.block_types: dict[str, str] = {}
        """The types of the quantized tensors of GGUF files, as llama.cpp names them, by name."""
        self._options = options
        self._is_stripped = False
        """Whether a name had the prefix to strip."""
        self._places: dict[str, _Place] = {}
        self._shards: dict[Path, Shard] = {}
        self._unreadable: dict[Path, AbstractSet[str]] = {}

    def add(self, path: Path, *, prefix: str = "", names: AbstractSet[str] | None = None) -> None:
        """Add the tensors of a file, or those in ``names``, with ``prefix`` in front of their names.

        Raises:
            DamagedSource: the file is damaged, or a tensor is in an earlier file too.
        """
        self.versions.record(path)
        try:
            shard, prefix = self._opened(path, prefix)
        except UnsupportedSource as error:
            advice = keeping(prefix + path.name, instead_of=error.advice)
            raise type(error)(error.message, advice=advice) from None
        if isinstance(shard, SafetensorsShard):
            self.metadata[path] = shard.metadata
        check_content(
            path, shard.specs, self.metadata.get(path, {}), self.values.get(prefix + path.name)
        )
        self.notices.extend(f"{quote(path)}: {notice}" for notice in shard.notices)
        strip = self._options.strip_prefix or ""
        for name, spec in shard.specs.items():
            if names is not None and name not in names:
                self.is_partial = True
                continue
            self._is_stripped |= bool(strip) and name.startswith(strip)
            full = prefix + name.removeprefix(strip)
            if full in self.specs:
                raise DamagedSource(
                    f"tensor {quote(full)} is in both {quote(self._places[full].shard.path)} "
                    f"and {quote(path)}"
                )
            self.specs[full] = spec if full == name else TensorSpec(full, spec.dtype, spec.shape)
            self._places[full] = _Place(shard, name)

    def _opened(self, path: Path, prefix: str) -> tuple[Shard, str]:
        """Open a file; return it and the prefix of its tensors' names."""
        kind = _BY_ENDING.get(path.suffix.lower())
        if kind is None and is_gguf(path, self.versions.open):
            kind = GgufShard
        if kind is None:
            checkpoint = self._shards[path] = self._open_checkpoint(path)
            checkpoint.check_readable(skip=self._options.skip_unreadable)
            self.values[prefix + path.name] = checkpoint.values
            self._unreadable |= {path: checkpoint.unreadable.keys()}
            return checkpoint, prefix
        self._check_no_parts(path)
        file = self._shards[path] = kind(path, self.versions.open)
        if file.role in COMPANIONS and not self.specs.keys().isdisjoint(file.specs):
            prefix += f"{path.stem}/"  # heads for more tokens have names of the model's tensors
        self.block_types.update((prefix + name, blocks) for name, blocks in file.block_types())
        return file, prefix

    def _check_no_parts(self, path: Path) -> None:
        """Check that no option asks for a part of a checkpoint. Raises UsageError if one does."""
        if self._options.subtree is not None or self._options.strip_prefix:
            reason = "it has no parts for --subtree"
            if self._options.subtree is None:
                reason = "--strip-prefix does not apply"
            raise UsageError(f"{quote(path)} is not a PyTorch checkpoint, so {reason}")

    def check_complete(self) -> None:
        """Check that no part of a split GGUF file is missing. Raises DamagedSource if one is."""
        check_complete(shard for shard in self._shards.values() if isinstance(shard, GgufShard))

    def _open_checkpoint(self, path: Path) -> Checkpoint:
        # The readers of pickles take a while to import, and most models need none.
        from blobstore.sources.pytorch.checkpoint import Checkpoint
        from blobstore.sources.pytorch.container import UnknownFormat

        try:
            options = self._options
            return Checkpoint(
                path,
                subtree=options.subtree,
                skip_unreadable=options.skip_unreadable,
                opener=self.versions.open,
            )
        except SourceNotFound:
            raise DamagedSource(f"weight file {quote(path)} is missing") from None
        except UnknownFormat as error:
            if kind := kind_of_name(path.name):
                raise kind.error(quote(path)) from None
            raise error from None

    def check_stripped(self, path: Path) -> None:
        """Check that some name in ``path`` had the prefix to strip, if there is one.

        A prefix that could be stripped of all names becomes a notice.

        Raises:
            UsageError: no name had it.
        """
        if self._options.strip_prefix and not self._is_stripped:
            raise UsageError(
                f"no tensor of {quote(path)} has a name that begins with "
                f"{quote(self._options.strip_prefix)}"
            )
        if self._shards.keys() == self._unreadable.keys():  # all are checkpoints
            self.notices += wrapper_notices(self.specs)

    def names_in(self, path: Path) -> AbstractSet[str]:
        """Return the names of all tensors of an added file, also of those left out, without prefix."""
        return self._shards[path].specs.keys() | self._unreadable.get(path, set())

    def read(self, name: str, buffer: memoryview) -> Iterator[memoryview]:
        """Yield a tensor's bytes in pieces; see :meth:`TensorSource.read`."""
        shard, inner = self._places[name]
        return shard.read(inner, buffer)

    def check_unchanged(self) -> None:
        """See :class:`TensorSource`."""
        self.versions.check({path: shard.version() for path, shard in self._shards.items()})

    def recorded(self, name_of: Callable[[Path], str]) -> Iterator[RecordedFile]:
        """Yield the record of each file, under the name that ``name_of`` returns for its path."""
        for path, shard in self._shards.items():
            size = shard.version().size
            if isinstance(shard, FileShard):
                yield RecordedFile(
                    name_of(path), shard.format, size, shard.header(), None, shard.gaps, shard.role
                )
            else:
                yield RecordedFile(name_of(path), "pytorch", size, b"")

    def close(self) -> None:
        """Close the files."""
        while self._shards:
            self._shards.popitem()[1].close()


def keeping(name: str, among: Iterable[str] = (), *, instead_of: str = "") -> str:
    """Return the advice to store a file as it is, or those of the same ending among some.

    Names are relative to the folder of the source. ``instead_of`` is other advice, which comes first.
    """
    ending = PurePath(name).suffix
    if ending and sum(it.endswith(ending) for it in among) > 1:
        advice = f"store such files as they are with create --keep {shell_word(f'*{ending}')}"
    elif is_valid_name(name):
        advice = f"store the file as it is with create --keep {shell_word(name)}"
    else:
        advice = "give the file a name of letters, digits, '_', '.' and '-', and store it as it is with create --keep"
    return f"{instead_of}, or {advice}" if instead_of else advice


def wrapper_notices(names: Collection[str]) -> list[str]:
    """Return a notice if all names begin with the same prefix of a wrapper."""
    found = _WRAPPERS.match(next(iter(names), ""))
    if found is None or not all(name.startswith(found[0]) for name in names):
        return []
    return [
        f"all names begin with {quote(found[0])}; --strip-prefix {shell_word(found[0])} removes it"
    ]


def read_index(index: Path, opener: Opener = open_regular) -> bytes:
    """Return the bytes of an ``*.index.json``. Raises DamagedSource if it cannot be read."""
    try:
        return read_regular(index, _MAX_INDEX_SIZE, opener)
    except (OSError, BlobstoreError) as error:
        raise DamagedSource(f"cannot read weight index {quote(index)}: {error}") from error


def read_weight_map(index: Path, opener: Opener = open_regular) -> dict[str, str]:
    """Return the map from tensor names to file names of an ``*.index.json``, which may be empty.

    Raises:
        DamagedSource: the index is malformed, or names a file with a path separator or with another
            ending than it should.
    """
    try:
        value: Any = strict_json.loads(read_index(index, opener))
    except ValueError as error:
        raise DamagedSource(f"weight index {quote(index)}: {error}") from None
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise DamagedSource(
            f"weight index {quote(index)} has no 'weight_map' from tensor to file names"
        )
    ending = ".bin" if ".bin." in index.name else SAFETENSORS
    weight_map = {name: file.removeprefix("./") for name, file in weight_map.items()}
    for name, file in weight_map.items():
        if "/" in file or "\\" in file or "\0" in file or not file.endswith(ending):
            raise DamagedSource(
                f"weight index {quote(index)}: file {quote(file)} of tensor {quote(name)} is "
                f"not the plain name of a {ending} file",
                advice="put all files next to the index, and name them in it without folders",
            )
    return weight_map


def add_indexed(
    shards: ShardSet,
    index: Path,
    weight_map: dict[str, str],
    *,
    prefix: str,
    ignore: bool,
    is_tied: bool = False,
) -> Iterator[str]:
    """Add the shards that an index names; yield notices.

    ``is_tied`` says that the output head is tied to the embeddings. Some programs then leave it out of the
    shards and not out of the index, and libraries load such folders.

    Raises:
        DamagedSource: a shard is missing or damaged, lacks a tensor that the index places in it, or,
            unless ``ignore``, has one that the index does not.
    """
    by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, set()).add(name)
    for file, names in sorted(by_file.items()):
        path = index.parent / file
        shards.add(path, prefix=prefix, names=names)
        found = shards.names_in(path)
        lacking = sorted(names - found)
        if is_tied and lacking == [_HEAD]:
            yield f"{quote(index)} places {quote(_HEAD)} in {quote(path)}: left out, since it is tied"
        elif lacking:
            raise DamagedSource(
                f"shard {quote(path)} lacks tensor {join_some([*map(quote, lacking)], 1)} that "
                f"{quote(index)} places in it"
            )
        if extra := sorted(found - names):
            unnamed = (
                f"shard {quote(path)} has tensor {join_some([*map(quote, extra)], 1)} that "
                f"{quote(index)} does not place in it"
            )
            if not ignore:
                raise DamagedSource(f"{unnamed}; leave such tensors out with --ignore-unindexed")
            yield f"left out: {unnamed}"
