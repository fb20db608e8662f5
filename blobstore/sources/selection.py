"""Decides which files of a model folder are read, from the names of its files and a few small ones.

A folder has components: the model itself, the parts of a diffusers pipeline listed in
``model_index.json``, and the modules of a sentence-transformers model listed in ``modules.json``. The
same decision holds for a folder and for the listing of a Hub repository that is not downloaded yet.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from blobstore.core import strict_json
from blobstore.core.escape import cli_command, escape, join_some, quote, shell_word
from blobstore.core.file_kinds import FileKind, kind_of, kind_of_name
from blobstore.core.files import read_regular
from blobstore.core.globs import any_glob_matches, glob_matches
from blobstore.core.schemes import OLLAMA
from blobstore.errors import BlobstoreError, DamagedSource, SourceError
from blobstore.manifests.file_names import is_safe_name, is_valid_part
from blobstore.sources.base import COMPLETE
from blobstore.sources.file_tree import FileTree, joined
from blobstore.sources.gguf import GGUF
from blobstore.sources.gguf_models import choose_gguf, gguf_files
from blobstore.sources.parts import check_finished, check_whole
from blobstore.sources.safetensors import SAFETENSORS
from blobstore.sources.sharded import CHECKPOINTS, ENDINGS, has_ending, keeping, read_weight_map
from blobstore.sources.small_files import (
    MAX_SMALL_FILE,
    counted,
    is_kept,
    is_weight_index,
    left_out,
    matching_files,
    small_files,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from blobstore.sources.base import SourceOptions

_T = TypeVar("_T")
_STEMS = {
    SAFETENSORS: ("model", "diffusion_pytorch_model"),
    ".bin": ("pytorch_model", "diffusion_pytorch_model"),
}
"""Names of weight files by ending, without ending and shard number."""
_ADAPTERS = "adapters.safetensors"
_ADAPTERS_OF_STEP = re.compile(rf"[0-9]+_{re.escape(_ADAPTERS)}")
"""Matches the files that mlx-lm saves next to its adapters while it trains them."""
_ADAPTER_CONFIG = "adapter_config.json"
_OF_ADAPTER = re.compile(r"[^/]*(adapter|lora)[^/]*", re.IGNORECASE)
"""Matches the names of weights that :data:`_ADAPTER_CONFIG` describes."""
_EXTRA_FOLDERS = ("additional_chat_templates",)
_MODEL_FILES = ("config.json", "model_index.json", "modules.json")
_TRAINING_STATE = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state)[^/]*\.(bin|pt|pth|ckpt)"
)
"""Checkpoints next to the weights that have no model."""

_LIBRARIES = ("diffusers", "transformers", "sentence_transformers")
"""Libraries whose classes have weights, unless their names match the next pattern."""
_WITHOUT_WEIGHTS = re.compile(
    r".*(Scheduler|Tokenizer|Processor|FeatureExtractor|Guidance|Guider)(Fast)?|Mel"
    r"|(Splade)?Pooling|Normalize|Dropout|BoW|Router|Asym"
)
"""Classes of components that have no weights."""
_MODEL_KEYS = {"_class_name", "architectures"}
"""Keys that the config of every model has."""


class _Listed(NamedTuple):
    """A component that ``model_index.json`` or ``modules.json`` lists."""

    folder: str
    """The folder of the component; empty for the model itself."""
    library: str
    class_name: str


class ComponentWeights(NamedTuple):
    """The weights of one component: the files of an index, or files by themselves."""

    folder: str
    """The folder of the component; empty for the model itself."""
    index_name: str | None
    """The index that is followed."""
    files: Sequence[str]
    """The names of the weight files."""
    others: Sequence[str]
    """The names of weight files that are not chosen."""


@dataclass(slots=True)
class Selection:
    """The files of a folder that are read. All names are relative to the folder."""

    weights: list[ComponentWeights] = field(default_factory=list)
    indexes: list[str] = field(default_factory=list)
    """The indexes that exports write again, also those that are not followed."""
    files: list[str] = field(default_factory=list)
    """The files that are stored as they are, sorted."""
    notices: list[str] = field(default_factory=list)

    def weight_names(self) -> set[str]:
        """Return the names of all weight files and indexes."""
        return {*self.indexes}.union(*(part.files for part in self.weights))


def select_files(tree: FileTree, options: SourceOptions) -> Selection:
    """Return the weights and small files to read.

    Raises:
        DamagedSource: a file is missing or malformed, or files and index contradict each other.
        SourceError: there are no weights, or several sets and ``options.weights`` chooses none.
    """
    selection = Selection()
    listed = _listed(tree)
    named = {part.folder for part in listed if part.folder}
    components = sorted(folder for folder in named if tree.is_folder(folder))
    for folder in ("", *components):
        _select_weights(tree, folder, options, selection)
    selection.indexes = [part.index_name for part in selection.weights if part.index_name]
    folders = (*components, *_EXTRA_FOLDERS)
    kept = matching_files(tree, options.keep, selection.weight_names())
    for weights in selection.weights:
        selection.indexes.extend(_unfollowed_indexes(tree, weights, kept, selection.notices))
    used = selection.weight_names()
    small = chain(tree.entries(), *(tree.files_below(folder) for folder in folders))
    unused = (name for name in small if name not in kept and name not in used)
    files = set(small_files(tree, unused, selection.notices))
    for config in sorted(filter(partial(_lacks_adapter, tree, used | kept), files)):
        files.remove(config)
        selection.notices.append(
            f"left out: {tree.label(config)}, since its adapter is not imported"
        )
    selection.files = sorted(files | kept)
    selection.notices.extend(check_finished(tree, {*used, *selection.files}, would_be_imported))
    if not any(part.files for part in selection.weights) and not kept:
        raise _no_weights(tree, options.weights)
    for part in listed:
        selection.notices.extend(_check_has_weights(tree, part, kept))
    others = [name for part in selection.weights for name in part.others if name not in kept]
    if others:
        selection.notices.append(
            f"left out: {counted(tree, others, 'weight file')}; choose other weights with --weights"
        )
    stored = {*used, *selection.files}
    selection.notices.extend(
        f"no file of {tree.label()} matches --keep {quote(pattern)}"
        for pattern in options.keep
        if not any(glob_matches(name, pattern) for name in stored)
    )
    selection.notices.extend(left_out(tree, stored.union(others), options.keep, selection.notices))
    if model := next(_other_models(tree, stored), None):
        selection.notices.append(
            f"if {quote(model)} is a model too, {cli_command('create', model)} imports it"
        )
    return selection


def _has_no_model(name: str) -> bool:
    """Return whether a checkpoint, by its name, has no model. It is read only if it is named exactly."""
    return is_kept(name) or _TRAINING_STATE.fullmatch(name) is not None


def is_model_folder(folder: Path) -> bool:
    """Return whether a folder seems to be a model, whether complete and readable or not."""
    return folder.is_dir() and any(
        name in _MODEL_FILES or has_ending(name) or kind_of_name(name)
        for name in FileTree(folder).entries()
    )


def would_be_imported(name: str) -> bool:
    """Return whether a file of this name, without its folder, is imported if a folder has it."""
    return has_ending(name) or is_kept(name)


def read_json(tree: FileTree, name: str, kind: type[_T]) -> _T:
    """Return the decoded file; an empty ``kind`` if there is none.

    Raises:
        DamagedSource: it cannot be parsed, or is of another kind.
        SourceError: it cannot be read, or is text of another encoding.
    """
    if not tree.has(name):
        return kind()
    path = tree.document(name, MAX_SMALL_FILE)
    try:
        value = strict_json.loads_any(read_regular(path, MAX_SMALL_FILE, tree.versions.open))
    except OSError as error:
        raise SourceError(f"cannot read {tree.label(name)}: {error.strerror}") from error
    except DamagedSource:
        raise
    except (ValueError, BlobstoreError) as error:
        # A cut file ends in the middle of a character at worst.
        if isinstance(error, UnicodeDecodeError) and error.end < len(error.object):
            raise SourceError(
                f"{tree.label(name)} is not {error.encoding.upper()} at byte {error.start}; save it "
                "as UTF-8"
            ) from None
        raise DamagedSource(f"{tree.label(name)} cannot be read: {error}") from None
    if not isinstance(value, kind):
        expected = "object" if kind is dict else "list"
        raise DamagedSource(f"{tree.label(name)} is not a JSON {expected}")
    return value


def _listed(tree: FileTree) -> list[_Listed]:
    """Return the components that the folder's lists name, checked; not those that are excluded."""
    # A component is [library, class], or [null, null] if the pipeline does not have it.
    pipeline = [
        _Listed(name, str(value[0]), str(value[1]))
        for name, value in read_json(tree, "model_index.json", dict).items()
        if isinstance(value, list) and len(value) == 2 and value[1] is not None
    ]
    modules = [
        _Listed(path, *str(module.get("type")).rpartition(".")[::2])
        for module in read_json(tree, "modules.json", list)
        if isinstance(module, dict) and isinstance(path := module.get("path"), str)
    ]
    for part in (*pipeline, *modules):
        name = part.folder
        if name and not is_valid_part(name):
            raise DamagedSource(
                f"{tree.label()} lists a component {quote(name)}, which is not a folder name"
            )
        if part in pipeline and not tree.is_folder(name) and not tree.is_excluded(name):
            raise DamagedSource(
                f"model_index.json of {tree.label()} lists component {quote(name)}, but "
                "there is no such folder"
            )
    return [part for part in (*pipeline, *modules) if not tree.is_excluded(part.folder)]


