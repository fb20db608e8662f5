from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blobstore.core import strict_json
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import Manifest, ModelConfig
from blobstore.models.published import published_scheme
from blobstore.store.local import LocalStore
from tests.support.models import add_blob


def manifest_with(store: LocalStore, config: bytes) -> Manifest:
    known = add_blob(store, config)
    return Manifest(config=Descriptor(media_types.CONFIG, known.digest, known.size), layers=())


@pytest.mark.parametrize("scheme", ["awq", ""])
def test_the_config_has_the_scheme(store: LocalStore, scheme: str) -> None:
    config = ModelConfig(published_scheme=scheme).to_bytes()
    assert published_scheme(store, manifest_with(store, config)) == scheme


@pytest.mark.parametrize("value", [7, None, ["awq"], {"published_scheme": 7}])
def test_other_configs_have_none(store: LocalStore, value: Any) -> None:
    config = strict_json.dumps(value).encode()
    assert published_scheme(store, manifest_with(store, config)) == ""


def test_configs_that_cannot_be_read_have_none(store: LocalStore) -> None:
    assert published_scheme(store, manifest_with(store, b"not json")) == ""
    large = ModelConfig(published_scheme="awq").to_bytes() + b" " * 2**20
    assert published_scheme(store, manifest_with(store, large)) == ""
    manifest = manifest_with(store, ModelConfig(published_scheme="awq").to_bytes())
    Path(store.blob_path(manifest.config.digest)).unlink()
    assert published_scheme(store, manifest) == ""
