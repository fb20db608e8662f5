"""The form of requests to a registry, and the meaning of its responses: pure functions of texts and numbers.

Nothing here has a socket, a clock or a state, so that tests can try every response. The rules are those of
RFC 9110 (HTTP), RFC 6750 (Bearer) and the OCI distribution specification; a comment says where real servers
differ. All text of a server is shortened and escaped before it enters an error.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlencode, urljoin, urlsplit

from blobstore.core import limits, strict_json
from blobstore.core.escape import join_some, quote, quote_url
from blobstore.errors import BlobDamaged, RemoteError, RemoteRefused
from blobstore.http import rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime

    from blobstore.http.rules import Rule

MAX_URL: Final = 16 * 2**10
"""Characters; signed URLs of object stores have up to 3,000."""
MAX_ERROR: Final = limits.ERROR.one
"""Bytes that are read of the document that explains an error."""
MAX_TOKEN: Final = limits.ERROR.one
"""Bytes of a token with the JSON around it; those of large registries have about 5,000."""
DAMAGED_ADVICE: Final = (
    "push the model again under another repository, or ask the operator to restore the blob"
)
"""What to do about a blob that the registry has, but with other bytes: registries never replace it."""
_SIZE_ADVICE: Final = (
    "the registry, or a proxy in front of it, limits the size of a request: push with smaller parts, such as "
    "'--part-size 1MiB', or raise the limit (client_max_body_size of nginx)"
)
IDENTITY_TOKEN: Final = "<token>"  # noqa: S105 - a name
"""The user name that stands for a token in place of a password."""
_MAX_CHALLENGE: Final = 8 * 2**10
_LIFETIMES: Final = (60, 3600)
"""Seconds that a token is used for, at least and at most, whatever the server says."""
_REFUSALS: Final = range(400, 500)
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(?:(\d{1,19})|\*)", re.ASCII)
_RECEIVED = re.compile(r"(?:bytes=)?0-(\d{1,19})", re.ASCII)
_URL = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+", re.ASCII)
"""The characters of RFC 3986. Parsers of URLs disagree about others, such as the backslash."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_NUMBER = re.compile(r"\d{1,19}", re.ASCII)
_RATE_LIMIT = re.compile(r";\s*r=0\s*;\s*t=(\d{1,9})", re.ASCII)
_LINK = re.compile(r'<([^<>]{1,16384})>\s*;\s*rel="?next"?', re.ASCII | re.IGNORECASE)
_PARAMETER = re.compile(
    r"(?:([A-Za-z][\w-]{0,31}) +)?([A-Za-z][\w-]{0,31}) *= *(?:\"((?:[^\"\\]|\\.)*)\"|([^\s,\"]+))",
    re.ASCII,
)
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+", re.ASCII)
_LOOPBACK = re.compile(r"localhost|127(?:\.\d{1,3}){3}|::1", re.ASCII | re.IGNORECASE)


class TransientError(RemoteError):
    """A request failed in a way that may be over soon."""

    def __init__(
        self, message: str = "", *, retry_after: float = 0, status: int = 0, code: str = ""
    ) -> None:
        super().__init__(message, status=status, code=code)
        self.retry_after = retry_after
        """Seconds that the server asks to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to a registry, or to the server that issues its tokens."""

    what: str
    """The subject of the request, with which errors begin."""
    method: str
    url: str
    rule: Rule
    """The meaning of its statuses."""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Callable[[], Iterable[bytes]] | None = None
    """Returns the bytes from the start, each time it is called."""
    size: int = 0
    """Bytes of the body."""
    timeout: float = 0
    """Seconds that the response may take, if more than usual."""
    scopes: frozenset[str] = frozenset()
    """The resource that the request needs, in the words of the token specification."""
    is_for_token: bool = False
    """Whether it asks for a token: it needs none, and no redirect is followed."""


class Reply(NamedTuple):
    """A small response."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str
    """The URL that it came from, after redirects."""


class Login(NamedTuple):
    """A user and a password; or an identity token, with ``<token>`` as the user."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"<Login of {quote(self.user)}>"

    @property
    def basic(self) -> str:
        """The value of the header that sends it."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


class Challenge(NamedTuple):
    """How a registry wants requests to be authorized."""

    scheme: str
    """``bearer`` or ``basic``."""
    realm: str = ""
    service: str = ""
    scopes: frozenset[str] = frozenset()


class Token(NamedTuple):
    """The authorization of a request."""

    value: str
    lifetime: float
    """Seconds."""


class Span(NamedTuple):
    """Bytes of a response's body."""

    skip: int
    """Bytes before those that were asked for: of a server that ignores ranges."""
    length: int
    """Bytes that were asked for."""