def _check_has_weights(tree: FileTree, part: _Listed, kept: Collection[str]) -> Iterator[str]:
    """Check that a component has weights; yield a notice if it has none and may not need any.

    A download that was interrupted often has the config of a component and not its weights.

    Raises:
        DamagedSource: it needs weights and has none.
    """
    folder = part.folder
    names = [name for name in tree.entries(folder) if not _has_no_model(name)]
    if any(map(has_ending, names)):
        return
    if _WITHOUT_WEIGHTS.fullmatch(part.class_name) or any(
        name.startswith(f"{folder}/" if folder else "") for name in kept
    ):
        return
    what = f"{tree.label(folder)}, a {escape(part.class_name)}, has no weights"
    config = read_json(tree, joined(folder, "config.json"), dict)
    if part.library.partition(".")[0] in _LIBRARIES or not _MODEL_KEYS.isdisjoint(config):
        advice = f"{COMPLETE}, or leave it out with --exclude {shell_word(folder)}"
        raise DamagedSource(what, advice=advice if folder else COMPLETE)
    yield what


def _select_weights(
    tree: FileTree, folder: str, options: SourceOptions, selection: Selection
) -> None:
    """Add the weights of one component."""
    weights, names = options.weights, _weight_files(tree, folder, options)
    index: str | None = None
    chosen: Sequence[str] = _gguf_files(tree, folder, names, options, selection.notices)
    if chosen:  # and notices say which others are left out
        names = [name for name in names if not has_ending(name, GGUF)]
    else:
        index, chosen = _choose(tree, folder, names, weights)
    if index is not None:
        weight_map = _weight_map(tree, joined(folder, index))
        chosen = sorted(set(weight_map.values()))
        others = [name for name in names if name not in chosen]
        for name in chosen:
            if not tree.has(joined(folder, name)):
                raise DamagedSource(
                    f"shard {tree.label(joined(folder, name))} is missing; "
                    f"tensors that "
                    f"{tree.label(joined(folder, index))} places in it: "
                    f"{list(weight_map.values()).count(name)}",
                    advice=COMPLETE
                    + f", or choose other weights with --weights {shell_word(others[0])}"
                    if others
                    else "",
                )
    else:
        check_whole(tree, [joined(folder, name) for name in chosen])
    for name in chosen:  # it may be a broken link
        tree.size(joined(folder, name))
    selection.weights.append(
        ComponentWeights(
            folder,
            index and joined(folder, index),
            [joined(folder, name) for name in chosen],
            [joined(folder, name) for name in names if name not in chosen],
        )
    )


