"""Credentials in the files of Docker and Podman, which other clients of registries use too.

The files have one form. Each names a credential helper for a registry (``credHelpers``) or for all
(``credsStore``), a program ``docker-credential-NAME`` that keeps passwords in a keychain; without one, the
passwords are in the file itself (``auths``), readable by its owner. The files are read in Podman's order, and
the first login counts. A key of ``auths`` is a registry, or the start of a repository's path there: the longest
that fits counts, and no other is sent.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import contextlib
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
from blobstore.http.protocol import IDENTITY_TOKEN, Login

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MAX_FILE: Final = 2**20
_SECONDS: Final = 120
"""How long a helper may take; it may ask the user to unlock a keychain."""
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_KEYS: Final = {"docker.io": "https://index.docker.io/v1/"}
"""Registries whose credentials Docker keeps under another name than the host."""
_HOSTS: Final = {"index.docker.io": "docker.io", "registry-1.docker.io": "docker.io"}
_VERSIONS: Final = ("v1", "v2")
"""Paths of keys that stand for the whole registry."""


class Credentials(Protocol):
    """Knows logins at registries."""

    def find(self, host: str, repository: str = "") -> Login | None:
        """Return the login for a repository of a registry, or for the registry, if there is one.

        Raises:
            BlobstoreError: it cannot be read.
            OSError: as above.
        """
        ...


class GivenLogin:
    """One login, for whatever registry is asked for."""

    def __init__(self, login: Login | None) -> None:
        self._login = login

    def find(self, host: str, repository: str = "") -> Login | None:
        """Return the login."""
        del host, repository
        return self._login


class LoginFiles:
    """The logins in all files that Podman reads, among them Docker's."""

    def __init__(self) -> None:
        """Read nothing yet."""
        self._files = [LoginFile(path) for path in _paths()]

    def find(self, host: str, repository: str = "") -> Login | None:
        """Return the first login for a repository, or for the registry.

        Raises:
            BlobstoreError: no login was found, and a file or helper that may have it cannot be read.
            OSError: as above.
        """
        problems: list[BlobstoreError | OSError] = []
        for file in self._files:
            try:
                login = file.find(host, repository)
            except (BlobstoreError, OSError) as error:
                problems.append(error)
                continue
            if login is not None:
                return login
        if problems:
            raise problems[0]
        return None

    def store(self, host: str, login: Login) -> str:
        """Keep a login, in the file that has one of the registry, or else in Docker's; return where, in words.

        Raises:
            BlobstoreError: the file is malformed, the helper fails, or there is no home folder.
            OSError: the file cannot be written.
        """
        if not self._files:
            raise BlobstoreError("there is no home folder for passwords; set DOCKER_CONFIG")
        for file in self._files:
            is_owner = False
            # A file that cannot be read has none.
            with contextlib.suppress(BlobstoreError, OSError):
                is_owner = file.find(host) is not None
            if is_owner:
                return file.store(host, login)
        return self._files[-1].store(host, login)

    def hosts(self) -> list[str]:
        """Return the registries that the files name, as far as they can be read; no helper is asked."""
        found: list[str] = []
        for file in self._files:
            with contextlib.suppress(BlobstoreError, OSError):
                found += file.hosts()
        return list(dict.fromkeys(found))

    def erase(self, host: str) -> tuple[str, ...]:
        """Forget the login at a registry in all files; return where there was one, in words.

        Raises:
            BlobstoreError: a file is malformed, or a helper fails. The other files have forgotten it.
            OSError: a file cannot be written. As above.
        """
        places: list[str] = []
        problems: list[BlobstoreError | OSError] = []
        for file in self._files:
            try:
                places.append(file.erase(host))
            except (BlobstoreError, OSError) as error:
                problems.append(error)
        if problems:
            raise problems[0]
        return tuple(filter(None, places))


def _paths() -> Iterator[Path]:
    """Yield the files that may have logins, in Podman's order (containers-auth.json); Docker's is the last."""
    if given := os.environ.get("REGISTRY_AUTH_FILE"):
        yield Path(given)
        return
    run = os.environ.get("XDG_RUNTIME_DIR")
    yield (
        Path(run, "containers/auth.json")
        if run
        else Path(f"/run/containers/{os.getuid()}/auth.json")
    )
    for variable, default, name in (
        ("XDG_CONFIG_HOME", ".config", "containers/auth.json"),
        ("DOCKER_CONFIG", ".docker", "config.json"),
    ):
        with contextlib.suppress(RuntimeError):  # there is no home folder
            yield Path(os.environ.get(variable) or Path.home() / default, name)


