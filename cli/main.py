"""The program ``blobstore``: finds its commands and turns errors into messages and exit codes.

Commands are imported when they are used, and import their operations inside functions, so that
``--help`` stays fast. This is the only module that turns errors into messages and exit codes.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import signal
import sys
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

import blobstore
from blobstore.cli import options
from blobstore.cli.output import OutputClosed, is_verbose, show_error, show_json, with_options
from blobstore.cli.progress import progress_bar
from blobstore.cli.render import printable_lines
from blobstore.core import interrupts, progress
from blobstore.core.escape import escape, quote
from blobstore.core.interrupts import Stopped
from blobstore.core.synonyms import ALIASES, SYNONYMS
from blobstore.errors import BlobstoreError, RemoteError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

GROUPS = {
    "Import models": ("create", "ingest", "inspect", "convert"),
    "Look at models": (*("list", "show", "info", "cat", "find", "du", "page", "diff", "compare"),),
    "Use models": ("run", "link", "export", "serve", "bench"),
    "Manage names": ("cp", "tag", "mv", "history", "restore", "rm"),
    "Keep a store in order": ("verify", "repair", "gc", "freeze", "thaw", "sign"),
    "Move models": (
        *("push", "pull", "login", "logout", "lock", "sync", "follow", "pack", "unpack"),
    ),
    "Shell": ("completion",),
}
"""The commands under the headings of the help, as the table and the navigation of the documents have them."""
_COMMANDS = tuple(chain.from_iterable(GROUPS.values()))
_ELSEWHERE = {
    **dict.fromkeys(
        ("chat", "generate"),
        "'blobstore run' starts a server that is installed, and 'blobstore link' makes a folder for any "
        "of them",
    ),
    **dict.fromkeys(
        ("ps", "stop", "kill", "logs"),
        "'blobstore run' and 'blobstore serve' end with Ctrl-C in their terminal, and 'blobstore list' shows the "
        "models",
    ),
    "open": "'blobstore show NAME' lists the tensors of a model, and 'blobstore.open' maps them in Python",
    "upgrade": "a new version of the program comes with pip; stores of earlier versions stay as they are",
    **dict.fromkeys(
        ("dedup", "dedupe", "deduplicate", "optimize"),
        "equal tensors are always stored once; 'blobstore freeze' compresses models, and 'blobstore du' shows "
        "what they share",
    ),
    "tags": "'blobstore list NAME' shows the tags of a name, and 'blobstore list oci://HOST/REPOSITORY' those in "
    "a registry",
    **dict.fromkeys(
        ("env", "config", "whoami", "cache", "where"),
        "the store is the folder of --store or $BLOBSTORE_HOME; 'blobstore du' shows what is there",
    ),
    "quantize": "'blobstore create SOURCE NAME --quantize TYPE' quantizes what it imports",
    "dequantize": "'blobstore export NAME DIR --dequantize' writes plain values",
    **dict.fromkeys(
        ("doctor", "status"), "'blobstore verify' checks a store, and 'blobstore du' sums it up"
    ),
}
"""Names that are not commands, with advice on the commands for their purpose."""
_BROKEN_PIPE = 128 + signal.SIGPIPE
_MAX_DESCRIPTORS = 10240
"""As many as macOS allows if it says that there is no limit."""
_DID_YOU_MEAN = re.compile(
    r"\.? \(?(?:Did you mean|Possible options:)(?: one of:)? ([^?)]+)[?.)]*$"
)

_EPILOG = """\b
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 damaged data,
130 interrupted, 143 terminated.

\b
With --json, a failed command also prints on standard output
{"error": {"kind": …, "message": …, "exit_code": …}}; kind is the name of
the Python exception in blobstore.errors, or Interrupted. What a registry or
object storage has answered follows as "status" and "code", if it is known.

\b
Completion in bash, zsh or fish, for example:
  eval "$(blobstore completion bash)"
