"""Frameworks that a Python may have no build of: what imports one is skipped then, with the reason."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from tests.support.markers import FRAMEWORKS

ABSENT = {
    name
    for name in {"distributed", "diffusers", "lightning"}.union(*FRAMEWORKS.values())
    if find_spec(name) is None
}


def skip_without_framework(
    report: pytest.TestReport | pytest.CollectReport, error: BaseException | None
) -> None:
    """Change the report of a test or module to "skipped", if it failed because a framework is absent."""
    while error is not None:
        library = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ImportError) and library in ABSENT:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            report.outcome = "skipped"
            report.longrepr = (report.nodeid, 0, f"{library} is not installed for Python {version}")
        error = error.__cause__ or error.__context__
