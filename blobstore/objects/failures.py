"""Converts errors of obstore to errors of one line, which say what to do and show no credentials."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError, RemoteError, RemoteRefused
from blobstore.objects.response_rules import CODES, STATUSES, Answer, Request

_STATUS = re.compile(
    r"status code: (\d{3})[^:]*(?::.*?<Code>([A-Za-z0-9._-]{1,60})</Code>)?", re.DOTALL
)
_CAUSE = re.compile(r'(?:message|error): "([^"\\]{1,100})"|(TimedOut|Timeout)\b')
_NOT_CONNECTED: Final = "kind: Connect"
_SERVER = re.compile(r"(https?://)(?:[^/@\s]*@)?([^/@?\s,]{1,253})")
_NOT_TLS: Final = "InvalidContentType"
"""The error of rustls about a server that speaks plain HTTP."""
_TLS_EXPECTED = re.compile(r"HTTP request (?:was sent )?to (?:an )?HTTPS (?:port|server)")
"""The answers of nginx and servers in Go to plain HTTP."""
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?([A-Za-z]{1,40})")
_ALERT = re.compile(r"AlertReceived\(\s*([A-Za-z]{1,40})")
_CLOSED = re.compile(
    r"IncompleteMessage|(?:kind: |Kind\()(?:UnexpectedEof|ConnectionReset|BrokenPipe)\b"
)
"""The end of a connection: of HTTP, or as a kind of the system's errors. A document may have an early end too."""
_NO_CREDENTIALS = re.compile(r"External AWS credential provider: (?:\w+: )?([^\n]*)")
"""The error of :mod:`blobstore.objects.aws` when obstore asked for credentials."""
_SELF_SIGNED: Final = "CaUsedAsEndEntity"
_THROTTLED: Final = {"429", "503"}
_REDIRECTED: Final = {"301", "302", "307", "308"}
_OF_S3: Final = re.compile(r"\b(AWS_|s3:)")
"""Matches advice about the settings of S3, which other services do not have."""
_RIGHTS: Final = {
    "s3:GetObject": " (without s3:ListBucket, a missing object is denied too); if the requester pays, set "
    "AWS_REQUEST_PAYER=true",
    "s3:PutObject": "; if the bucket requires encryption, set AWS_SERVER_SIDE_ENCRYPTION",
}
"""Remarks on these rights, for requests that were denied."""


class Failure(NamedTuple):
    """An error of obstore."""

    answer: Answer
    text: str
    status: str | None
    code: str | None
    is_panic: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure | None:
        """Return the failure of an error; None if it is not one of obstore."""
        if isinstance(error, BlobstoreError):
            return None
        from obstore import exceptions

        is_panic = type(error).__module__ == "pyo3_runtime"  # of Rust, which is a BaseException
        kinds = (exceptions.BaseError, ValueError, OSError, NotImplementedError)
        if not (is_panic or isinstance(error, kinds)):
            return None
        text = str(error)
        found = _STATUS.search(text)
        status, code = found.groups() if found else (None, None)
        # Before the status: S3 sends these codes with 400, 403 and 404.
        if code in CODES:
            return cls(Answer.UNUSABLE, text, status, code)
        if status is not None:
            answer = STATUSES.get(int(status), Answer.FAILED)
        elif isinstance(error, FileNotFoundError):
            answer = Answer.ABSENT
        elif isinstance(error, (exceptions.AlreadyExistsError, exceptions.PreconditionError)):
            answer = Answer.CONDITION
        else:
            answer = Answer.FAILED
        return cls(answer, text, status, code, is_panic)

    @property
    def may_be_credentials(self) -> bool:
        """Whether other credentials could help.

        S3 answers requests with expired credentials with 400, without a reason if there is no body.
        """
        is_refusal = self.code in CODES and CODES[self.code].is_refusal
        is_without_reason = self.status == "400" and self.code is None
        return self.answer is Answer.DENIED or is_refusal or is_without_reason

    def error(self, what: str, request: Request) -> RemoteError:
        """Return the error for the user.

        Args:
            what: the object, quoted.
            request: what was asked.
        """
        error = self._explained(what, request)
        if not what.startswith("'s3:") and _OF_S3.search(error.advice):
            error = type(error)(
                error.message, advice="check the credentials and settings in the environment"
            )
        error.status, error.code = int(self.status or 0), self.code or ""
        return error

    def _explained(self, what: str, request: Request) -> RemoteError:
        shown = ", ".join(filter(None, (self.status, self.code)))
        shown = f" (status {shown})" if shown else ""
        if self.code in CODES:
            message, advice, is_refusal = CODES[self.code]
            kind = RemoteRefused if is_refusal else RemoteError
            return kind(f"{what}: {message}{shown}", advice=advice)
        if found := _NO_CREDENTIALS.search(self.text):
            return RemoteRefused(found[1])
        if _TLS_EXPECTED.search(self.text):  # with status 400, which is about credentials otherwise
            return RemoteError(
                f"{what}: {_server(self.text)} speaks TLS, and was asked without it",
                advice="AWS_ENDPOINT_URL may have to begin with https://",
            )
        if self.may_be_credentials:
            return RemoteRefused(
                f"{what}: access denied{shown}",
                advice="check the credentials, which may have expired, and that they allow "
                f"{request.action}{_RIGHTS.get(request.action, '')}",
            )
        if self.code is not None and self.code.startswith("KMS."):
            return RemoteRefused(
                f"{what}: the key that encrypts the bucket cannot be used{shown}",
                advice="check the key, and AWS_SSE_KMS_KEY_ID",
            )
        if self.status in _THROTTLED:
            return RemoteError(
                f"{what}: the server is overloaded, and refuses requests for too long{shown}",
                advice="try again later, or with fewer streams",
            )
        if self.status in _REDIRECTED or "redirect" in self.text:
            return RemoteError(
                f"{what}: the server redirects to another place{shown}",
                advice="set AWS_REGION to the region of the bucket, or check AWS_ENDPOINT_URL",
            )
        if failure := _of_connection(what, self.text):
            return failure
        if self.is_panic:
            return RemoteError(
                f"{what}: the library obstore failed: {quote(self.text.strip(), 200)}",
                advice="check the settings in the environment",
            )
        # Object storage says which it lacks, the object or the bucket.
        is_foreign = self.status == "404" and self.code is None
        advice = "it may be another kind of server; check AWS_ENDPOINT_URL" if is_foreign else ""
        return RemoteError(f"{what}: {_line(self.text)}{shown}", advice=advice)


