"""Failures of the library and of the loop get a line of the log each, without their texts."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from blobstore.serve.log import MAX_LINES, ErrorLog, Log


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (OSError("a-token"), ["it failed: OSError"]),
        (None, ["it failed"]),
        (ConnectionResetError("a-token"), []),
    ],
)
def test_a_failure_is_noted_by_its_type(error: Exception | None, lines: list[str]) -> None:
    written: list[str] = []
    log = Log(written.append)

    async def run() -> None:
        errors = ErrorLog(log)
        info = None if error is None else (type(error), error, None)
        record = errors.makeRecord("", logging.ERROR, "", 0, "it %s", ("failed",), info)
        errors.handle(record)
        asyncio.get_running_loop().call_exception_handler(
            {"message": "it failed", "exception": error}
        )

    asyncio.run(run())
    log.flush()
    noted = [json.loads(line)["error"] for text in written for line in text.splitlines()]
    assert noted == lines * 2
    assert not log.lines


def test_a_log_that_nobody_reads_keeps_its_newest_lines() -> None:
    written: list[str] = []
    log = Log(written.append)
    for number in range(MAX_LINES + 3):
        log.note(number=number)
    assert len(log.lines) == MAX_LINES
    log.flush()
    *lines, last = (json.loads(line) for text in written for line in text.splitlines())
    assert [line["number"] for line in lines] == [*range(3, MAX_LINES + 3)]
    assert last["dropped"] == 3
    log.note(number=0)
    log.flush()
    assert "dropped" not in written[-1]
