"""A repository of a registry as the target of a push: blobs first, manifests next, and the tag last.

A blob that the registry has is not sent again, and one that another repository has is mounted from there. What
a registry says to have it may have lost, and says so only when it is sent the manifest.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Final

from blobstore.core.arguments import local_path
from blobstore.core.escape import quote
from blobstore.core.workers import WorkerPool
from blobstore.errors import BlobstoreError, ModelNotFound, RemoteError, RemoteRefused, UsageError
from blobstore.manifests import media_types
from blobstore.manifests.reference import DEFAULT_HOST
from blobstore.operations.transfer.push_target import PushedModel
from blobstore.registry import response_rules
from blobstore.registry.client import RegistryClient
from blobstore.registry.layouts.oci import MAX_LAYERS
from blobstore.registry.reference import RemoteReference
from blobstore.remotes.checked_pieces import CheckedPieces
from blobstore.remotes.cold_layers import COLD_BASES
from blobstore.remotes.cold_manifests import fetch_base_layers, fetch_cold_layers
from blobstore.remotes.referrers import fetch_referrers
from blobstore.remotes.registry_plan import plan_for_registry, pushed_blobs
from blobstore.remotes.send_cold import send_cold_manifests
from blobstore.remotes.signatures import push_signatures
from blobstore.remotes.transfer_cache import PushCache
from blobstore.signatures.keys import PrivateKey, read_key

if TYPE_CHECKING:
    import os
    from collections import Counter
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from blobstore.core.digest import BlobId, Digest
    from blobstore.core.rate_limit import RateLimiter
    from blobstore.manifests.reference import Reference
    from blobstore.objects.address import StoreAddress
    from blobstore.operations.transfer.push_target import Sent
    from blobstore.registry.layouts.plan import RemoteLayout, RemotePlan
    from blobstore.registry.manifest import RemoteManifest
    from blobstore.remotes.checked_pieces import PushedBlob
    from blobstore.remotes.cold_layers import ColdLayer
    from blobstore.remotes.registry_plan import Hashing
    from blobstore.signatures.keys import Passphrase
    from blobstore.store.local import LocalStore

_MANY_LAYERS: Final = 100
"""A registry that refuses a manifest of more layers may have a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryOptions:
    """Options of a push to a registry, which object storage does not have."""

    layout: RemoteLayout = "oci"
    """``oci`` is a ModelPack artifact, ``ollama`` the local manifest byte for byte, ``image`` a container image with
    the files in ``/models``."""
    max_layers: int = MAX_LAYERS
    """Layers per manifest of the layout ``oci``; larger models become an index of parts."""
    mount_from: tuple[str, ...] = ()
    """Repositories of the registry that may have blobs of the model."""
    mount: bool = True
    """Whether to mount blobs of other repositories, those included that the store remembers."""
    part_size: int | None = None
    """Bytes of a blob that one request sends at most, for proxies that limit requests; by default 64 MiB."""
    sign_key: str | os.PathLike[str] | None = None
    """The file of a private key in PEM, to sign the manifest in the registry for cosign."""
    plain_http: bool | None = None
    """Use HTTP without TLS; by default only for this machine."""
    passphrase: Callable[[], Passphrase] | None = field(default=None, compare=False)
    """Called if that key is encrypted."""


DEFAULT_OPTIONS = RegistryOptions()


def check_options(options: RegistryOptions) -> None:
    """Check how blobs are given to a registry. Raises UsageError."""
    if options.mount_from and not options.mount:
        raise UsageError("mount_from cannot be combined with mount=False")
    if options.part_size is not None and options.part_size < 1:
        raise UsageError(f"part_size must be at least 1 byte, got {options.part_size}")


def check_unused(options: RegistryOptions, remote: str | StoreAddress) -> None:
    """Check that all options have their defaults. Raises UsageError."""
    for option in fields(options):
        if option.compare and getattr(options, option.name) != option.default:
            raise UsageError(
                f"{option.name} is for registries, and {quote(remote)} is object storage"
            )


def registry_address(reference: Reference, remote: str | RemoteReference | None) -> RemoteReference:
    """Return where to push a model. Raises UsageError."""
    if remote is None:
        if reference.host == DEFAULT_HOST:
            path = str(reference).rpartition(":")[0].lower()
            raise UsageError(
                f"{quote(reference)} has no host to push to",
                advice=f"give a REMOTE such as registry.example.com/{path} or s3://bucket/prefix",
            )
        return RemoteReference.of(reference)
    address = remote if isinstance(remote, RemoteReference) else RemoteReference.parse(remote)
    address.check_writable()
    if address.digest is not None:
        raise UsageError(f"cannot push to the digest {quote(address)}; give a tag")
    return address


