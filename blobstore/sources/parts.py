"""Finds files that are not finished, or that are only a part of the weights.

What says so is a control file of a downloader next to the file, the file's own name, files or folders that differ
from it in a number only, or values inside. All of it is asked here.
"""

from __future__ import annotations

import contextlib
import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from blobstore.core.escape import join_some, quote, shell_word
from blobstore.errors import DamagedSource, UnsupportedSource
from blobstore.gguf.roles import role_of_name
from blobstore.sources.file_tree import joined
from blobstore.sources.gguf import GGUF

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from blobstore.core.tensor import TensorSpec
    from blobstore.sources.file_tree import FileTree

DATA_FILE: Final = ".distcp"
"""Ending of the data files of ``torch.distributed.checkpoint``."""
_UNFINISHED: Final = re.compile(
    r"(?P<whole>.+)\.(aria2(__temp)?|part|partial|incomplete|unfinished|crdownload|opdownload|download(ing|inprogress)?"
    r"|!qb|!ut|bc!|st|te?mp|filepart|dctmp|xltd|td(\.cfg)?|ytdl)",
    re.IGNORECASE,
)
"""Matches the names of what downloaders have next to a file, or in its place, until it is complete."""
_DOWNLOADS: Final = (".cache/huggingface/download", ".huggingface/download", "._____temp")
"""Folders in which clients of the Hub and of ModelScope have files until they are complete."""
_PIECE: Final = re.compile(
    r"(?P<whole>.+\.(?:gguf|safetensors|bin|pt|pth|ckpt))"
    r"(?P<mark>[-._](?:part|split)[-_]?(?=\d+(?:of\d+)?$|[a-z]{1,2}$)|\.(?=0\d\d$|a[a-z]$))\w+",
    re.IGNORECASE,
)
"""Matches the names of files that were cut at any byte, as ``split`` does."""
_NAMED: Final = (
    (
        re.compile(r"(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_(optim|model)_states\.pt"),
        "the part of one process of DeepSpeed ZeRO",
        "import the folder",
    ),
    (
        re.compile(r"layer_\d+(-model_\d+-model|_expert_\d+_mp_rank_\d+_(model|optim))_states\.pt"),
        "one layer or expert of a checkpoint of DeepSpeed",
        "load the checkpoint with DeepSpeed and save complete weights",
    ),
    (
        re.compile(r".*(fsdp_|world_size_([2-9]|\d{2,9})_)rank_?\d+\.(bin|pt|pth)"),
        "the part of one process of FSDP",
        "merge the parts with the program that saved them, and import the result",
    ),
    (
        re.compile(rf"\.metadata|.*{re.escape(DATA_FILE)}"),
        "one file of a folder of torch.distributed.checkpoint",
        "import the folder",
    ),
)
"""Names of files that are always parts."""
_JOIN: Final = "join the parts with the program that saved them, and import the result"
_FOLDER: Final = "create from the folder that has all of them"
_OF: Final = re.compile(r"-\d{1,9}-of-(?P<count>\d{1,9})(?!\d)")
_NUMBER: Final = re.compile(
    r"(?<![a-z])(?P<word>[mtpe]p_rank|model_part|consolidated|world_size_\d+_rank|rank|shard|part|tp)"
    r"[-_.]?(?P<number>\d{1,9})(?!\d)",
    re.IGNORECASE,
)
"""Matches the number of a process in the name of a file or folder."""
_ALWAYS: Final = ("mp_rank", "tp_rank", "pp_rank", "ep_rank", "model_part", "consolidated")
"""Words whose number is that of a part if it is not 0, whatever lies next to it."""
_SIZES: Final = frozenset(
    (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "model_parallel_size"),
        *("expert_model_parallel_size", "expert_tensor_parallel_size", "mp_world_size"),
        *("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"),
    )
)
"""Keys of programs of training for the number of processes that have parts of the model."""
_MAX_DEPTH: Final = 4
_MAX_DIGITS: Final = 10
_PART_KEY: Final = "DCP_SHARDING_INFO"
"""The key in the metadata of a safetensors file that holds one rank's parts of tensors."""
_SHOWN: Final = 4