def is_loopback(host: str) -> bool:
    """Return whether a host, without its port, is this machine by name or address."""
    return _LOOPBACK.fullmatch(host.strip("[]")) is not None


def host_of(url: str) -> str:
    """Return the host of a URL without port and brackets, in lower case."""
    return urlsplit(url).hostname or ""


def address_of(base: str) -> str:
    """Return a server's URL as users write it: without the scheme where that is the default."""
    scheme, _, host = base.partition("://")
    return host if (scheme == "http") == is_loopback(host_of(base)) else base


def has_same_origin(url: str, other: str) -> bool:
    """Return whether two URLs have the same scheme, host and port."""
    return _origin(url) == _origin(other)


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname or "", port


def resolve(location: str | None, base: str) -> str:
    """Return the URL that a ``Location`` or ``Link`` of the response from ``base`` stands for.

    Raises:
        RemoteError: it is missing, malformed, has a user name, or leads from https to http.
    """
    if not location:
        raise RemoteError(f"{quote(host_of(base))} redirects without a Location")
    try:
        url = urljoin(base, location)
        parts = urlsplit(url)
        is_sound = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and len(url) <= MAX_URL
            # Parsers drop tabs and newlines, so the text is checked before it is joined, too.
            and _URL.fullmatch(location) is not None
            and _URL.fullmatch(url) is not None
        )
    except ValueError:
        is_sound = False
    if not is_sound or parts.username is not None or parts.password is not None:
        raise RemoteError(
            f"{quote(host_of(base))} refers to a malformed URL: {quote_url(location)}"
        )
    if urlsplit(base).scheme == "https" and parts.scheme == "http":
        raise RemoteError(
            f"{quote(host_of(base))} refers from https to http: {quote_url(location)}",
            advice="if it is behind a proxy, its operator must make it send https URLs",
        )
    return url


def resolve_upload(location: str | None, base: str) -> str:
    """Return the URL at which an upload goes on, which is at the registry itself.

    Raises:
        RemoteError: as :func:`resolve`, or it is at another host.
    """
    url = resolve(location, base)
    if not has_same_origin(url, base):
        is_port = host_of(url) == host_of(base)
        raise RemoteError(
            f"{quote(host_of(base))} wants an upload to go to another server: {quote_url(url)}",
            advice="a proxy in front of the registry must pass the port on, as nginx does with "
            "'proxy_set_header Host $http_host'"
            if is_port
            else "",
        )
    return url


def with_query(url: str, query: str) -> str:
    """Return a URL with one more parameter; those that it has stay, as the specification asks."""
    return f"{url}{'&' if '?' in url else '?'}{query}"


def next_page(link: str | None, base: str) -> str | None:
    """Return the URL of the next page of a list, by the ``Link`` header of this one.

    Raises:
        RemoteError: as :func:`resolve`, or it is at another server or is this page.
    """
    if link is None:
        return None
    found = _LINK.search(link)
    if found is None:
        return None
    url = resolve(found[1], base)
    if not has_same_origin(url, base) or url == base:
        raise RemoteError(f"{quote(host_of(base))} lists its next page at {quote_url(found[1])}")
    return url


def content_length(text: str | None) -> int | None:
    """Return the number of bytes that a response announces, or None if it announces none.

    Raises:
        RemoteError: it is not a number.
    """
    if text is None:
        return None
    if _NUMBER.fullmatch(text) is None:
        raise RemoteError(f"a response has the malformed Content-Length {quote(text)}")
    return int(text)


def check_encoding(headers: Mapping[str, str]) -> None:
    """Check that a body comes as it is: digests and ranges are about those bytes.

    Raises:
        RemoteError: it is compressed.
    """
    encoding = headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise RemoteError(f"a response has the encoding {quote(encoding)}, which was not accepted")


def scope(repository: str, actions: str) -> str:
    """Return the scope of a repository, for ``pull`` or ``pull,push``."""
    return f"repository:{repository}:{actions}"