def _weight_map(tree: FileTree, index: str) -> dict[str, str]:
    """Return what an index says. Raises as :meth:`FileTree.document` and :func:`read_weight_map`."""
    return read_weight_map(tree.document(index, MAX_SMALL_FILE), tree.versions.open)


def _gguf_files(
    tree: FileTree,
    folder: str,
    names: Sequence[str],
    options: SourceOptions,
    notices: list[str],
) -> list[str]:
    """Return the GGUF files to read, if there are no other weights or none that the pattern matches."""
    others = [name for name in names if not has_ending(name, GGUF)]
    if options.weights is not None:
        others = [name for name in others if glob_matches(name, options.weights)]
    return [] if others else choose_gguf(tree, folder, options.weights, options.keep, notices)


def _unfollowed_indexes(
    tree: FileTree, part: ComponentWeights, kept: Collection[str], notices: list[str]
) -> Iterator[str]:
    """Yield the other indexes of a component, which exports write too; add notices of those left out."""
    entries = tree.entries(part.folder)
    left_out = {*entries} - {name.rpartition("/")[2] for name in part.files}
    for index in filter(is_weight_index, entries):
        name = joined(part.folder, index)
        if name == part.index_name or name in kept:
            continue
        size = tree.size(name)
        ending = SAFETENSORS if f"{SAFETENSORS}." in index else ".bin"
        others = (it for it in left_out if it.endswith(ending) and not _has_no_model(it))
        if any(others):  # it may name them
            notices.append(f"left out: {tree.label(name)}; choose other weights with --weights")
        elif size is None or size > MAX_SMALL_FILE or not is_safe_name(name):
            notices.append(f"left out: {tree.label(name)}, not a file that an export can write")
        else:
            yield name


