from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from blobstore.errors import BlobDamaged, BlobMissing
from blobstore.manifests.reference import Reference
from blobstore.models.tensors import StoredTensor, read_tensors
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, blob

NAME = Reference.parse("m")
WEIGHT = ("w.weight", "U32", (2, 4), bytes(32))
SCALE = ("w.weight.scale", "BF16", (2, 1), bytes(4))
BIAS = ("w.weight.bias", "BF16", (2, 1), bytes(4))


def contents(store: LocalStore, **blobs: bytes) -> Mapping[str, StoredTensor]:
    add_blobs(store, "m", blobs)
    return read_tensors(store, store.resolve(NAME)).tensors


def test_a_layer_is_a_tensor(store: LocalStore) -> None:
    (found,) = contents(store, a=blob(("a", "F32", (2, 3), bytes(24)))).values()
    assert (found.name, found.type_name, found.shape, found.nbytes) == ("a", "F32", (2, 3), 24)
    assert (found.qparams, found.item, found.group_size) == ({}, None, 0)


def test_a_layer_is_a_group(store: LocalStore) -> None:
    found = contents(store, g=blob(("g.1.w", "U8", (1,), b"x"), ("g.0.w", "U8", (2,), b"yz")))
    assert list(found) == ["g.1.w", "g.0.w"]
    assert all(tensor.layer.name == "g" for tensor in found.values())


def test_a_quantized_weight_has_its_qparams(store: LocalStore) -> None:
    data = blob(WEIGHT, SCALE, BIAS, quant_type="int4", group_size="32")
    (found,) = contents(store, w=data).values()
    assert found.name == "w.weight"
    assert list(found.qparams) == [".scale", ".bias"]
    assert (found.type_name, found.group_size, found.shape) == ("int4", 32, (2, 32))
    assert found.nbytes == 40


def test_a_global_scale_is_a_qparam(store: LocalStore) -> None:
    data = blob(
        WEIGHT,
        ("w.weight.scale", "U8", (2, 2), bytes(4)),
        ("w.weight.global_scale", "F32", (), bytes(4)),
        quant_type="nvfp4",
    )
    (found,) = contents(store, w=data).values()
    assert set(found.qparams) == {".scale", ".global_scale"}
    assert (found.type_name, found.group_size) == ("nvfp4", 16)


def test_metadata_of_a_tensor_overrides_that_of_the_blob(store: LocalStore) -> None:
    other = [
        ("x.weight", "U32", (2, 16), bytes(128)),
        ("x.weight.scale", "BF16", (2, 1), bytes(4)),
        ("x.weight.bias", "BF16", (2, 1), bytes(4)),
    ]
    data = blob(
        WEIGHT,
        SCALE,
        BIAS,
        *other,
        quant_type="int4",
        group_size="32",
        x__weight__quant_type="int8",
        x__weight__group_size="64",
    )
    found = contents(store, g=data)
    assert (found["w.weight"].type_name, found["w.weight"].shape) == ("int4", (2, 32))
    assert (found["x.weight"].type_name, found["x.weight"].shape) == ("int8", (2, 64))
    assert found["x.weight"].group_size == 64


def test_without_metadata_the_type_is_unknown_and_the_shape_as_stored(store: LocalStore) -> None:
    (found,) = contents(store, w=blob(WEIGHT, SCALE)).values()
    assert (found.type_name, found.item, found.shape) == ("unknown", None, (2, 4))


def test_metadata_that_contradicts_the_shapes_counts_as_damage(store: LocalStore) -> None:
    whole = blob(("a", "U8", (1,), b"x"))
    add_blobs(store, "m", {"a": whole, "w": blob(WEIGHT, SCALE, BIAS, quant_type="int8")})
    manifest = store.resolve(NAME)
    fault = r"layer 'w': tensor 'w\.weight': int8 cannot have a group_size of '16'"
    with pytest.raises(BlobDamaged, match=fault):
        read_tensors(store, manifest)
    found = read_tensors(store, manifest, collect_faults=True)
    (bad,) = [layer.digest for layer in manifest.layers if layer.name == "w"]
    assert (list(found.tensors), [digest for digest, _ in found.faults]) == (["a"], [bad])


def test_plain_tensors_may_have_names_like_qparams(store: LocalStore) -> None:
    found = contents(
        store,
        a=blob(("q.bias", "F32", (1,), bytes(4))),
        b=blob(("router.scale", "F32", (1,), bytes(4))),
        g=blob(
            ("g.q", "F32", (1,), bytes(4)),
            ("g.q.scale", "F32", (1,), bytes(4)),
            ("g.q.bias", "F32", (1,), bytes(4)),
            ("g.r.bias", "F32", (1,), bytes(4)),
        ),
        u=blob(("u.w", "U32", (1,), bytes(4)), ("u.w.bias", "U32", (1,), bytes(4))),
        f=blob(("f.weight", "U32", (1,), bytes(4)), ("f.scale", "F32", (1,), bytes(4))),
    )
    assert list(found) == [
        *("q.bias", "router.scale", "g.q", "g.q.scale", "g.q.bias", "g.r.bias"),
        *("u.w", "u.w.bias", "f.weight", "f.scale"),
    ]
    assert not any(tensor.qparams for tensor in found.values())


def test_a_constant_key_stands_for_the_layer_s_name(store: LocalStore) -> None:
    same = blob(("data", "U8", (3,), b"abc"))
    found = contents(store, x=same, y=same)
    assert list(found) == ["x", "y"]
    assert found["x"].layer.digest == found["y"].layer.digest


def test_in_a_group_the_constant_key_is_a_name(store: LocalStore) -> None:
    data = blob(("data", "U8", (1,), b"a"), ("more", "U8", (1,), b"b"))
    assert list(contents(store, g=data)) == ["data", "more"]


def test_a_tensor_in_two_layers_is_an_error(store: LocalStore) -> None:
    one, two = blob(("t", "U8", (1,), b"1")), blob(("t", "U8", (1,), b"2"))
    with pytest.raises(BlobDamaged, match="tensor 't' is in two layers, 'a' and 'b'"):
        contents(store, a=one, b=two)


def test_an_error_names_the_layer(store: LocalStore) -> None:
    data = blob(("a", "U8", (3,), b"abc"))
    contents(store, **{"bad\x1b": data})
    path = Path(store.blob_path(store.resolve(NAME).layers[0].digest))
    path.unlink()
    with pytest.raises(BlobMissing, match=r"^layer 'bad\\x1b': blob '.*' is missing"):
        read_tensors(store, store.resolve(NAME))
    path.write_bytes(bytes(len(data)))
    with pytest.raises(BlobDamaged, match=r"^layer 'bad\\x1b': blob '.*': header"):
        read_tensors(store, store.resolve(NAME))


def test_faults_are_collected_on_request(store: LocalStore) -> None:
    names = ("whole", "missing", "short", "folder")
    contents(store, **{name: blob((name, "U8", (1,), b"x")) for name in names})
    manifest = store.resolve(NAME)
    paths = {layer.name: Path(store.blob_path(layer.digest)) for layer in manifest.layers}
    paths["missing"].unlink()
    paths["short"].chmod(0o600)
    os.truncate(paths["short"], 1)
    paths["folder"].unlink()
    paths["folder"].mkdir()
    found = read_tensors(store, manifest, collect_faults=True)
    assert list(found.tensors) == ["whole"]
    by_digest = {layer.digest: layer.name for layer in manifest.layers}
    assert {by_digest[digest]: type(error) for (digest, _), error in found.faults.items()} == {
        "missing": BlobMissing,
        "short": BlobDamaged,
        "folder": BlobDamaged,
    }
