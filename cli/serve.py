"""``blobstore serve``: serves the store to clients of the Hub and of registries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output
from blobstore.core import interrupts

if TYPE_CHECKING:
    from blobstore.store.local import LocalStore


@click.command("serve", short_help="Serve the models to clients of the Hub and of registries.")
@options.shared("store")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen on; one that other machines reach needs --token-file or --anonymous.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port to listen on; 0 for any free one.",
)
@click.option(
    "--allow",
    multiple=True,
    metavar="GLOB",
    help="Serve only models with such names, for example 'org/*'; may be repeated.",
)
@click.option(
    "--token-file",
    type=arguments.FILE,
    metavar="FILE",
    help="File of tokens, one on each line; each request needs one. Read again when it changes.",
)
@click.option(
    "--tls-cert",
    type=arguments.FILE,
    metavar="FILE",
    help="Speak TLS with this certificate, in PEM with those of its issuers. Read again when it changes.",
)
@click.option(
    "--tls-key",
    type=arguments.FILE,
    metavar="FILE",
    help="The key of the certificate, in PEM.",
)
@click.option(
    "--upstream",
    metavar="URL",
    help="Fetch models that the store lacks from this Hub, for example https://huggingface.co.",
)
@click.option(
    "--upstream-token-file",
    type=arguments.FILE,
    metavar="FILE",
    help="File with the token for the upstream, for clients without a token of their own.",
)
@click.option(
    "--peers",
    metavar="URL,...",
    callback=lambda _, __, value: [one for one in (value or "").split(",") if one],
    help="Ask these other servers for blobs before the upstream, for example http://node2:8080.",
)
@click.option(
    "--fresh",
    type=click.FloatRange(min=0),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="Ask the upstream again after so long what a tag is, and who may read it.",
)
@click.option(
    "--max-size",
    metavar="SIZE",
    callback=options.parse_size,
    help="Keep at most SIZE of the upstream's models, such as 2TB; the least recently used go first.",
)
@click.option(
    "--prewarm",
    type=arguments.FILE,
    metavar="LOCKFILE",
    help="Fetch the models of this file of 'blobstore lock' first; /readyz says no until they are there.",
)
@click.option(
    "--drain",
    type=click.FloatRange(min=0),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="End so long after Ctrl-C or SIGTERM at the latest; responses that are being sent go on until then.",
)
@click.option("--anonymous", is_flag=True, help="Serve everyone who reaches the address.")
def command(
    store: LocalStore,
    host: str,
    port: int,
    allow: tuple[str, ...],
    token_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    upstream: str | None,
    upstream_token_file: str | None,
    peers: list[str],
    fresh: float,
    max_size: int | None,
    prewarm: str | None,
    drain: float,
    anonymous: bool,
) -> None:
    """Serve the models of the store over HTTP until Ctrl-C. Needs 'tensor-blobstore[serve]'.

    Set HF_ENDPOINT to the printed address, and transformers, vLLM, diffusers, hf and others load
    models from the store as from the Hub. Tags are revisions; main is latest.

    The log has a line of JSON for each request and goes to standard error; --quiet prints none.
    """
    from blobstore.serve.serve import serve

    # These fill a store that is not there yet.
    if upstream is None and not peers and prewarm is None:
        output.show_note(*arguments.store_notes(store))
    try:
        serve(
            store,
            host=host,
            port=port,
            allow=allow,
            token_file=token_file,
            tls_cert=tls_cert,
            tls_key=tls_key,
            anonymous=anonymous,
            upstream=upstream,
            upstream_token_file=upstream_token_file,
            peers=peers,
            fresh=fresh,
            max_size=max_size,
            prewarm=prewarm,
            drain=drain,
            on_ready=lambda address: output.show(f"serving {address}; stop with Ctrl-C"),
            log=None if output.is_quiet() else output.show_line,
        )
    except interrupts.Stopped as stopped:
        stopped.is_noted = not output.is_quiet()  # in the log, all of whose lines are JSON
        raise
