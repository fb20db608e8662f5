"""References: the names of models, ``[host/][namespace/]model[:tag]``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from blobstore.core.escape import most_like, question, quote, quote_place
from blobstore.core.globs import glob_matches
from blobstore.errors import InvalidReference, NameConflict, UsageError

DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"

# Ollama's grammar, ASCII only: the first character is alphanumeric or "_", so that no part can be ".", "..", hidden,
# or an option. No part is longer than Ollama permits, although the Hub does, because Ollama skips the manifests of
# other names when it looks for layers that nothing needs, and removes those.
_PARTS = {
    "host": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,254}", re.ASCII),
    "namespace": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}", re.ASCII),
    "model": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}", re.ASCII),
    "tag": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}", re.ASCII),
}
_PATH = re.compile("/".join(pattern.pattern for pattern in _PARTS.values()), re.ASCII)
"""Matches all parts at once. None of them can have a slash."""
_NUMBERS = re.compile("([0-9]+)")
_DIGITS: Final = 80
"""The digits of the longest number in a model or tag."""
_PATHS = ("/", "./", "../", "~")
_HOST_ALONE = re.compile(
    r"localhost|[A-Za-z0-9][\w-]*(?:(?:\.[\w-]+)+(?::\d{1,5})?|:\d{1,5})", re.ASCII
)
"""Matches what can only be a host, as with docker: it has a dot or a port, or is ``localhost``."""
_RULES = {
    "host": "1 to 255 letters, digits, '_', '-', '.' and ':'",
    "namespace": "1 to 80 letters, digits, '_' and '-'",
    "model": "1 to 80 letters, digits, '_', '-' and '.'",
    "tag": "1 to 80 letters, digits, '_', '-' and '.'",
}


@dataclass(frozen=True, slots=True)
class Reference:
    """The full name of a model. Every part has been checked, so it can become a path. Names sort by their parts."""

    host: str
    namespace: str
    model: str
    tag: str

    def __post_init__(self) -> None:
        if is_path(f"{self.host}/{self.namespace}/{self.model}/{self.tag}"):
            return
        for part, pattern in _PARTS.items():
            value = getattr(self, part)
            if pattern.fullmatch(value) is None:
                raise InvalidReference(
                    f"not a model name: {part} {quote(value)} must be {_RULES[part]}, "
                    "beginning with a letter, digit or '_'"
                )

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Return the reference that ``text`` spells, its missing parts filled with the defaults.

        A model has no namespace of its own in ``host/model``, where the host has a dot or a port.

        Raises:
            InvalidReference: a part is empty, too long, or has a character outside the grammar,
                or there are more than three parts.
        """
        if text.startswith("oci://"):
            raise InvalidReference(
                f"not a model name: {quote_place(text)} is an address in a registry",
                advice="fetch the model with 'blobstore pull' first",
            )
        if text.startswith(_PATHS):
            raise InvalidReference(f"not a model name: {quote_place(text)} is a path")
        path, slash, last = text.rpartition("/")
        model, colon, tag = last.partition(":")
        if colon and not tag:
            raise InvalidReference(f"not a model name: {quote_place(text)} has an empty tag")
        parts = path.split("/") if slash else []
        if len(parts) > 2:
            raise InvalidReference(
                f"not a model name: {quote_place(text)}; expected [host/][namespace/]model[:tag]"
            )
        if len(parts) == 1 and _HOST_ALONE.fullmatch(parts[0]):
            parts.append(DEFAULT_NAMESPACE)
        host, namespace = [DEFAULT_HOST, DEFAULT_NAMESPACE][: 2 - len(parts)] + parts
        return cls(host, namespace, model, tag or DEFAULT_TAG)

    @classmethod
    def of(cls, name: str | Reference) -> Reference:
        """Return ``name`` itself if it is a reference, and parse it if it is a string.

        Raises:
            InvalidReference: as :meth:`parse`.
            UsageError: it is neither.
        """
        if not isinstance(name, str | Reference):
            raise UsageError(
                f"a name is a text, got {quote(type(name).__name__)}",
                advice="store= takes a store",
            )
        if isinstance(name, Reference):
            return name
        try:
            return cls.parse(name)
        except InvalidReference as error:
            advice = error.advice
            if not advice and name.startswith(_PATHS):
                advice = "store= takes a store"
            elif not advice and not set("*?[").isdisjoint(name):
                advice = "a glob stands for several models, and one is needed here"
            raise InvalidReference(error.message, advice=advice) from None

    def __lt__(self, other: Reference) -> bool:
        pairs = zip(self.parts, other.parts, strict=True)
        one, two = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
        return natural_order(one) < natural_order(two)

    @property
    def parts(self) -> tuple[str, str, str, str]:
        """Host, namespace, model and tag."""
        return (self.host, self.namespace, self.model, self.tag)

    @property
    def full(self) -> str:
        """The name with all of its parts."""
        return f"{self.host}/{self.namespace}/{self.model}:{self.tag}"

    def __str__(self) -> str:
        """Return the shortest name that parses to this reference; the tag is always shown."""
        parts = [f"{self.model}:{self.tag}"]
        is_own = self.namespace != DEFAULT_NAMESPACE
        if is_own or not (self.host == DEFAULT_HOST or _HOST_ALONE.fullmatch(self.host)):
            parts.insert(0, self.namespace)
        if self.host != DEFAULT_HOST or _HOST_ALONE.fullmatch(self.namespace):
            parts.insert(0, self.host)
        return "/".join(parts)

    def under(self, prefix: str) -> Reference:
        """Return the name with the host and namespace of ``prefix``, which is ``[host/]namespace``.

        Raises:
            InvalidReference: ``prefix`` is neither a namespace nor a host.
        """
        return replace(Reference.parse(f"{prefix.rstrip('/')}/x"), model=self.model, tag=self.tag)

    def __repr__(self) -> str:
        return f"Reference({str(self)!r})"


