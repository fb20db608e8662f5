"""Every request in the table of clients gets the response that they decided by."""

from __future__ import annotations

import re

import pytest

from blobstore.serve.library import Library
from tests.support.client_requests import (
    TABLE,
    answer_to,
    decisive,
    load_rows,
    served_library,
)
from tests.support.serve import json_of

DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.000Z")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return served_library(tmp_path_factory.mktemp("served"))


def test_clients_get_what_they_decide_by(library: Library) -> None:
    rows = load_rows(library)
    wrong = {
        f"{row['method']} {row['target']}": (row["clients"], decisive(row, answer_to(library, row)))
        for row in rows
        if decisive(row, answer_to(library, row)) != row["decides_by"]
    }
    assert not wrong


def test_each_client_is_in_the_table() -> None:
    written = TABLE.read_text(encoding="utf-8")
    for client in (
        *("huggingface_hub 0.17.3", "huggingface_hub 0.23.5", "huggingface_hub 0.34.4"),
        *("huggingface_hub 1.33.0", "huggingface_hub 2.4.0", "@huggingface/hub 2.17.5"),
        *("hf-hub (Rust)", "transformers 5.23.0 pipeline", "accelerate 1.15.0 estimate-memory"),
        *("ramalama 0.25 GGUF by quantization", "ramalama 0.25 file", "ramalama 0.25 safetensors"),
        *("llama.cpp (by its source)", "skopeo 1.9.3", "podman 4.3.1", "containerd 1.6.20"),
        "oras-py 0.2.43",
    ):
        assert f'"{client}"' in written
    assert "127.0.0.1" not in written


def test_clients_get_dates_that_they_can_read(library: Library) -> None:
    asked = {row["target"]: row for row in load_rows(library)}
    info = asked["/api/models/team/chat"]
    value = json_of(answer_to(library, info))
    assert DATE.fullmatch(value["lastModified"])
    assert value["createdAt"] == value["lastModified"]


def test_every_request_is_one_that_a_client_sends(library: Library) -> None:
    for row in load_rows(library):
        assert row["clients"]
        refused = row["decides_by"]["status"] in (400, 405, 415)
        assert not refused, row["target"]
