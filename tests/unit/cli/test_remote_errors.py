from __future__ import annotations

import json
from pathlib import Path

import pytest

from blobstore.errors import RemoteRefused
from blobstore.objects.store import ObjectStore
from tests.support.hostile_s3 import failure, hostile_s3
from tests.support.raw_server import RawServer, reply
from tests.unit.cli.running import run


def error_of(*arguments: object) -> dict[str, object]:
    value = json.loads(run(*arguments, "--json", exit_code=1).stdout)
    found: dict[str, object] = value["error"]
    return found


def test_json_of_an_error_has_the_status_and_code_of_a_registry(tmp_path: Path) -> None:
    body = b'{"errors": [{"code": "DENIED", "message": "no"}]}'
    with RawServer(lambda _: reply(403, body)) as server:
        error = error_of("pull", f"{server.host}/a", "--store", tmp_path)
    assert error.keys() == {"kind", "message", "exit_code", "status", "code"}
    assert (error["kind"], error["status"], error["code"]) == ("RemoteRefused", 403, "DENIED")


def test_json_of_an_error_without_an_answer_has_neither(tmp_path: Path) -> None:
    error = error_of("pull", "127.0.0.1:1/a", "--store", tmp_path)
    assert error.keys() == {"kind", "message", "exit_code"}


def test_error_of_object_storage_has_its_status_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hostile_s3() as server:
        server.set_environment(monkeypatch)
        server.disturb = lambda _: failure(403, "AccessDenied")
        with pytest.raises(RemoteRefused) as caught:
            ObjectStore(server.address).read_manifest("m")
        assert (caught.value.status, caught.value.code) == (403, "AccessDenied")
        error = error_of("pull", f"{server.address}/m", "--store", tmp_path)
    assert (error["status"], error["code"]) == (403, "AccessDenied")