REPOSITORIES_SCOPE: Final = "registry:catalog:*"
"""The scope of the list of repositories, as distribution asks for it."""


def repositories(scopes: Iterable[str]) -> frozenset[str]:
    """Return the repositories of scopes; without one, ``""`` for the registry."""
    names = (text.split(":")[1] for text in scopes if text.startswith("repository:"))
    return frozenset(names) or frozenset({""})


def challenge_of(text: str) -> Challenge | None:
    """Return the challenge in ``WWW-Authenticate`` that can be met: Bearer, or else Basic.

    Raises:
        RemoteError: it is too long.
    """
    if len(text) > _MAX_CHALLENGE:
        raise RemoteError(f"the registry sent a challenge of {len(text)} characters")
    found: dict[str, dict[str, str]] = {}
    parameters: dict[str, str] = {}
    for scheme, key, quoted, plain in _PARAMETER.findall(text):
        if scheme:
            parameters = found.setdefault(scheme.lower(), {})
        parameters.setdefault(key.lower(), re.sub(r"\\(.)", r"\1", quoted) or plain)
    if "bearer" in found:
        bearer = found["bearer"]
        scopes = frozenset(bearer.get("scope", "").split())
        return Challenge("bearer", bearer.get("realm", ""), bearer.get("service", ""), scopes)
    return Challenge("basic") if "basic" in found or text.strip().lower() == "basic" else None


def check_secrecy(url: str, host: str) -> None:
    """Check that credentials for a registry may be sent to a URL.

    Raises:
        RemoteRefused: anyone in between could read them.
    """
    parts = urlsplit(url)
    if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
        raise RemoteRefused(
            f"the credentials for {quote(host)} must not be sent to {quote_url(url)}, which is not encrypted",
            advice="use https, or log out to go on without credentials",
        )


def token_request(
    challenge: Challenge, scopes: frozenset[str], login: Login | None, base: str
) -> Request:
    """Return the request that asks the realm of a challenge for a token.

    Raises:
        RemoteError: the realm is malformed, or leads from https to http.
        RemoteRefused: the credentials would be sent unencrypted.
    """
    host = host_of(base)
    realm = resolve(challenge.realm, base)
    if login is not None:
        check_secrecy(realm, host)
    asked = [("scope", text) for text in sorted(scopes)]
    if challenge.service:
        asked.insert(0, ("service", challenge.service))
    what = f"token for {quote(host)}"
    if login is None or login.user != IDENTITY_TOKEN:
        headers = {"authorization": login.basic} if login else {}
        url = with_query(realm, urlencode(asked)) if asked else realm
        return Request(
            what=what,
            method="GET",
            url=url,
            rule=rules.TOKEN,
            headers=headers,
            scopes=scopes,
            is_for_token=True,
        )
    grant = [
        ("grant_type", "refresh_token"),
        ("refresh_token", login.password),
        ("client_id", "blobstore"),
    ]
    scope_text = " ".join(sorted(scopes))
    form = urlencode([*grant, ("service", challenge.service), ("scope", scope_text)]).encode()
    return Request(
        what=what,
        method="POST",
        url=realm,
        rule=rules.TOKEN,
        headers={"content-type": "application/x-www-form-urlencoded"},
        body=lambda: (form,),
        size=len(form),
        scopes=scopes,
        is_for_token=True,
    )


def token_of(body: bytes) -> Token:
    """Return the token in the response of a realm.

    Raises:
        RemoteError: it is missing.
    """
    try:
        value: Any = strict_json.loads(body)
        # Servers use either name.
        text = value.get("token") or value.get("access_token")
        lifetime = value.get("expires_in", 0)
    except (ValueError, AttributeError):
        text = None
    if not isinstance(text, str) or _TOKEN.fullmatch(text) is None:
        raise RemoteError("the server that issues tokens sent none")
    if not isinstance(lifetime, int | float):
        lifetime = 0
    shortest, longest = _LIFETIMES
    return Token(text, min(max(lifetime, shortest), longest))


def range_of(begin: int, end: int) -> str:
    """Return the header that asks for the bytes from ``begin`` to before ``end``.

    Never for an empty range: distribution 2.8 answers one at the end of a blob with a response that
    announces more bytes than it sends.
    """
    if not 0 <= begin < end:
        raise ValueError(f"range of no bytes: {begin} to {end}")
    return f"bytes={begin}-{end - 1}"


