"""Push to and pull from a real registry on this machine, compared with bare loops and with skopeo.

    python -m tests.benchmarks.registries [--folder DIR] [--scale X] [--rounds N]

The registry is Debian's ``docker-registry``. A bare loop sends the same requests on as many threads: for a
push, it hashes each file while it sends it; for a pull, it hashes each blob while it writes it, syncs it and
renames it. It uses the HTTP library of the client, and a second one that of Python. skopeo copies the same
blobs from and to an OCI layout.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import httpx2
import numpy as np

import blobstore
from blobstore.core.digest import Digest
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.http.transport import Transport
from blobstore.manifests import media_types
from blobstore.operations.sign.sign import sign_model
from blobstore.operations.transfer.pull import pull_model
from blobstore.operations.transfer.push import push_model
from blobstore.registry.client import RegistryClient
from blobstore.registry.reference import RemoteReference
from blobstore.registry.store import RemoteSource
from blobstore.remotes.model_reader import HEADER_REQUEST, RemoteReader
from blobstore.store.local import LocalStore
from tests.benchmarks import common
from tests.benchmarks.export import record_digests
from tests.support.registry import Server, running_registry
from tests.support.signing import key_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from typing_extensions import Buffer

    Body = bytes | Iterable[Buffer] | None

_STREAMS = 8
_PIECE = 2**20
_MODELS = {
    "301 blobs, 525 MB": [4096] * 100 + [2**20] * 180 + [2**24] * 20,
    "2 GiB in 200 blobs": [2 * common.GIB // 200] * 200,
}
_NAME = "bench/model:latest"
_MANIFEST = f"/v2/{_NAME.replace(':', '/manifests/')}"
_CONTEXT = httpx2.create_ssl_context()  # making one takes longer than a request
_BLOBS = f"/v2/{_NAME.partition(':')[0]}/blobs"


def make_store(folder: Path, sizes: list[int], scale: float) -> LocalStore:
    """Return a store with a model of random bf16 tensors, one in each blob."""
    shapes = [max(1, int(size * scale) // 2) for size in sizes]
    specs = [
        TensorSpec(f"unit.{number}.weight", DTYPES["BF16"], (count,))
        for number, count in enumerate(shapes)
    ]
    nbytes = {spec.name: spec.nbytes for spec in specs}
    source = common.write_model(folder / "source", specs, lambda name: [os.urandom(nbytes[name])])
    store = LocalStore(folder / "store")
    blobstore.create(source, "m", store=store)
    record_digests(store, source)  # as after an import from the Hub; sign needs them
    shutil.rmtree(source)
    return store


class StandardConnection:
    """A connection of Python's ``http.client``."""

    def __init__(self, host: str) -> None:
        self._connection = HTTPConnection(host)
        self._buffer = memoryview(bytearray(_PIECE))

    def ask(
        self, method: str, path: str, body: Body = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Mapping[str, str]]:
        """Return the status and the headers of a response."""
        self._connection.request(method, path, body, headers or {})  # type: ignore[arg-type]
        response = self._connection.getresponse()
        response.read()
        return response.status, response.headers  # type: ignore[return-value]

    def pieces(self, path: str, headers: dict[str, str] | None = None) -> Iterator[Buffer]:
        """Yield what the server has at a path."""
        self._connection.request("GET", path, headers=headers or {})
        response = self._connection.getresponse()
        while count := response.readinto(self._buffer):
            yield self._buffer[:count]


class Httpx2Connection:
    """A connection of httpx2, which the client of blobstore uses."""

    def __init__(self, host: str) -> None:
        self._client = httpx2.Client(base_url=f"http://{host}", trust_env=False, verify=_CONTEXT)

    def ask(
        self, method: str, path: str, body: Body = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Mapping[str, str]]:
        """Return the status and the headers of a response."""
        response = self._client.request(method, path, content=body, headers=headers)  # type: ignore[arg-type]
        return response.status_code, response.headers

    def pieces(self, path: str, headers: dict[str, str] | None = None) -> Iterator[Buffer]:
        """Yield what the server has at a path."""
        with self._client.stream("GET", path, headers=headers) as response:
            yield from response.iter_raw()


