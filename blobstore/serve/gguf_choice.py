"""Chooses the GGUF file of a quantization, for which llama.cpp and RamaLama ask a Hub at an address of registries.

A quantization is not a revision. It chooses a file of ``main`` by its name, and the client then gets that file at its
own address. These clients are recognized because they accept only JSON for a manifest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore.gguf.roles import USUAL, best, has_quantization, role_of_name
from blobstore.manifests.reference import DEFAULT_TAG
from blobstore.serve.messages import JSON, json_response
from blobstore.serve.refusal import API_VERSION, error_response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.serve.library import ServedModel
    from blobstore.serve.messages import Request, Response
    from blobstore.serve.visible import Visible


def wants_gguf(request: Request) -> bool:
    """Return whether a request for a manifest asks for the name of a GGUF file."""
    return request.headers.get("accept", "").strip().lower() == JSON


def gguf_choice(repository: Reference, quantization: str, library: Visible) -> Response:
    """Return the GGUF file of a repository that has a quantization. Raises NotPrepared."""
    model = library.model(repository, with_digests=True)
    roles: dict[str, str] = {}
    if model is not None:
        names = [name for name in model.files if name.lower().endswith(".gguf")]
        roles = {name: model.description.roles.get(name) or role_of_name(name) for name in names}
    main = _chosen([name for name, role in roles.items() if role == "model"], quantization)
    if model is None or main is None:
        message = "the model has no GGUF file of this quantization"
        return error_response(404, "MANIFEST_UNKNOWN", message)
    value = {"schemaVersion": 2, "mediaType": JSON, "ggufFile": _described(model, main)}
    if projectors := [name for name, role in roles.items() if role == "projector"]:
        value["mmprojFile"] = _described(model, best(projectors, quantization.upper()))
    return json_response(value, headers=API_VERSION)


def _chosen(names: Sequence[str], quantization: str) -> str | None:
    """Return the first file of a quantization: of a model in parts, that is the first part."""
    if quantization == DEFAULT_TAG:
        return _chosen(names, USUAL) or next(iter(names), None)
    return next((name for name in names if has_quantization(name, quantization)), None)


def _described(model: ServedModel, name: str) -> dict[str, Any]:
    digest, size = (model.digests or {})[name], model.files[name].size
    lfs = {"sha256": digest.hex, "size": size}
    return {"rfilename": name, "blobId": str(digest), "size": size, "lfs": lfs}
