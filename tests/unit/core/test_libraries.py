"""Errors of libraries that are not installed with blobstore."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from blobstore.core.libraries import optional_libraries
from blobstore.errors import MissingLibrary


def test_a_library_that_lacks_a_part_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "aiohttp"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "core.so").write_bytes(b"no library")
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiohttp"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))

    with (
        pytest.raises(
            MissingLibrary, match=r"^aiohttp is installed, but cannot be loaded: .*core"
        ) as caught,
        optional_libraries(),
    ):
        import_module("aiohttp.core")

    assert caught.value.advice == "run: pip install 'tensor-blobstore[serve]'"


def test_an_import_error_of_other_code_stays_what_it_is() -> None:
    with pytest.raises(ImportError, match=r"'json\.nothing'") as caught, optional_libraries():
        import_module("json.nothing")

    assert not isinstance(caught.value, MissingLibrary)
