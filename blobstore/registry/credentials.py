"""Credentials in Docker's configuration, which other clients of registries use too.

The file ``config.json`` lies in ``$DOCKER_CONFIG``, or in ``~/.docker``. It names a credential helper for a
registry (``credHelpers``) or for all (``credsStore``), a program ``docker-credential-NAME`` that keeps
passwords in a keychain; without one, the passwords are in the file itself (``auths``), readable by its owner.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from blobstore.core import interrupts, strict_json
from blobstore.core.escape import escape, quote
from blobstore.core.files import read_regular, write_file
from blobstore.errors import BlobstoreError, UsageError
from blobstore.registry.protocol import IDENTITY_TOKEN, Login

if TYPE_CHECKING:
    from collections.abc import Mapping

_FILE: Final = "config.json"
_MAX_FILE: Final = 2**20
_SECONDS: Final = 120
"""How long a helper may take; it may ask the user to unlock a keychain."""
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_KEYS: Final = {"docker.io": "https://index.docker.io/v1/"}
"""Registries whose credentials Docker keeps under another name than the host."""


class Credentials(Protocol):
    """Knows logins at registries."""

    def find(self, host: str) -> Login | None:
        """Return the login at a registry, if there is one.

        Raises:
            BlobstoreError: it cannot be read.
        """
        ...


class GivenLogin:
    """One login, for whatever registry is asked for."""

    def __init__(self, login: Login | None) -> None:
        self._login = login

    def find(self, host: str) -> Login | None:
        """Return the login."""
        del host
        return self._login


class DockerCredentials:
    """The logins in Docker's configuration."""

    def __init__(self, folder: Path | None = None) -> None:
        """Read nothing yet.

        Args:
            folder: where ``config.json`` lies; by default where Docker looks for it.
        """
        given = os.environ.get("DOCKER_CONFIG")
        self.path = (folder or Path(given or Path.home() / ".docker")) / _FILE

    def find(self, host: str) -> Login | None:
        """Return the login at a registry, by its helper or else from the file.

        Raises:
            BlobstoreError: the file is malformed, or the helper fails.
        """
        config = self._read()
        helper = _helper(config, host)
        found = _ask(helper, "get", _key(host)) if helper else None
        if found is not None:
            user, secret = found.get("Username"), found.get("Secret")
            if not isinstance(user, str) or not isinstance(secret, str) or not secret:
                raise BlobstoreError(f"credential helper {quote(helper)} sent no user and secret")
            return Login(user, secret)
        auths = _object(config, "auths")
        for key in (_key(host), *(key for key in auths if _host_of(key) == _host_of(_key(host)))):
            login = _login_in(auths.get(key), f"{self._shown()}: auths of {quote(host)}")
            if login is not None:
                return login
        return None

    def store(self, host: str, login: Login) -> str:
        """Keep a login; return where, in words.

        Raises:
            BlobstoreError: the file is malformed, or the helper fails.
            OSError: the file cannot be written.
        """
        config = self._read()
        helper = _helper(config, host)
        entry: dict[str, str] = {}
        if helper:
            secret = {"ServerURL": _key(host), "Username": login.user, "Secret": login.password}
            _ask(helper, "store", json.dumps(secret))
        else:
            entry["auth"] = base64.b64encode(f"{login.user}:{login.password}".encode()).decode()
        config["auths"] = _without(_object(config, "auths"), host) | {_key(host): entry}
        self._write(config)
        return f"credential helper {quote(helper)}" if helper else self._shown()

    def erase(self, host: str) -> bool:
        """Forget the login at a registry; return whether there was one.

        Raises:
            BlobstoreError: the file is malformed, or the helper fails.
            OSError: the file cannot be written.
        """
        config = self._read()
        helper = _helper(config, host)
        was_there = bool(helper) and _ask(helper, "get", _key(host)) is not None
        if was_there:
            _ask(helper, "erase", _key(host))
        auths = _object(config, "auths")
        rest = _without(auths, host)
        if rest != auths:
            config["auths"] = rest
            self._write(config)
        return was_there or rest != auths

    def _shown(self) -> str:
        return quote(self.path)

    def _read(self) -> dict[str, Any]:
        try:
            value = strict_json.loads(read_regular(self.path, _MAX_FILE))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise BlobstoreError(f"{self._shown()}: {error}") from None
        if not isinstance(value, dict):
            raise BlobstoreError(f"{self._shown()}: not a Docker configuration")
        return value

    def _write(self, config: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = json.dumps(config, indent="\t") + "\n"
        write_file(self.path.resolve(), [text.encode()], mode=0o600)


def check_user(user: str) -> None:
    """Check the name of a user: HTTP sends it with a colon and the password after it.

    Raises:
        UsageError: it is empty, or has a colon or characters that do not print.
    """
    if not user or ":" in user or not user.isprintable():
        raise UsageError(f"not the name of a user: {quote(user)}")


def _key(host: str) -> str:
    return _KEYS.get(host, host)


def _host_of(key: str) -> str:
    """Return the host in a key of ``auths``, which may be a URL."""
    return re.sub(r"^https?://", "", key).partition("/")[0]


def _without(auths: Mapping[str, Any], host: str) -> dict[str, Any]:
    gone = _host_of(_key(host))
    return {key: entry for key, entry in auths.items() if _host_of(key) != gone}


def _object(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _helper(config: Mapping[str, Any], host: str) -> str:
    """Return the name of the helper for a registry, or nothing."""
    name = _object(config, "credHelpers").get(_key(host)) or config.get("credsStore") or ""
    if name and (not isinstance(name, str) or _HELPER.fullmatch(name) is None):
        raise BlobstoreError(f"Docker's configuration has the malformed helper {quote(name)}")
    return str(name)


def _ask(helper: str, action: str, text: str) -> dict[str, Any] | None:
    """Run a credential helper; return its answer, or None if it has no such credentials."""
    program = f"docker-credential-{helper}"
    path = shutil.which(program)
    if path is None:
        raise BlobstoreError(
            f"the credential helper {quote(program)} of Docker's configuration is not installed"
        )
    try:
        done = interrupts.call(
            lambda: subprocess.run(
                [path, action],
                input=text.encode(),
                capture_output=True,
                timeout=_SECONDS,
                check=False,
            )
        )
    except subprocess.TimeoutExpired:
        raise BlobstoreError(f"{quote(program)} did not answer within {_SECONDS} s") from None
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace").strip()
        if action == "get" and "credentials not found" in said:
            return None
        raise BlobstoreError(f"{quote(program)} failed: {escape(said, 200)}")
    if action != "get":
        return {}
    try:
        answer: Any = strict_json.loads(done.stdout)
    except ValueError as error:
        raise BlobstoreError(f"{quote(program)} sent no credentials: {error}") from None
    return answer if isinstance(answer, dict) else {}


def _login_in(entry: Any, where: str) -> Login | None:
    """Return the login in an entry of ``auths``; None if a helper has it."""
    if not isinstance(entry, dict):
        return None
    token = entry.get("identitytoken")
    if isinstance(token, str) and token:
        return Login(IDENTITY_TOKEN, token)
    packed = entry.get("auth")
    if not isinstance(packed, str) or not packed:
        return None
    try:
        user, colon, password = base64.b64decode(packed, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        colon = ""
    if not colon:
        raise BlobstoreError(f"{where} are malformed")
    return Login(user, password.strip("\0"))
