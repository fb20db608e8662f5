"""``blobstore logout``: forgets the password for a registry."""

from __future__ import annotations

import click

from blobstore.cli import options, render
from blobstore.core.escape import escape


@click.command("logout", short_help="Log out of a registry.")
@click.argument("registry", metavar="REGISTRY")
@options.json_option
def command(registry: str, as_json: bool) -> None:
    """Forget the password for the registry REGISTRY, in the files of Podman and Docker or their helpers."""
    from blobstore.registry.credentials import LoginFiles
    from blobstore.registry.reference import host_in

    host = host_in(registry)
    places = LoginFiles().erase(host)
    if as_json:
        render.show_json({"host": host, "removed": bool(places)})
        return
    if places:
        render.show(f"logged out of {escape(host)}; the password was in {', '.join(places)}")
    else:
        render.show(f"nothing to do: not logged in at {escape(host)}")
