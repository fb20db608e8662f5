"""The operation ``info``: what is known about a model, on one page."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest
from blobstore.errors import BlobstoreError, Damaged
from blobstore.manifests.reference import Reference
from blobstore.models.model_card import card_field, decoded_config, small_texts, stated_license
from blobstore.models.source_layers import read_source_record
from blobstore.operations.describe.show import describe_model, model_source
from blobstore.quantization.formats import type_name
from blobstore.remotes.addresses import is_address, reading_models
from blobstore.store.catalog import read_catalog, read_entry
from blobstore.store.holdings import Holdings
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from blobstore.manifests.source_record import SourceRecord
    from blobstore.operations.describe.show import ModelDescription

_BASE_KEYS = ("base_model", "base_model_name_or_path", "_name_or_path")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What is known about a model."""

    description: ModelDescription
    digest: Digest
    """The digest of the manifest's bytes, whose start is the ID."""
    modified: float | None
    """When the manifest was written, in seconds since the epoch; None for a remote model."""
    aliases: tuple[Reference, ...]
    """Other names of the same manifest."""
    types: tuple[tuple[str, int, int], ...]
    """Each type of tensor, with the number of tensors and of bytes; largest first."""
    source: SourceRecord | None
    """What the model was imported from, if that is known."""
    license: str | None
    """The license as the model card or a license file names it; nobody has checked it."""
    bases: tuple[str, ...]
    """The models that the model card or a config names as its base."""
    blobs: int
    disk_size: int
    """Bytes of the blobs on disk, compressed if they are frozen. Of a remote model, those that are here."""
    unique_size: int | None
    """Bytes among them that no model of another ID needs; None for a remote model."""
    store: Path | None = None
    """The shared store that has the model, if it is not in the store itself; the disk is that of this store."""


def model_info(
    reference: str | Reference, *, store: StoreLike = None, plain_http: bool | None = None
) -> ModelInfo:
    """Collect what is known about a model. Only headers and small files are read.

    Args:
        reference: the model's name, or the address of a remote one.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        plain_http: whether to use HTTP without TLS for registries; by default only for this machine.

    Returns:
        what manifest, headers, configs and model card say.

    Raises:
        ModelNotFound: the store has no such model.
        InvalidManifest: the manifest is damaged.
        BlobDamaged: two blobs of the model have a tensor of the same name.
        RemoteError: the remote cannot be reached, refuses access or misbehaves.
        StoreError: the store cannot be read.
    """
    local, store = LocalStore.of(store), LocalStore.to_read(store)
    if is_address(reference):
        return _remote_info(store, reference, plain_http)
    reference = Reference.of(reference)
    holder = local.holder(reference)
    entry = read_entry(holder, reference)
    if entry.manifest is None or entry.digest is None:
        raise entry.error or BlobstoreError(f"model {reference} cannot be read")
    description = describe_model(reference, store=store)
    try:
        source = model_source(reference, store=store)
    except BlobstoreError:  # among the faults of the description, or found by verify
        source = None
    texts = dict(small_texts(store, entry.manifest))
    catalog = read_catalog(holder)
    names = catalog.named(entry.digest)
    holdings = Holdings(holder, catalog)
    held = set(chain.from_iterable(map(holdings.of, names)))
    files = {number: holdings.files(number) for number in held}
    sizes = {number: sum(file.st_size for file in found) for number, found in files.items()}
    return ModelInfo(
        description=description,
        digest=entry.digest,
        modified=entry.modified,
        aliases=tuple(name for name in names if name != reference),
        types=_types(description),
        source=source,
        license=stated_license(texts),
        bases=tuple(dict.fromkeys(stated_bases(texts))),
        blobs=len(entry.blobs),
        disk_size=sum(sizes.values()),
        unique_size=sum(sizes[number] for number in holdings.freed(names)),
        store=None if holder is local else holder.root,
    )


def _remote_info(store: LocalStore, address: str, plain_http: bool | None) -> ModelInfo:
    description = describe_model(address, store=store, plain_http=plain_http)
    with reading_models(store, address, plain_http=plain_http) as (reader, (name,)):
        manifest = reader.resolve(name)
        digest = Digest.of(reader.read_manifest(name))
        texts = dict(small_texts(reader, manifest))
        source = None
        with contextlib.suppress(Damaged):
            source = read_source_record(reader, manifest)
    return ModelInfo(
        description=description,
        digest=digest,
        modified=None,
        aliases=(),
        types=_types(description),
        source=source,
        license=stated_license(texts),
        bases=tuple(dict.fromkeys(stated_bases(texts))),
        blobs=len(manifest.blobs),
        disk_size=sum(blob.size for blob in manifest.blobs if store.has_blobs([blob])),
        unique_size=None,
    )


def _types(description: ModelDescription) -> tuple[tuple[str, int, int], ...]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in description.tensors:
        name = type_name(tensor.type, tensor.group_size)
        counts[name] += 1
        sizes[name] += tensor.size
    return tuple((name, counts[name], size) for name, size in sizes.most_common())


def stated_bases(texts: dict[str, str]) -> Iterator[str]:
    """Yield the models that the model card or a config names as the base."""
    yield from card_field(texts, "base_model")
    for name in ("config.json", "adapter_config.json"):
        config = decoded_config(texts, name)
        for key in _BASE_KEYS:
            value = config.get(key)
            for base in value if isinstance(value, list) else [value]:
                if isinstance(base, str) and base:
                    yield base
