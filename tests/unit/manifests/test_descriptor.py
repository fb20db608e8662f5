from __future__ import annotations

import json
from typing import Any

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import InvalidManifest
from blobstore.manifests.descriptor import MAX_SIZE, Descriptor

HEX = "0" * 64
SOUND: dict[str, Any] = {"mediaType": "m", "digest": f"sha256:{HEX}", "size": 5}


def test_reads_a_descriptor() -> None:
    found = Descriptor.from_json(SOUND | {"name": "n", "from": "f", "annotations": {"a": [1]}})
    assert found == Descriptor(
        media_type="m",
        digest=Digest(HEX),
        size=5,
        name="n",
        from_="f",
        extra={"annotations": {"a": [1]}},
    )


def test_leaves_out_what_is_empty() -> None:
    found = Descriptor.from_json(SOUND)
    assert (found.name, found.from_, found.extra) == ("", "", {})
    assert list(found.to_json()) == ["mediaType", "digest", "size"]


def test_writes_its_fields_in_ollama_s_order_and_unknown_ones_last() -> None:
    mixed = {"z": 1, "name": "n", "from": "f", "a": None} | SOUND
    written = Descriptor.from_json(mixed).to_json()
    assert list(written) == ["mediaType", "digest", "size", "from", "name", "z", "a"]
    assert written == mixed


@pytest.mark.parametrize("value", [None, 1, "x", [], [SOUND], True])
def test_rejects_values_that_are_not_objects(value: Any) -> None:
    with pytest.raises(InvalidManifest, match="^: expected an object, got '"):
        Descriptor.from_json(value)


@pytest.mark.parametrize("field", ["mediaType", "digest", "size"])
def test_refuses_a_missing_field(field: str) -> None:
    with pytest.raises(InvalidManifest, match=rf"^\.{field}: expected .*, got 'None'"):
        Descriptor.from_json({key: value for key, value in SOUND.items() if key != field})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mediaType", 1),
        ("mediaType", None),
        ("mediaType", ["m"]),
        ("digest", 1),
        ("digest", None),
        ("digest", ""),
        ("digest", HEX),
        ("digest", f"sha256-{HEX}"),
        ("digest", f"sha256:{'A' * 64}"),
        ("digest", f"sha256:{'../' * 21}a"),
        ("digest", f"sha512:{HEX}"),
        ("size", None),
        ("size", -1),
        ("size", MAX_SIZE + 1),
        ("size", 5.0),
        ("size", -0.0),
        ("size", "5"),
        ("size", True),
        ("size", [5]),
        ("name", None),
        ("name", 1),
        ("name", ["n"]),
        ("from", 1),
        ("from", None),
    ],
)
def test_refuses_a_field_out_of_form(field: str, value: Any) -> None:
    with pytest.raises(InvalidManifest, match=rf"^\.{field}: "):
        Descriptor.from_json(SOUND | {field: value})


@pytest.mark.parametrize("size", [0, MAX_SIZE])
def test_takes_sizes_to_the_limit(size: int) -> None:
    assert Descriptor.from_json(SOUND | {"size": size}).size == size


@pytest.mark.parametrize("name", ["", "../../x", "\x1b[2J", "a" * 70_000, "/"])
def test_any_text_is_a_name(name: str) -> None:
    found = Descriptor.from_json(SOUND | {"name": name})
    assert found.name == name
    assert json.loads(json.dumps(found.to_json())).get("name", "") == name


def test_messages_are_short_and_printable() -> None:
    for value in (["\x1b" * 10_000], "\n" * 10_000, {"a": "\u202e" * 10_000}):
        for field in ("mediaType", "digest", "size", "name"):
            if field == "name" and isinstance(value, str):
                continue
            if field == "mediaType" and isinstance(value, str):
                continue
            with pytest.raises(InvalidManifest) as caught:
                Descriptor.from_json(SOUND | {field: value})
            assert str(caught.value).isprintable()
            assert len(str(caught.value)) < 2000