"""


class _UsageError(click.UsageError):
    """A usage error of click, shown as other errors are: in one line."""

    def show(self, file: IO[Any] | None = None) -> None:
        del file
        show_error(f"{self.message}; see '{self.ctx.command_path if self.ctx else ''} --help'")


class _Program(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(_COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        longest = max(map(len, _COMMANDS))
        limit = formatter.width - 6 - longest
        for heading, names in GROUPS.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(heading):
                formatter.write_dl(
                    [(n.ljust(longest), one.get_short_help_str(limit)) for n, one in found if one]
                )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"blobstore.cli.{name}").command
        interrupts.check()
        if command.params[-1] is not options.COMMON[-1]:
            command.params.extend(options.COMMON)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args == ["version"]:
            _show_version(ctx)
        if args == ["help"]:
            click.echo(ctx.get_help())
            ctx.exit()
        if args[0] == "help":
            args = [*args[1:2], "--help"]
        name = args[0]
        if self.get_command(ctx, name) is None and not (
            name.startswith("-") or ctx.resilient_parsing
        ):
            raise click.UsageError(f"no such command {quote(name)}{_suggestion(name)}", ctx)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options.expect_json(ctx, args)
        with _usage_errors_in_one_line(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            interrupts.check()  # imports take long enough for an impatient user
            with _usage_errors_in_one_line(ctx):
                return super().invoke(ctx)
        except click.UsageError as error:
            _report_json(ctx, "UsageError", error.format_message(), error.exit_code)
            raise
        except OutputClosed:
            ctx.exit(_BROKEN_PIPE)
        except Stopped as stopped:
            _report_json(ctx, "Interrupted", "interrupted", stopped.exit_code)
            raise
        except (click.exceptions.Exit, click.Abort):
            raise
        # A RuntimeError is that of a thread that cannot be started.
        except (BlobstoreError, OSError, MemoryError, RuntimeError) as error:
            if request := interrupts.cause(error):
                # Ctrl-C reaches the processes of a terminal together: what fails now is a consequence.
                _report_json(ctx, "Interrupted", "interrupted", request.exit_code)
                raise request from None
            if not isinstance(error, BlobstoreError):
                reason = getattr(error, "strerror", None) or str(error) or "out of memory"
                name = getattr(error, "filename", None)
                where = f" ({quote(name)})" if name else ""
                error = BlobstoreError(f"the system failed: {reason}{where}")
            text = with_options(str(error))
            _report_json(ctx, type(error).__name__, text, error.exit_code, error)
            if is_verbose():
                import traceback

                click.echo(printable_lines(traceback.format_exc()), err=True, nl=False)
            show_error(text)
            ctx.exit(error.exit_code)


@click.group(cls=_Program, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EPILOG)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, _, asked: _show_version(ctx) if asked else None,
    help="Show the version and exit.",
)
@options.global_store_option
def program() -> None:
    """A content-addressed store for model weights.

    A model is stored as one verified blob per tensor. Equal tensors are stored once, and programs
    map them into memory without copying. The store is the folder given with --store, or else
    $BLOBSTORE_HOME, or else ~/.blobstore. A models folder of Ollama works too.
    """


program.params.extend(options.COMMON)


def main() -> None:
    """Run the command line and exit the process."""
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal cannot encode are escaped; they must not be an error.
        if isinstance(stream, io.TextIOWrapper):  # None if the caller closed it
            stream.reconfigure(errors="backslashreplace")
    _raise_descriptor_limit()
    # What this program starts must find no modules in the working directory, which may be a stranger's model.
    os.environ["PYTHONSAFEPATH"] = "1"
    progress.listen(progress_bar)
    try:
        program(prog_name="blobstore")
    except Stopped as stopped:
        if not stopped.is_noted:
            click.echo("blobstore: interrupted", err=True)
        # Not sys.exit, which would wait for the calls that were left behind. All output is flushed.
        os._exit(stopped.exit_code)


def _raise_descriptor_limit() -> None:
    """Allow as many open files as the system does: each shard of a source is one, and macOS starts with 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _show_version(ctx: click.Context) -> None:
    click.echo(f"blobstore {blobstore.__version__}")
    ctx.exit()


def _report_json(
    ctx: click.Context,
    kind: str,
    message: str,
    exit_code: int,
    error: BlobstoreError | None = None,
) -> None:
    if options.wants_json(ctx):
        value: dict[str, Any] = {"kind": kind, "message": message, "exit_code": exit_code}
        if isinstance(error, RemoteError):
            answered = {"status": error.status, "code": error.code}
            value |= {name: known for name, known in answered.items() if known}
        # If standard output cannot be written, the message on standard error is enough.
        with contextlib.suppress(BlobstoreError, OutputClosed):
            show_json({"error": value})


def _suggestion(name: str) -> str:
    """Return the commands that a mistyped name may mean, as the end of an error."""
    from difflib import get_close_matches

    if name in _ELSEWHERE:
        return f"; {_ELSEWHERE[name]}"
    synonym = SYNONYMS.get(name)
    near = [synonym] if synonym else get_close_matches(name, (*_COMMANDS, *ALIASES))
    return f"; did you mean {' or '.join(map(quote, near))}?" if near else ""


@contextlib.contextmanager
def _usage_errors_in_one_line(ctx: click.Context) -> Iterator[None]:
    """Give the errors of click the form of all others: lower case, one line, no full stop."""
    try:
        yield
    except click.UsageError as error:
        # The help itself; click 8.1 has no such class.
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        text = escape(" ".join(error.format_message().split()))
        text = _DID_YOU_MEAN.sub(r"; did you mean \1?", text).removesuffix(".")
        where = error.ctx or ctx
        if error.ctx is None and ctx.invoked_subcommand:  # as of an option that lacks its value
            where = click.Context(ctx.command, ctx, ctx.invoked_subcommand)
        raise _UsageError(text[:1].lower() + text[1:], where) from None
