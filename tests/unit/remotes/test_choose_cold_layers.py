"""The choice between a blob, its compressed form, and a chain of deltas."""

from __future__ import annotations

from blobstore.core.digest import BlobId, Digest
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.remotes.choose_cold_layers import usable_layers
from blobstore.remotes.cold_layers import ColdLayer
from blobstore.store.local import LocalStore


def cut(bases: dict[int, int | None]) -> set[int]:
    """Return the numbers of the layers that are used, given the base of each."""
    ids = {number: BlobId(Digest.of(b"%d" % number), 100) for number in bases}
    layers = {
        ids[number].digest: ColdLayer(
            ids[number],
            BlobId(Digest.of(b"stored%d" % number), 10),
            None if base is None else ids[base],
        )
        for number, base in bases.items()
    }
    blobs = [Descriptor(media_types.TENSOR, *one, str(number)) for number, one in ids.items()]
    store = LocalStore("/nowhere")
    found, without_base, _ = usable_layers(store, layers, blobs, lambda _: False)
    assert not without_base
    return {number for number, one in ids.items() if one.digest in found}


def test_a_form_that_states_another_size_of_its_blob_is_not_used() -> None:
    blob = BlobId(Digest.of(b"blob"), 100)
    form = ColdLayer(blob, BlobId(Digest.of(b"form"), 10))
    forged = form._replace(blob=blob._replace(size=90))
    store, missing = LocalStore("/nowhere"), [Descriptor(media_types.TENSOR, *blob)]
    for offered, expected in ((form, {blob.digest: form}), (forged, {})):
        assert usable_layers(store, {blob.digest: offered}, missing, bool).layers == expected


def test_very_long_chains_and_cycles_take_one_walk() -> None:
    many = 10_000
    chain: dict[int, int | None] = {number: number - 1 for number in range(1, many)}
    assert len(cut(chain | {0: None})) == many
    assert len(cut(chain | {0: many - 1})) == many - 1


def test_deltas_of_one_pull_make_chains_but_no_cycles() -> None:
    chain = {0: None, 1: 0, 2: 1, 3: 2}
    assert cut(chain) == {0, 1, 2, 3}
    assert cut({0: 0}) == set()
    assert len(cut({0: 1, 1: 2, 2: 0, 3: 0, 4: 3})) == 4
    assert (
        len(cut({4: 3, 3: 0, 0: 1, 1: 2, 2: 0, **{n: n - 1 for n in range(6, 200)}, 5: 4})) == 199
    )
