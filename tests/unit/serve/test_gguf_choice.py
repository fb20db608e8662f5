"""The GGUF file that a quantization chooses."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.operations.create.create import create
from blobstore.serve.gguf_choice import _chosen
from blobstore.serve.library import Library
from blobstore.sources.base import SourceOptions
from blobstore.store.local import LocalStore
from tests.support.gguf_files import TEXT, gguf_file, text
from tests.support.ollama_store import GGUF_FILE, add_gguf_model
from tests.support.serve import ask, json_of

JSON = {"accept": "application/json", "user-agent": "llama-cpp"}
FILES = [
    "Q8_0/model-Q8_0-00001-of-00002.gguf",
    "Q8_0/model-Q8_0-00002-of-00002.gguf",
    "model-IQ4_XS.gguf",
    "model-Q4_K_M.gguf",
    "model-Q4_K_S.gguf",
    "model.f16.gguf",
]


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ("Q4_K_M", "model-Q4_K_M.gguf"),
        ("q4_k_s", "model-Q4_K_S.gguf"),
        ("Q8_0", "Q8_0/model-Q8_0-00001-of-00002.gguf"),
        ("F16", "model.f16.gguf"),
        ("latest", "model-Q4_K_M.gguf"),
        ("Q4_K", None),
        ("Q4", None),
        (".*", None),
    ],
)
def test_a_quantization_is_a_part_of_the_name(quantization: str, name: str | None) -> None:
    assert _chosen(FILES, quantization) == name


def test_without_the_usual_quantization_the_first_file_is_chosen() -> None:
    assert _chosen(FILES[:3], "latest") == FILES[0]
    assert _chosen([], "latest") is None


def test_a_file_is_named_with_its_digest(store: LocalStore, tmp_path: Path) -> None:
    values = struct.pack("<32f", *range(32))
    data = gguf_file([("general.architecture", TEXT, text("llama"))], [("t", 0, (32,), values)])
    (tmp_path / "chat-Q8_0.gguf").write_bytes(data)
    create(tmp_path / "chat-Q8_0.gguf", "team/Chat-GGUF", store=store)
    library = Library(store)
    target = "/v2/team/chat-gguf/manifests/{}"
    for quantization in ("Q8_0", "latest"):
        response = ask(library, target.format(quantization), headers=JSON)
        assert response.headers["Content-Type"] == "application/json"
        file = json_of(response)["ggufFile"]
        assert file["rfilename"] == "chat-Q8_0.gguf"
        assert (file["blobId"], file["size"]) == (str(Digest.of(data)), len(data))
        assert "mmprojFile" not in json_of(response)
    response = ask(library, target.format("Q4_K_M"), headers=JSON)
    assert (response.status, json_of(response)["errors"][0]["code"]) == (404, "MANIFEST_UNKNOWN")
    # A quantization is no tag: it has no manifest, and no revision of the Hub has its name.
    assert ask(library, target.format("Q8_0"), headers={"accept": "*/*"}).status == 404
    assert ask(library, "/api/models/team/Chat-GGUF/revision/Q8_0").status == 404


def test_the_header_says_which_file_is_the_projector(store: LocalStore, tmp_path: Path) -> None:
    for name, kind in (("a.gguf", "mmproj"), ("b.gguf", "model")):
        data = gguf_file([("general.type", TEXT, text(kind))], [(kind, 0, (1,), bytes(4))])
        (tmp_path / name).write_bytes(data)
    create(tmp_path, "vision", store=store, source_options=SourceOptions(weights="?.gguf"))
    found = json_of(ask(Library(store), "/v2/library/vision/manifests/latest", headers=JSON))
    assert found["ggufFile"]["rfilename"] == "b.gguf"
    assert found["mmprojFile"]["rfilename"] == "a.gguf"


def test_a_projector_comes_with_the_file(store: LocalStore) -> None:
    add_gguf_model(store, "ollama", GGUF_FILE, projector=GGUF_FILE)
    found = json_of(ask(Library(store), "/v2/library/ollama/manifests/latest", headers=JSON))
    assert found["ggufFile"]["rfilename"] == "model.gguf"
    assert found["mmprojFile"]["rfilename"] == "mmproj.gguf"


def test_a_model_without_gguf_files_has_none(library: Library) -> None:
    assert ask(library, "/v2/org/model/manifests/latest", headers=JSON).status == 404
    assert ask(library, "/v2/org/none/manifests/latest", headers=JSON).status == 404