def _weight_files(tree: FileTree, folder: str, options: SourceOptions) -> list[str]:
    """Return the names of the safetensors files, else of checkpoints, else of other formats; for a pattern, of all."""
    every = tree.entries(folder)
    names: list[str] = []
    for endings in ENDINGS:
        if names and options.weights is None:
            return names
        names += [
            name
            for name in every
            if has_ending(name, endings)
            and (options.weights is not None or not _has_no_model(name))
            and not _is_kept_whole(tree, joined(folder, name), options)
        ]
    return names


def _is_kept_whole(tree: FileTree, name: str, options: SourceOptions) -> bool:
    """Return whether ``--keep`` names a file that would be read, or matches one that cannot be."""
    if not any_glob_matches(name, options.keep):
        return False
    # Runtimes want GGUF files as they are. Other patterns are meant for what is not read.
    return name in options.keep or has_ending(name, GGUF) or not _may_be_weights(tree, name)


def _may_be_weights(tree: FileTree, name: str) -> bool:
    """Return whether the first bytes of a file are those of weights, or are not known yet."""
    head = tree.head(name)
    if head is None:
        return True
    if not has_ending(name, CHECKPOINTS):
        kind = kind_of(head)
        return kind is not None and kind.use == "read"
    from blobstore.sources.pytorch.container import (
        is_checkpoint,  # most models need no readers of pickles
    )

    return is_checkpoint(head)


