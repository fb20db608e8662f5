"""Every request that clients were seen to send gets the response that they were content with."""

from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.serve.library import Library
from tests.support.recorded_clients import LOGS, answered, load_log, recorded_library

CLIENTS = sorted(path.stem for path in LOGS.glob("*.json"))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return recorded_library(tmp_path_factory.mktemp("recorded"))


@pytest.mark.parametrize("client", CLIENTS)
def test_requests_of_a_client_are_answered_as_they_were(client: str, library: Library) -> None:
    entries = load_log(LOGS / f"{client}.json", library)
    assert entries
    for entry in entries:
        assert answered(library, entry) == entry


def test_clients_of_both_protocols_were_recorded() -> None:
    names = {client.rpartition("-")[0] for client in CLIENTS}
    assert names >= {"huggingface_hub", "transformers", "ollama", "oras", "skopeo"}


def test_no_log_has_what_differs_from_machine_to_machine() -> None:
    for path in LOGS.glob("*.json"):
        text = Path(path).read_text(encoding="utf-8")
        assert "127.0.0.1" not in text
        assert "authorization" not in text
