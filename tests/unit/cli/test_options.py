from __future__ import annotations

import click
import pytest

from blobstore.cli.options import parse_size

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
def test_refuses_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size such as 5GB"):
        parse_size(click.Context(click.Command("x")), PARAMETER, text)
