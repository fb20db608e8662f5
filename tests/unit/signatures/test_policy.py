from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import InvalidPolicy
from blobstore.manifests.reference import Reference
from blobstore.signatures.cosign import parse_signature, payload, write_signature
from blobstore.signatures.keys import PrivateKey
from blobstore.signatures.policy import Policy, decide, parse_policy
from blobstore.signatures.signature import Signature
from tests.support.signing import key_files, private_key

MANIFEST = Digest.of(b"manifest")
OTHER = Digest.of(b"other")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "theirs"):
        key_files(folder, name)
    (folder / "private.pub").write_bytes((folder / "ours.pem").read_bytes())
    return folder


def parse(files: Path, text: str) -> Policy:
    return parse_policy(text.encode(), lambda name: (files / name).read_bytes())


def key(files: Path, name: str) -> PrivateKey:
    return PrivateKey.from_pem((files / f"{name}.pem").read_bytes(), name)


def signed(by: PrivateKey, manifest: Digest = MANIFEST) -> Signature:
    content = payload("model", manifest, 7)
    return parse_signature(write_signature(content, by.sign(content, is_sha256=True)))


POLICY = f"""
version = 1
default = "off"
[keys]
ours = "ours.pub"
theirs = "theirs.pub"
[[rules]]
match = "team/open*"
action = "off"
[[rules]]
match = "team/*"
action = "enforce"
keys = ["ours"]
[[rules]]
match = "pinned"
action = "enforce"
pins = ["{MANIFEST}"]
[[rules]]
match = "both"
action = "warn"
pins = ["{MANIFEST}"]
keys = ["ours", "theirs"]
"""


def test_the_first_rule_that_matches_decides(files: Path) -> None:
    policy = parse(files, POLICY)

    def action(name: str) -> str:
        return decide(policy, Reference.parse(name), MANIFEST, []).action

    assert [action(name) for name in ("team/opened", "team/x", "pinned", "both", "x")] == [
        "off",
        "enforce",
        "enforce",
        "warn",
        "off",
    ]


def test_a_rule_needs_a_signature_of_this_manifest_by_one_of_its_keys(files: Path) -> None:
    policy, name = parse(files, POLICY), Reference.parse("team/model")
    ours, theirs = key(files, "ours"), key(files, "theirs")

    trusted = decide(policy, name, MANIFEST, [signed(theirs), signed(ours)])
    refused = [
        decide(policy, name, MANIFEST, signatures)
        for signatures in ([], [signed(theirs)], [signed(private_key())], [signed(ours, OTHER)])
    ]

    assert (trusted.is_trusted, trusted.signer, trusted.reason) == (True, "ours", "")
    assert all(verdict.is_refused and "'team/*'" in verdict.reason for verdict in refused)


def test_a_pin_is_for_one_manifest_and_needs_no_signature(files: Path) -> None:
    policy, name = parse(files, POLICY), Reference.parse("pinned")
    assert decide(policy, name, MANIFEST, []).is_trusted
    assert decide(policy, name, OTHER, [signed(key(files, "ours"), OTHER)]).is_refused


def test_a_rule_with_pins_and_keys_needs_both_and_a_warning_refuses_nothing(files: Path) -> None:
    policy, name = parse(files, POLICY), Reference.parse("both")
    ours = key(files, "ours")

    verdicts = [
        decide(policy, name, MANIFEST, [signed(ours)]),
        decide(policy, name, MANIFEST, []),
        decide(policy, name, OTHER, [signed(ours, OTHER)]),
    ]

    assert [verdict.is_trusted for verdict in verdicts] == [True, False, False]
    assert not any(verdict.is_refused for verdict in verdicts)


def test_a_model_that_no_rule_matches_is_refused_unless_the_file_says_otherwise(
    files: Path,
) -> None:
    name = Reference.parse("model")
    assert decide(parse(files, "version = 1"), name, MANIFEST, []).is_refused
    warned = decide(parse(files, 'version = 1\ndefault = "warn"'), name, MANIFEST, [])
    assert (warned.is_trusted, warned.is_refused) == (False, False)
    assert decide(parse(files, 'version = 1\ndefault = "off"'), name, MANIFEST, []).is_trusted


def test_rules_match_names_with_or_without_the_parts_that_may_be_left_out(files: Path) -> None:
    for pattern in ("model", "model:*", "registry.ollama.ai/library/model:latest"):
        text = f'version = 1\ndefault = "off"\n[[rules]]\nmatch = "{pattern}"\naction = "warn"\npins = ["{OTHER}"]'
        verdict = decide(parse(files, text), Reference.parse("model"), MANIFEST, [])
        assert verdict.action == "warn", pattern


def test_a_key_may_stand_in_the_file_itself(files: Path) -> None:
    pem = (files / "ours.pub").read_text()
    policy = parse(
        files,
        f'version = 1\n[keys]\nhere = """\n{pem}"""\n[[rules]]\nmatch = "*"\naction = "enforce"\nkeys = ["here"]',
    )
    verdict = decide(policy, Reference.parse("x"), MANIFEST, [signed(key(files, "ours"))])
    assert verdict.signer == "here"


def test_a_pattern_that_takes_seconds_to_match_is_refused() -> None:
    text = (
        f'version = 1\n[[rules]]\nmatch = "{"[" * 10_000}"\naction = "enforce"\npins = ["{OTHER}"]'
    )
    with pytest.raises(
        InvalidPolicy, match=r"rules\[0\]\.match: a pattern has at most 1000 characters"
    ):
        parse_policy(text.encode(), lambda _: b"")


RULE = '[[rules]]\nmatch = "*"\naction = "enforce"\n'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "version = 2",
        "version = true",
        "version = '1'",
        "version = 1\nrule = []",
        "version = 1\ndefault = 'deny'",
        "version = 1\ndefault = []",
        "version = 1\nkeys = []",
        "version = 1\nrules = {}",
        "version = 1\nrules = [1]",
        "version = 1\n[keys]\na = 1",
        "version = 1\n[keys]\na = 'private.pub'",
        'version = 1\n[keys]\n"\\u001b" = "private.pub"',
        "version = 1\n[keys]\na = '-----BEGIN PUBLIC KEY-----'",
        f"version = 1\n{RULE}",
        f"version = 1\n{RULE}keys = []",
        f"version = 1\n{RULE}keys = 'ours'",
        f"version = 1\n{RULE}keys = ['ours']",
        f"version = 1\n{RULE}keys = [1]",
        f"version = 1\n{RULE}pins = []",
        f"version = 1\n{RULE}pins = ['sha256:00']",
        f"version = 1\n{RULE}pin = ['{MANIFEST}']",
        f"version = 1\n[[rules]]\nmatch = ''\naction = 'warn'\npins = ['{MANIFEST}']",
        f"version = 1\n[[rules]]\naction = 'warn'\npins = ['{MANIFEST}']",
        f"version = 1\n[[rules]]\nmatch = '*'\npins = ['{MANIFEST}']",
        f"version = 1\n[[rules]]\nmatch = '*'\naction = 'Enforce'\npins = ['{MANIFEST}']",
        "version = 1\nx = " + "[" * 5000,
        "version = 1\nversion = 1",
    ],
)
def test_rejects_a_policy_with_a_mistake(files: Path, text: str) -> None:
    with pytest.raises(InvalidPolicy) as caught:
        parse(files, text)
    assert str(caught.value).isprintable()


def test_rejects_a_policy_that_is_not_utf_8() -> None:
    with pytest.raises(InvalidPolicy):
        parse_policy(b"version = 1 # \xff", lambda _: b"")
