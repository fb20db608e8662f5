"""Forged records of a source: they write no file elsewhere, show nothing of others, and take little memory."""

from __future__ import annotations

import base64
import json
import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import blobstore
from blobstore.errors import BlobDamaged
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.source_record import SourceRecord
from blobstore.operations.export.export import export_model
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.faults.known import command
from tests.support.models import add_blob, replace_file, with_layers, write_folder

SECRET = b"the weights of another model of the store"
UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]")
ESCAPE = "\x1b[2J\u202e\nforged"
HEADER = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("original")
    store = LocalStore(tmp_path / "store")
    for name, data in (
        ("m", np.arange(4, dtype=np.float32)),
        ("other", np.frombuffer(SECRET, "u1")),
    ):
        folder = write_folder(tmp_path / name, {"a": data}, files={"config.json": b"{}"})
        blobstore.create(folder, name, store=store)
    return store.root


@pytest.fixture
def store(original: Path, tmp_path: Path) -> LocalStore:
    return LocalStore(shutil.copytree(original, tmp_path / "store"))


def record_of(store: LocalStore) -> tuple[dict[str, Any], bytes]:
    """Return the record of the model as JSON, and the data in it."""
    (layer,) = store.resolve("m").layers_of(media_types.SOURCE)
    value = json.loads(store.read_blob(layer.digest, layer.size))
    return value, zstandard.decompress(base64.b64decode(value["data"]))


def packed(data: bytes) -> str:
    return base64.b64encode(zstandard.compress(data)).decode()


def forge(store: LocalStore, content: bytes) -> None:
    """Let the model have another record, with a config and a manifest that agree with it."""
    (layer,) = store.resolve("m").layers_of(media_types.SOURCE)
    replace_file(store, "m", layer.name, content)


def with_file(**fields: Any) -> dict[str, Any]:
    start = len(HEADER).to_bytes(8, "little") + HEADER
    file = {"name": "model.safetensors", "format": "safetensors", "size": len(start) + 16}
    rest = b'{"stored_names":{},"left_out":{}}'
    return {"files": [file | {"held": len(start)} | fields], "data": packed(start + rest)}


def with_rest(rest: bytes) -> dict[str, Any]:
    start = len(HEADER).to_bytes(8, "little") + HEADER
    return with_file() | {"data": packed(start + rest)}


HOSTILE: dict[str, dict[str, Any]] = {
    **{
        f"name {name!r:.30}": with_file(name=name)
        for name in ("../m", "/etc/x", "a/../../x", "a\\b", ".", "", "a//b", "x" * 5000, ESCAPE, 1)
    },
    "the name of a small file": with_file(name="config.json"),
    "a name inside a small file": with_file(name="config.json/model.safetensors"),
    **{
        f"size {size!r:.20}": with_file(size=size)
        for size in (0, 1, 10**18, 2**63, 2**64, 10**40, -1, 1.5, True, "9", None)
    },
    **{f"held {held!r:.20}": with_file(held=held) for held in (0, 7, 10**9, -1, True, None)},
    "a file twice": {
        "files": with_file()["files"] * 2,
        "data": packed(2 * (len(HEADER).to_bytes(8, "little") + HEADER)),
    },
    "the digest of another model's blob": with_file(sha256="a" * 64),
    "a false digest": with_file(sha256=ESCAPE),
    "an unknown format": with_file(format=ESCAPE),
    "overlapping tensors": with_rest(b'{"stored_names":{"a":"a","b":"a"},"left_out":{"a":"AAAA"}}'),
    "the blob's tensor under the name of another": with_rest(
        b'{"stored_names":{"a":"other"},"left_out":{}}'
    ),
    "a tensor of its own": with_rest(
        b'{"stored_names":{},"left_out":{"a":"AAAAAAAAAAAAAAAAAAAAAA=="}}'
    ),
    "escapes in the repository": {"kind": "hub", "repository": ESCAPE, "commit": ESCAPE},
    "escapes in an option": {"options": {"revision": ESCAPE, ESCAPE: ESCAPE}},
    "an option that is a tree": {"options": {"include": [[[[]]]]}},
    "options of other types": {"options": {"quantize": 1, "experts": {}, "group_size": "x"}},
    "data of another type": {"data": 1},
    "data without a frame": {"data": "AAAA"},
    "two frames": {"data": packed(b"x") + packed(b"y")},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_forged_record_is_refused_or_harmless(
    what: str, store: LocalStore, tmp_path: Path
) -> None:
    value, _ = record_of(store)
    forge(store, json.dumps(value | HOSTILE[what]).encode())
    before = {path for path in tmp_path.rglob("*") if store.root not in path.parents}
    out = tmp_path / "out"
    for arguments in (
        ("info", "m"),
        ("show", "m"),
        ("list", "--json"),
        ("verify", "m"),
        ("page", "m", tmp_path / "page.html"),
        ("export", "m", out),
    ):
        code, output, errors = command(*arguments, "--store", store.root)
        assert code in {0, 1, 4}, errors
        assert not UNPRINTABLE.search(output + errors)
        assert "Traceback" not in errors
    made = {path for path in tmp_path.rglob("*") if store.root not in path.parents} - before
    assert all(path == out or out in path.parents or path.name == "page.html" for path in made)
    for path in made:
        assert path.is_dir() or SECRET not in path.read_bytes()
    if out.exists():
        array = np.arange(4, dtype=np.float32)
        assert (
            b"".join(path.read_bytes()[-16:] for path in out.glob("*.safetensors"))
            == array.tobytes()
        )


@pytest.mark.parametrize("value", ["[]", "{}", '""'])
def test_a_record_of_some_kilobytes_takes_no_gigabytes(store: LocalStore, value: str) -> None:
    count = 120 * 2**20 // (len(value) + 1)
    rest = b'{"stored_names":{},"left_out":{},"x":[%s0]}' % (f"{value},".encode() * count)
    content = json.dumps(record_of(store)[0] | with_rest(rest)).encode()
    assert len(content) < 50_000
    tracemalloc.start()
    try:
        with pytest.raises(BlobDamaged, match=r"\$\.data: .* more than 768 MiB"):
            SourceRecord.from_bytes(content)
        assert tracemalloc.get_traced_memory()[1] < 600 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_that_promises_another_size_is_refused(store: LocalStore) -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 10**6)
    content = record_of(store)[0] | {"data": base64.b64encode(frame).decode()}
    with pytest.raises(BlobDamaged, match=r"\$\.data"):
        SourceRecord.from_bytes(json.dumps(content).encode())


def test_a_stack_whose_name_has_a_million_parts_is_refused_at_once(
    store: LocalStore, tmp_path: Path
) -> None:
    name = ".".join("0" * 500_000)
    array = np.zeros((2, 2), np.uint8)
    blobstore.create(write_folder(tmp_path / "dots", {name: array}), "m", store=store)
    digest, size = add_blob(store, json.dumps({name: [f"{name}.0", f"{name}.1"]}).encode())
    manifest = store.resolve("m")
    stacks = Descriptor(media_types.STACKS, digest, size, "stacks")
    store.names.publish(replace_any("m"), with_layers(store, manifest, [*manifest.layers, stacks]))
    with pytest.raises(BlobDamaged, match="that are not its experts in order"):
        export_model("m", tmp_path / "out", store=store)
