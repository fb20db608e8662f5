"""The glossary: words that this project does not use, and what it says instead."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "blobstore",
    "manifests",
    "cli",
    "tests",
    "docs",
    ".ci",
    "changelog.d",
    ".github",
)
WRITTEN = {".py", ".md", ".toml", ".yaml", ".yml", ".ipynb", ""}
NOT_OURS = ("tests/data", "tests/vectors")

# A pattern in lower case, and what to write instead. A word ends at an underscore too: names are prose.
GLOSSARY = {
    r"anew": "again",
    r"whoever": "a caller that, or the passive voice",
    r"(?:is|are|was|were|be|being|been) told": "is reported",
    r"(?<!cannot )(?<!can )tells? (?:whether|what|how|of|which|where|that)": "returns whether, reports",
    r"coded (?:by|alone|against)": "delta-encoded against a base, compressed on its own",
    r"made smaller|less room|more room": "compressed, less space",
    r"room(?!s? number)": "space",
    r"mend(?:s|ed|ing)?": "repair",
    r"put aside|putting aside": "quarantine",
    r"dealt(?: out)?": "shard, distribute",
    r"g[ia]ven? back": "release, return, free",
    r"beside": "next to, besides, with",
    r"meanwhile": "concurrently, in the meantime",
    r"endless": "non-finite",
    r"(?:that|which|it|what) (?:is|are) (?:none|no(?! longer| more| such| need)\b)": "there is no X, is not a Y",
    r"without a word": "silently",
    r"check sums?": "checksum",
    r"seal(?:s|ed)?": "checksum, digest",
    r"digits of (?:a|the|its) digest": "hex digest",
    r"lock alone": "the exclusive lock",
    r"pass(?:es|ed)? over": "skip",
    r"le(?:ave|ft) alone": "skip, leave unchanged",
    r"takes? (?:\w+ ){1,4}away": "remove",
    r"be it": "if, whether",
    r"(?:mb|gb|bytes?|bits|gb/s|ms) an? (?!time\b|\w+ly\b)\w+": "per",
    r"an? (?:buffer|map|module|blob|file|fsync|header|thread) an? (?:thread|blob|tensor|second|model|layer|file|chunk|call)": "per",
}
# A pattern that begins with a condition is searched at every place, and ten times slower. Most files have no
# match without it.
PATTERNS = {
    re.compile(pattern): re.compile(rf"(?<![A-Za-z]){pattern}(?![A-Za-z])", re.IGNORECASE)
    for pattern in GLOSSARY
}


def written_files() -> list[str]:
    """Return the files of code and prose, relative to the root; links are not followed."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("*.toml")]
    for folder in FOLDERS:
        found += [
            path
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and path.suffix in WRITTEN and "__pycache__" not in path.parts
        ]
    names = {path.resolve().relative_to(ROOT).as_posix() for path in found}
    ours = names - {"tests/test_prose.py"}
    return sorted(name for name in ours if not name.startswith(NOT_OURS))


def stumbles(text: str) -> list[str]:
    """Return each place where the text uses a word that the glossary replaces."""
    words = text.replace("_", " ")
    lower = words.lower()
    return [
        f"{text.count(chr(10), 0, found.start()) + 1}: {found[0]!r}; write: {GLOSSARY[anywhere.pattern]}"
        for anywhere, pattern in PATTERNS.items()
        if anywhere.search(lower)
        for found in pattern.finditer(words)
    ]


def test_prose_keeps_to_the_glossary() -> None:
    found = [
        f"{name}:{place}"
        for name in written_files()
        for place in stumbles((ROOT / name).read_text(encoding="utf-8"))
    ]

    assert found == []


def test_the_glossary_is_that_of_the_documents() -> None:
    for text in ("a blob is coded by another", "test_what_is_told", "Anew", "at 5 MB a model"):
        assert stumbles(text) != []
    assert stumbles("A delta is encoded against a base. Returns whether it exists.") == []