class Bare(NamedTuple):
    """The requests of a push and of a pull on as many threads, and nothing else."""

    host: str
    layout: Path
    """An OCI layout with the blobs and the manifest."""
    connect: type[StandardConnection | Httpx2Connection]

    @property
    def manifest(self) -> dict[str, Any]:
        """The descriptor of the manifest."""
        found: dict[str, Any] = json.loads((self.layout / "index.json").read_bytes())
        return found["manifests"][0]  # type: ignore[no-any-return]

    def file(self, digest: str) -> Path:
        """Return the file of a blob or of the manifest."""
        return self.layout / "blobs" / digest.replace(":", "/")

    def push(self) -> None:
        """Send the blobs, then the manifest."""
        data = self.file(self.manifest["digest"]).read_bytes()
        self._on_threads(self._send, _blobs(data))
        headers = {"Content-Type": self.manifest["mediaType"]}
        assert self.connect(self.host).ask("PUT", _MANIFEST, data, headers)[0] == 201

    def pull(self, folder: Path) -> None:
        """Fetch the manifest, then the blobs, into durable files of a new folder."""
        folder.mkdir()
        headers = {"Accept": self.manifest["mediaType"]}
        data = b"".join(map(bytes, self.connect(self.host).pieces(_MANIFEST, headers)))
        self._on_threads(partial(self._fetch, folder), _blobs(data))
        (folder / "manifest").write_bytes(data)
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def _on_threads(self, job: Callable[[Any, str], None], blobs: Iterable[str]) -> None:
        threads = threading.local()

        def run(blob: str) -> None:
            if not hasattr(threads, "connection"):
                threads.connection = self.connect(self.host)
            job(threads.connection, blob)

        with ThreadPoolExecutor(_STREAMS) as pool:
            list(pool.map(run, blobs))

    def _send(self, connection: StandardConnection | Httpx2Connection, blob: str) -> None:
        assert connection.ask("HEAD", f"{_BLOBS}/{blob}")[0] == 404
        _, headers = connection.ask("POST", f"{_BLOBS}/uploads/")
        path = "/" + headers["location"].split("/", 3)[3]
        length = {"Content-Length": str(self.file(blob).stat().st_size)}
        pieces = _hashed_pieces(self.file(blob), blob)
        assert connection.ask("PUT", f"{path}&digest={blob}", pieces, length)[0] == 201

    def _fetch(
        self, folder: Path, connection: StandardConnection | Httpx2Connection, blob: str
    ) -> None:
        digest = hashlib.sha256()
        temporary = folder / f"{blob}.part"
        with temporary.open("wb", buffering=0) as file:
            for piece in connection.pieces(f"{_BLOBS}/{blob}"):
                digest.update(piece)
                file.write(piece)
            os.fsync(file.fileno())
        assert blob == f"sha256:{digest.hexdigest()}"
        temporary.rename(folder / blob)


def _blobs(manifest: bytes) -> list[str]:
    """Return the digests of the blobs that a manifest lists, the largest first."""
    content = json.loads(manifest)
    sizes = {item["digest"]: item["size"] for item in [content["config"], *content["layers"]]}
    return sorted(sizes, key=lambda digest: -sizes[digest])


def _hashed_pieces(path: Path, blob: str) -> Iterator[Buffer]:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            yield buffer[:count]
    assert blob == f"sha256:{digest.hexdigest()}"


def make_layout(folder: Path, store: LocalStore, host: str) -> Bare:
    """Return the model that was pushed as an OCI layout, whose blobs are links to those of the store."""
    repository, tag = _NAME.split(":")
    bare = Bare(host, folder, Httpx2Connection)
    (folder / "blobs" / "sha256").mkdir(parents=True)
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    with RegistryClient(host) as client:
        root = client.get_manifest(repository, tag)
        for item in [json.loads(root.data)["config"], *json.loads(root.data)["layers"]]:
            digest, path = Digest.parse(item["digest"]), bare.file(item["digest"])
            if store.exists(digest, item["size"]):
                path.hardlink_to(store.blob_path(digest))
            else:
                path.write_bytes(b"".join(client.read_blob(repository, digest, 0, item["size"])))
    bare.file(str(root.digest)).write_bytes(root.data)
    manifest = {
        "mediaType": root.media_type,
        "digest": str(root.digest),
        "size": len(root.data),
        "annotations": {"org.opencontainers.image.ref.name": tag},
    }
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
    return bare


