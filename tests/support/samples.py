"""How many random cases a test tries: a quarter, or all with ``--hypothesis-profile=thorough``."""

from __future__ import annotations

from hypothesis import settings

_SHARE = 4


def samples(number: int) -> int:
    """Return ``number`` in the profile ``thorough`` of hypothesis, and a quarter of it otherwise."""
    is_thorough = settings.get_current_profile_name() == "thorough"
    return number if is_thorough else max(1, number // _SHARE)
