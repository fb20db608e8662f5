"""Blobstore: a content-addressed store for model weights.

``blobstore.create`` takes a model apart into one verified blob per tensor, or per group of experts;
``blobstore.open`` maps the tensors back into a program without copying them. The names in ``__all__``
are the public interface, with ``blobstore.errors``, ``blobstore.safetensors`` and
``blobstore.integrations``; ``docs/reference/python.md`` describes them. Each name is imported on first use, so
that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

from blobstore.core import pictures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.archives.reader import ArchiveReader, open_archive
    from blobstore.errors import BlobstoreError
    from blobstore.integrations.run import run_model as run
    from blobstore.manifests.lock_file import LockedModel
    from blobstore.manifests.reference import Reference
    from blobstore.manifests.source_record import SourceRecord
    from blobstore.models.model import Model
    from blobstore.operations.archive.pack import Packed
    from blobstore.operations.archive.pack import pack_models as pack
    from blobstore.operations.archive.unpack import CheckedArchive, Unpacked, check_archive
    from blobstore.operations.archive.unpack import unpack_archive as unpack
    from blobstore.operations.compare.compare import Comparison
    from blobstore.operations.compare.compare import compare_models as compare
    from blobstore.operations.compare.diff import Difference
    from blobstore.operations.compare.diff import diff_models as diff
    from blobstore.operations.create.create import Created, create
    from blobstore.operations.create.create_all import CreatedModel, create_all
    from blobstore.operations.create.save import save
    from blobstore.operations.describe.cat import read_file
    from blobstore.operations.describe.disk_usage import StoreUsage
    from blobstore.operations.describe.disk_usage import measure_usage as du
    from blobstore.operations.describe.find import FoundPlaces
    from blobstore.operations.describe.find import find_content as find
    from blobstore.operations.describe.info import ModelInfo
    from blobstore.operations.describe.info import model_info as info
    from blobstore.operations.describe.list import ListedModel
    from blobstore.operations.describe.list import list_models as list  # noqa: A004
    from blobstore.operations.describe.show import ModelDescription
    from blobstore.operations.describe.show import describe_model as show
    from blobstore.operations.describe.show import model_source as show_source
    from blobstore.operations.export.convert import Copied
    from blobstore.operations.export.convert import convert_checkpoint as convert
    from blobstore.operations.export.export import Exported
    from blobstore.operations.export.export import export_model as export
    from blobstore.operations.export.link import Linked
    from blobstore.operations.export.link import link_model as link
    from blobstore.operations.follow.follow import Followed, follow
    from blobstore.operations.follow.push_version import PushedVersion, push_version
    from blobstore.operations.freeze.freeze import Frozen
    from blobstore.operations.freeze.freeze import freeze_models as freeze
    from blobstore.operations.freeze.thaw import Thawed
    from blobstore.operations.freeze.thaw import thaw_models as thaw
    from blobstore.operations.ingest.ingest import IngestedModel, ingest
    from blobstore.operations.load import load
    from blobstore.operations.maintenance.collected import Collected
    from blobstore.operations.maintenance.copy_to_store import CopiedModel, copy_to_store
    from blobstore.operations.maintenance.gc import collect_garbage as gc
    from blobstore.operations.maintenance.gc_objects import CollectedObjects
    from blobstore.operations.maintenance.gc_objects import collect_objects as gc_remote
    from blobstore.operations.maintenance.history import FormerModel
    from blobstore.operations.maintenance.history import model_history as history
    from blobstore.operations.maintenance.history import restore_model as restore
    from blobstore.operations.maintenance.names import Named, RemovedModels
    from blobstore.operations.maintenance.names import copy_model as copy
    from blobstore.operations.maintenance.names import remove_models as remove
    from blobstore.operations.maintenance.names import rename_model as rename
    from blobstore.operations.maintenance.repair import Repaired
    from blobstore.operations.maintenance.repair import repair_models as repair
    from blobstore.operations.maintenance.verify import Verified
    from blobstore.operations.maintenance.verify import verify_models as verify
    from blobstore.operations.open import LocalStore
    from blobstore.operations.open import open_model as open  # noqa: A004
    from blobstore.operations.sign.report import SignedModel, check_signatures
    from blobstore.operations.sign.sign import Signed
    from blobstore.operations.sign.sign import sign_model as sign
    from blobstore.operations.transfer.pull import Pulled
    from blobstore.operations.transfer.pull import pull_model as pull
    from blobstore.operations.transfer.push import Pushed
    from blobstore.operations.transfer.push import push_model as push
    from blobstore.operations.transfer.registry_target import RegistryOptions
    from blobstore.operations.transfer.sync import SyncedModel
    from blobstore.operations.transfer.sync import lock_models as lock
    from blobstore.operations.transfer.sync import sync_models as sync
    from blobstore.pages.write import Page
    from blobstore.pages.write import write_page as page
    from blobstore.planning.plan import ModelPlan, QuantizeOptions
    from blobstore.remotes.addresses import ReadPlan
    from blobstore.serve.start import RunningServer, start_server
    from blobstore.sources.base import SourceOptions
    from blobstore.sources.pytorch.checkpoint import Checkpoint, open_checkpoint
    from blobstore.sources.pytorch.inspect import Inspection
    from blobstore.sources.pytorch.inspect import inspect_checkpoint as inspect
    from blobstore.store.local import StoreLike

    __version__: str

# Where each public name is defined, and under which name.
_HOMES = {
    "ArchiveReader": ("blobstore.archives.reader", "ArchiveReader"),
    "BlobstoreError": ("blobstore.errors", "BlobstoreError"),
    "CheckedArchive": ("blobstore.operations.archive.unpack", "CheckedArchive"),
    "Checkpoint": ("blobstore.sources.pytorch.checkpoint", "Checkpoint"),
    "Collected": ("blobstore.operations.maintenance.collected", "Collected"),
    "CollectedObjects": ("blobstore.operations.maintenance.gc_objects", "CollectedObjects"),
    "Comparison": ("blobstore.operations.compare.compare", "Comparison"),
    "Copied": ("blobstore.operations.export.convert", "Copied"),
    "CopiedModel": ("blobstore.operations.maintenance.copy_to_store", "CopiedModel"),
    "Created": ("blobstore.operations.create.create", "Created"),
    "CreatedModel": ("blobstore.operations.create.create_all", "CreatedModel"),
    "Difference": ("blobstore.operations.compare.diff", "Difference"),
    "Exported": ("blobstore.operations.export.export", "Exported"),
    "Followed": ("blobstore.operations.follow.follow", "Followed"),
    "FormerModel": ("blobstore.operations.maintenance.history", "FormerModel"),
    "FoundPlaces": ("blobstore.operations.describe.find", "FoundPlaces"),
    "Frozen": ("blobstore.operations.freeze.freeze", "Frozen"),
    "IngestedModel": ("blobstore.operations.ingest.ingest", "IngestedModel"),
    "Inspection": ("blobstore.sources.pytorch.inspect", "Inspection"),
    "Linked": ("blobstore.operations.export.link", "Linked"),
    "ListedModel": ("blobstore.operations.describe.list", "ListedModel"),
    "LocalStore": ("blobstore.operations.open", "LocalStore"),
    "LockedModel": ("blobstore.manifests.lock_file", "LockedModel"),
    "Model": ("blobstore.models.model", "Model"),
    "ModelDescription": ("blobstore.operations.describe.show", "ModelDescription"),
    "ModelInfo": ("blobstore.operations.describe.info", "ModelInfo"),
    "ModelPlan": ("blobstore.planning.plan", "ModelPlan"),
    "Named": ("blobstore.operations.maintenance.names", "Named"),
    "Page": ("blobstore.pages.write", "Page"),
    "Packed": ("blobstore.operations.archive.pack", "Packed"),
    "Pulled": ("blobstore.operations.transfer.pull", "Pulled"),
    "Pushed": ("blobstore.operations.transfer.push", "Pushed"),
    "PushedVersion": ("blobstore.operations.follow.push_version", "PushedVersion"),
    "QuantizeOptions": ("blobstore.planning.plan", "QuantizeOptions"),
    "ReadPlan": ("blobstore.remotes.addresses", "ReadPlan"),
    "Reference": ("blobstore.manifests.reference", "Reference"),
    "RegistryOptions": ("blobstore.operations.transfer.registry_target", "RegistryOptions"),
    "RemovedModels": ("blobstore.operations.maintenance.names", "RemovedModels"),
    "Repaired": ("blobstore.operations.maintenance.repair", "Repaired"),
    "RunningServer": ("blobstore.serve.start", "RunningServer"),
    "Signed": ("blobstore.operations.sign.sign", "Signed"),
    "SignedModel": ("blobstore.operations.sign.report", "SignedModel"),
    "SourceOptions": ("blobstore.sources.base", "SourceOptions"),
    "SourceRecord": ("blobstore.manifests.source_record", "SourceRecord"),
    "StoreLike": ("blobstore.store.local", "StoreLike"),
    "StoreUsage": ("blobstore.operations.describe.disk_usage", "StoreUsage"),
    "SyncedModel": ("blobstore.operations.transfer.sync", "SyncedModel"),
    "Thawed": ("blobstore.operations.freeze.thaw", "Thawed"),
    "Unpacked": ("blobstore.operations.archive.unpack", "Unpacked"),
    "Verified": ("blobstore.operations.maintenance.verify", "Verified"),
    "check_archive": ("blobstore.operations.archive.unpack", "check_archive"),
    "check_signatures": ("blobstore.operations.sign.report", "check_signatures"),
    "compare": ("blobstore.operations.compare.compare", "compare_models"),
    "convert": ("blobstore.operations.export.convert", "convert_checkpoint"),
    "copy": ("blobstore.operations.maintenance.names", "copy_model"),
    "copy_to_store": ("blobstore.operations.maintenance.copy_to_store", "copy_to_store"),
    "create": ("blobstore.operations.create.create", "create"),
    "create_all": ("blobstore.operations.create.create_all", "create_all"),
    "diff": ("blobstore.operations.compare.diff", "diff_models"),
    "du": ("blobstore.operations.describe.disk_usage", "measure_usage"),
    "export": ("blobstore.operations.export.export", "export_model"),
    "find": ("blobstore.operations.describe.find", "find_content"),
    "follow": ("blobstore.operations.follow.follow", "follow"),
    "freeze": ("blobstore.operations.freeze.freeze", "freeze_models"),
    "gc": ("blobstore.operations.maintenance.gc", "collect_garbage"),
    "gc_remote": ("blobstore.operations.maintenance.gc_objects", "collect_objects"),
    "history": ("blobstore.operations.maintenance.history", "model_history"),
    "info": ("blobstore.operations.describe.info", "model_info"),
    "ingest": ("blobstore.operations.ingest.ingest", "ingest"),
    "inspect": ("blobstore.sources.pytorch.inspect", "inspect_checkpoint"),
    "link": ("blobstore.operations.export.link", "link_model"),
    "list": ("blobstore.operations.describe.list", "list_models"),
    "load": ("blobstore.operations.load", "load"),
    "lock": ("blobstore.operations.transfer.sync", "lock_models"),
    "open": ("blobstore.operations.open", "open_model"),
    "open_archive": ("blobstore.archives.reader", "open_archive"),
    "open_checkpoint": ("blobstore.sources.pytorch.checkpoint", "open_checkpoint"),
    "pack": ("blobstore.operations.archive.pack", "pack_models"),
    "page": ("blobstore.pages.write", "write_page"),
    "pull": ("blobstore.operations.transfer.pull", "pull_model"),
    "push": ("blobstore.operations.transfer.push", "push_model"),
    "push_version": ("blobstore.operations.follow.push_version", "push_version"),
    "read_file": ("blobstore.operations.describe.cat", "read_file"),
    "remove": ("blobstore.operations.maintenance.names", "remove_models"),
    "rename": ("blobstore.operations.maintenance.names", "rename_model"),
    "repair": ("blobstore.operations.maintenance.repair", "repair_models"),
    "restore": ("blobstore.operations.maintenance.history", "restore_model"),
    "run": ("blobstore.integrations.run", "run_model"),
    "save": ("blobstore.operations.create.save", "save"),
    "show": ("blobstore.operations.describe.show", "describe_model"),
    "show_source": ("blobstore.operations.describe.show", "model_source"),
    "sign": ("blobstore.operations.sign.sign", "sign_model"),
    "start_server": ("blobstore.serve.start", "start_server"),
    "sync": ("blobstore.operations.transfer.sync", "sync_models"),
    "thaw": ("blobstore.operations.freeze.thaw", "thaw_models"),
    "unpack": ("blobstore.operations.archive.unpack", "unpack_archive"),
    "verify": ("blobstore.operations.maintenance.verify", "verify_models"),
}

_MODULES = ("errors", "safetensors")
"""Public modules, which are imported when they are used."""

__all__ = [
    "ArchiveReader",
    "BlobstoreError",
    "CheckedArchive",
    "Checkpoint",
    "Collected",
    "CollectedObjects",
    "Comparison",
    "Copied",
    "CopiedModel",
    "Created",
    "CreatedModel",
    "Difference",
    "Exported",
    "Followed",
    "FormerModel",
    "FoundPlaces",
    "Frozen",
    "IngestedModel",
    "Inspection",
    "Linked",
    "ListedModel",
    "LocalStore",
    "LockedModel",
    "Model",
    "ModelDescription",
    "ModelInfo",
    "ModelPlan",
    "Named",
    "Packed",
    "Page",
    "Pulled",
    "Pushed",
    "PushedVersion",
    "QuantizeOptions",
    "ReadPlan",
    "Reference",
    "RegistryOptions",
    "RemovedModels",
    "Repaired",
    "RunningServer",
    "Signed",
    "SignedModel",
    "SourceOptions",
    "SourceRecord",
    "StoreLike",
    "StoreUsage",
    "SyncedModel",
    "Thawed",
    "Unpacked",
    "Verified",
    "check_archive",
    "check_signatures",
    "compare",
    "convert",
    "copy",
    "copy_to_store",
    "create",
    "create_all",
    "diff",
    "du",
    "export",
    "find",
    "follow",
    "freeze",
    "gc",
    "gc_remote",
    "history",
    "info",
    "ingest",
    "inspect",
    "link",
    "list",
    "load",
    "lock",
    "open",
    "open_archive",
    "open_checkpoint",
    "pack",
    "page",
    "pull",
    "push",
    "push_version",
    "read_file",
    "remove",
    "rename",
    "repair",
    "restore",
    "run",
    "save",
    "show",
    "show_source",
    "sign",
    "start_server",
    "sync",
    "thaw",
    "unpack",
    "verify",
]

# What notebooks show of a store and of a model; the packages of both know nothing of the page.
pictures.register("store", "blobstore.pages.notebook", "store_picture")
pictures.register("model", "blobstore.pages.notebook", "model_picture")

if not TYPE_CHECKING:  # a type checker reports a name that does not exist

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from blobstore.core.libraries import installed_version

            value = installed_version()
        elif name in _MODULES:
            value = import_module(f"blobstore.{name}")
        elif name in _HOMES:
            module, attribute = _HOMES[name]
            value = getattr(import_module(module), attribute)
            if isinstance(value, FunctionType):
                from blobstore.core.public_calls import checked_calls

                value = checked_calls(name, value)
        else:
            from blobstore.core.public_calls import SHORT, advice_on_name

            if name in SHORT:
                return __getattr__(SHORT[name])
            advice = "" if name.startswith("_") else advice_on_name(name, __all__)
            raise AttributeError(f"module 'blobstore' has no attribute {name!r}{advice}")
        globals()[name] = value
        return value


def __dir__() -> Sequence[str]:
    return [*__all__, "__version__"]