def run(*command: str | Path) -> None:
    """Run a command that must succeed."""
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


def skopeo(source: str, target: str) -> None:
    """Copy between an OCI layout and the registry."""
    options = ["--insecure-policy", "copy", "--quiet", "--preserve-digests"]
    run("skopeo", *options, "--src-tls-verify=false", "--dest-tls-verify=false", source, target)


def compare(folder: Path, store: LocalStore, server: Server, bare: Bare, rounds: int) -> None:
    """Print the tables of push and of pull."""
    address, target = f"{server.host}/{_NAME}", folder / "target"
    command = (sys.executable, "-m", "blobstore.cli")

    def push(work: Callable[[], object]) -> float:
        shutil.rmtree(server.root / "docker", ignore_errors=True)
        return common.timed(work)

    def pull(work: Callable[[], object]) -> float:
        taken = common.timed(work)
        shutil.rmtree(target)
        return taken

    nbytes = sum(blob.size for blob in store.resolve("m").blobs)
    layout, remote = f"oci:{bare.layout}:latest", f"docker://{address}"
    limit, standard = "bare loop", bare._replace(connect=StandardConnection)
    pushes: dict[str, Callable[[], object]] = {
        limit: bare.push,
        "bare loop, http.client": standard.push,
        "push_model": lambda: push_model("m", address, store=store, streams=_STREAMS),
        "skopeo copy": lambda: skopeo(layout, remote),
        "blobstore push": lambda: run(*command, "push", "m", address, "--store", store.root),
    }
    pulls: dict[str, Callable[[], object]] = {
        limit: lambda: bare.pull(target),
        "bare loop, http.client": lambda: standard.pull(target),
        "pull_model": lambda: pull_model(address, "m", store=target, streams=_STREAMS),
        "skopeo copy": lambda: skopeo(remote, f"oci:{target}:latest"),
        "blobstore pull": lambda: run(*command, "pull", address, "m", "--store", target),
    }
    for title, cases, measure in (("push", pushes, push), ("pull", pulls, pull)):
        print(f"{title}\n")
        timed = {name: partial(measure, work) for name, work in cases.items()}
        common.table(common.rounds(timed, rounds, os.sync), limit, nbytes)
    unchanged = {
        "push_model, unchanged": lambda: common.timed(pushes["push_model"]),
        "blobstore push, unchanged": lambda: common.timed(pushes["blobstore push"]),
    }
    common.table(common.rounds(unchanged, rounds), "push_model, unchanged")


def read_headers(store: LocalStore, server: Server, bare: Bare, rounds: int) -> None:
    """Print the table of reading the header of one tensor, over a connection that is open."""
    address = RemoteReference.parse(f"{server.host}/{_NAME}")
    layers = store.resolve("m").layers_of(media_types.TENSOR)
    blobs = cycle(layer.id for layer in layers if layer.size > HEADER_REQUEST)
    connection = bare.connect(server.host)
    headers = {"Range": f"bytes=0-{HEADER_REQUEST - 1}"}

    def read_start() -> list[Buffer]:
        return list(connection.pieces(f"{_BLOBS}/{next(blobs).digest}", headers))

    with RegistryClient(server.host) as client:
        source = RemoteSource.resolve(client, address)
        reader = RemoteReader({address.name(): source})
        cases = {
            "one range": lambda: common.timed(read_start),
            "read_headers": lambda: common.timed(lambda: list(reader.read_headers([next(blobs)]))),
        }
        common.table(common.rounds(cases, rounds * 20), "one range")


