from __future__ import annotations

import os

import pytest

from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.support.sandbox import NOBODY
from tests.unit.cli.running import run


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_warns_of_a_name_that_another_user_gave(stored: LocalStore) -> None:
    os.chown(stored.manifest_path(Reference.parse("dense")), NOBODY, NOBODY)
    assert "was put into the store by another user" in run("show", "dense").stderr
    assert run("list").stderr == ""
