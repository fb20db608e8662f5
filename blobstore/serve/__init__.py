"""Serves the models of a store over HTTP, as the Hub and as a registry of containers do. It only reads.

``routes`` turns a request into a response without a socket; ``hub`` and ``registry`` know one protocol each.
``library`` finds models, and ``model_files`` composes their files of parts of blobs. Only ``server`` imports aiohttp,
and only ``blob_reader`` opens blobs.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import NoReturn

from blobstore.errors import InvalidCall


class _Package(ModuleType):
    """This package, which has the name of a command, and so is called by mistake."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise InvalidCall(
            "blobstore.serve is a package", advice="did you mean 'blobstore.start_server'?"
        )


sys.modules[__name__].__class__ = _Package
