"""Divides the GGUF files of a folder into models: each has one quantization and the companions that it needs.

A folder often has one model in several quantizations, a projector in several types, and files that no server
loads. Files that lie in a folder named after a quantization count as if they lay in the folder itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.escape import cli_command, join_some, quote, shell_word
from blobstore.core.globs import any_glob_matches, glob_matches
from blobstore.errors import BlobstoreError, SourceError
from blobstore.gguf.file import read_file_header
from blobstore.gguf.header import MAGIC, InvalidGguf, parse_start
from blobstore.gguf.roles import (
    COMPANIONS,
    Role,
    belongs_to,
    best,
    is_quantization,
    named,
    role_of,
    role_of_name,
)
from blobstore.sources.file_tree import joined
from blobstore.sources.gguf import GGUF

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from blobstore.sources.file_tree import FileTree

_START = 64 << 10
"""Bytes of a file that have its metadata up to the tokenizer."""
_SHOWN = 5
EACH_MODEL = "imports each model"
"""The end of a notice of models that are left out."""


class GgufModel(NamedTuple):
    """One quantization of a model. Names are relative to the folder that was looked at."""

    stem: str
    """What the names of all quantizations have in common, in lower case."""
    quantization: str
    """Empty if no name says it."""
    files: Sequence[str]
    """The file of the model, or its parts."""
    companions: Sequence[str]
    """The files to load with it."""


@dataclass(frozen=True, slots=True)
class GgufFiles:
    """The GGUF files of a folder."""

    models: Sequence[GgufModel]
    roles: Mapping[str, Role] = field(repr=False)
    """The roles of all files, by name."""

    @property
    def folders(self) -> set[str]:
        """The folders that have some of the files, if there are models."""
        names = self.roles if self.models else ()
        return {name.rpartition("/")[0] for name in names} - {""}

    def pattern_of(self, model: GgufModel) -> str:
        """Return what ``--weights`` has to be for a model: its quantization, or else its first file."""
        same = [it for it in self.models if it.quantization == model.quantization]
        return model.quantization if model.quantization and len(same) == 1 else model.files[0]


def gguf_files(tree: FileTree, folder: str = "", keep: Iterable[str] = ()) -> GgufFiles:
    """Return the GGUF files of a folder, except those that match ``keep``.

    Files that are only listed are taken for what their names say.

    Raises:
        OSError, SourceError: the folder cannot be read.
    """
    found: dict[str, dict[str, Role]] = {}  # by folder
    for full in tree.files_below(folder):
        name = full[len(folder) + 1 :] if folder else full
        above, _, last = name.rpartition("/")
        is_near = "/" not in above and last.lower().endswith(GGUF) and not last.startswith(".")
        if is_near and not any_glob_matches(full, keep):
            found.setdefault(above, {})[name] = _role(tree, full)
    roles: dict[str, Role] = {}
    for above, inside in found.items():
        # A projector next to another model belongs to that.
        if not above or is_quantization(above) or "model" not in inside.values():
            roles |= inside
    models = [name for name, role in roles.items() if role == "model"]
    groups = _grouped(tree, folder, models) if len(models) > 1 else [models] if models else []
    stems = {named(group[0]).stem for group in groups}
    described = []
    for group in groups:
        stem, quantization, _ = named(group[0])
        usable = [
            name
            for name, role in roles.items()
            if role in COMPANIONS and (len(stems) == 1 or belongs_to(named(name).stem, stem))
        ]
        companions = list(_one_of_each_type(usable, roles, quantization))
        described.append(GgufModel(stem, quantization, group, companions))
    return GgufFiles(described, roles)


def choose_gguf(
    tree: FileTree, folder: str, weights: str | None, keep: Sequence[str], notices: list[str]
) -> list[str]:
    """Return the files of the model to read, and of its companions; add notices of the others.

    Args:
        tree: the files of the source.
        folder: the folder of the component.
        weights: a pattern of names, or a quantization in letters of any case; None for the only model.
        keep: patterns of files that are stored as they are.
        notices: messages for the user.

    Raises:
        SourceError: there are several models, or none that ``weights`` chooses.
    """
    found = gguf_files(tree, folder, keep)
    chosen = [it for it in found.models if weights is None or _is_chosen(it, weights)]
    if len(chosen) > 1:
        labels = [found.pattern_of(model) for model in chosen]
        raise SourceError(
            f"{tree.label(folder)} has several GGUF models ({join_some([*map(quote, labels)], _SHOWN)})",
            advice=f"choose one with --weights {shell_word(labels[0])}, or import each with "
            f"{cli_command('create', '--all', tree.place)}",
        )
    matching = [name for name in found.roles if weights is not None and glob_matches(name, weights)]
    if chosen:
        files, companions = [*chosen[0].files], chosen[0].companions
        named_roles = {found.roles[name] for name in matching if name not in files}
        files += [name for name in companions if found.roles[name] not in named_roles]
        files += [name for name in matching if name not in files]
    else:
        files = matching if weights is not None else list(found.roles)
        if len(files) > 1 and len({named(name).stem for name in files}) > 1:
            raise SourceError(
                f"{tree.label(folder)} has several GGUF files ({join_some([*map(quote, files)], _SHOWN)}) "
                f"and no model among them; choose one with --weights {shell_word(files[0])}"
            )
        files = [best(files, "")] if files else []
    if files:
        notices.extend(_left_out(tree, folder, found, files))
    return files


def _left_out(tree: FileTree, folder: str, found: GgufFiles, files: Sequence[str]) -> Iterator[str]:
    """Yield notices of the GGUF files that are not read, one for each role."""
    for role in dict.fromkeys(found.roles.values()):
        others = [it for it, its in found.roles.items() if its == role and it not in files]
        if not others:
            continue
        listed = join_some([tree.label(joined(folder, name)) for name in others], _SHOWN)
        advice = "--keep stores such files as they are"
        if role == "model":
            advice = f"{cli_command('create', '--all', tree.place)} {EACH_MODEL}"
        elif role in COMPANIONS and role in map(found.roles.get, files):
            advice = "--exclude leaves out the one that was taken instead"
        yield f"left out: {listed} (role: {role}); {advice}"


def _is_chosen(model: GgufModel, weights: str) -> bool:
    return model.quantization == weights.upper() or any(
        glob_matches(name, weights) for name in model.files
    )


def _role(tree: FileTree, name: str) -> Role:
    try:
        descriptor, _ = tree.versions.open(tree.root / name)
    except (OSError, BlobstoreError):  # it is not here yet, or the reader says why
        return role_of_name(name)
    try:
        data = os.pread(descriptor, _START, 0)
        return role_of(*parse_start(data), name) if data[:4] == MAGIC else role_of_name(name)
    except (OSError, InvalidGguf):
        return role_of_name(name)
    finally:
        os.close(descriptor)


def _grouped(tree: FileTree, folder: str, names: Sequence[str]) -> list[list[str]]:
    """Return the files of each model; parts are known by their names, or else by their headers."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for name in names:
        stem, quantization, part = named(name)
        total = part.rpartition("-")[2]
        if not part:
            stem, total = _without_numbers(stem), ""
        key = (name.rpartition("/")[0], stem, quantization, total)
        groups.setdefault(key, []).append(name)
    found = []
    for key, group in groups.items():
        if key[-1] or len(group) == 1:
            found.append(group)
            continue
        parts = [name for name in group if _is_part(tree, joined(folder, name))]
        found += [[name] for name in group if name not in parts]
        found += [parts] if parts else []
    return sorted(found)


def _without_numbers(stem: str) -> str:
    return "".join("#" if letter.isdigit() else letter for letter in stem)


def _is_part(tree: FileTree, name: str) -> bool:
    """Return whether the header of a file says that it is one of several parts."""
    try:
        header = read_file_header(tree.root / name, tree.versions.open)
    except BlobstoreError:
        return False
    count = header.metadata.get("split.count", 1)
    return isinstance(count, int) and count > 1


def _one_of_each_type(
    names: Sequence[str], roles: Mapping[str, Role], quantization: str
) -> Iterator[str]:
    """Yield one of the files that differ in their types only, for each role and stem."""
    alike: dict[tuple[Role, str], list[str]] = {}
    for name in names:
        alike.setdefault((roles[name], named(name).stem), []).append(name)
    for same in alike.values():
        yield best(same, quantization)
