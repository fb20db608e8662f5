"""``blobstore logout``: forgets the password for a registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options
from blobstore.core.escape import escape

if TYPE_CHECKING:
    from blobstore.cli.output import Output


@click.command("logout", short_help="Log out of a registry.")
@click.argument("registry", metavar="REGISTRY", type=arguments.HOST)
@options.shared("json")
def command(registry: str, out: Output) -> None:
    """Forget the password for the registry REGISTRY, in the files of Podman and Docker or their helpers."""
    from blobstore.registry.credentials import LoginFiles
    from blobstore.registry.reference import host_in

    host = host_in(registry)
    places = LoginFiles().erase(host)
    text = f"nothing to do: not logged in at {escape(host)}"
    if places:
        text = f"logged out of {escape(host)}; the password was in {', '.join(places)}"
    out.result({"host": host, "removed": bool(places)}, text)
