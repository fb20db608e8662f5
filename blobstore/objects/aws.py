"""The user's settings for S3: the environment, then the profile of ``~/.aws``, as AWS's tools read them.

A profile that has keys of its own is read here. If it has other credentials or none, botocore finds them if it
is installed. Without it, obstore knows the roles of machines and containers.

https://docs.aws.amazon.com/sdkref/latest/guide/settings-reference.html
"""

from __future__ import annotations

import configparser
import contextlib
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from blobstore.core.escape import quote
from blobstore.core.libraries import install_command
from blobstore.errors import BlobstoreError, MissingLibrary, RemoteError, RemoteRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_KEYS: Final = {
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
}
"""obstore's names of credentials, and those in profiles; the variables are the latter in capitals."""
_OTHERS: Final = {
    "region": (("AWS_REGION", "AWS_DEFAULT_REGION"), "region"),
    "endpoint": (
        ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "endpoint_url",
    ),
    "ca_bundle": (("AWS_CA_BUNDLE",), "ca_bundle"),
}
_BY_OBSTORE: Final = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Where obstore finds credentials by itself."""
_CREDENTIALS_ELSEWHERE: Final = (
    "credential_process",
    "role_arn",
    "sso_session",
    "sso_start_url",
    "login_session",
)
"""Keys of a profile whose credentials only botocore can obtain."""
_VALID: Final = timedelta(minutes=10)
"""How long obstore uses credentials of botocore, which renews its own ten minutes before they expire."""
_CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]", re.ASCII)


class Settings(NamedTuple):
    """The configuration for obstore."""

    options: dict[str, str]
    """By obstore's names, and ``ca_bundle``, which is a path."""
    provider: Callable[[], dict[str, Any]] | None = None
    """Returns credentials that are renewed from time to time."""


class _Profile(NamedTuple):
    name: str
    values: Mapping[str, Any]
    session: Any = None
    """The session of botocore, if that finds the credentials."""

    def own_keys(self) -> dict[str, str]:
        """Return the credentials that the profile has itself."""
        if any(key in self.values for key in _CREDENTIALS_ELSEWHERE):
            return {}
        return {key: self.values[at] for key, at in _KEYS.items() if self.values.get(at)}


def find_settings(where: object) -> Settings:
    """Return the settings of the user, who wants to reach ``where``.

    Raises:
        MissingLibrary: the profile needs botocore, which is not installed.
        RemoteRefused: there are no credentials, or they cannot be obtained.
        RemoteError: a setting cannot be used.
    """
    name = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    profile = _profile(where, name)
    options: dict[str, str] = {}
    for option, (variables, key) in _OTHERS.items():
        values = {f"${variable}": os.environ.get(variable) for variable in variables}
        values[f"{key} of the profile {quote(name)}"] = profile.values.get(key)
        place, value = next(((at, text) for at, text in values.items() if text), ("", ""))
        if value:
            options[option] = _checked(option, value, place)
    if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in {"1", "true", "yes", "on"}:
        return Settings(options)
    # The environment comes first, as in AWS's tools.
    keys = {key: os.environ.get(at.upper()) or "" for key, at in _KEYS.items()}
    if not keys["access_key_id"]:
        keys = profile.own_keys()
    if keys:
        if not keys.get("secret_access_key"):
            raise RemoteRefused(
                f"{quote(where)}: the credentials have no secret access key",
                advice="set AWS_SECRET_ACCESS_KEY, or aws_secret_access_key of the profile",
            )
        return Settings(options | _checked_keys(keys))
    if profile.session is not None:
        return _with_botocore(where, profile, options)
    if any(map(os.environ.get, _BY_OBSTORE)):
        return Settings(options)
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        raise _no_credentials(where)
    return Settings(options)


def _profile(where: object, name: str) -> _Profile:
    """Return a profile; botocore, which takes a second to import, reads it only if it is needed."""
    profile = _Profile(name, _read_profile(name))
    has_keys = bool(os.environ.get("AWS_ACCESS_KEY_ID"))
    needing = [] if has_keys else [*_CREDENTIALS_ELSEWHERE]
    if not any(map(os.environ.get, _OTHERS["endpoint"][0])):
        needing.append("services")
    key = next((key for key in needing if key in profile.values), None)
    if key is None and (has_keys or profile.own_keys()):
        return profile
    try:
        from botocore.session import Session
    except ImportError:
        if key is None:
            return profile
        raise MissingLibrary(
            f"the profile {quote(name)} has {key}, which needs the package botocore",
            advice=f"run: {install_command('botocore')}",
        ) from None
    session = Session()
    # AWS's tools read this variable, and botocore does not.
    if region := os.environ.get("AWS_REGION"):
        session.set_config_variable("region", region)
    try:
        values = dict(session.get_scoped_config())
        if "services" in values:
            services = session.full_config.get("services", {}).get(values["services"], {})
            values |= services.get("s3", {})
    except _errors() as error:
        raise _failed(where, name, error) from None
    return _Profile(name, values, session)


