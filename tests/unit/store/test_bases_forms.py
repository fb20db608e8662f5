from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.freezing import freeze_models
from blobstore.store.bases import states, which_are_whole
from blobstore.store.local import LocalStore
from blobstore.thawing import thaw_models
from tests.frozen import flip, layers, put


@pytest.mark.parametrize(
    ("hot", "cold", "expected"),
    [
        ("whole", None, (True, True)),
        ("damaged", None, (False, True)),
        (None, None, (False, True)),
        (None, "whole", (True, True)),
        (None, "damaged", (False, False)),
        ("whole", "whole", (True, True)),
        ("whole", "damaged", (True, False)),
        ("damaged", "whole", (False, True)),
        ("damaged", "damaged", (False, False)),
    ],
)
def test_tells_which_forms_are_whole(
    tmp_path: Path, hot: str | None, cold: str | None, expected: tuple[bool, bool]
) -> None:
    store = LocalStore(tmp_path / "store")
    put(store, "a", {"x": 1})
    freeze_models(["a"], store=store)
    thaw_models(["a"], store=store, keep_cold=True)
    item = layers(store, "a")["x"]
    for state, path in (
        (hot, store.layout.blob(item.digest)),
        (cold, store.layout.cold_blob(item.digest)),
    ):
        if state is None:
            Path(path).unlink()
        elif state == "damaged":
            flip(path, 30_000)
    assert which_are_whole(store, item.digest, item.size, lambda _: None) == expected
    there = states(store.layout, item.digest)
    assert [state is None for state in there] == [hot is None, cold is None]
