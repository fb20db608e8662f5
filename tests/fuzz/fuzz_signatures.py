"""Fuzz signatures and policies: they may be refused, but not crash, hang, grow or be trusted.

In an environment with this package, its extra ``[sign]`` and ``atheris``, from the root of the repository::

    python tests/fuzz/fuzz_signatures.py

runs for five minutes. Options of libFuzzer and folders with more inputs may follow; new inputs are kept in
the first folder. An input that fails is written to ``crash-*``, ``timeout-*`` or ``oom-*``, and is run again
if it is given as the only argument.

The first byte of an input states what the rest is: a complete signature, a statement, a payload of cosign,
the subject of such a payload, a policy, or a key. The target adds what encloses it, and asks whether a policy
trusts the result. The key of the policy has signed nothing but the seed, so nothing else may be trusted.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["blobstore"]):
    from blobstore.core.digest import Digest
    from blobstore.errors import InvalidPolicy, InvalidSignature, UsageError
    from blobstore.manifests.file_names import is_safe_name
    from blobstore.manifests.reference import Reference
    from blobstore.signatures import bundle, cosign
    from blobstore.signatures.keys import PublicKey
    from blobstore.signatures.policy import Policy, Rule, decide, parse_policy

from tests.fuzz.harness import run
from tests.support.signing import private_key

MANIFEST = Digest.of(b"manifest")
SUBJECT = f'{{"annotations":{{"vnd.blobstore.manifest":"{MANIFEST}"}}}}'.encode()
KEY = private_key()
STATEMENT = bundle.statement("model", {"a": MANIFEST, "b/c": Digest.of(b"")}, MANIFEST)
PAYLOAD = cosign.payload("model", MANIFEST, 7)
SIGNED = (
    KEY.sign(bundle.pre_authentication_encoding(STATEMENT)),
    KEY.sign(PAYLOAD, is_sha256=True),
)
POLICY = Policy(rules=(Rule(pattern="*", action="enforce", keys=(KEY.public,)),), default="enforce")
NAME = Reference.parse("model")
FORMS = (
    lambda data: data,
    lambda data: bundle.write_bundle(data, SIGNED[0], ""),
    lambda data: cosign.write_signature(data, SIGNED[1]),
    lambda data: cosign.write_signature(
        cosign.payload("model", Digest.of(data), 7), SIGNED[1], data
    ),
)


def read_one(data: bytes) -> None:
    """Parse an input, and ask whether it is trusted."""
    if not data:
        return
    form, content = data[0] % (len(FORMS) + 2), data[1:]
    try:
        if form == len(FORMS):
            policy = parse_policy(content, lambda _: content)
            decide(policy, NAME, MANIFEST, [])
        elif form > len(FORMS):
            PublicKey.from_pem(content, "key")
        else:
            _check(FORMS[form](content))
    except (InvalidSignature, InvalidPolicy, UsageError) as error:
        assert str(error).isprintable(), str(error)
        assert len(str(error)) < 4000, str(error)


def _check(data: bytes) -> None:
    found = cosign.parse_signature(data)
    assert all(map(is_safe_name, found.files)), found.files
    if decide(POLICY, NAME, MANIFEST, [found]).is_trusted:
        known = (bundle.pre_authentication_encoding(STATEMENT), PAYLOAD)
        assert found.signed in known, found.signed
        assert found.manifest == MANIFEST


def write_seeds(folder: Path) -> None:
    """Write a signature of each kind, and its parts, as inputs."""
    pem = "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"
    rule = f'[[rules]]\nmatch = "*"\naction = "warn"\nkeys = ["a"]\npins = ["{MANIFEST}"]\n'
    inputs = (
        b"\0" + bundle.write_bundle(STATEMENT, SIGNED[0], KEY.public.fingerprint),
        b"\0" + cosign.write_signature(PAYLOAD, SIGNED[1]),
        b"\1" + STATEMENT,
        b"\2" + PAYLOAD,
        b"\3" + SUBJECT,
        b"\4" + f'version = 1\ndefault = "off"\n[keys]\na = """{pem}"""\n{rule}'.encode(),
        b"\5" + pem.encode(),
    )
    for number, data in enumerate(inputs):
        (folder / str(number)).write_bytes(data)


def main() -> None:
    """Run libFuzzer; it ends the process."""
    run(read_one, write_seeds, "-timeout=10")


if __name__ == "__main__":
    main()