def _choose(
    tree: FileTree, folder: str, names: Sequence[str], weights: str | None
) -> tuple[str | None, Sequence[str]]:
    """Return the index to follow, or the files to read, of one component."""
    indexes = {
        ending: [
            name for name in tree.entries(folder) if glob_matches(name, f"*{ending}.*index*.json")
        ]
        for ending in (SAFETENSORS, ".bin")
    }
    if weights is not None:
        every = [*indexes[SAFETENSORS], *indexes[".bin"]]
        return _choose_by(tree, folder, weights, every, names)
    is_safetensors = indexes[SAFETENSORS] or any(has_ending(name, SAFETENSORS) for name in names)
    ending = SAFETENSORS if is_safetensors else ".bin"
    if read_json(tree, joined(folder, "model_index.json"), dict):
        # The folder of a pipeline often has all components once more in a single file.
        names = [name for name in names if name.startswith(("model", "pytorch_model"))]
    for stem in _STEMS[ending]:
        single = f"{stem}{ending}"
        index = f"{single}.index.json"
        if index in indexes[ending] and (mapped := _mapped(tree, folder, index)):
            if single in names and single not in mapped:
                raise SourceError(
                    f"{tree.label(folder)} has both {single} and the shards of {index}; "
                    f"choose with --weights {single} or --weights '{stem}-*{ending}'"
                )
            return index, ()
        if single in names:
            return None, [single]
        shards = [name for name in names if re.fullmatch(rf"{stem}-\d+-of-\d+\{ending}", name)]
        if shards:
            _check_numbers(tree, folder, shards)
            return None, shards
    # Of a variant, such as model.safetensors.index.fp16.json.
    complete = [name for name in indexes[ending] if {*names} <= _mapped(tree, folder, name)]
    if len(complete) == 1:
        return complete[0], ()
    names = [
        name
        for name in names
        if not _is_of_earlier_step(name, names)
        and (has_ending(name, SAFETENSORS) or _may_be_weights(tree, joined(folder, name)))
    ]
    if len(names) > 1:
        raise SourceError(
            f"{tree.label(folder)} has several weight files "
            f"({join_some([*map(quote, names)], 5)}) and none is named "
            f"{_STEMS[ending][0]}{ending}; choose one with --weights {shell_word(names[0])}"
        )
    return None, names


def _is_of_earlier_step(name: str, names: Sequence[str]) -> bool:
    """Return whether a file has adapters of an earlier step than the file without a number."""
    return _ADAPTERS in names and _ADAPTERS_OF_STEP.fullmatch(name) is not None


def _choose_by(
    tree: FileTree, folder: str, weights: str, indexes: Sequence[str], names: Sequence[str]
) -> tuple[str | None, Sequence[str]]:
    """Return the index or the files that ``--weights`` chooses."""
    # A pattern such as '*.bin' means the model. Training state has to be named exactly.
    chosen = {
        name
        for name in names
        if glob_matches(name, weights) and (name == weights or not _has_no_model(name))
    }
    for index in indexes:
        mapped = _mapped(tree, folder, index)
        if not mapped & chosen:
            continue
        if chosen <= mapped:
            return index, ()
        raise SourceError(
            f"pattern {quote(weights)} chooses files of {tree.label(joined(folder, index))} and "
            "others; give a narrower --weights"
        )
    return None, sorted(chosen)


def _mapped(tree: FileTree, folder: str, index: str) -> set[str]:
    """Return the names of the files that an index names."""
    return {*_weight_map(tree, joined(folder, index)).values()}


def _check_numbers(tree: FileTree, folder: str, shards: Sequence[str]) -> None:
    """Check that shards without an index are one complete set, by the numbers in their names."""
    sets: dict[str, set[int]] = {}
    for name in shards:
        sets.setdefault(name.rpartition("-")[2], set()).add(
            int(re.findall(r"-(\d+)-of-", name)[-1])
        )
    complete = [
        total
        for total, numbers in sets.items()
        # Not by a range: a name can claim billions of shards.
        if min(numbers) == 1 and max(numbers) == len(numbers) == int(total.partition(".")[0])
    ]
    if len(sets) > 1 and complete:
        raise SourceError(
            f"{tree.label(folder)} has {len(sets)} sets of shards, and there is no index; choose with "
            + " or ".join(f"--weights '*-of-{total}'" for total in sorted(complete))
        )
    if not complete:
        raise DamagedSource(
            f"the weight files of {tree.label(folder)} are not a complete set of shards, and there is "
            f"no index: {len(shards)} found, such as {quote(shards[0])}"
        )


