"""Completes the record of a source with the options of its import and the bytes that its blobs leave out."""

from __future__ import annotations

import glob
import json
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from blobstore.core.escape import quote
from blobstore.errors import BlobDamaged, UsageError
from blobstore.manifests.file_names import is_safe_name
from blobstore.manifests.source_record import MAX_NEW_SIZE
from blobstore.planning.grouping import EXPERT_FORMS, ExpertForm
from blobstore.planning.plan import QuantizeOptions, plan_source, policy_of
from blobstore.quantization.formats import parse_format
from blobstore.quantization.recipes import Copied, Prequantized
from blobstore.sources.base import SourceOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from blobstore.manifests.source_record import SourceRecord
    from blobstore.planning.grouping import BlobPlan
    from blobstore.planning.plan import ModelPlan
    from blobstore.sources.base import TensorSource

_Options = TypeVar("_Options", SourceOptions, QuantizeOptions)

_MAX_LEFT_OUT = 16 * 2**20
"""Bytes of tensors that a record itself holds: more than the input scales of any model."""
_BUFFER_SIZE = 1 << 16
_PUBLIC_NAMES = {"quant_type": "quantize"}
"""Names of fields that ``create`` calls otherwise."""


class ImportOptions(NamedTuple):
    """The options of an import that decide which bytes it stores."""

    source: SourceOptions = SourceOptions()
    quantize: QuantizeOptions = QuantizeOptions()
    experts: ExpertForm = "packed"
    decode: bool = False
    as_is: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """The options as arguments of :func:`~blobstore.operations.create.create.create`."""
        return {
            "source_options": self.source,
            "quantize": self.quantize,
            "experts": self.experts,
            "decode": self.decode,
            "as_is": self.as_is,
        }

    def plan(self, source: TensorSource) -> ModelPlan:
        """Return the plan for an open source. Raises as :func:`plan_source`."""
        return plan_source(
            source,
            experts=self.experts,
            quantize=self.quantize,
            decode=self.decode,
            as_is=self.as_is,
        )

    def keeping(self, names: Iterable[str]) -> ImportOptions:
        """Return the options with some tensors kept as they are."""
        overrides = (f"{glob.escape(name)}=none" for name in names)
        quantize = replace(self.quantize, overrides=(*self.quantize.overrides, *overrides))
        return self._replace(quantize=quantize)

    def to_json(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, each in one spelling.

        Raises:
            UsageError: a text is not valid Unicode.
        """
        quantize = self.quantize
        if quantize.quant_type is not None:
            item = parse_format(quantize.quant_type)
            size = quantize.group_size
            size = None if size is None or size == item.group_size else int(size)
            quantize = replace(quantize, quant_type=item.name, group_size=size)
        changed: dict[str, Any] = {} if self.experts == "packed" else {"experts": self.experts}
        if self.decode:
            changed["decode"] = True
        if self.as_is:
            changed["as_is"] = True
        for options in (self.source, quantize):
            for field in fields(options):
                value = getattr(options, field.name)
                value = bool(value) if isinstance(field.default, bool) else value
                if value != field.default:
                    name = _PUBLIC_NAMES.get(field.name, field.name)
                    changed[name] = list(value) if isinstance(value, tuple) else value
        try:
            json.dumps(changed, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"options {quote(changed)} are not valid Unicode; match such file names with '?' or '*'"
            ) from None
        return changed

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ImportOptions:
        """Return the options of a record, which are not trusted.

        Raises:
            BlobDamaged: they are not what :meth:`to_json` returns for options that ``create`` accepts.
        """
        left = dict(value)
        experts, decode = left.pop("experts", "packed"), left.pop("decode", False) is True
        as_is = left.pop("as_is", False) is True
        source, quantize = _parsed(SourceOptions(), left), _parsed(QuantizeOptions(), left)
        options = cls(source, quantize, experts, decode, as_is)
        try:
            policy_of(quantize, {}, ())
            is_sound = experts in EXPERT_FORMS and options.to_json() == value
        except UsageError as error:
            raise BlobDamaged(
                f"the source layer has options that create refuses: {error}"
            ) from None
        if not is_sound:
            raise BlobDamaged(
                f"the source layer has options that create does not record: {quote(value)}"
            )
        return options


def _parsed(options: _Options, value: dict[str, Any]) -> _Options:
    """Return ``options`` with the fields that ``value`` has, which are removed from it."""
    changes: dict[str, Any] = {}
    for field in fields(options):
        name = _PUBLIC_NAMES.get(field.name, field.name)
        if name not in value:
            continue
        found = value.pop(name)
        expected: type = type(field.default)
        if field.default is None:
            expected = int if field.name == "group_size" else str
        elif isinstance(found, list) and all(isinstance(item, str) for item in found):
            found = tuple(found)
        if type(found) is not expected:
            raise BlobDamaged(
                f"the source layer has options that create does not record: {name} {quote(found)}"
            )
        changes[field.name] = found
    return replace(options, **changes)


def source_record(
    source: TensorSource, blobs: Iterable[BlobPlan], options: ImportOptions
) -> tuple[SourceRecord, list[str]]:
    """Return the record of an import, and a notice if it cannot hold the files of the source.

    Args:
        source: the source of the model.
        blobs: the plans of all blobs.
        options: the options of the import.

    Raises:
        DamagedSource: the source cannot be read.
        UsageError: an option is not valid Unicode.
    """
    record = replace(source.record(), options=options.to_json())
    reason = ""
    unsafe = [file.name for file in record.files if not is_safe_name(file.name)]
    if unsafe:
        record = replace(record, files=tuple(it for it in record.files if it.name not in unsafe))
        reason = f"{quote(unsafe[0])} has a backslash or characters that cannot be printed"
    stored_names, left_out = _differences(source, blobs)
    is_converted = record.is_converted or left_out is None
    if left_out is not None and sum(source.specs[name].nbytes for name in left_out) > _MAX_LEFT_OUT:
        reason = f"the scales of activations and shapes of packed weights are over {_MAX_LEFT_OUT >> 20} MiB"
    if left_out is not None and not is_converted and not reason:
        buffer = memoryview(bytearray(_BUFFER_SIZE))
        kept = {name: b"".join(map(bytes, source.read(name, buffer))) for name in left_out}
        record = replace(record, stored_names=stored_names, left_out=kept)
    if len(record.data()) > MAX_NEW_SIZE:
        reason = f"the headers and indexes of the weight files are over {MAX_NEW_SIZE >> 20} MiB"
        files = (it._replace(start=b"") for it in record.files if it.format != "index")
        record = replace(record, files=tuple(files), stored_names={}, left_out={})
    notices = [f"export will write new weight files: {reason}"]
    record = replace(record, is_converted=is_converted or bool(reason))
    return record, notices if reason and not is_converted else []


def _differences(
    source: TensorSource, blobs: Iterable[BlobPlan]
) -> tuple[dict[str, str], list[str] | None]:
    """Return the names in blobs of tensors that are renamed, and the tensors that no blob holds unchanged.

    The latter are None if bytes of tensors are converted.
    """
    left_out = dict.fromkeys(source.specs)
    stored_names: dict[str, str] = {}
    for recipe in (recipe for blob in blobs for recipe in blob.tensors):
        if isinstance(recipe, Copied):
            for name in recipe.sources:
                del left_out[name]
        elif isinstance(recipe, Prequantized):
            for part in recipe.parts:
                (name,) = part.sources
                if not part.is_reciprocal:  # 1 / (1 / x) is not always x, so the record holds x
                    del left_out[name]
                if name != part.spec.name:
                    stored_names[name] = part.spec.name
        else:
            return {}, None
    return stored_names, list(left_out)
