"""Chooses the GGUF file of a quantization, for which llama.cpp and RamaLama ask a Hub at an address of registries.

A quantization is not a revision. It chooses a file of ``main`` by its name, and the client then gets that file at its
own address. These clients are recognized because they accept only JSON for a manifest.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from blobstore.manifests.reference import DEFAULT_TAG
from blobstore.serve.messages import JSON, json_response
from blobstore.serve.refusal import API_VERSION, error_response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.serve.library import ServedModel
    from blobstore.serve.messages import Request, Response
    from blobstore.serve.visible import Visible

_USUAL: Final = "Q4_K_M"
"""The default quantization, if the repository has it."""


def wants_gguf(request: Request) -> bool:
    """Return whether a request for a manifest asks for the name of a GGUF file."""
    return request.headers.get("accept", "").strip().lower() == JSON


def gguf_choice(repository: Reference, quantization: str, library: Visible) -> Response:
    """Return the GGUF file of a repository that has a quantization. Raises NotPrepared."""
    model = library.model(repository, with_digests=True)
    names = [name for name in model.files if name.endswith(".gguf")] if model else []
    main = _chosen([name for name in names if not _is_projector(name)], quantization)
    if model is None or main is None:
        message = "the model has no GGUF file of this quantization"
        return error_response(404, "MANIFEST_UNKNOWN", message)
    value = {"schemaVersion": 2, "mediaType": JSON, "ggufFile": _described(model, main)}
    if projector := next(filter(_is_projector, names), None):
        value["mmprojFile"] = _described(model, projector)
    return json_response(value, headers=API_VERSION)


def _chosen(names: Sequence[str], quantization: str) -> str | None:
    """Return the first file of a quantization: of a model in parts, that is the first part."""
    if quantization == DEFAULT_TAG:
        return _chosen(names, _USUAL) or next(iter(names), None)
    label = rf"(?<![A-Za-z0-9]){re.escape(quantization)}(?![A-Za-z0-9_])"
    return next((name for name in names if re.search(label, name, re.IGNORECASE)), None)


def _is_projector(name: str) -> bool:
    return "mmproj" in name.rpartition("/")[2].lower()


def _described(model: ServedModel, name: str) -> dict[str, Any]:
    digest, size = (model.digests or {})[name], model.files[name].size
    lfs = {"sha256": digest.hex, "size": size}
    return {"rfilename": name, "blobId": str(digest), "size": size, "lfs": lfs}
