"""A store with something of everything, its page, and a browser that shows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.browser import Browser, running_browser


@pytest.fixture(scope="session")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests."""
    with running_browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def browser(tab: Browser) -> Browser:
    """The browser with a window of a usual size, in light colours."""
    tab.open("about:blank")
    tab.resize(1180, 900)
    return tab
