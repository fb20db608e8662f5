from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

import blobstore
from blobstore.core import limits
from blobstore.core.digest import Digest
from blobstore.core.limits import Limit
from blobstore.errors import InvalidSignature, NotTrusted, UsageError
from blobstore.operations.transfer.registry_target import RegistryOptions
from blobstore.registry.client import RegistryClient
from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.registry.layouts.plan import RemoteLayout
from blobstore.registry.manifest import OCI_INDEX, OCI_MANIFEST, ImageManifest
from blobstore.remotes.referrers import fetch_referrers
from blobstore.remotes.signatures import fetch_signatures
from blobstore.signatures.cosign import parse_signature, payload, signed_by, write_signature
from blobstore.signatures.keys import PrivateKey
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.models import dense_tensors, write_folder
from tests.support.registry import Server
from tests.support.signing import KeyFiles, key_files, policy, public_key
from tests.support.stub_registry import StubRegistry

LAYOUTS: tuple[RemoteLayout, ...] = ("oci", "ollama", "image")
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    folder = write_folder(tmp_path / "model", dense_tensors(), shards=2)
    blobstore.create(folder, "model", store=store)
    return store


def manifest_of(store: LocalStore, name: str = "model") -> Digest:
    return Digest.of(store.read_manifest(name))


def kinds(store: LocalStore, name: str = "model") -> list[str]:
    return sorted(parse_signature(one).kind for one in store.signatures(manifest_of(store, name)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_signatures_go_along_with_the_model_in_every_layout(
    store: LocalStore, other: LocalStore, key: KeyFiles, remote: str, layout: RemoteLayout
) -> None:
    blobstore.sign("model", key.private, store=store)
    policy(other, key)

    pushed = blobstore.push("model", remote, store=store, registry=RegistryOptions(layout=layout))
    pulled = blobstore.pull(remote, "copy", store=other)

    # A signature in cosign's form has a tag of its own if the registry has another manifest.
    assert (pushed.digest == manifest_of(store)) == (layout == "ollama")
    assert pushed.signatures == pulled.signatures == 2
    assert other.read_manifest("copy") == store.read_manifest("model")
    assert kinds(other, "copy") == ["cosign", "oms"]
    assert set(other.signatures(manifest_of(other, "copy"))) == set(
        store.signatures(manifest_of(store))
    )
    blobstore.open("copy", store=other).close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_push_with_a_key_signs_the_manifest_in_the_registry(
    store: LocalStore, other: LocalStore, key: KeyFiles, remote: str, layout: RemoteLayout
) -> None:
    policy(other, key)

    pushed = blobstore.push(
        "model", remote, store=store, registry=RegistryOptions(layout=layout, sign_key=key.private)
    )
    again = blobstore.push(
        "model", remote, store=store, registry=RegistryOptions(layout=layout, sign_key=key.private)
    )
    blobstore.pull(remote, "copy", store=other)

    assert (pushed.signatures, again.signatures, again.is_unchanged) == (1, 1, True)
    (data,) = other.signatures(manifest_of(other, "copy"))
    found = parse_signature(data)
    assert (found.stated, found.manifest) == (pushed.digest, manifest_of(store))
    assert found.name == remote
    assert found.is_by(public_key(key))
    blobstore.open("copy", store=other).close()


def test_the_registry_has_what_cosign_looks_for(
    store: LocalStore, key: KeyFiles, remote: str, server: Server
) -> None:
    pushed = blobstore.push(
        "model", remote, store=store, registry=RegistryOptions(sign_key=key.private)
    )
    repository = remote.partition("/")[2]

    with RegistryClient(server.host) as client:
        content = client.get_manifest(repository, f"sha256-{pushed.digest.hex}.sig").parse()
        assert isinstance(content, ImageManifest)
        (layer,) = content.layers
        payload = json.loads(
            b"".join(client.read_blob(repository, layer.digest, 0, layer.size, size=layer.size))
        )

    assert layer.media_type == "application/vnd.dev.cosign.simplesigning.v1+json"
    assert "dev.cosignproject.cosign/signature" in layer.annotations
    assert payload["critical"]["image"] == {"docker-manifest-digest": str(pushed.digest)}


def test_signatures_of_several_keys_are_added_to_those_that_are_there(
    store: LocalStore, other: LocalStore, key: KeyFiles, remote: str, tmp_path: Path
) -> None:
    second = key_files(tmp_path, "second")
    for one in (key, second):
        blobstore.sign("model", one.private, store=store)
        blobstore.push("model", remote, store=store, registry=RegistryOptions(sign_key=one.private))
    repeated = blobstore.push("model", remote, store=store)

    pulled = blobstore.pull(remote, "copy", store=other)

    # Each key has signed the manifest here, that in the registry, and the files.
    assert repeated.signatures == pulled.signatures == 6
    assert kinds(other, "copy") == [*["cosign"] * 4, "oms", "oms"]


def test_the_bundle_refers_to_the_manifest_of_the_model(
    store: LocalStore, key: KeyFiles, remote: str, server: Server
) -> None:
    blobstore.sign("model", key.private, store=store)
    pushed = blobstore.push("model", remote, store=store)
    repository = remote.partition("/")[2]

    with RegistryClient(server.host) as client:
        (item,) = client.referrers(repository, pushed.digest)
        content = client.get_manifest(repository, str(item.digest)).parse()

    assert item.artifact_type == BUNDLE
    assert isinstance(content, ImageManifest)
    assert content.subject is not None
    assert content.subject.digest == pushed.digest
    assert [layer.media_type for layer in content.layers] == [BUNDLE]


def test_signatures_and_compressed_forms_are_listed_together(
    store: LocalStore, other: LocalStore, key: KeyFiles, remote: str
) -> None:
    frozen.put(store, "weights", {"a": 1})
    for name in ("first", "second"):
        pushed = blobstore.push("weights", remote, store=store, cold=True)
        blobstore.sign("weights", key_files(other.root.parent, name).private, store=store)
        assert blobstore.push("weights", remote, store=store).signatures
    policy(other, key)
    with pytest.raises(NotTrusted):
        blobstore.pull(remote, "copy", store=other)
    blobstore.sign("weights", key.private, store=store)
    blobstore.push("weights", remote, store=store)
    pulled = blobstore.pull(remote, "copy", store=other)
    assert (pushed.cold_blobs, pulled.signatures) == (1, 2)  # those of the key which is trusted
    assert pulled.bytes_saved > 0


def test_an_unsigned_model_is_refused_before_a_blob_is_fetched(
    store: LocalStore, other: LocalStore, key: KeyFiles, tmp_path: Path
) -> None:
    policy(other, key)
    with StubRegistry() as registry:
        remote = registry.put(store, plan_ollama(store.read_manifest("model")), "team/m", "v1")
        with pytest.raises(NotTrusted, match="the policy refuses model copy:latest"):
            blobstore.pull(remote, "copy", store=other)
        assert not registry.sent
        policy(other, key, "warn")
        pulled = blobstore.pull(remote, "copy", store=other)
    assert pulled.notices[0].startswith("model copy:latest is not trusted: it has no signature")


def test_the_key_is_read_before_anything_is_sent(
    store: LocalStore, remote: str, tmp_path: Path
) -> None:
    encrypted = key_files(tmp_path, "encrypted", passphrase=b"x")
    with pytest.raises(UsageError, match="encrypted"):
        blobstore.push(
            "model", remote, store=store, registry=RegistryOptions(sign_key=encrypted.private)
        )
    with RegistryClient(remote.partition("/")[0]) as client:
        repository = remote.partition("/")[2]
        assert client.head_manifest(repository, "latest") is None


def test_signatures_that_are_hostile_or_broken_count_as_missing(
    store: LocalStore, other: LocalStore, key: KeyFiles
) -> None:
    """The registry offers what is large, missing, of another type, of another digest, or no JSON."""
    root = plan_ollama(store.read_manifest("model")).root
    policy(other, key)
    with StubRegistry() as registry:
        remote = registry.put(store, plan_ollama(store.read_manifest("model")), "team/m", "v1")

        def blob(media_type: str, data: bytes, **other: object) -> dict[str, object]:
            registry.blobs[str(Digest.of(data))] = data
            described = {"mediaType": media_type, "digest": str(Digest.of(data)), "size": len(data)}
            return described | other

        simple = "application/vnd.dev.cosign.simplesigning.v1+json"
        name = "dev.cosignproject.cosign/signature"
        signed, wrong = payload("m", root.digest, 1), f"sha256:{'0' * 64}"
        signer = PrivateKey.from_pem(key.private.read_bytes(), "key")
        signature = base64.b64encode(signer.sign(signed, is_sha256=True)).decode()
        registry.blobs[wrong] = signed
        layers = [
            blob(simple, b"{}", annotations={name: "AAAA"}),
            blob(simple, b"[" * 60_000, annotations={name: "AAAA"}),
            blob(simple, bytes(70_000), annotations={name: "AAAA"}),
            blob(simple, b"x", annotations={name: "!!"}),
            blob(simple, b"y"),
            blob("text/plain", b"z"),
            blob(simple, signed, annotations={name: signature}) | {"digest": wrong},
        ]
        config = blob("application/vnd.oci.empty.v1+json", b"{}")
        value = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": layers}
        tag = f"sha256-{root.digest.hex}"
        registry.put_manifest("team/m", f"{tag}.sig", OCI_MANIFEST, json.dumps(value).encode())
        listed = []
        for number, content in enumerate((b"{}", b"[]", b"\xff", b"[" * 99_999)):
            item = value | {"layers": [blob(BUNDLE, content)], "artifactType": BUNDLE}
            data = json.dumps(item | {"annotations": {"n": str(number)}}).encode()
            registry.put_manifest("team/m", str(Digest.of(data)), OCI_MANIFEST, data)
            listed.append(
                {
                    "mediaType": OCI_MANIFEST,
                    "digest": str(Digest.of(data)),
                    "size": len(data),
                    "artifactType": BUNDLE,
                }
            )
        listed.append(listed[0] | {"digest": f"sha256:{'1' * 64}"})
        nested = json.dumps({"schemaVersion": 2, "manifests": listed}).encode()
        registry.put_manifest("team/m", str(Digest.of(nested)), OCI_INDEX, nested)
        listed.append(listed[0] | {"digest": str(Digest.of(nested))})
        index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": listed}
        registry.put_manifest("team/m", tag, OCI_INDEX, json.dumps(index).encode())

        with RegistryClient(registry.host) as client:
            found = fetch_referrers(client, "team/m", root)
            assert len(found) > 1
            fetched = fetch_signatures(client, "team/m", root, manifest_of(store), found)
            assert list(signed_by(fetched, [public_key(key)])) == []
        with pytest.raises(NotTrusted):
            blobstore.pull(remote, "copy", store=other)


@pytest.mark.parametrize(
    ("limit", "count"), [(Limit(10, 35, 100), 3), (Limit(10, 100, 4), 4), (Limit(9, 100, 100), 0)]
)
def test_signatures_of_a_registry_are_fetched_up_to_the_limits(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, limit: Limit, count: int
) -> None:
    monkeypatch.setattr(limits, "SIGNATURES", limit)
    plan = plan_ollama(store.read_manifest("model"))
    with StubRegistry() as registry:
        registry.put(store, plan, "team/m", "v1")
        listed = []
        for number in range(6):
            bundle = b"%010d" % number
            registry.blobs[str(Digest.of(bundle))] = bundle
            layer = {"mediaType": BUNDLE, "digest": str(Digest.of(bundle)), "size": len(bundle)}
            value = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "layers": [layer]}
            data = json.dumps(value | {"config": layer, "artifactType": BUNDLE}).encode()
            registry.put_manifest("team/m", str(Digest.of(data)), OCI_MANIFEST, data)
            item = {"mediaType": OCI_MANIFEST, "digest": str(Digest.of(data)), "size": len(data)}
            listed.append(item | {"artifactType": BUNDLE})
        index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": listed}
        tag = f"sha256-{plan.root.digest.hex}"
        registry.put_manifest("team/m", tag, OCI_INDEX, json.dumps(index).encode())
        with RegistryClient(registry.host) as client:
            found = fetch_referrers(client, "team/m", plan.root)
            assert len(found) == 6
            fetched = fetch_signatures(client, "team/m", plan.root, manifest_of(store), found)
            assert len(list(fetched)) == count


def test_a_signature_counts_for_the_model_that_the_signed_manifest_names_alone(
    store: LocalStore, key: KeyFiles, remote: str
) -> None:
    pushed = blobstore.push(
        "model", remote, store=store, registry=RegistryOptions(sign_key=key.private)
    )
    (data,) = store.signatures(manifest_of(store))
    found = parse_signature(data)
    subject = json.loads(data)["subject"]

    assert json.loads(data).keys() == {"mediaType", "payload", "signature", "subject"}
    without = parse_signature(write_signature(found.signed, found.signature))
    assert without.manifest == pushed.digest
    for wrong in (b"{}", b"[]", b"\xff", store.read_manifest("model")):
        with pytest.raises(InvalidSignature):
            parse_signature(write_signature(found.signed, found.signature, wrong))
    altered = data.replace(subject.encode(), b"!")
    with pytest.raises(InvalidSignature):
        parse_signature(altered)
