"""``blobstore logout``: forgets the password for a registry."""

from __future__ import annotations

import click

from blobstore.cli import options, render
from blobstore.core.escape import escape


@click.command("logout", short_help="Log out of a registry.")
@click.argument("registry", metavar="REGISTRY")
@options.json_option
def command(registry: str, as_json: bool) -> None:
    """Forget the password for the registry REGISTRY, in Docker's configuration or its helper."""
    from blobstore.registry.credentials import DockerCredentials
    from blobstore.registry.reference import host_in

    host = host_in(registry)
    is_removed = DockerCredentials().erase(host)
    if as_json:
        render.show_json({"host": host, "removed": is_removed})
        return
    done = "logged out of" if is_removed else "nothing to do: not logged in at"
    render.show(f"{done} {escape(host)}")
