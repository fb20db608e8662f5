"""Authorization of requests to one registry: tokens, cached for each set of scopes, or a password.

A registry says with its first response of status 401 what it wants. From then on, a request is sent with
authorization at once. The credentials are looked up when they are needed first, because that may start a
credential helper which asks the user.

A login that the registry has rejected is not sent again, as that may lock an account. Until the registry has
accepted a password, one request at a time sends it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError, RemoteRefused
from blobstore.http import protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from blobstore.http.protocol import Challenge, Login, Reply, Request

_RENEWED: Final = 0.8
"""Share of a token's lifetime after which it is replaced."""
_ACCEPTING: Final = frozenset({*range(200, 400), HTTPStatus.NOT_FOUND})
"""Statuses that prove that the password is right. Overloaded servers may not have checked it."""


class Authorizer:
    """Authorizes the requests to one registry. Any number of threads may share it."""

    def __init__(
        self,
        base: str,
        find_login: Callable[[str], Login | None],
        fetch: Callable[[Request, int], Reply],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look up nothing yet.

        Args:
            base: the URL of the registry.
            find_login: returns the credentials for a repository, or for "" those for the registry; called
                once for each.
            fetch: sends a request for a token, and returns a response of a limited size.
            clock: returns seconds.
        """
        self._base = base
        self._find_login = find_login
        self._fetch = fetch
        self._clock = clock
        self._challenge: Challenge | None = None
        self._logins: dict[str, Login | None] = {}
        self._refusals: dict[tuple[Challenge, frozenset[str]], RemoteRefused] = {}
        self._accepted: set[str] = set()
        """The logins that have given access to something, as :attr:`Login.basic` writes them."""
        self._rejected: dict[str, RemoteRefused] = {}
        self._trial = threading.Lock()  # held by a request with a password that may be wrong
        self.problem = ""
        """Why credentials could not be looked up; requests go without them then."""
        self._wider: dict[frozenset[str], frozenset[str]] = {}
        self._tokens: dict[tuple[Challenge, frozenset[str]], tuple[str, float]] = {}
        self._lock = threading.Lock()  # one token is fetched at a time; the others wait for it

    @contextlib.contextmanager
    def authorized(self, scopes: frozenset[str]) -> Iterator[str | None]:
        """Give a block that sends one request its header ``Authorization``. Raises as :meth:`authorization`."""
        header = self.authorization(scopes)
        with contextlib.ExitStack() as stack:
            if _is_password(header) and header not in self._accepted:
                stack.enter_context(self._trial)
                # Another request may have proved the password, or had it rejected, while this one
                # waited.
                header = self.authorization(scopes)
                if header in self._accepted:
                    stack.close()
            yield header

    def judge(self, header: str | None, status: int) -> None:
        """Record the status of the response to a request with a header ``Authorization``."""
        if header is None or not _is_password(header):
            return
        if status == HTTPStatus.UNAUTHORIZED:
            host = self._base.partition("://")[2]
            self._reject(
                header,
                RemoteRefused(
                    f"login at {quote(host)}: status {status}",
                    advice=f"the credentials for {host} give no access to it",
                    status=status,
                ),
            )
        elif status in _ACCEPTING:
            self._accepted.add(header)

    def authorization(self, scopes: frozenset[str]) -> str | None:
        """Return the header ``Authorization`` for a request that needs ``scopes``.

        Raises:
            RemoteRefused: the credentials are wrong, or must not be sent there, or the repositories have
                different ones.
            RemoteError: no token can be obtained.
        """
        with self._lock:
            challenge = self._challenge
            if challenge is None:
                return None
            login = self._login(scopes)
            if login is not None and login.basic in self._rejected:
                raise self._rejected[login.basic].copy()
            if challenge.scheme == "basic":
                return login.basic if login else None
            scopes = self._wider.get(scopes, scopes)
            key = challenge, scopes
            if key in self._refusals:
                raise self._refusals[key].copy()
            header, renewed = self._tokens.get(key, ("", 0.0))
            if not header or self._clock() >= renewed:
                request = protocol.token_request(challenge, scopes, login, self._base)
                try:
                    token = protocol.token_of(self._fetch(request, protocol.MAX_TOKEN).body)
                except RemoteRefused as error:
                    self._refusals[key] = error
                    if login is not None and error.status == HTTPStatus.UNAUTHORIZED:
                        self._reject(login.basic, error)
                    raise
                if login is not None:
                    # A token is given only if the password is right.
                    self._accepted.add(login.basic)
                header, renewed = f"Bearer {token.value}", self._clock() + token.lifetime * _RENEWED
                self._tokens[key] = header, renewed
            return header

    def learn(self, challenge: Challenge, scopes: frozenset[str], rejected: str | None) -> bool:
        """Record a challenge; return whether :meth:`authorization` may meet it.

        Args:
            challenge: what the registry wants.
            scopes: those of the request.
            rejected: the authorization that the request had.
        """
        with self._lock:
            if challenge.scheme == "basic":
                login = self._login(scopes)
                self._challenge = challenge
                # The login that was just rejected would be rejected again.
                return login is not None and login.basic != rejected
            # Without scopes, which differ between requests, it is the same for all tokens of the
            # registry.
            self._challenge = challenge._replace(scopes=frozenset())
            if not challenge.scopes <= self._wider.get(scopes, scopes):
                self._wider[scopes] = scopes | challenge.scopes
            key = self._challenge, self._wider.get(scopes, scopes)
            # Another thread may have replaced the rejected token already.
            if rejected is not None and self._tokens.get(key, ("", 0))[0] == rejected:
                del self._tokens[key]
            return True

    def has_login(self, scopes: frozenset[str]) -> bool:
        """Return whether there are credentials for ``scopes``, and they were needed."""
        return any(self._logins.get(name) for name in protocol.repositories(scopes))

    def _login(self, scopes: frozenset[str]) -> Login | None:
        """Return the one login for all repositories of ``scopes``."""
        logins = {self._login_of(name) for name in protocol.repositories(scopes)}
        if len(logins) > 1:
            raise RemoteRefused("the two repositories have different credentials")
        (login,) = logins
        if login is not None:
            protocol.check_secrecy(self._base, protocol.host_of(self._base))
        return login

    def _reject(self, header: str, error: RemoteRefused) -> None:
        """Do not send a login again, unless it has given access before."""
        if header not in self._accepted:
            self._rejected.setdefault(header, error)

    def _login_of(self, repository: str) -> Login | None:
        if repository not in self._logins:
            # Before the helper runs, so that one that fails is not asked again.
            self._logins[repository] = None
            try:
                self._logins[repository] = self._find_login(repository)
            except (BlobstoreError, OSError) as error:
                self.problem = str(error)
        return self._logins[repository]


def _is_password(header: str | None) -> bool:
    return header is not None and header.startswith("Basic ")
