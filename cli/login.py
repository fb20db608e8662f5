"""``blobstore login``: keeps a password for a registry."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options
from blobstore.cli.prompt import ask
from blobstore.core import interrupts
from blobstore.core.escape import escape
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from blobstore.cli.output import Output

_MAX_PASSWORD = 64 * 2**10


@click.command("login", short_help="Log in at a registry.")
@click.argument("registry", metavar="REGISTRY", type=arguments.HOST)
@click.option("--username", "-u", metavar="USER", help="The user; asked for by default.")
@click.option("--password-stdin", is_flag=True, help="Read the password from standard input.")
@options.shared("json")
def command(registry: str, username: str | None, password_stdin: bool, out: Output) -> None:
    """Log in at the registry REGISTRY, which is host[:port], and keep the password.

    With http://host:port, as of a 'blobstore serve', TLS is not used; with https://, it is, on this
    machine too. The password is kept where
    Podman or Docker has one for the registry, or else where Docker keeps it: by the credential
    helper that Docker's configuration names, or in that file. It is kept only if the registry does
    not refuse it.
    """
    from blobstore.http.protocol import Login
    from blobstore.registry.client import RegistryClient
    from blobstore.registry.credentials import GivenLogin, LoginFiles, check_user
    from blobstore.registry.reference import host_in, split_scheme

    host = host_in(registry)
    plain_http = {"http": True, "https": False}.get(split_scheme(registry)[0])
    if not (password_stdin and username) and not sys.stdin.isatty():
        raise UsageError("there is no terminal to ask; give --username and --password-stdin")
    user = username or ask("Username")
    check_user(user)
    password = _read_password() if password_stdin else ask("Password", is_hidden=True)
    if not password:
        raise UsageError("the password is empty")
    login = Login(user, password)
    with RegistryClient(host, plain_http=plain_http, credentials=GivenLogin(login)) as client:
        is_checked = client.check_login()
    place = LoginFiles().store(host, login)
    notes = ["the registry did not ask for a password, so it was not checked"]
    out.result(
        {"host": host, "user": user, "checked": is_checked, "path": place},
        f"logged in at {escape(host)} as {escape(user)}; the password is in {place}",
        notes=[] if is_checked else notes,
    )


def _read_password() -> str:
    """Return what standard input holds, without the line break at its end."""
    data: bytes = interrupts.call(partial(sys.stdin.buffer.read, _MAX_PASSWORD))
    try:
        return data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise UsageError("the password on standard input is not UTF-8") from None