def sign(store: LocalStore, folder: Path, rounds: int) -> None:
    """Print the seconds of signing a model."""
    key = key_files(folder).private

    def case() -> float:
        shutil.rmtree(store.folder("signatures"), ignore_errors=True)
        return common.timed(lambda: sign_model("m", key, store=store))

    common.table(common.rounds({"sign_model": case}, rounds * 4), "sign_model")


def measure_memory(store: LocalStore, server: Server, folder: Path) -> None:
    """Print the private memory of a push and a pull, with that of the libraries."""
    address = f"{server.host}/{_NAME}"
    shutil.rmtree(server.root / "docker")
    for operation, arguments in (("push", "'m', sys.argv[1]"), ("pull", "sys.argv[1], 'm'")):
        used = common.private_memory(
            "begin()\n"
            f"from blobstore.operations.transfer.{operation} import {operation}_model\n"
            f"{operation}_model({arguments}, store=sys.argv[2])",
            address,
            str(store.root if operation == "push" else folder / "memory"),
        )
        print(f"private memory of {operation}: {used / 2**20:.0f} MiB\n")
    shutil.rmtree(folder / "memory")


def fine_tune(folder: Path, server: Server, scale: float) -> None:
    """Print what a pull transfers of a fine-tune whose base is present."""
    random = np.random.default_rng(0)
    shape = (1024, max(1, int(1024 * scale)))
    specs = [TensorSpec(f"unit.{number}.weight", DTYPES["BF16"], shape) for number in range(32)]
    weights = [random.standard_normal(shape, np.float32) * np.float32(0.02) for _ in specs]
    origin, target = LocalStore(folder / "origin"), LocalStore(folder / "tuned")
    for model, update in (("base", 0), ("tune", 2e-4)):
        values = {
            spec.name: weight + random.standard_normal(shape, np.float32) * np.float32(update)
            for spec, weight in zip(specs, weights, strict=True)
        }
        source = common.write_model(
            folder / model,
            specs,
            lambda name, values=values: [  # type: ignore[misc]
                (values[name].view(np.uint32) >> 16).astype(np.uint16).tobytes()
            ],
        )
        blobstore.create(source, model, store=origin)
    push_model("base", f"{server.host}/bench/base", store=origin)
    pushed = push_model("tune", f"{server.host}/bench/tune", store=origin, cold=True, base="base")
    pull_model(f"{server.host}/bench/base", "base", store=target)
    received, pieces = 0, Transport.pieces

    def counted(transport: Transport, response: httpx2.Response) -> Iterator[bytes]:
        nonlocal received
        for piece in pieces(transport, response):
            received += len(piece)
            yield piece

    with patch.object(Transport, "pieces", counted):
        pulled = pull_model(f"{server.host}/bench/tune", "tune", store=target)
    size = sum(blob.size for blob in origin.resolve("tune").blobs)
    print("| a fine-tune whose base is present | bytes | of its cold size |\n| --- | --- | --- |")
    for what, nbytes in {
        "the model": size,
        "its cold size": pushed.bytes_cold,
        "fetched blobs": pulled.bytes_fetched,
        "all bodies of responses, manifests included": received,
    }.items():
        print(f"| {what} | {nbytes} | {nbytes / pushed.bytes_cold:.4f} |")
    print()


def main() -> None:
    """Print the tables."""
    options = common.arguments(__doc__)
    for title, sizes in _MODELS.items():
        print(f"## {title}, {_STREAMS} streams\n")
        with (
            common.workspace(options.folder) as folder,
            running_registry(folder / "server") as server,
        ):
            store = make_store(folder, sizes, options.scale)
            push_model("m", f"{server.host}/{_NAME}", store=store)
            bare = make_layout(folder / "layout", store, server.host)
            compare(folder, store, server, bare, options.rounds)
            read_headers(store, server, bare, options.rounds)
            sign(store, folder, options.rounds)
            measure_memory(store, server, folder)
    with common.workspace(options.folder) as folder, running_registry(folder / "server") as server:
        fine_tune(folder, server, options.scale)


if __name__ == "__main__":
    main()