def check_finished(
    tree: FileTree, used: Collection[str], is_wanted: Callable[[str], bool]
) -> Iterator[str]:
    """Check that no downloader says that a file is not complete; yield a notice if one may say so.

    Args:
        tree: the files of the source.
        used: the names of those that are imported.
        is_wanted: returns whether a file of this name, without its folder, would be imported.

    Raises:
        DamagedSource: a file that is imported, or would be if it were there, is not complete.
    """
    for folder in sorted({"", *(name.rpartition("/")[0] for name in used)}):
        for entry in tree.entries(folder):
            found = _UNFINISHED.fullmatch(entry)
            if found is None:
                continue
            name, whole = joined(folder, entry), found["whole"]
            is_read = joined(folder, whole) in used
            if is_read or (not tree.has(joined(folder, whole)) and is_wanted(whole)):
                if not is_read and _is_another_model(whole, used):
                    yield f"left out: {tree.label(name)}, an unfinished download of another model"
                    continue
                raise _unfinished(tree.label(name), name)
    for folder in _DOWNLOADS:
        if any(
            name.endswith((".incomplete", ".safetensors", ".bin")) for name in tree.entries(folder)
        ):
            yield (
                f"{tree.label(folder)} has unfinished downloads; if files are missing, download the "
                "model again"
            )


def _is_another_model(name: str, used: Collection[str]) -> bool:
    """Return whether a GGUF file is not needed by the model that is read: it is of another quantization."""
    is_model = name.lower().endswith(GGUF) and role_of_name(name) == "model"
    return is_model and any(it.lower().endswith(GGUF) for it in used)


def check_whole(tree: FileTree, names: Iterable[str]) -> None:
    """Check that files without an index are neither parts nor pieces, by their names and their neighbours.

    Raises:
        DamagedSource: one is a download that is not finished.
        UnsupportedSource: one is a part.
    """
    names = [*names]
    for name in names:
        _check_file(name.rpartition("/")[2], tree.label(name))
        _check_numbers(name.split("/"), tree.entries, tree.label(name), names)


def check_downloaded(path: Path, is_excluded: Callable[[str], bool]) -> None:
    """Check that no downloader says that one file is not complete.

    ``is_excluded`` returns whether a file of a name next to it counts as absent.

    Raises:
        DamagedSource: one does.
    """
    if _UNFINISHED.fullmatch(path.name):
        raise DamagedSource(f"{quote(path)} is an unfinished download", advice="finish it")
    for entry in _names_in(path.absolute().parent):
        found = _UNFINISHED.fullmatch(entry)
        if found and found["whole"] == path.name and not is_excluded(entry):
            raise _unfinished(quote(path.with_name(entry)), entry)


def check_whole_path(path: Path, *, is_part: bool = False) -> None:
    """Check one file, or a folder, as :func:`check_whole`, and by the folders that it is in.

    Args:
        path: the file or folder.
        is_part: whether the user asks for a part of the file.

    Raises:
        DamagedSource: it is a download that is not finished.
        UnsupportedSource: it is a part.
    """
    path = path.absolute()
    is_file = not path.is_dir()
    if is_file:
        _check_file(path.name, quote(path), is_part=is_part)
    parts = path.parts[1:][-3:]
    root = Path(*path.parts[: len(path.parts) - len(parts)])
    _check_numbers(parts, lambda name: _names_in(root / name), quote(path), (), is_file=is_file)


def _names_in(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)  # noqa: PTH208 - names
    return []


def check_content(
    path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str], values: Any
) -> None:
    """Check that nothing in a file says that it has parts of tensors.

    Args:
        path: the file.
        specs: its tensors.
        metadata: the ``__metadata__`` of a safetensors file.
        values: the simple values of a PyTorch checkpoint.

    Raises:
        UnsupportedSource: something does.
    """
    if _PART_KEY in metadata:
        raise UnsupportedSource(
            f"{quote(path)} has parts of tensors, as torch.distributed.checkpoint writes them "
            f"({_PART_KEY} in its metadata)",
            advice="create from the folder that has the shards of all processes",
        )
    if found := next(_sizes(values), None):
        raise UnsupportedSource(
            f"{quote(path)} has the part of one process: {found[0]} is {found[1]}",
            advice=f"{_JOIN}; if its tensors are complete, save its state_dict alone with torch",
        )
    embedding, norm = specs.get("tok_embeddings.weight"), specs.get("norm.weight")
    if embedding and norm and embedding.shape[-1:] != norm.shape[-1:]:  # Meta's shards
        raise UnsupportedSource(
            f"{quote(path)} has a part of 'tok_embeddings.weight'",
            advice="create from the folder that has all shards and params.json",
        )


