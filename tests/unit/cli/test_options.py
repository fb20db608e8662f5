from __future__ import annotations

import click
import pytest

from blobstore.cli.options import parse_duration, parse_rate, parse_size, shared
from blobstore.store.local import LocalStore
from tests.unit.cli.running import run

PARAMETER = click.Option(["--shard-size"])


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("5 gb", 5 * 10**9),
        ("5G", 5 * 10**9),
        ("500MiB", 500 * 2**20),
        ("1.5kb", 1500),
        ("2TiB", 2 * 2**40),
        ("77", 77),
        ("77B", 77),
    ],
)
def test_reads_sizes(text: str, size: int) -> None:
    assert parse_size(click.Context(click.Command("x")), PARAMETER, text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5XB", "1e9", "i", "5iB", "٣GB", "9" * 400])
def test_rejects_invalid_sizes(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size such as 5GB"):
        parse_size(click.Context(click.Command("x")), PARAMETER, text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("0s", 0), ("30m", 1800), ("1.5d", 129_600), ("1w", 604_800)]
)
def test_reads_durations(text: str, seconds: float) -> None:
    assert parse_duration(click.Context(click.Command("x")), PARAMETER, text) == seconds


def test_rejects_a_duration_without_a_unit() -> None:
    with pytest.raises(click.BadParameter, match="is not a time such as 30m"):
        parse_duration(click.Context(click.Command("x")), PARAMETER, "5")


@pytest.mark.parametrize("text", ["5B", "5B/s", "5 B"])
def test_reads_rates(text: str) -> None:
    assert parse_rate(click.Context(click.Command("x")), PARAMETER, text) == 5


@pytest.mark.parametrize("text", ["5", "5/s", "", "0MB/s", "MB"])
def test_rejects_a_rate_without_a_unit(text: str) -> None:
    with pytest.raises(click.BadParameter):
        parse_rate(click.Context(click.Command("x")), PARAMETER, text)


def test_a_store_that_is_a_device_is_an_error_without_advice_to_change_its_mode() -> None:
    result = run("list", "--store", "/dev/null", exit_code=1)

    assert result.stderr.startswith("blobstore: error: ")
    assert "chmod" not in result.stderr


def test_warns_of_a_store_that_everybody_may_write_to(stored: LocalStore) -> None:
    stored.root.chmod(0o777)
    assert run("show", "dense").stderr.startswith("note: every user may write to '")


def test_shared_options_have_the_order_in_which_a_command_lists_them() -> None:
    @click.command()
    @shared("jobs", "json")
    @shared("keep")
    def command() -> None: ...

    assert [param.name for param in command.params] == ["jobs", "out", "keep"]