def is_path(text: str) -> bool:
    """Return whether a text is the path of a reference: its parts with slashes between them."""
    return _PATH.fullmatch(text) is not None


def all_under(prefix: str | None, references: Iterable[Reference]) -> list[Reference]:
    """Return names with the host and namespace of a prefix, if there is one; see :meth:`Reference.under`.

    Raises:
        InvalidReference: the prefix is neither a namespace nor a host.
        NameConflict: two names would become one.
    """
    before = list(references)
    after = before if prefix is None else [one.under(prefix) for one in before]
    first: dict[Reference, Reference] = {}
    for old, new in zip(before, after, strict=True):
        if (other := first.setdefault(new, old)) != old:
            raise NameConflict(f"{quote(other)} and {quote(old)} would both become {quote(new)}")
    return after


Names = str | Reference | Iterable[str | Reference]
"""One model or several."""


def similar_names(reference: Reference, others: Iterable[Reference]) -> str:
    """Return a question about the names that are most like a reference, or nothing."""
    # The default tag would make all names alike.
    name = str(reference).removesuffix(":latest")
    models = {str(one).removesuffix(":latest"): one.model for one in others}
    near = most_like(name, models, 0.6)
    if not near:  # the namespace or the tag may be missing
        alike = most_like(reference.model, dict.fromkeys(models.values()), 0.7)
        near = [one for one, model in models.items() if model in alike][:2]
    return question(near)


def natural_order(part: str) -> tuple[str, str]:
    """Return a key that sorts parts of names as people do, numbers by their values: ``step-5``, ``step-10``."""
    return _NUMBERS.sub(lambda match: match[0].zfill(_DIGITS), part), part


def by_numbers(reference: Reference) -> tuple[list[str], list[int]]:
    """Return a key that sorts names that differ only in numbers by these: ``step-9-a``, ``step-10-a``, ``step-1-b``."""
    parts = _NUMBERS.split(reference.full)
    return parts[::2], [int(part) for part in parts[1::2]]


def own_first(reference: Reference, given: float) -> tuple[bool, float, Reference]:
    """Return a key that sorts the names of a model, each with its time: the own one is the first.

    That is the oldest with a number in its tag: in a copy of a store, ``run:best`` may be older than ``run:step-5``.
    """
    return _NUMBERS.search(reference.tag) is None, given, reference


def is_alias_of(reference: Reference, model: Reference) -> bool:
    """Return whether a name of a model is no step or version like its own one: ``best``, but not ``v2`` next to ``v1``."""
    return by_numbers(reference)[0] != by_numbers(model)[0]


def name_matches(reference: Reference, pattern: str) -> bool:
    """Return whether a glob matches a name as it is shown, or with all its parts if the glob begins with the host.

    The tag ``latest`` may be left out. A wildcard matches nothing that is left out: ``*llama*`` is about names that
    people see, and not about all of ``registry.ollama.ai``.

    Raises:
        UsageError: the glob is too long.
    """
    is_full = pattern.startswith(f"{reference.host}/")
    names = (str(reference), reference.full) if is_full else (str(reference),)
    spellings = {*names, *(one.removesuffix(":latest") for one in names)}
    return any(glob_matches(spelling, pattern) for spelling in spellings)
