from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.errors import UsageError


def test_options_of_another_type_are_refused(tmp_path: Path) -> None:
    wrong: Any = 4
    quantize = "QuantizeOptions or the name of a type, such as 'int4'"
    for name, kind in (("quantize", quantize), ("source_options", "SourceOptions")):
        with pytest.raises(UsageError, match=f"^{name} is '4', .*; expected blobstore.{kind}$"):
            blobstore.create(tmp_path, "m", store=tmp_path / "store", **{name: wrong})
    with pytest.raises(UsageError, match=r"^registry is '4', .* blobstore\.RegistryOptions$"):
        blobstore.push("m", "oci://127.0.0.1:1/m", store=tmp_path / "store", registry=wrong)
