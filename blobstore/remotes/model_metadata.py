"""What a model's blobs say about it, for the configs that other tools read in a registry.

Only headers and small files are read, and nothing is guessed: a field that the model does not state is
left out.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.tensor import DType
from blobstore.errors import BlobstoreError, Damaged
from blobstore.folders.link_plan import plan_links
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.models.contents import ModelContents
from blobstore.models.model_card import config_of_source, small_texts, stated_license
from blobstore.models.small_files import first_text, stated_by
from blobstore.registry.layouts.plan import ModelMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blobstore.models.small_files import ModelFiles

_HUB = "https://huggingface.co"
_PRECISIONS = {
    DType.F64: "float64",
    DType.F32: "float32",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.F8_E4M3: "float8_e4m3",
    DType.F8_E5M2: "float8_e5m2",
    DType.I64: "int64",
    DType.I32: "int32",
    DType.I16: "int16",
    DType.I8: "int8",
    DType.U8: "uint8",
    DType.BOOL: "bool",
}
_SPDX = {
    "afl-3.0": "AFL-3.0",
    "agpl-3.0": "AGPL-3.0-only",
    "apache-2.0": "Apache-2.0",
    "artistic-2.0": "Artistic-2.0",
    "bsd-2-clause": "BSD-2-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "bsl-1.0": "BSL-1.0",
    "cc-by-4.0": "CC-BY-4.0",
    "cc-by-nc-4.0": "CC-BY-NC-4.0",
    "cc-by-nc-nd-4.0": "CC-BY-NC-ND-4.0",
    "cc-by-nc-sa-4.0": "CC-BY-NC-SA-4.0",
    "cc-by-sa-4.0": "CC-BY-SA-4.0",
    "cc0-1.0": "CC0-1.0",
    "gpl-3.0": "GPL-3.0-only",
    "isc": "ISC",
    "lgpl-3.0": "LGPL-3.0-only",
    "mit": "MIT",
    "mpl-2.0": "MPL-2.0",
    "unlicense": "Unlicense",
    "wtfpl": "WTFPL",
    "zlib": "Zlib",
}
"""The Hub's names of licenses that SPDX knows. Others, such as ``llama3``, are not SPDX's."""
_INDEX = ".safetensors.index."


class _Folder(NamedTuple):
    """The folder that other libraries can load from the blobs as they are; empty if they cannot."""

    weight_files: Mapping[str, str]
    generated: Mapping[str, bytes]


def model_metadata(files: ModelFiles) -> ModelMetadata:
    """Return what the configs of registries say about a model.

    Raises:
        InvalidManifest, BlobMissing, BlobDamaged: the model is damaged.
    """
    store, manifest = files.store, files.manifest
    precisions: Counter[str] = Counter()
    quantization: Counter[str] = Counter()
    model = ModelContents(store, manifest)
    for tensor in model.tensors.tensors.values():
        count = math.prod(tensor.shape)
        if tensor.is_quantized:
            quantization[tensor.type_name] += count
        else:
            dtype = tensor.entry.spec.dtype
            precisions[_PRECISIONS.get(dtype, dtype.value.lower())] += count
    record = model.record
    repository = record.repository if record is not None else ""
    config = stated_by(files, "config.json") or config_of_source(store, manifest)
    folder = _loadable_folder(model)
    license_name = stated_license(dict(small_texts(store, manifest))) or ""
    identifier = _SPDX.get(license_name.lower().removesuffix(" license"))
    return ModelMetadata(
        name=repository.rpartition("/")[2] or Reference.of(files.reference).model,
        family=_printable(first_text(config, "model_type")),
        architecture=_printable(files.architecture or first_text(config, "architectures")),
        format="gguf" if manifest.layers_of(media_types.MODEL) else "safetensors",
        parameters=precisions.total() + quantization.total(),
        precision=_most_common(precisions),
        quantization=_most_common(quantization),
        licenses=(identifier,) if identifier else (),
        source_url=f"{_HUB}/{repository}" if repository else "",
        revision=record.commit if record is not None else "",
        weight_files=folder.weight_files,
        generated=folder.generated,
    )


def _printable(text: str) -> str:
    """Return a text if it is printable, else an empty one: a config cannot have lone surrogates, for example."""
    return text if text.isprintable() else ""


def _most_common(counts: Counter[str]) -> tuple[str, ...]:
    """Return the keys, those of most parameters first."""
    return tuple(sorted(counts, key=lambda key: (-counts[key], key)))


def _loadable_folder(model: ModelContents) -> _Folder:
    """Return the names of the blobs as weight files, if transformers can load them unchanged.

    It cannot if a blob has quantized weights, stacked experts, or tensors of other names than the folder
    needs: such files would need other headers, or configs.
    """
    nothing = _Folder({}, {})
    try:
        plan = plan_links(model)
    except Damaged:
        raise
    except BlobstoreError:  # a model that cannot be exported
        return nothing
    layers = model.manifest.layers_of(media_types.TENSOR)
    tensors = (link for link in plan.links if link.layer.media_type == media_types.TENSOR)
    linked = {link.layer.name: link.name for link in tensors}
    is_loadable = (
        not plan.relabelled
        and not plan.gathered
        and len(linked) == len(layers)
        and all(_INDEX in name for name in plan.written)
    )
    return _Folder(linked, plan.written) if is_loadable else nothing