def _unfinished(label: str, name: str) -> DamagedSource:
    return DamagedSource(
        f"{label} says that a download is not finished",
        advice=f"finish it, or if the file is complete, ignore that with --exclude {shell_word(name)}",
    )


def _check_file(name: str, label: str, *, is_part: bool = False) -> None:
    """Check the name of a file by itself; ``is_part`` says that the user asks for a part of it."""
    if _UNFINISHED.fullmatch(name):
        raise DamagedSource(f"{label} is an unfinished download", advice="finish it")
    if piece := _PIECE.fullmatch(name):
        whole = label[1:-1].removesuffix(name) + piece["whole"]
        raise UnsupportedSource(
            f"{label} is a piece of {quote(piece['whole'])}",
            advice=f"join all pieces in order with 'cat {shell_word(whole + piece['mark'])}* > "
            f"{shell_word(whole)}', and import that",
        )
    for pattern, what, advice in _NAMED:
        if pattern.fullmatch(name) and not is_part:
            raise UnsupportedSource(f"{label} is {what}", advice=advice)


def _check_numbers(
    parts: Sequence[str],
    entries: Callable[[str], Iterable[str]],
    label: str,
    used: Collection[str],
    *,
    is_file: bool = True,
) -> None:
    """Check the numbers in the parts of a path; ``used`` has the names of files that are read together."""
    for depth, name in enumerate(parts):
        inside = partial(entries, "/".join(parts[:depth]))
        found: tuple[str, str] | None
        if is_file and depth == len(parts) - 1:
            here = {it.rpartition("/")[2] for it in used}
            found = _shard_of(name, here) or _rank_of(name, inside, here)
        else:
            found = _rank_of(name, inside, (), "p_rank")
        if found:
            raise UnsupportedSource(f"{label} is one of several parts: {found[0]}", advice=found[1])


def _shard_of(name: str, used: Collection[str]) -> tuple[str, str] | None:
    """Return what says that a file is a shard, of which not all are read, and the advice."""
    found = _OF.search(name)
    if found is None or name.endswith(GGUF):  # the header says more
        return None
    count = int(found["count"])
    same = [it for it in used if _OF.sub("", it) == _OF.sub("", name)]
    is_whole = count <= 1 or len(same) == count
    return None if is_whole else (f"its name says that there are {count}", _FOLDER)


def _rank_of(
    name: str, entries: Callable[[], Iterable[str]], used: Collection[str], ending: str = ""
) -> tuple[str, str] | None:
    """Return what says that a name has the number of a process, and the advice; ``ending`` ends the word before it."""
    for found in _NUMBER.finditer(name):
        word = found["word"].lower()
        if not word.endswith(ending):
            continue
        before, after = name[: found.start("number")], name[found.end("number") :]
        alike = {int(found["number"]): name}
        for it in entries():  # only here: a folder may have thousands, and few names have a number
            number = it.removeprefix(before).removesuffix(after)
            if number.isdecimal() and len(number) < _MAX_DIGITS and before + number + after == it:
                alike[int(number)] = it
        others = sorted({*alike.values()} - {name, *used})
        # Numbers that do not count files are others: the rank of an adapter, the number of a step.
        is_counted = min(alike) <= 1 and max(alike) - min(alike) == len(alike) - 1
        advice = _FOLDER if word == "consolidated" else _JOIN
        if others and is_counted:
            return f"{join_some([*map(quote, others)], _SHOWN)} is next to it", advice
        if word in _ALWAYS and int(found["number"]) and not {*alike.values()} <= {*used}:
            return f"its name has {quote(found[0])}", advice
    return None


def _sizes(value: Any, depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield the keys that say how many processes have parts of the model, and the numbers above 1."""
    if not isinstance(value, dict) or depth == _MAX_DEPTH:
        return
    for key, inner in value.items():
        if key in _SIZES and type(inner) is int and inner > 1:
            yield key, inner
        yield from _sizes(inner, depth + 1)
