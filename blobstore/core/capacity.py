"""All that is counted while a server answers, or while a remote is read: threads, connections, jobs and buffers.

No client may stop the others, so each row says what happens when it is full, and three rules hold:

- A task that has a part of a row never waits for another part of it.
- What a client waits for ends when the client leaves, or when nothing has moved for a while. One place sees to
  that: :meth:`blobstore.serve.server.Server.run` asks aiohttp to cancel what it does for a client that leaves, and
  every request runs under one deadline, which only bytes that are sent move.
- Work on threads has no client. All who need it share it, and it is not begun if they have left by then.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal, NamedTuple


class Capacity(NamedTuple):
    """The limit of a resource, and the treatment of one more request for it."""

    most: int
    when_full: Literal["refused", "queued", "yields"]
    """Refused at once; or waits for its turn; or another one is ended for it, which did nothing for the longest time."""
    what: str
    at_once: int = 0
    """How many threads compute at once, and the others wait for their turn; 0 for all."""

    def executor(self) -> ThreadPoolExecutor:
        """Return a pool of this many threads, which begin when there is work."""
        return ThreadPoolExecutor(self.most, self.what.partition(" ")[0])


# A server
CONNECTIONS: Final = Capacity(4096, "yields", "connections that are open")
HANDSHAKES: Final = Capacity(256, "yields", "handshakes of TLS that have not ended")
JOBS: Final = Capacity(1000, "refused", "jobs of a kind of work that are begun or wait")
ANSWER: Final = Capacity(8, "queued", "answers that take their time")
SEND: Final = Capacity(8, "queued", "sends: reads of files")
DECODE: Final = Capacity(os.cpu_count() or 1, "queued", "decoding of pieces of frozen blobs")
VERIFY: Final = Capacity(64, "queued", "verifications of blobs before they are sent", at_once=4)
PREPARE: Final = Capacity(4, "queued", "preparations of models of the store")
HASH: Final = Capacity(
    16, "queued", "hashes of all bytes of a model, each of which has some memory", at_once=2
)
ARRIVALS: Final = Capacity(32, "refused", "arrivals: models that an upstream sends at once")
PATIENT: Final = Capacity(
    16, "refused", "patient questions, for which a busy upstream is waited for"
)
FETCH: Final = Capacity(
    2 * ARRIVALS.most + 64,
    "queued",
    "fetches: two waits for each arrival, and questions about them",
)
ASK: Final = Capacity(64, "queued", "asks: questions to others about what was never fetched")
TRY: Final = Capacity(16, "queued", "tries of tokens of which no right is known")
LIST: Final = Capacity(1, "queued", "lists of the tags of one model that are made")
LIST_ALL: Final = Capacity(1, "queued", "lists of all models that are made")
WATCH: Final = Capacity(1, "queued", "watches: looks at all manifests that clients wait for")
DECODED: Final = Capacity(32, "yields", "decoded pieces of frozen blobs that are being sent")
TEXTS: Final = Capacity(
    64 << 20, "yields", "texts: bytes of forms that arrive, and of answers that clients read"
)
ARRIVING_FILES: Final = Capacity(
    4096, "refused", "files of arrivals, each of which is open until the model is imported"
)
DOWNLOADS: Final = Capacity(8, "queued", "downloads: files of a model that are fetched at once")
PROBES: Final = Capacity(64, "queued", "probes: peers that are asked for a model at once")
PEER_BLOBS: Final = Capacity(8, "queued", "blobs that are fetched from peers for a model at once")

# Models of other servers and of object storage
RANGES: Final = Capacity(16, "queued", "ranges of blobs that a load reads at once")
HEADERS: Final = Capacity(8, "queued", "headers that are read at once when a model is opened")
CATALOG: Final = Capacity(8, "queued", "names that a list of models reads at once")
TAGS: Final = Capacity(8, "queued", "tags of a registry that a list reads at once")
KEPT: Final = Capacity(1, "queued", "kept: loads whose blobs get their names in the background")
TRIAL: Final = Capacity(1, "queued", "trials of a password that a registry has not accepted yet")
TOKEN: Final = Capacity(1, "queued", "tokens that are fetched from a registry at once")

ALL: Final = {name: value for name, value in globals().items() if isinstance(value, Capacity)}
"""The table, which tests go through."""