def _errors() -> tuple[type[Exception], ...]:
    """Return the errors of botocore, and of Python for files, programs and answers of an unexpected form."""
    from botocore.exceptions import BotoCoreError, ClientError

    return BotoCoreError, ClientError, OSError, ValueError, LookupError, TypeError, AttributeError


def _with_botocore(where: object, profile: _Profile, options: dict[str, str]) -> Settings:
    """Return settings with the credentials that botocore finds."""
    from botocore.credentials import RefreshableCredentials

    def ask(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except _errors() as error:
            raise _failed(where, profile.name, error) from None

    credentials = ask(profile.session.get_credentials)
    if credentials is None:
        raise _no_credentials(where)

    def provide() -> dict[str, Any]:
        frozen = ask(credentials.get_frozen_credentials)
        return _checked_keys(
            dict(zip(_KEYS, (frozen.access_key, frozen.secret_key, frozen.token), strict=True))
        )

    keys = provide()
    if not isinstance(credentials, RefreshableCredentials):
        return Settings(options | keys)

    def renew() -> dict[str, Any]:
        keys = provide()
        keys["token"] = keys.pop("session_token", None)
        return keys | {"expires_at": datetime.now(UTC) + _VALID}

    return Settings(options, renew)


def _read_profile(name: str) -> dict[str, str]:
    """Return the settings of a profile.

    https://docs.aws.amazon.com/sdkref/latest/guide/file-format.html
    """
    values: dict[str, str] = {}
    is_there = name == "default"
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        path = Path(os.environ.get(variable) or f"~/.aws/{file}")
        with contextlib.suppress(RuntimeError):  # there is no home folder
            path = path.expanduser()
        # Without interpolation: secrets may have percent signs.
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read_string(path.read_text(encoding="utf-8"), str(path))
        except OSError:
            continue
        except (configparser.Error, UnicodeDecodeError):
            raise _malformed(path) from None
        if parser.has_section(section):
            is_there = True
            values |= dict(parser[section])
    if not is_there:
        raise _no_profile(name)
    return values


def _checked(option: str, value: str, place: str) -> str:
    """Return a value that obstore can send. Raises RemoteError, which shows no credentials."""
    if option == "endpoint":
        return _endpoint(value, place)
    if option == "ca_bundle":
        try:
            has_certificates = _CERTIFICATE in Path(value).read_bytes()
            why = "it has no certificates"
        except OSError as error:
            has_certificates, why = False, str(error.strerror)
        if not has_certificates:
            raise RemoteError(
                f"{place} is {quote(value)}: {why}",
                advice="name a file of certificates in PEM form",
            )
    elif not (value.isascii() and value.isprintable()):
        raise RemoteError(f"the {option} of {place} has characters that no request may have")
    return value


def _checked_keys(keys: Mapping[str, str | None]) -> dict[str, str]:
    return {key: _checked(key, value, "the credentials") for key, value in keys.items() if value}


def _endpoint(value: str, place: str) -> str:
    """Return the address of a server, as obstore takes it."""
    try:
        url = urlsplit(value)
        is_valid = _HOST.fullmatch(url.netloc.removesuffix(f":{url.port}")) is not None
    except ValueError:
        is_valid = False
    scheme = value.partition("://")[0].lower()
    if "@" in value:
        raise RemoteError(
            f"{place} has a user name or a password",
            advice="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead",
        )
    if (
        scheme not in {"http", "https"}
        or not is_valid
        or url.query
        or not (value.isascii() and value.isprintable() and " " not in value)
    ):
        raise RemoteError(
            f"{place} is {quote(value)}, which is not the address of a server",
            advice="write http://host:port or https://host:port",
        )
    return f"{scheme}://{value.partition('://')[2]}"


def _failed(where: object, name: str, error: Exception) -> BlobstoreError:
    """Return the meaning of an error of botocore."""
    if isinstance(error, BlobstoreError):
        return error
    kind = type(error).__name__
    if kind == "ProfileNotFound":
        return _no_profile(name)
    if kind == "ConfigParseError":
        return _malformed(getattr(error, "kwargs", {}).get("path", "~/.aws"))
    text = " ".join(str(error).split())[:300]
    advice = "check the profile"
    if "SSO" in kind or "SSO" in text:
        advice = f"run: aws sso login --profile {name}"
    return RemoteRefused(
        f"{quote(where)}: the profile {quote(name)} gives no credentials: {quote(text)}",
        advice=advice,
    )


def _malformed(path: object) -> RemoteError:
    """Return an error without the parser's message, which may show a line with a secret."""
    return RemoteError(f"{quote(path)} is not a valid file of AWS's tools")


def _no_profile(name: str) -> RemoteError:
    return RemoteError(
        f"there is no profile {quote(name)} in the files of AWS's tools",
        advice="set AWS_PROFILE to another, or unset it",
    )


def _no_credentials(where: object) -> RemoteRefused:
    return RemoteRefused(
        f"{quote(where)}: there are no credentials in the environment or the profile",
        advice="set AWS_PROFILE or AWS_ACCESS_KEY_ID, or for a public bucket "
        "AWS_SKIP_SIGNATURE=true",
    )