def _lacks_adapter(tree: FileTree, used: Collection[str], name: str) -> bool:
    """Return whether a file is the config of an adapter next to a model, and the adapter is not imported.

    Libraries would look for it.
    """
    folder, _, last = name.rpartition("/")
    is_next_to_model = last == _ADAPTER_CONFIG and tree.has(joined(folder, "config.json"))
    return is_next_to_model and not any(
        it.rpartition("/")[0] == folder and _OF_ADAPTER.fullmatch(it.rpartition("/")[2])
        for it in used
    )


def _other_models(tree: FileTree, stored: Collection[str]) -> Iterator[str]:
    """Yield the paths of the folders of which nothing is read and that have weights."""
    for name in tree.entries() if tree.is_local else ():
        is_read = any(file.startswith(f"{name}/") for file in stored)
        if not is_read and not name.startswith(".") and tree.is_folder(name):
            with suppress(OSError, SourceError):
                inside = (
                    it for it in tree.entries(name) if has_ending(it) and not _has_no_model(it)
                )
                if any(_may_be_weights(tree, joined(name, it)) for it in inside):
                    yield str(tree.root / name)


def _other_kind(tree: FileTree, name: str) -> FileKind | None:
    """Return the kind of a file that has weights, as far as it is known, and is not read."""
    if not has_ending(name):
        return kind_of_name(name)
    if _TRAINING_STATE.fullmatch(name.rpartition("/")[2]):
        return FileKind("the state of a training program, which has no model")
    if _may_be_weights(tree, name):
        return None
    return kind_of(tree.head(name) or b"") or FileKind("a file of an unknown format")


def _no_weights(tree: FileTree, weights: str | None) -> BlobstoreError:
    if weights is not None:
        labels = sorted({it.quantization for it in gguf_files(tree).models if it.quantization})
        return SourceError(
            f"no file in {tree.label()} matches --weights {quote(weights)}",
            advice=f"it has {join_some(labels, 20)}" if labels else "",
        )
    names = [*tree.files_below()]
    deeper = dict.fromkeys(
        str(path.parent)
        for path in map(PurePath, names)
        if has_ending(path.name) and not _has_no_model(path.name)
    )
    for name in sorted(names, key=lambda name: name.count("/")):
        check_whole(tree, [name])
        path = PurePath(name)
        # The state of a training program next to weights is of that model, which --all imports.
        is_state = _has_no_model(path.name) and str(path.parent) in deeper
        if not is_state and (kind := _other_kind(tree, name)):
            where = f"{tree.label()} has no weights that can be read, but {quote(name)}"
            keep = keeping(name, names, instead_of=kind.advice)
            return kind.error(where, advice="" if kind.use == "absent" else keep)
    what = "has no weight files" if tree.entries() else "is empty"
    advice = ""
    if deeper:
        advice = f"{tree.label(next(iter(deeper)))} has some"
        if len(deeper) > 1 and tree.is_local:
            advice = (
                f"{cli_command('create', '--all', tree.place)} imports each folder that has some"
            )
    elif tree.is_folder("manifests") and tree.is_folder("blobs"):
        what = "is a folder of a store of models, Ollama's or another one"
        advice = f"{cli_command('create', '--all', f'{OLLAMA}://')} imports those of $OLLAMA_MODELS"
    elif others := [it for it in names if not is_kept(it.rpartition("/")[2])]:
        largest = max(others, key=lambda it: tree.size(it) or 0)
        kind = kind_of(tree.head(largest) or b" ") or FileKind("of an unknown format")
        advice = (
            f"{quote(largest)} is {kind.what}; {keeping(largest, others, instead_of=kind.advice)}"
        )
    return SourceError(
        f"{tree.label()} {what}; expected a Hugging Face model folder", advice=advice
    )