@contextlib.contextmanager
def open_registry(
    store: LocalStore,
    reference: Reference,
    address: RemoteReference,
    options: RegistryOptions,
    limiter: RateLimiter | None,
    hashing: Hashing,
    *,
    dry_run: bool,
) -> Iterator[RegistryTarget]:
    """Yield a repository as the target of a model; ``hashing`` returns workers for layers to be planned."""
    key = None
    if options.sign_key is not None:
        text = read_key(local_path(options.sign_key, "source"))
        key = PrivateKey.from_pem(text, str(options.sign_key), options.passphrase)

    def plan_of(model: Reference, hashing: Hashing) -> RemotePlan:
        return plan_for_registry(store, model, options.layout, options.max_layers, hashing)

    plan = plan_of(reference, hashing)
    http, part_size = options.plain_http, options.part_size
    with (
        RegistryClient(
            address.host, plain_http=http, limiter=limiter, part_size=part_size
        ) as client,
        # The name may be removed while its blobs are sent.
        store.lease_if_writable(
            blob.digest for blob in (*plan.blobs, *store.resolve(reference).blobs)
        ),
        contextlib.ExitStack() as uploads,
    ):
        cache = PushCache(store, address)
        if not dry_run:  # which writes nothing
            uploads.enter_context(cache)
        yield RegistryTarget(store, client, address, plan, cache, options, key, plan_of)


def _hash_nothing(size: int, _: int) -> WorkerPool:
    """Return idle workers: the layers of a model that was pushed were hashed then, so none is read for a hint."""
    if size:
        raise ModelNotFound("the layers of the model were not hashed")
    return WorkerPool(1, None, 0)


