"""Errors of libraries that are not installed with blobstore."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from blobstore.core.libraries import optional_libraries
from blobstore.errors import MissingLibrary


def test_a_library_that_lacks_a_part_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "starlette"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "core.so").write_bytes(b"no library")
    for name in [name for name in sys.modules if name.partition(".")[0] == "starlette"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))

    with (
        pytest.raises(
            MissingLibrary, match=r"^starlette is installed, but cannot be loaded: .*core"
        ) as caught,
        optional_libraries(),
    ):
        import starlette.core  # type: ignore[import-not-found]  # noqa: F401

    assert caught.value.advice == "run: pip install 'tensor-blobstore[page]'"


def test_an_import_error_of_other_code_stays_what_it_is() -> None:
    with (
        pytest.raises(ImportError, match="cannot import name 'nothing'") as caught,
        optional_libraries(),
    ):
        from json import nothing  # type: ignore[attr-defined]  # noqa: F401

    assert not isinstance(caught.value, MissingLibrary)
