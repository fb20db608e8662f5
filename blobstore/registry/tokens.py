"""What authorizes requests to one registry: tokens, cached for each set of scopes, or a password.

A registry says with its first response of status 401 what it wants. From then on, a request is sent with
authorization at once. The credentials are looked up when they are needed first, because that may start a
credential helper which asks the user.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from blobstore.registry import protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from blobstore.registry.protocol import Challenge, Login, Reply, Request

_RENEWED: Final = 0.8
"""Share of a token's lifetime after which it is replaced."""


class Authorizer:
    """Authorizes the requests to one registry. Any number of threads may share it."""

    def __init__(
        self,
        base: str,
        find_login: Callable[[], Login | None],
        fetch: Callable[[Request, int], Reply],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look up nothing yet.

        Args:
            base: the URL of the registry.
            find_login: returns its credentials; called once at most.
            fetch: sends a request for a token, and returns a response of a limited size.
            clock: returns seconds.
        """
        self._base = base
        self._find_login = find_login
        self._fetch = fetch
        self._clock = clock
        self._challenge: Challenge | None = None
        self._login: Login | None = None
        self._is_login_known = False
        self._wider: dict[frozenset[str], frozenset[str]] = {}
        self._tokens: dict[tuple[Challenge, frozenset[str]], tuple[str, float]] = {}
        self._lock = threading.Lock()  # one token is fetched at a time; the others wait for it

    def authorization(self, scopes: frozenset[str]) -> str | None:
        """Return the header ``Authorization`` for a request that needs ``scopes``.

        Raises:
            RemoteRefused: the credentials are wrong, or must not be sent there.
            RemoteError: no token can be had.
        """
        with self._lock:
            challenge = self._challenge
            if challenge is None:
                return None
            login = self._known_login()
            if challenge.scheme == "basic":
                return login.basic if login else None
            scopes = self._wider.get(scopes, scopes)
            header, renewed = self._tokens.get((challenge, scopes), ("", 0.0))
            if not header or self._clock() >= renewed:
                request = protocol.token_request(challenge, scopes, login, self._base)
                token = protocol.token_of(self._fetch(request, protocol.MAX_TOKEN).body)
                header, renewed = f"Bearer {token.value}", self._clock() + token.lifetime * _RENEWED
                self._tokens[challenge, scopes] = header, renewed
            return header

    def learn(self, challenge: Challenge, scopes: frozenset[str], rejected: str | None) -> bool:
        """Take note of a challenge; return whether :meth:`authorization` may meet it.

        Args:
            challenge: what the registry wants.
            scopes: those of the request.
            rejected: the authorization that the request had.
        """
        with self._lock:
            if challenge.scheme == "basic":
                login = self._known_login()
                self._challenge = challenge
                return login is not None and login.basic != rejected
            self._challenge = challenge._replace(scopes=frozenset())
            if not challenge.scopes <= self._wider.get(scopes, scopes):
                self._wider[scopes] = scopes | challenge.scopes
            key = self._challenge, self._wider.get(scopes, scopes)
            if rejected is not None and self._tokens.get(key, ("", 0))[0] == rejected:
                del self._tokens[key]
            return True

    @property
    def has_login(self) -> bool:
        """Whether there are credentials for the registry, and they were needed."""
        return self._login is not None

    def _known_login(self) -> Login | None:
        if not self._is_login_known:
            self._login = self._find_login()
            self._is_login_known = True
        if self._login is not None:
            protocol.check_secrecy(self._base, protocol.host_of(self._base))
        return self._login
