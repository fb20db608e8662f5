"""Temporary folders of small files, and library errors in one line."""

from __future__ import annotations

import logging
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.errors import (
    BlobDamaged,
    BlobstoreError,
    InvalidManifest,
    ModelNotFound,
    UsageError,
)
from blobstore.integrations import small_files
from blobstore.integrations.small_files import (
    check_layers,
    check_names,
    library_errors,
    log_verified,
    read_json,
    temporary_folder,
    verify_level,
)
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.sources.base import SourceOptions
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support.folders import contents
from tests.support.logs import logged as log_messages
from tests.support.models import dense_tensors, replace_file, with_layers, write_folder
from tests.support.signing import key_files, policy

FILES = {
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ x }}",
    "1_Pooling/config.json": b'{"pooling": 1}',
    "modules.json": b'[{"path": "1_Pooling"}]',
}


@pytest.fixture
def model(store: LocalStore, tmp_path: Path) -> blobstore.Model:
    blobstore.create(
        write_folder(tmp_path / "source", dense_tensors(), files=FILES), "m", store=store
    )
    return blobstore.open("m", store=store)


def test_writes_the_small_files_and_no_weights_and_removes_them(model: blobstore.Model) -> None:
    with temporary_folder(model) as folder:
        found = contents(folder)
    assert found == {"config.json": b'{"model_type": "tiny"}\n', **FILES}
    assert not folder.exists()


@pytest.mark.slow
def test_does_not_write_large_files_that_were_kept(store: LocalStore, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", dense_tensors())
    (source / "x.gguf").write_bytes(b"GGUF")
    os.truncate(source / "x.gguf", 64 * 2**20 + 1)
    blobstore.create(source, "m", store=store, source_options=SourceOptions(keep=("*.gguf",)))
    with blobstore.open("m", store=store) as model, temporary_folder(model) as folder:
        assert list(contents(folder)) == ["config.json"]


def test_removes_the_folder_after_an_error(model: blobstore.Model) -> None:
    with pytest.raises(ZeroDivisionError), temporary_folder(model) as folder:
        _ = 1 / 0
    assert not folder.exists()


def test_the_folder_is_in_memory_if_there_is_enough(
    model: blobstore.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(small_files, "_MEMORY", str(tmp_path / "memory"))
    with temporary_folder(model) as folder:
        assert folder.parent == tmp_path
    (tmp_path / "memory").mkdir()
    with temporary_folder(model) as folder:
        assert folder.parent == tmp_path / "memory"
        assert folder.stat().st_mode & 0o777 == 0o700
    with monkeypatch.context() as patch:
        patch.setattr(small_files, "_SPARE", 1 << 60)
        with temporary_folder(model) as folder:
            assert folder.parent == tmp_path
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with temporary_folder(model) as folder:
        assert folder.parent == tmp_path


def test_writes_only_matching_files(model: blobstore.Model) -> None:
    with temporary_folder(model, ("*config.json",)) as folder:
        assert set(contents(folder)) == {"config.json", "1_Pooling/config.json"}


def test_replaces_files(model: blobstore.Model) -> None:
    with temporary_folder(model, ("config.json",), {"config.json": b"1", "new/a": b"2"}) as folder:
        assert contents(folder) == {"config.json": b"1", "new/a": b"2"}


def test_rejects_a_file_outside_the_folder(model: blobstore.Model, store: LocalStore) -> None:
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
    store.names.publish(replace_any("evil"), with_layers(store, model.manifest, layers))
    with (
        blobstore.open("evil", store=store) as opened,
        pytest.raises(InvalidManifest, match="not a file name"),
        temporary_folder(opened),
    ):
        pass


def test_reads_an_object(model: blobstore.Model) -> None:
    assert read_json(model, "1_Pooling/config.json") == {"pooling": 1}


def test_names_a_missing_file(model: blobstore.Model) -> None:
    with pytest.raises(BlobstoreError, match="m:latest has no 2_Dense/config.json"):
        read_json(model, "2_Dense/config.json")


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "is not JSON"), (b"[1]", "is not a JSON object")]
)
def test_names_a_file_that_is_not_an_object(
    content: bytes, message: str, store: LocalStore, tmp_path: Path
) -> None:
    blobstore.create(write_folder(tmp_path / "source", dense_tensors()), "m", store=store)
    replace_file(store, "m", "config.json", content)
    with (
        blobstore.open("m", store=store) as model,
        pytest.raises(BlobDamaged, match=f"config.json of m:latest {message}"),
    ):
        read_json(model, "config.json")


