"""The digest of the layers, by which a manifest that has changed since it was written is found.

Nothing holds the digest of a manifest, and one changed bit can make another valid name or media type. So
the config, a blob that the manifest names by digest, holds the digest of the list of layers. The rest of
the manifest follows from the config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import InvalidManifest
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import LAYERS_DIGEST, Manifest

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_CONFIG_SIZE: Final = 2**20
"""Bytes. A larger config was not written by this project and holds no digest of the layers."""
ADVICE: Final = (
    "create the model again, copy it from another of its names, or run 'blobstore repair NAME "
    "--from STORE' with a store that has it too"
)
"""The advice of errors about changed manifests."""


def layers_digest(layers: Iterable[Descriptor]) -> Digest:
    """Return the digest of a list of layers, of its bytes in a manifest from bracket to bracket."""
    return Digest.of(listed(layers))


def listed(layers: Iterable[Descriptor]) -> bytes:
    """Return the list of layers as it stands in a manifest."""
    return strict_json.dumps([layer.to_json() for layer in layers]).encode()


def check_layers(manifest: bytes, config: bytes) -> bool:
    """Check that the file ``manifest`` is what was written with ``config``, to the last bit.

    The line feed at its end may be missing: some versions of Ollama write none when they pull a
    model. Configs that say nothing of the layers, such as Ollama's own, fit any manifest.

    Returns:
        Whether the config says something of the layers.

    Raises:
        InvalidManifest: the file was changed.
    """
    promised = promise(config)
    if promised is None:
        return False
    described = Descriptor(media_types.CONFIG, Digest.of(config), len(config))
    begin = Manifest(config=described, layers=()).to_bytes().removesuffix(b"[]}\n")
    written = manifest.removesuffix(b"\n")
    if not (written.startswith(begin) and written.endswith(b"}")):
        raise InvalidManifest(
            "the manifest was changed since it was written, not in its list of layers",
            advice=ADVICE,
        )
    found = str(Digest.of(written[len(begin) : -1]))
    if found != promised:
        raise InvalidManifest(
            f"the manifest was changed since it was written: its list of layers has digest {found}, "
            f"and its config promises {quote(promised)}",
            advice=ADVICE,
        )
    return True


def promise(config: bytes) -> str | None:
    """Return the digest of the layers that a config states; None if it states none."""
    value = _decoded(config).get(LAYERS_DIGEST)
    return None if value is None else str(value)


def say_the_same(ours: bytes, theirs: bytes) -> bool:
    """Return whether two configs are equal except for the digests of the layers."""
    if ours == theirs:
        return True
    sides = _decoded(ours), _decoded(theirs)
    for side in sides:
        side.pop(LAYERS_DIGEST, None)
    return bool(sides[0]) and sides[0] == sides[1]


def _decoded(config: bytes) -> dict[str, Any]:
    try:
        value = strict_json.loads(config)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