class RegistryTarget:
    """A repository of a registry that a model is pushed to."""

    kind = "the registry"
    checks_manifests = True
    notices: Sequence[str] = ()

    def __init__(
        self,
        store: LocalStore,
        client: RegistryClient,
        address: RemoteReference,
        plan: RemotePlan,
        cache: PushCache,
        options: RegistryOptions,
        key: PrivateKey | None,
        plan_of: Callable[[Reference, Hashing], RemotePlan],
    ) -> None:
        """Ask what the tag refers to."""
        self._store, self._client, self._key = store, client, key
        self._address, self._repository = address, address.repository
        self._plan, self._cache = plan, cache
        self._plan_of = plan_of
        self._mount_from = options.mount_from
        self._sources = cache.sources() if options.mount else {}
        self._claimed: dict[Digest, Sent] = {}
        """Blobs that were not sent, because the registry says that it has or has mounted them."""
        self.model = PushedModel(
            address=address,
            digest=plan.root.digest,
            layout=options.layout,
            manifests=len(plan.manifests),
            blobs=pushed_blobs(plan, store),
            # Only a hint: without an answer, every blob is looked for.
            is_published=client.head_manifest(self._repository, address.tag) == plan.root.digest,
        )

    def has(self, blob: PushedBlob) -> bool:
        """Return whether the registry says that it has a blob.

        Raises:
            RemoteError: it says so, but with another size.
        """
        found = self._client.blob_size(self._repository, blob.digest, for_upload=True)
        # A registry never replaces a blob that it has, so sending this one again would not help.
        if found not in {None, blob.size}:
            raise RemoteError(
                f"{quote(self._address.host)} has blob {blob.digest} with {found} bytes instead of "
                f"{blob.size}: its storage is damaged"
            )
        if found is not None:
            self._claimed[blob.digest] = "present"
        return found is not None

    def send(self, blob: PushedBlob, report: Callable[[int], object]) -> Mapping[Sent, int]:
        """Mount a blob, or upload it."""
        if self._is_mounted(blob):
            self._claimed[blob.digest] = "mounted"
            return {"mounted": blob.size}
        resumed = self._upload(blob, report)
        return {"sent": blob.size - resumed, "resumed": resumed}

    def _is_mounted(self, blob: PushedBlob) -> bool:
        """Mount a blob from another repository that may have it; return whether that succeeded."""
        known = self._sources.get(blob.digest.hex)
        sources = dict.fromkeys((*self._mount_from, *([known] if known else ())))
        return any(
            self._client.mount_blob(self._repository, blob.digest, source)
            for source in sources
            if source != self._repository
        )

    def _upload(self, blob: PushedBlob, report: Callable[[int], object]) -> int:
        """Upload a blob, from where an upload that was interrupted ended; return the bytes before that."""
        # An upload in one request cannot be resumed: nothing would be kept, and looking is in vain.
        is_resumable = blob.size > self._client.part_size
        with contextlib.closing(CheckedPieces(blob, report)) as pieces:
            resumed = self._client.upload_blob(
                self._repository,
                *blob.id,
                pieces,
                session=self._cache.session(blob.digest) if is_resumable else None,
                on_session=partial(self._cache.keep_session, blob.digest),
            )
        # Only now: if the upload fails, the next push resumes it by this note.
        self._cache.forget_session(blob.digest)
        return resumed

    def publish(self, workers: WorkerPool, sent: Counter[Sent]) -> None:
        """Send the manifests, the one with the tag last."""
        send_missing = partial(self._send_missing, workers, sent)
        *parts, root = self._plan.manifests
        # Before the index, which registries refuse if they lack one of its parts.
        for part in parts:
            # A part has its digest as its name, so one that is there is the same.
            if self._client.head_manifest(self._repository, str(part.digest)) is None:
                self._put(str(part.digest), part, send_missing)
        # Always sent, because the tag may refer to another manifest.
        self._put(self._address.tag, root, send_missing)
        # Only the accepted manifest shows that the repository has all blobs.
        self._cache.add(blob.digest for blob in self.model.blobs)

    def _send_missing(
        self, workers: WorkerPool, sent: Counter[Sent], named: frozenset[str]
    ) -> None:
        """Send the blobs that the registry names, or if it names none all that it said to have."""
        missing = [blob for blob in self.model.blobs if str(blob.digest) in named] or [
            blob for blob in self.model.blobs if blob.digest in self._claimed
        ]
        # Their bytes were reported as done before.
        workers.run(missing, lambda blob: self._upload(blob, lambda _: None), self.abort)
        for blob in missing:
            # Removed, so that a blob that is missing again later is not counted twice.
            if (claimed := self._claimed.pop(blob.digest, None)) is not None:
                sent[claimed] -= blob.size
                sent["sent"] += blob.size

    def _put(
        self,
        reference: str,
        manifest: RemoteManifest,
        send_missing: Callable[[frozenset[str]], object],
    ) -> None:
        try:
            self._client.put_manifest(self._repository, reference, manifest, send_missing)
        except RemoteRefused as error:
            if advice := self._advice(error, manifest):
                raise RemoteRefused(
                    error.message, advice=advice, status=error.status, code=error.code
                ) from None
            raise

    def _advice(self, error: RemoteRefused, manifest: RemoteManifest) -> str:
        """Return advice if a registry refuses a manifest, or nothing."""
        # The config has a digest too. An approximate number will do for advice.
        layers = manifest.data.count(b'"digest"') - 1
        if layers > _MANY_LAYERS:
            is_docker = manifest.media_type == media_types.MANIFEST
            option = "--layout oci" if is_docker else f"--max-layers {_MANY_LAYERS}"
            return (
                f"the manifest has {layers} layers; if that is too many for this registry, "
                f"push with '{option}'"
            )
        if self.model.layout != "image" and response_rules.refuses_form(error):
            return "if this registry takes container images only, push with '--layout image'"
        return ""

    def send_signatures(self) -> int:
        """Send the signatures of the model, and one of the manifest there if there is a key."""
        return push_signatures(self._client, self._address, self._plan.root, self._store, self._key)

    def read_cold_layers(self, *, verify: bool) -> Mapping[Digest, ColdLayer]:
        """Return the smallest cold layer of each blob that manifests list which refer to the model's."""
        if verify:  # then each is encoded again, looked for, and listed again
            return {}
        listed = fetch_referrers(self._client, self._repository, self._plan.root)
        blobs = (blob.id for blob in self._plan.blobs)
        return fetch_cold_layers(self._client, self._repository, listed, blobs)

    def read_forms_with(self, model: Reference) -> Mapping[Digest, ColdLayer]:
        """Return the cold layers that manifests list which refer to that of another model, if it is there."""
        client, repository = self._client, self._repository
        try:
            # Equal models have equal manifests, so that of a former version need not be noted.
            plan = self._plan_of(model, _hash_nothing)
        except BlobstoreError:  # it is damaged, removed, or was not pushed in this layout
            return {}
        listed = fetch_referrers(client, repository, plan.root)
        blobs = [blob.id for blob in plan.blobs]
        return {
            **fetch_base_layers(client, repository, listed, len(blobs)),
            **fetch_cold_layers(client, repository, listed, blobs),
        }

    def list_cold_layers(self, layers: Sequence[ColdLayer], bases: Sequence[ColdLayer]) -> None:
        """List cold layers in manifests that refer to the model's."""
        client, repository, root = self._client, self._repository, self._plan.root
        # Those of bases first: a push that is interrupted between the two sends both lists again.
        with contextlib.suppress(RemoteRefused):  # it has lost one of them
            send_cold_manifests(client, repository, root, bases, COLD_BASES)
        send_cold_manifests(client, repository, root, layers)

    def check_manifests(self) -> None:
        """Read the manifests back. Raises BlobDamaged if one has another digest."""
        for manifest in self._plan.manifests:
            # The client compares the digest.
            self._client.get_manifest(self._repository, str(manifest.digest))

    def read(self, blob: BlobId) -> Generator[memoryview, None, None]:
        """Yield the bytes of a blob, unchecked."""
        pieces = self._client.read_blob(self._repository, blob.digest, 0, blob.size, size=blob.size)
        with contextlib.closing(pieces):
            for piece in pieces:
                yield memoryview(piece)

    def abort(self) -> None:
        """End the requests of other threads, as cancelled."""
        self._client.abort()
