from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from blobstore.cli import output
from blobstore.cli.output import VOLUME_KEYS, Output, exit_with, record
from blobstore.core.digest import Digest
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.unit.cli.running import LAUNCHER, on_terminal


def not_wanted() -> Iterator[str]:
    yield "it was made"
    raise AssertionError


def test_a_result_is_text_and_then_its_notes(capsys: pytest.CaptureFixture[str]) -> None:
    Output(is_json=False).result({}, iter(["one", "two"]), notes=["three"])
    assert capsys.readouterr() == ("one\ntwo\n", "note: three\n")


def test_a_result_with_nothing_to_say_is_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    Output(is_json=False).result({}, [])
    assert capsys.readouterr().out == ""


def test_a_result_in_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(is_json=True)
    out.line("a model is done")
    out.result(lambda: {"path": Path("a"), "name": Reference.parse("b")}, "text", notes=["note"])
    assert capsys.readouterr() == ('{"path": "a", "name": "b:latest"}\n', "")


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("groups", [[], [[]], [[{"a": [1]}, {"b": "]["}]], [[[]], [], [{}], [{}]]])
def test_a_growing_document_is_the_same_as_one_of_all(
    groups: list[list[object]],
    is_terminal: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda: is_terminal)
    document = output.GrowingJson("items")
    for group in groups:
        document.add(group)
    document.end({"errors": ["x"]})
    growing = capsys.readouterr().out
    output.show_json({"items": [one for group in groups for one in group], "errors": ["x"]})
    assert growing == capsys.readouterr().out


def test_only_the_form_that_is_printed_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    Output(is_json=True).result({}, not_wanted())
    Output(is_json=False).result(lambda: list(not_wanted()), "text")
    assert capsys.readouterr().out == "{}\ntext\n"


def test_quiet_prints_the_names_of_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    with click.Context(click.Command("x")) as context:
        context.meta[VOLUME_KEYS["quiet"]] = True
        Output(is_json=False).result({}, "table", names=["a\x1b", "b"], notes=["note"])
    assert capsys.readouterr() == ("a\\x1b\nb\n", "")


def test_errors_end_a_command_with_their_code(capsys: pytest.CaptureFixture[str]) -> None:
    with click.Context(click.Command("x")):
        exit_with([])
        with pytest.raises(click.exceptions.Exit) as caught:
            exit_with(iter(["one", "two"]))
        assert caught.value.exit_code == 4
    assert capsys.readouterr().err == "blobstore: error: one\nblobstore: error: two\n"


class Found(NamedTuple):
    digest: Digest
    size: int
    modified: float | None
    snr_db: float
    architecture: str


def test_a_record_has_the_keys_and_forms_of_json() -> None:
    digest = Digest.of(b"")
    fields = "digest short=digest.short bytes=size modified snr_db architecture"
    assert record(Found(digest, 2, 0.0, math.inf, ""), fields) == {
        "digest": str(digest),
        "short": digest.short,
        "bytes": 2,
        "modified": "1970-01-01T00:00:00+00:00",
        "snr_db": "Infinity",
        "architecture": None,
    }
    assert record(Found(digest, 2, None, 1.5, "A"), "modified snr_db architecture") == {
        "modified": None,
        "snr_db": 1.5,
        "architecture": "A",
    }


def test_errors_are_red_on_a_terminal(stored: LocalStore) -> None:
    assert b"\x1b[31m\x1b[1mblobstore: error:\x1b[0m no such" in on_terminal(
        LAUNCHER, "shwo", exit_code=2
    )
    assert b"\x1b" not in on_terminal(LAUNCHER, "shwo", exit_code=2, NO_COLOR="1")


def test_a_terminal_gets_the_manifest_escaped(stored: LocalStore) -> None:
    path = stored.manifest_path(Reference.parse("dense"))
    path.write_bytes(b'{"\x1b]0;x\x07": "\xe2\x80\xae\xff"}\n')
    shown = on_terminal(LAUNCHER, "show", "dense", "--manifest")
    assert shown == b'{"\\x1b]0;x\\x07": "\\u202e\\xff"}\r\n'
