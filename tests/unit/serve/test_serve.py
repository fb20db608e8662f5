"""The options of a server that are refused before it listens."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from blobstore.errors import BlobstoreError, MissingLibrary, UsageError
from blobstore.serve.serve import _read_tokens, serve
from blobstore.store.local import LocalStore
from tests.support.serve_process import serving


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "cache.example", ""])
def test_an_address_that_others_reach_needs_a_token_or_the_will_to_have_none(
    store: LocalStore, host: str
) -> None:
    with pytest.raises(UsageError, match="give token_file, or anonymous=True"):
        serve(store, host=host)


def test_a_server_with_tokens_is_not_anonymous(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="anonymous"):
        serve(store, token_file=tmp_path / "tokens", anonymous=True)


def test_a_token_file_must_be_there_and_have_tokens(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(BlobstoreError, match="cannot read the token file"):
        serve(store, token_file=tmp_path / "tokens")
    (tmp_path / "tokens").write_text("short\n")
    with pytest.raises(UsageError, match="line 1"):
        serve(store, token_file=tmp_path / "tokens")


def test_a_library_that_peers_need_is_missed_before_the_port_is_open(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    monkeypatch.delitem(sys.modules, "blobstore.http.transport", raising=False)

    with pytest.raises(MissingLibrary, match="httpx2"):
        serve(store, peers=["http://localhost:1"], port=0, on_ready=pytest.fail)


def test_what_decodes_frozen_models_is_imported_before_the_first_request(
    store: LocalStore, tmp_path: Path
) -> None:
    """An import of numpy that fails, for too many open files, fails for as long as the process lives."""
    pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")
    store.root.mkdir()
    with serving(store, tmp_path, is_new=True) as server:
        assert "numpy" in Path(f"/proc/{server.process.pid}/maps").read_text()


@pytest.mark.parametrize("text", ["", "the-new-token"])
def test_a_token_file_without_a_newline_at_its_end_counts_after_a_while(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "tokens"
    path.write_text("the-old-token\n")
    before, _ = _read_tokens(path, None)
    path.write_text(text)
    held, fault = _read_tokens(path, before)
    assert held is before
    assert "it had before holds for 10 s" in fault
    for seconds in (-11, 3600):  # a clock that is wrong does not make it hold for longer
        os.utime(path, (time.time() + seconds,) * 2)
        after, _ = _read_tokens(path, before)
        assert [one.secret for one in after.tokens or ()] == ([text.encode()] if text else [])