class LoginFile:
    """The logins in one file, which may not exist."""

    def __init__(self, path: Path) -> None:
        """Read nothing yet."""
        self.path = path

    def find(self, host: str, repository: str = "") -> Login | None:
        """Return the login for a repository, by the registry's helper or else from the file.

        Raises:
            BlobstoreError: no login was found, and the file is malformed or the helper fails.
            OSError: the file cannot be read.
        """
        config = self._read()
        problem: BlobstoreError | OSError | None = None
        try:
            login = _from_helper(_helper(config, host), host)
        except (BlobstoreError, OSError) as error:
            login, problem = None, error
        login = login or self._written(config, host, repository)
        if login is None and problem is not None:
            raise problem
        return login

    def hosts(self) -> list[str]:
        """Return the registries that the file names.

        Raises:
            BlobstoreError: the file is malformed.
            OSError: the file cannot be read.
        """
        config = self._read()
        keys = [*_object(config, "auths"), *_object(config, "credHelpers")]
        return [_place_of(key).partition("/")[0] for key in keys]

    def _written(self, config: Mapping[str, Any], host: str, repository: str) -> Login | None:
        """Return the login of the longest key that is the registry or the start of the repository's path."""
        auths = _object(config, "auths")
        wanted = f"{host}/{repository}"
        fitting = [key for key in auths if f"{wanted}/".startswith(f"{_place_of(key)}/")]
        # Of equal ones, that which Docker writes.
        fitting.sort(key=lambda key: (len(_place_of(key)), key == _key(host)), reverse=True)
        for key in fitting:
            login = _login_in(auths[key], f"{self.shown}: auths of {quote(_place_of(key))}")
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
        return f"credential helper {quote(helper)}" if helper else self.shown

    def erase(self, host: str) -> str:
        """Forget the login at a registry; return where it was, in words, or nothing.

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
        if was_there:
            return f"credential helper {quote(helper)}"
        return self.shown if rest != auths else ""

    @property
    def shown(self) -> str:
        """The path in quotes."""
        return quote(self.path)

    def _read(self) -> dict[str, Any]:
        try:
            # Editors on Windows begin a file with a byte order mark.
            data = read_regular(self.path, _MAX_FILE).removeprefix(codecs.BOM_UTF8).strip()
            value = strict_json.loads(data) if data else {}
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise BlobstoreError(f"{self.shown}: {error}") from None
        if not isinstance(value, dict):
            raise BlobstoreError(f"{self.shown}: not a Docker configuration")
        return value

    def _write(self, config: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = json.dumps(config, indent="\t") + "\n"
        # If the path is a link, its target is replaced and the link stays.
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


def _place_of(key: str) -> str:
    """Return the ``host[/path]`` that a key of ``auths`` stands for; it may be a URL."""
    host, _, path = re.sub(r"^https?://", "", key).partition("/")
    path = path.strip("/")
    host = _HOSTS.get(host, host)
    return host if not path or path in _VERSIONS else f"{host}/{path}"


def _without(auths: Mapping[str, Any], host: str) -> dict[str, Any]:
    """Return the entries but those of the registry itself; entries of paths there are other logins."""
    return {key: entry for key, entry in auths.items() if _place_of(key) != host}


def _object(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _helper(config: Mapping[str, Any], host: str) -> str:
    """Return the name of the helper for a registry, or nothing."""
    name = _object(config, "credHelpers").get(_key(host)) or config.get("credsStore") or ""
    if name and (not isinstance(name, str) or _HELPER.fullmatch(name) is None):
        raise BlobstoreError(f"Docker's configuration has the malformed helper {quote(name)}")
    return str(name)


def _from_helper(helper: str, host: str) -> Login | None:
    """Return the login that a helper has for a registry; None if there is no helper or no login."""
    found = _ask(helper, "get", _key(host)) if helper else None
    if found is None:
        return None
    user, secret = found.get("Username"), found.get("Secret")
    if not isinstance(user, str) or not isinstance(secret, str) or not secret:
        raise BlobstoreError(f"credential helper {quote(helper)} sent no user and secret")
    return Login(user, secret)


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
        # Helpers say this with a text and not with an exit status.
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
        match entry:
            case {"username": str(user), "password": str(password)} if user and password:
                return Login(user, password)
        return None
    try:
        user, colon, password = base64.b64decode(packed, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        colon = ""
    if not colon:
        raise BlobstoreError(f"{where} are malformed")
    # As Docker does.
    return Login(user, password.strip("\0"))
