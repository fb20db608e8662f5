"""The policy: the signatures that a model needs, and the action without them. It does no I/O.

A policy is a TOML file; docs/guides/signatures.md describes it. The first rule whose pattern matches a
model's name decides. A mistake in the file is an error and never an open door: unknown keys, types and names
are refused, and a model that no rule matches is refused unless the file states another default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from blobstore.core import toml
from blobstore.core.digest import Digest
from blobstore.core.escape import join_some, quote
from blobstore.core.globs import MAX_GLOB
from blobstore.errors import InvalidDigest, InvalidPolicy, InvalidSignature, UsageError
from blobstore.manifests.reference import name_matches
from blobstore.signatures.cosign import parse_envelope
from blobstore.signatures.keys import PublicKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.signatures.signature import Envelope

Action = Literal["off", "warn", "enforce"]
VERSION: Final = 1
"""Of the format of policy files."""
MAX_POLICY_SIZE: Final = 2**20
"""Bytes of a policy file."""
_ACTIONS: Final = get_args(Action)
_PEM = "-----BEGIN "
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The requirements for models whose names match a pattern: all that are given here."""

    pattern: str
    action: Action
    keys: tuple[PublicKey, ...] = ()
    """A signature by one of these keys."""
    pins: tuple[Digest, ...] | None = None
    """One of these digests of its manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The rules, in order."""

    rules: tuple[Rule, ...]
    default: Action
    """The action for models that no rule matches."""
    keys: tuple[PublicKey, ...] = ()
    """All keys that the policy names."""

    def rule_of(self, reference: Reference) -> Rule | None:
        """Return the first rule that matches a name."""
        return next((one for one in self.rules if name_matches(reference, one.pattern)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict of a policy about a model."""

    action: Action
    is_trusted: bool
    """Whether the model has what its rule asks for; true if that is nothing."""
    signer: str = ""
    """The name of the first of the rule's keys that was found to have signed it."""
    reason: str = ""
    """The requirements that are not met."""

    @property
    def is_refused(self) -> bool:
        """Whether the model must not be used."""
        return not self.is_trusted and self.action == "enforce"

    def notices(self, reference: Reference) -> tuple[str, ...]:
        """Return the warnings about a model that may be used."""
        return () if self.is_trusted else (f"model {reference} is not trusted: {self.reason}",)


def decide(
    policy: Policy, reference: Reference, manifest: Digest, signatures: Iterable[Envelope]
) -> Verdict:
    """Return the verdict of a policy about a model.

    Signatures are taken one at a time, only if keys are needed, and only until one of these made one. What
    a signature states is parsed after that.

    Args:
        policy: the policy.
        reference: the model's name.
        manifest: the digest of its manifest.
        signatures: what is said to sign it. Signatures of other manifests do not count.
    """
    rule = policy.rule_of(reference)
    if rule is None:
        reason = "" if policy.default == "off" else "no rule of the policy matches its name"
        return Verdict(action=policy.default, is_trusted=not reason, reason=reason)
    if rule.action == "off":
        return Verdict(action="off", is_trusted=True)
    if rule.pins is not None and manifest not in rule.pins:
        reason = f"its ID {manifest} is not one that rule {quote(rule.pattern)} pins"
        return Verdict(action=rule.action, is_trusted=False, reason=reason)
    if not rule.keys:
        return Verdict(action=rule.action, is_trusted=True)
    count = 0
    for one in signatures:
        count += 1
        signer = next((key.name for key in rule.keys if one.is_by(key)), None)
        if signer is not None and _manifest_of(one) == manifest:
            return Verdict(action=rule.action, is_trusted=True, signer=signer)
    names = join_some([quote(key.name) for key in rule.keys], _SHOWN)
    found = f"none of its signatures ({count}) is" if count else "it has no signature"
    reason = f"{found} by a key that rule {quote(rule.pattern)} trusts: {names}"
    return Verdict(action=rule.action, is_trusted=False, reason=reason)


def _manifest_of(envelope: Envelope) -> Digest | None:
    """Return the digest of the manifest that is signed, if any."""
    try:
        return parse_envelope(envelope).manifest
    except InvalidSignature:
        return None


def parse_policy(data: bytes, read_key: Callable[[str], bytes]) -> Policy:
    """Parse a policy file; ``read_key`` returns the content of a key file that it names.

    Raises:
        InvalidPolicy: it breaks the format, or names a key that cannot be used.
        MissingLibrary: it has keys, and ``cryptography`` is not installed.
    """
    try:
        value = toml.loads(data.decode())
    except ValueError as error:
        raise InvalidPolicy(f"not valid TOML: {quote(error)}") from None
    _check_keys(value, "version default keys rules", "the file")
    if type(value.get("version")) is not int or value["version"] != VERSION:
        raise InvalidPolicy(f"expected version = {VERSION}")
    keys: dict[str, PublicKey] = {}
    for name, text in _typed(value, "keys", dict, "the file", {}).items():
        if not isinstance(text, str):
            raise InvalidPolicy(f"keys: {quote(name)} must be the path of a key, or a key in PEM")
        pem = text.encode() if text.startswith(_PEM) else read_key(text)
        try:
            keys[name] = PublicKey.from_pem(pem, name)
        except UsageError as error:
            raise InvalidPolicy(f"keys: {error}") from None
    listed = _typed(value, "rules", list, "the file", [])
    rules = tuple(_parse_rule(index, rule, keys) for index, rule in enumerate(listed))
    default = _action(value.get("default", "enforce"), "default")
    return Policy(rules=rules, default=default, keys=tuple(keys.values()))


def _parse_rule(index: int, value: Any, keys: dict[str, PublicKey]) -> Rule:
    place = f"rules[{index}]"
    if not isinstance(value, dict):
        raise InvalidPolicy(f"{place}: expected a table")
    _check_keys(value, "match action keys pins", place)
    pattern = _typed(value, "match", str, place)
    if not pattern:
        raise InvalidPolicy(f"{place}.match: expected a pattern of names")
    if len(pattern) > MAX_GLOB:
        raise InvalidPolicy(f"{place}.match: a pattern has at most {MAX_GLOB} characters")
    action = _action(value.get("action"), f"{place}.action")
    names = _texts(value, "keys", place)
    unknown = [name for name in names or () if name not in keys]
    if unknown:
        raise InvalidPolicy(f"{place}.keys: there is no key {quote(unknown[0])} in [keys]")
    try:
        pins = (
            tuple(map(Digest.parse, pinned)) if (pinned := _texts(value, "pins", place)) else None
        )
    except InvalidDigest as error:
        raise InvalidPolicy(f"{place}.pins: {error}") from None
    if action != "off" and not names and not pins:
        raise InvalidPolicy(f"{place}: a rule that is not off needs 'keys', 'pins' or both")
    found = tuple(keys[name] for name in names or ())
    return Rule(pattern=pattern, action=action, keys=found, pins=pins)


def _action(value: Any, place: str) -> Action:
    if value not in _ACTIONS:
        raise InvalidPolicy(f"{place}: expected one of {', '.join(_ACTIONS)}, got {quote(value)}")
    action: Action = value
    return action


def _texts(value: dict[str, Any], key: str, place: str) -> Sequence[str] | None:
    """Return a list of texts, which must not be empty, or None without the key."""
    if key not in value:
        return None
    found = value[key]
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        raise InvalidPolicy(f"{place}.{key}: expected a list of texts that is not empty")
    return found


def _typed(value: dict[str, Any], key: str, kind: type, place: str, default: Any = None) -> Any:
    found = value.get(key, default)
    if not isinstance(found, kind):
        raise InvalidPolicy(f"{place}: {key} has a wrong type, or is missing")
    return found


def _check_keys(value: dict[str, Any], known: str, place: str) -> None:
    unknown = sorted(value.keys() - set(known.split()))
    if unknown:
        expected = ", ".join(known.split())
        raise InvalidPolicy(f"{place}: unknown key {quote(unknown[0])}; known are {expected}")