def test_a_librarys_error_becomes_one_printable_line() -> None:
    with pytest.raises(BlobstoreError) as caught, library_errors("it cannot load"):
        raise ValueError("two\n\tlines of \x1b[31mred" + "d" * 10_000)
    assert str(caught.value).startswith(r"it cannot load: ValueError: two lines of \x1b[31mreddd")
    assert len(str(caught.value)) < 600
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("error", [ModelNotFound("as it is"), MemoryError(), KeyboardInterrupt()])
def test_other_errors_are_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, library_errors("it cannot load"):
        raise error
    assert caught.value is error


def test_accepts_a_complete_model() -> None:
    check_names("x", missing=[], unexpected=[], misshapen=[])


def test_lists_all_tensors_that_do_not_fit() -> None:
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
def test_rejects_more_layers_than_there_are_tensors(
    config: dict[str, object], model: blobstore.Model
) -> None:
    with pytest.raises(BlobstoreError, match=r"m:latest states more layers than its \d+ tensors"):
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
def test_accepts_a_plausible_number_of_layers(
    config: dict[str, object], model: blobstore.Model
) -> None:
    check_layers(model, config)


@pytest.mark.parametrize(("depth", "is_found"), [(8, True), (9, False), (5_000, False)])
def test_looks_for_layers_as_deep_as_configs_are_nested(
    model: blobstore.Model, depth: int, *, is_found: bool
) -> None:
    config: dict[str, object] = {"num_layers": 10**6}
    for _ in range(depth):
        config = {"deeper": config}
    with pytest.raises(BlobstoreError, match="more layers") if is_found else nullcontext():
        check_layers(model, config)


def test_an_adapter_says_how_it_is_loaded(store: LocalStore, tmp_path: Path) -> None:
    files = {"adapter_config.json": b'{"base_model_name_or_path": "org/base"}'}
    folder = write_folder(tmp_path / "adapter", dense_tensors(), files=files)
    (folder / "config.json").unlink(missing_ok=True)
    blobstore.create(folder, "adapter", store=store)
    with (
        blobstore.open("adapter", store=store) as model,
        pytest.raises(
            BlobstoreError, match=r"adapter of 'org/base', which .*\.from_store loads with it"
        ),
    ):
        read_json(model, "config.json")


@pytest.mark.parametrize("name", ["m", "s3://bucket/m:latest", "m.gguf"])
def test_models_are_hashed_by_default_where_that_is_remembered(
    name: str, model: blobstore.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BLOBSTORE_VERIFY", raising=False)
    assert verify_level(None, name, model.store.root) == ("digest" if name == "m" else "size")
    assert verify_level(None, name, tmp_path / "cannot be written") == "size"
    assert verify_level("header", name, model.store.root) == "header"
    monkeypatch.setenv("BLOBSTORE_VERIFY", "none")
    assert verify_level(None, name, model.store.root) == "none"
    monkeypatch.setenv("BLOBSTORE_VERIFY", "everything")
    with pytest.raises(UsageError, match="must be none, size, header, digest or rehash"):
        verify_level(None, name, model.store.root)


def test_servers_log_what_was_verified_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BLOBSTORE_VERIFY", raising=False)
    store = LocalStore(tmp_path / "store")
    blobstore.create(write_folder(tmp_path / "source", dense_tensors()), "m", store=store)
    count = len(store.resolve("m").blobs)

    def logged(verify: Any, given: Any = None) -> str:
        with (
            blobstore.open("m", store=store, verify=verify) as model,
            log_messages(logging.INFO) as found,
        ):
            log_verified(model, verify, given)
        return found[0]

    assert logged("size", "size") == (
        "model m:latest: verify=size (as asked for), 0 blobs hashed, 0 known to be intact; "
        "there is no policy about signatures"
    )
    hashed = f"verify=rehash (by default), {count} blobs hashed, 0 known to be intact"
    assert hashed in logged("rehash")
    key = key_files(tmp_path)
    policy(store, key)
    blobstore.sign("m", key.private, store=store)
    monkeypatch.setenv("BLOBSTORE_VERIFY", "rehash")
    assert "(from $BLOBSTORE_VERIFY)" in logged("rehash")
    assert logged("size").endswith("; trusted by the policy, signed by 'ours'")
    store.policy_path.write_text('version = 1\ndefault = "off"')
    assert logged("size").endswith("; trusted by the policy, needs no signature")
    store.policy_path.write_text('version = 1\ndefault = "warn"')
    with pytest.warns(UserWarning, match="is not trusted"):
        found = logged("size")
    assert found.endswith("; not trusted by the policy: no rule of the policy matches its name")
