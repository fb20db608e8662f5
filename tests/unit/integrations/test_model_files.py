"""Small files in a folder for a while, and errors of a library in one line."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

import blobstore
from blobstore.errors import BlobDamaged, BlobstoreError, InvalidManifest, ModelNotFound
from blobstore.integrations import model_files
from blobstore.integrations.model_files import (
    blaming,
    check_layers,
    check_names,
    decoded,
    folder_of_files,
)
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, with_layers, write_folder

FILES = {
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ x }}",
    "1_Pooling/config.json": b'{"pooling": 1}',
    "modules.json": b'[{"path": "1_Pooling"}]',
}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def model(store: LocalStore, tmp_path: Path) -> blobstore.Model:
    blobstore.create(
        write_folder(tmp_path / "source", dense_tensors(), files=FILES), "m", store=store
    )
    return blobstore.open("m", store=store)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_gives_the_small_files_and_no_weights_and_removes_them(model: blobstore.Model) -> None:
    with folder_of_files(model) as folder:
        found = contents(folder)

    assert found == {"config.json": b'{"model_type": "tiny"}\n', **FILES}
    assert not folder.exists()


def test_removes_the_folder_after_an_error(model: blobstore.Model) -> None:
    with pytest.raises(ZeroDivisionError), folder_of_files(model) as folder:
        _ = 1 / 0

    assert not folder.exists()


def test_the_folder_is_in_memory_where_there_is_room_for_it(
    model: blobstore.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(model_files, "_MEMORY", str(tmp_path / "memory"))
    with folder_of_files(model) as folder:
        assert folder.parent == tmp_path
    (tmp_path / "memory").mkdir()
    with folder_of_files(model) as folder:
        assert folder.parent == tmp_path / "memory"
        assert folder.stat().st_mode & 0o777 == 0o700
    with monkeypatch.context() as patch:
        patch.setattr(model_files, "_SPARE", 1 << 60)
        with folder_of_files(model) as folder:
            assert folder.parent == tmp_path
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with folder_of_files(model) as folder:
        assert folder.parent == tmp_path


def test_gives_only_the_files_that_are_wanted(model: blobstore.Model) -> None:
    with folder_of_files(model, ("*config.json",)) as folder:
        assert set(contents(folder)) == {"config.json", "1_Pooling/config.json"}


def test_lets_a_file_say_something_else(model: blobstore.Model) -> None:
    with folder_of_files(model, ("config.json",), {"config.json": b"1", "new/a": b"2"}) as folder:
        assert contents(folder) == {"config.json": b"1", "new/a": b"2"}


def test_refuses_a_file_that_would_leave_the_folder(
    model: blobstore.Model, store: LocalStore
) -> None:
    layers = [
        Descriptor(
            media_type=media_types.JSON,
            digest=layer.digest,
            size=layer.size,
            name="../../evil.json",
        )
        if layer.name == "config.json"
        else layer
        for layer in model.manifest.layers
    ]
    store.publish(Reference.parse("evil"), with_layers(store, model.manifest, layers))

    with (
        blobstore.open("evil", store=store) as opened,
        pytest.raises(InvalidManifest, match="no file name"),
        folder_of_files(opened),
    ):
        pass


def test_reads_an_object(model: blobstore.Model) -> None:
    assert decoded(model, "1_Pooling/config.json") == {"pooling": 1}


def test_says_which_file_is_missing(model: blobstore.Model) -> None:
    with pytest.raises(BlobstoreError, match="m:latest has no 2_Dense/config.json"):
        decoded(model, "2_Dense/config.json")


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "is not JSON"), (b"[1]", "is not a JSON object")]
)
def test_says_which_file_is_no_object(
    content: bytes, message: str, store: LocalStore, tmp_path: Path
) -> None:
    files = {"config.json": content}
    blobstore.create(
        write_folder(tmp_path / "source", dense_tensors(), files=files), "m", store=store
    )
    with (
        blobstore.open("m", store=store) as model,
        pytest.raises(BlobDamaged, match=f"config.json of m:latest {message}"),
    ):
        decoded(model, "config.json")


def test_makes_one_printable_line_of_a_librarys_error() -> None:
    with pytest.raises(BlobstoreError) as caught, blaming("it cannot load"):
        raise ValueError("two\n\tlines of \x1b[31mred" + "d" * 10_000)

    assert str(caught.value).startswith(r"it cannot load: ValueError: two lines of \x1b[31mreddd")
    assert len(str(caught.value)) < 600
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("error", [ModelNotFound("as it is"), MemoryError(), KeyboardInterrupt()])
def test_lets_other_errors_be(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, blaming("it cannot load"):
        raise error

    assert caught.value is error


def test_accepts_a_model_that_got_all_it_needs() -> None:
    check_names("x", missing=[], unexpected=[], misshapen=[])


def test_lists_all_that_does_not_fit() -> None:
    many = [f"layer.{number:04}" for number in range(1000)]

    with pytest.raises(BlobstoreError) as caught:
        check_names(
            "Llama cannot take m",
            missing=many[::-1],
            unexpected=["a\nb"],
            misshapen=[("w", (2, 3), (4, 3))],
            mistyped=[("v", "int64", "float32")],
        )

    names = ", ".join(f"'{name}'" for name in many)
    assert str(caught.value) == (
        f"Llama cannot take m: 1000 tensors missing: {names}; "
        r"1 tensor unexpected: 'a\nb'; "
        "1 tensor of another shape: 'w' [2, 3] where [4, 3] is expected; "
        "1 tensor of another type: 'v' int64 where float32 is expected"
    )


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 1001},
        {"n_layer": 10**30},
        {"num_layers": 1e30},
        {"text_config": {"num_hidden_layers": 2000}},
        {"encoder_layers": 2000},
        {"vision_config": {"depth": 2000}},
    ],
)
def test_refuses_more_layers_than_there_are_tensors(
    config: dict[str, object], model: blobstore.Model
) -> None:
    with pytest.raises(BlobstoreError, match=r"m:latest asks for more layers than its \d+ tensors"):
        check_layers(model, config)


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 1000},  # that may share one layer's tensors
        {"max_window_layers": 10**6},
        {"num_hidden_layers": None, "n_layers": "many", "layer_types": [10**6]},
        {"vocab_size": 10**6, "text_config": 3},
    ],
)
def test_accepts_what_asks_for_no_absurd_number_of_layers(
    config: dict[str, object], model: blobstore.Model
) -> None:
    check_layers(model, config)


def test_looks_for_layers_in_a_deep_config(model: blobstore.Model) -> None:
    config: dict[str, object] = {"num_layers": 10**6}
    for _ in range(5_000):  # deeper than Python calls
        config = {"deeper": config}
    check_layers(model, config)
