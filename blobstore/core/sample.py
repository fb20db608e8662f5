"""The blobs that a check of a part of a store hashes."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from blobstore.core.digest import Digest

_SPELLING = re.compile(
    r"(?P<percent>\d{1,3}(?:\.\d{1,9})?)\s*%|(?P<part>\d{1,6})\s*/\s*(?P<parts>\d{1,6})", re.ASCII
)
_HEX = 12
_PLACES: int = 16**_HEX
"""Places on the circle. The place of a blob is the beginning of its digest."""


@dataclass(frozen=True, slots=True)
class Sample:
    """An arc of the circle on which digests are spread evenly."""

    begin: int
    length: int

    @classmethod
    def parse(cls, text: str | float) -> Sample:
        """Return the sample that a text spells, such as ``5%`` or ``2/7``; 0.05 is 5 % too.

        A percentage begins anywhere, so it chooses other blobs each time. The parts ``1/7`` to ``7/7`` are
        all blobs together.

        Raises:
            UsageError: the share is not above 0 and at most 100 %, or the text spells neither form.
        """
        spelled = f"{text:%}" if isinstance(text, float) else str(text).strip()
        match = _SPELLING.fullmatch(spelled)
        if match and match["percent"] and 0 < (percent := float(match["percent"])) <= 100:
            return cls(random.randrange(_PLACES), round(percent / 100 * _PLACES))  # noqa: S311 - no secret
        if match and match["part"] and 1 <= (part := int(match["part"])) <= int(match["parts"]):
            begin, end = (at * _PLACES // int(match["parts"]) for at in (part - 1, part))
            return cls(begin, end - begin)
        raise UsageError(
            f"{quote(text)} is not a sample",
            advice="give a share such as 5%, or a part such as 2/7",
        )

    def __contains__(self, digest: Digest) -> bool:
        """Return whether a blob belongs to the sample."""
        return (int(digest.hex[:_HEX], 16) - self.begin) % _PLACES < self.length


ALL = Sample(0, _PLACES)
NONE = Sample(0, 0)