def _server(text: str) -> str:
    """Return the address of the server of a request, quoted."""
    found = _SERVER.search(text)
    return "the server" if found is None else quote(found[1] + found[2])


def _of_connection(what: str, text: str) -> RemoteError | None:
    """Return the error of a connection that failed or ended; None if it did not."""
    if _NOT_TLS in text:
        return RemoteError(
            f"{what}: {_server(text)} does not speak TLS",
            advice="AWS_ENDPOINT_URL may have to begin with http://",
        )
    if found := _CERTIFICATE.search(text):
        return _untrusted(what, found[1])
    if found := _ALERT.search(text):
        return RemoteRefused(
            f"{what}: the server refuses the TLS connection ({found[1]})",
            advice="it may ask for a certificate of the client, which requests to object storage do not have",
        )
    if _CLOSED.search(text):
        # With TLS 1.3, a client that has no certificate may learn no more than this.
        return RemoteError(
            f"{what}: the server closed the connection before its answer was complete",
            advice="try again; if the server always does this, it may ask for a certificate of the "
            "client, which requests to object storage do not have",
        )
    if _NOT_CONNECTED in text:
        cause = _CAUSE.search(text)
        why = "" if cause is None else f": {quote(cause[1] or 'timed out')}"
        return RemoteError(
            f"{what}: cannot connect to {_server(text)}{why}", advice="check AWS_ENDPOINT_URL"
        )
    return None


def _untrusted(what: str, cause: str) -> RemoteError:
    if cause == _SELF_SIGNED:
        return RemoteError(
            f"{what}: the certificate of the server is that of an authority itself ({cause})",
            advice="create one with basicConstraints=CA:FALSE, or one that an authority has issued, "
            "and name the file in AWS_CA_BUNDLE",
        )
    if cause == "BadEncoding":
        return RemoteError(
            f"{what}: a certificate is malformed ({cause})", advice="check AWS_CA_BUNDLE"
        )
    return RemoteError(
        f"{what}: the certificate of the server is not trusted ({cause})",
        advice="name the file with the certificate of its authority in AWS_CA_BUNDLE, or check "
        "AWS_ENDPOINT_URL",
    )


def _line(text: str) -> str:
    """Return the end of the first line of an error, and its cause, which say what went wrong."""
    first, _, rest = text.partition("\n")
    if _STATUS.search(first):
        return "the request failed"
    cause = _CAUSE.search(rest)
    why = f" ({cause[1] or 'timed out'})" if cause else ""
    return quote(f"{first.rpartition(' - ')[2][:300]}{why}")