def span_of(
    status: int, headers: Mapping[str, str], begin: int, end: int, size: int | None = None
) -> Span:
    """Return the place of the bytes ``begin`` to ``end`` in the response to a request for them.

    ``size`` is that of the blob, if it is known.

    Raises:
        BlobDamaged: the blob has another length.
        RemoteError: the response does not fit the request.
    """
    length = content_length(headers.get("content-length"))
    if status != HTTPStatus.PARTIAL_CONTENT:  # the server ignored the range, which it may
        if length is not None and (length < end or (size is not None and length != size)):
            raise BlobDamaged(
                f"has {length} bytes, expected {size or f'at least {end}'}", advice=DAMAGED_ADVICE
            )
        return Span(begin, end - begin)
    text = headers.get("content-range", "")
    found = _RANGE.fullmatch(text)
    if found is None:
        raise RemoteError(f"a response has the malformed Content-Range {quote(text)}")
    first, last = int(found[1]), int(found[2])
    total = int(found[3]) if found[3] else None
    if total is not None and (total < end or (size is not None and total != size)):
        raise BlobDamaged(
            f"has {total} bytes, expected {size or f'at least {end}'}", advice=DAMAGED_ADVICE
        )
    if (first, last + 1) != (begin, end) or length not in (None, end - begin):
        raise RemoteError(
            f"a response to a request for bytes {begin} to {end - 1} has the Content-Range "
            f"{quote(text)} and the Content-Length {length}"
        )
    return Span(0, end - begin)


def bytes_received(text: str | None) -> int:
    """Return the bytes of an upload that a server has, by the ``Range`` header of its status.

    ``0-0`` can mean none or one, because distribution 2.8 says it for both: it counts as none.

    Raises:
        RemoteError: it is malformed.
    """
    found = _RECEIVED.fullmatch("0-0" if text is None else text)
    if found is None:
        raise RemoteError(f"an upload has the malformed Range {quote(text)}")
    last = int(found[1])
    return last + 1 if last else 0


def retry_after(headers: Mapping[str, str], now: datetime) -> float:
    """Return the seconds that a server asks to wait; 0 if it does not, or what it says is malformed.

    The Hub says it by the draft for ``RateLimit`` alone.
    """
    if found := _RATE_LIMIT.search(headers.get("ratelimit", "")):
        return float(found[1])
    text = headers.get("retry-after", "").strip()
    if _NUMBER.fullmatch(text):
        return float(text)
    try:
        return max(0.0, (parsedate_to_datetime(text) - now).total_seconds())
    except (TypeError, ValueError, OverflowError):
        return 0


def failure(
    what: str, status: int, headers: Mapping[str, str], body: bytes, now: datetime
) -> RemoteError:
    """Return the error that a response with an unexpected status stands for.

    ``what`` says what was asked for, as the start of a message.
    """
    explained, code = explanation(body), code_of(body)
    message = f"{what}: status {status}{f': {explained}' if explained else ''}"
    if status in rules.TRANSIENT:
        wait = retry_after(headers, now)
        return TransientError(message, retry_after=wait, status=status, code=code)
    kind = RemoteRefused if status in _REFUSALS else RemoteError
    advice = _SIZE_ADVICE if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE else ""
    # Registries name missing blobs in different fields, so the complete body is searched.
    digests = frozenset(_DIGEST.findall(body.decode("latin-1")))
    return kind(message, advice=advice, status=status, code=code, digests=digests)


def code_of(body: bytes) -> str:
    """Return the first error code of the specification in the document of an error, or nothing."""
    codes = (error["code"] for error in _errors_in(body))
    return next((code for code in codes if code in rules.ERROR_CODES), "")


def explanation(body: bytes) -> str:
    """Return the messages of an error document, or nothing if it has another form."""
    texts = (f"{error['code']} {error.get('message') or ''}".strip() for error in _errors_in(body))
    return join_some([quote(text) for text in texts], 3)


def _errors_in(body: bytes) -> list[dict[str, Any]]:
    """Return the errors with a code in the document of an error."""
    try:
        errors = strict_json.loads(body)["errors"]
        return [
            error
            for error in errors
            if isinstance(error, dict) and isinstance(error.get("code"), str)
        ]
    except (ValueError, KeyError, TypeError):
        return []
