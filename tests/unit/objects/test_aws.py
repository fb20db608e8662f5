"""Settings for S3, as the tools of AWS find them, with botocore and without."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from botocore.tokens import SSOTokenProvider
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from blobstore.errors import BlobstoreError, MissingLibrary, RemoteError, RemoteRefused
from blobstore.objects import aws, client
from blobstore.objects.store import ObjectStore
from tests.support.hostile_s3 import HostileS3, failure, hostile_s3
from tests.support.raw_server import Answer, RawServer, Received, reply

SECRET = "sEcReT+of/the+tests"
LATER = "2099-01-01T00:00:00Z"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the process a home without any file, and no variable of AWS."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setattr(client, "_RETRIES", {"max_retries": 0})
    return tmp_path


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileS3]:
    with hostile_s3() as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{running.server.host}")
        running.objects["p/k"] = b"data"
        yield running


@pytest.fixture(params=["botocore", "without botocore"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without botocore":
        without_botocore(monkeypatch)


def without_botocore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)


def configure(home: Path, text: str, file: str = "config") -> None:
    (home / ".aws").mkdir(exist_ok=True)
    (home / ".aws" / file).write_text(text, encoding="utf-8")


def sent(server: HostileS3) -> tuple[str, str | None]:
    """Read an object, and return the key and the token that the server received."""
    found = ObjectStore(server.address).client.get("k", 100)
    assert found is not None
    assert found.data == b"data"
    headers = server.server.requests[-1].headers
    key = headers["authorization"].partition("Credential=")[2].partition("/")[0]
    return key, headers.get("x-amz-security-token")


def refused(server: HostileS3, kind: type[BlobstoreError], message: str) -> None:
    """Check that nothing is sent, and that one line without a secret says why."""
    with pytest.raises(kind, match=message) as caught:
        ObjectStore(server.address)
    assert str(caught.value).isprintable()
    assert SECRET not in str(caught.value)
    assert not server.server.requests


def program(home: Path, output: str, status: int = 0) -> Path:
    path = home / "credentials.sh"
    path.write_text(f"#!/bin/sh\necho run >> {home}/runs\necho '{output}'\nexit {status}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def keys_as_json(**more: object) -> str:
    keys = {"Version": 1, "AccessKeyId": "PROCESS", "SecretAccessKey": SECRET, "SessionToken": "t"}
    return json.dumps(keys | more)


def sts(action: str) -> bytes:
    body = (
        f"<{action}Response><{action}Result><Credentials><AccessKeyId>ROLE</AccessKeyId>"
        f"<SecretAccessKey>{SECRET}</SecretAccessKey><SessionToken>of-role</SessionToken>"
        f"<Expiration>{LATER}</Expiration></Credentials></{action}Result></{action}Response>"
    )
    return reply(200, body.encode(), content_type="text/xml")


# Profiles


@pytest.mark.parametrize("more", [{}, {"Expiration": LATER}], ids=["for ever", "expiring"])
def test_a_program_that_the_profile_names_gives_the_credentials(
    server: HostileS3, home: Path, more: dict[str, object]
) -> None:
    configure(home, f"[default]\ncredential_process = {program(home, keys_as_json(**more))}\n")
    assert sent(server) == ("PROCESS", "t")
    assert (home / "runs").read_text() == "run\n"


def test_credentials_that_expire_are_renewed_by_their_program(
    server: HostileS3, home: Path
) -> None:
    soon = dt.datetime.now(dt.UTC) + dt.timedelta(minutes=1)
    path = program(home, keys_as_json(Expiration=soon.isoformat()))
    configure(home, f"[default]\ncredential_process = {path}\n")
    store = ObjectStore(server.address)
    program(home, keys_as_json(AccessKeyId="RENEWED", Expiration=LATER))
    assert store.client.get("k", 100) is not None
    assert "RENEWED" in server.server.requests[-1].headers["authorization"]


@pytest.mark.parametrize(
    ("output", "status"),
    [("{}", 0), ("not json", 0), (keys_as_json(), 1), (keys_as_json(Version=9), 0)],
)
def test_a_program_that_fails_is_reported_before_a_request(
    server: HostileS3, home: Path, output: str, status: int
) -> None:
    configure(home, f"[default]\ncredential_process = {program(home, output, status)}\n")
    refused(server, RemoteRefused, "the profile 'default' gives no credentials: ")


def test_a_program_that_does_not_exist_is_reported(server: HostileS3, home: Path) -> None:
    configure(home, "[default]\ncredential_process = /no/such/program\n")
    refused(server, RemoteRefused, "/no/such/program")


def test_a_program_that_fails_to_renew_is_reported(server: HostileS3, home: Path) -> None:
    soon = dt.datetime.now(dt.UTC) + dt.timedelta(minutes=1)
    path = program(home, keys_as_json(Expiration=soon.isoformat()))
    configure(home, f"[default]\ncredential_process = {path}\n")
    store = ObjectStore(server.address)
    program(home, "", status=3)
    with pytest.raises(RemoteError, match="gives no credentials") as caught:
        store.client.get("k", 100)
    assert str(caught.value).isprintable()


def test_a_role_is_assumed_with_the_keys_of_another_profile(
    server: HostileS3, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(
        home,
        "[profile work]\nrole_arn = arn:aws:iam::123456789012:role/x\nsource_profile = base\n"
        f"[profile base]\naws_access_key_id = BASE\naws_secret_access_key = {SECRET}\n",
    )
    monkeypatch.setenv("AWS_PROFILE", "work")
    with RawServer(lambda _: sts("AssumeRole")) as service:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://{service.host}")
        assert sent(server) == ("ROLE", "of-role")
        assert "Credential=BASE/" in service.requests[0].headers["authorization"]


def test_a_role_that_may_not_be_assumed_is_reported_before_a_request(
    server: HostileS3, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(
        home,
        "[default]\nrole_arn = arn:aws:iam::123456789012:role/x\nsource_profile = base\n"
        f"[profile base]\naws_access_key_id = BASE\naws_secret_access_key = {SECRET}\n",
    )
    body = b"<ErrorResponse><Error><Code>AccessDenied</Code><Message>not you</Message></Error></ErrorResponse>"
    with RawServer(lambda _: reply(403, body)) as service:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://{service.host}")
        refused(server, RemoteRefused, "AccessDenied.*not you")


def test_a_web_identity_is_exchanged_for_credentials(
    server: HostileS3, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "token").write_text("the-token")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/x")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(home / "token"))
    with RawServer(lambda _: sts("AssumeRoleWithWebIdentity")) as service:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://{service.host}")
        assert sent(server) == ("ROLE", "of-role")
        assert parse_qs(service.requests[0].body.decode())["WebIdentityToken"] == ["the-token"]


SSO = (
    "[default]\nsso_session = corp\nsso_account_id = 123456789012\nsso_role_name = r\n"
    "[sso-session corp]\nsso_region = us-east-1\nsso_start_url = https://corp.example/start\n"
)


def test_a_session_of_single_sign_on_gives_the_credentials(
    server: HostileS3, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(home, SSO)
    cache = home / "sso"
    cache.mkdir()
    monkeypatch.setattr(SSOTokenProvider, "_SSO_TOKEN_CACHE_DIR", str(cache))
    name = hashlib.sha1(b"corp", usedforsecurity=False).hexdigest()
    token = {"accessToken": "signed-on", "expiresAt": LATER, "startUrl": "x", "region": "us-east-1"}
    (cache / f"{name}.json").write_text(json.dumps(token))
    role = {
        "accessKeyId": "SSO",
        "secretAccessKey": SECRET,
        "sessionToken": "of-sso",
        "expiration": 4_000_000_000_000,
    }

    def answer(request: Received) -> Answer:
        is_known = request.headers.get("x-amz-sso_bearer_token") == "signed-on"
        body = json.dumps({"roleCredentials": role}).encode()
        return reply(200, body, content_type="application/json") if is_known else reply(401)

    with RawServer(answer) as service:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", f"http://{service.host}")
        assert sent(server) == ("SSO", "of-sso")


def test_the_advice_for_a_user_who_has_not_signed_on_is_the_command(
    server: HostileS3, home: Path
) -> None:
    configure(home, SSO)
    refused(server, RemoteRefused, "run: aws sso login --profile default")


def test_a_profile_may_name_a_server_for_each_service(
    server: HostileS3, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = os.environ["AWS_ENDPOINT_URL_S3"]
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    configure(
        home,
        f"[default]\nservices = local\naws_access_key_id = K\naws_secret_access_key = {SECRET}\n"
        f"endpoint_url = http://127.0.0.1:9\n[services local]\ns3 =\n  endpoint_url = {endpoint}\n",
    )
    assert sent(server) == ("K", None)


@pytest.mark.parametrize(
    "key", ["credential_process", "role_arn", "sso_session", "sso_start_url", "login_session"]
)
def test_without_botocore_the_key_and_the_extra_are_named_before_a_request(
    server: HostileS3, home: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    without_botocore(monkeypatch)
    configure(home, f"[default]\n{key} = x\n")
    refused(server, MissingLibrary, rf"'default' has {key}, .*botocore; .*tensor-blobstore\[aws\]")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert sent(server) == ("ENV", None)


def test_without_botocore_services_are_not_read_and_named(
    server: HostileS3, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_botocore(monkeypatch)
    keys = f"aws_access_key_id = K\naws_secret_access_key = {SECRET}\n"
    configure(home, f"[default]\nservices = local\n{keys}")
    assert sent(server) == ("K", None)  # the environment names the server
    server.server.requests.clear()
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    refused(server, MissingLibrary, "has services, ")


@pytest.mark.usefixtures("either")
def test_keys_of_a_profile_are_used(
    server: HostileS3, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "work")
    configure(home, "[profile work]\nregion = eu-west-1\n")
    keys = f"[work]\naws_access_key_id = K\naws_secret_access_key = {SECRET}\n"
    configure(home, keys, "credentials")
    monkeypatch.delenv("AWS_REGION")
    assert sent(server) == ("K", None)
    assert "/eu-west-1/s3/" in server.server.requests[-1].headers["authorization"]


def test_keys_that_were_renewed_in_the_file_are_used(server: HostileS3, home: Path) -> None:
    keys = f"[default]\naws_access_key_id = %s\naws_secret_access_key = {SECRET}\n"
    configure(home, keys % "OLD")
    store = ObjectStore(server.address)

    def check(request: Received) -> Answer | None:
        is_new = "Credential=NEW/" in request.headers["authorization"]
        return None if is_new else failure(403, "ExpiredToken")

    server.disturb = check
    with pytest.raises(RemoteRefused):
        store.client.get("k", 100)
    configure(home, keys % "NEW")
    assert store.client.get("k", 100) is not None


def test_botocore_takes_no_time_if_there_are_keys(home: Path) -> None:
    configure(home, f"[default]\naws_access_key_id = K\naws_secret_access_key = {SECRET}\n")
    program = (
        "import sys; from blobstore.objects.aws import find_settings; "
        "find_settings('s3://bucket'); print('botocore' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert done.stdout == b"False\n"


@pytest.mark.usefixtures("either")
def test_a_profile_that_does_not_exist_is_named(
    server: HostileS3, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(home, f"[default]\naws_access_key_id = K\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_PROFILE", "wrok")
    refused(server, RemoteError, "there is no profile 'wrok' .*; set AWS_PROFILE")


@pytest.mark.usefixtures("either")
def test_a_malformed_file_is_named_without_its_content(server: HostileS3, home: Path) -> None:
    configure(home, f"[default]\n{SECRET}\n")
    refused(server, RemoteError, "/.aws/config' is not a valid file")


@pytest.mark.usefixtures("either")
def test_no_credentials_are_reported_before_a_request(server: HostileS3) -> None:
    refused(server, RemoteRefused, "there are no credentials .*AWS_SKIP_SIGNATURE=true")


@pytest.mark.usefixtures("either")
def test_no_home_directory_is_needed(server: HostileS3, monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert sent(server) == ("ENV", None)


# Values that cannot be sent

KEYS = {"AWS_ACCESS_KEY_ID": "K", "AWS_SECRET_ACCESS_KEY": SECRET}


def set_all(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("AWS_ENDPOINT_URL_S3", "minio:9000"),
        ("AWS_ENDPOINT_URL", "minio:9000"),
        ("AWS_ENDPOINT", "minio:9000"),
        *(
            ("AWS_ENDPOINT_URL", value)
            for value in (
                *(
                    "127.0.0.1",
                    "http://",
                    "http:///x",
                    "://",
                    "ftp://x",
                    "http://a b",
                    "http://[::1",
                ),
                *("http://x:99999", "http://x:", "http://é.example", "http://x/?a=b", "\n"),
            )
        ),
    ],
)
def test_a_malformed_endpoint_is_named_with_its_variable(
    server: HostileS3, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    set_all(monkeypatch, KEYS | {variable: value})
    refused(server, RemoteError, rf"^\${variable} is .*; write http://host:port")


@pytest.mark.usefixtures("either")
def test_a_malformed_endpoint_of_a_profile_is_named(
    server: HostileS3, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    set_all(monkeypatch, KEYS)
    configure(home, "[default]\nendpoint_url = minio:9000\n")
    refused(server, RemoteError, "^endpoint_url of the profile 'default' is 'minio:9000'")


@pytest.mark.parametrize("end", ["", "/"])
def test_the_scheme_of_an_endpoint_may_be_written_in_capitals(
    server: HostileS3, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    set_all(monkeypatch, KEYS | {"AWS_ENDPOINT_URL_S3": f"HTTP://{server.server.host}{end}"})
    assert sent(server) == ("K", None)


def test_an_endpoint_with_a_password_is_refused_and_not_shown(
    server: HostileS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = f"http://me:{SECRET}@{server.server.host}"
    set_all(monkeypatch, KEYS | {"AWS_ENDPOINT_URL_S3": value})
    refused(server, RemoteError, r"^\$AWS_ENDPOINT_URL_S3 has a user name")


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "AWS_REGION"])
@pytest.mark.parametrize("end", ["\n", "\r", "é", "\x7f"])
def test_a_value_that_no_header_may_have_is_reported_and_not_shown(
    server: HostileS3, monkeypatch: pytest.MonkeyPatch, variable: str, end: str
) -> None:
    set_all(monkeypatch, KEYS | {variable: SECRET + end})
    refused(server, RemoteError, "has characters that no request may have")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("AWS_REQUEST_PAYER", "perhaps"),
        ("AWS_SERVER_SIDE_ENCRYPTION", "perhaps"),
        ("AWS_CHECKSUM_ALGORITHM", "perhaps"),
    ],
)
def test_values_that_obstore_refuses_are_one_line(
    server: HostileS3, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    set_all(monkeypatch, KEYS | {variable: value})
    refused(server, RemoteError, "perhaps")


def test_a_panic_of_rust_is_one_line(server: HostileS3, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, KEYS | {"AWS_ENDPOINT_URL_S3": "minio:9000"})
    monkeypatch.setattr(aws, "_endpoint", lambda value, _: value)
    store = ObjectStore(server.address)
    with pytest.raises(RemoteError, match="the library obstore failed: .*check the settings"):
        store.client.get("k", 100)
    with pytest.raises(RemoteError, match="the library obstore failed"):
        next(store.client.list("blobs"))


# Encryption and requester pays


def test_encryption_and_requester_pays_are_asked_for(
    server: HostileS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(
        monkeypatch,
        KEYS
        | {
            "AWS_SERVER_SIDE_ENCRYPTION": "aws:kms",
            "AWS_SSE_KMS_KEY_ID": "a-key",
            "AWS_REQUEST_PAYER": "true",
        },
    )
    ObjectStore(server.address).client.put("new", b"x")
    headers = server.server.requests[-1].headers
    assert headers["x-amz-server-side-encryption"] == "aws:kms"
    assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "a-key"
    sent(server)
    assert server.server.requests[-1].headers["x-amz-request-payer"] == "requester"


# Certificates


def certificate(
    folder: Path,
    name: str,
    issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None,
    *,
    is_authority: bool,
    host: str = "localhost",
    days: int = 9,
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    begin = now - dt.timedelta(days=20)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer[0].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .sign(key if issuer is None else issuer[1], hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / f"{name}.pem").write_bytes(made.public_bytes(pem))
    (folder / f"{name}.key").write_bytes(private)
    return made, key


def secured(folder: Path, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return context


CASES = {
    "of an authority": ("leaf", "authority", ""),
    "self-signed": ("self", "self", ""),
    "unknown": ("leaf", "", "is not trusted .UnknownIssuer.*AWS_CA_BUNDLE"),
    "expired": ("expired", "authority", "is not trusted .Expired"),
    "other host": ("other", "authority", "is not trusted .NotValidForName"),
    "an authority itself": ("authority", "authority", "is that of an authority itself.*CA:FALSE"),
}


@pytest.mark.parametrize(("served", "bundle", "message"), CASES.values(), ids=CASES)
def test_a_certificate_that_is_not_trusted_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, served: str, bundle: str, message: str
) -> None:
    authority = certificate(home, "authority", None, is_authority=True)
    certificate(home, "leaf", authority, is_authority=False)
    certificate(home, "self", None, is_authority=False)
    certificate(home, "expired", authority, is_authority=False, days=-1)
    certificate(home, "other", authority, is_authority=False, host="other.example")
    with hostile_s3(secured(home, served)) as server:
        server.objects["p/k"] = b"data"
        port = server.server.host.rpartition(":")[2]
        set_all(monkeypatch, KEYS | {"AWS_ENDPOINT_URL": f"https://localhost:{port}"})
        if bundle:
            monkeypatch.setenv("AWS_CA_BUNDLE", str(home / f"{bundle}.pem"))
        if not message:
            assert sent(server) == ("K", None)
            return
        with pytest.raises(RemoteError, match=f"certificate of the server {message}"):
            ObjectStore(server.address).client.get("k", 100)


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("http://localhost:1", "cannot connect to 'http://localhost:1': '.*refused'; check AWS_"),
        ("https://{host}", "'https://{host}' does not speak TLS; .* begin with http://$"),
    ],
)
def test_a_server_that_cannot_be_reached_is_named(
    server: HostileS3, monkeypatch: pytest.MonkeyPatch, endpoint: str, message: str
) -> None:
    host = server.server.host
    server.server.plain_answer = reply(400)
    set_all(monkeypatch, KEYS | {"AWS_ENDPOINT_URL_S3": endpoint.format(host=host)})
    with pytest.raises(RemoteError, match=message.format(host=host)):
        ObjectStore(server.address).client.get("k", 100)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b"The plain HTTP request was sent to HTTPS port", "speaks TLS.* begin with https://"),
        (400, b"Client sent an HTTP request to an HTTPS server.", "speaks TLS, and was asked with"),
        (400, b"", "access denied"),
        (404, b"404 page not found", "it may be another kind of server; check AWS_ENDPOINT_URL$"),
    ],
)
def test_a_server_of_another_kind_is_named(
    server: HostileS3, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, message: str
) -> None:
    set_all(monkeypatch, KEYS)
    server.disturb = lambda _: reply(status, body)
    with pytest.raises(RemoteError, match=message):
        list(ObjectStore(server.address).client.list("blobs"))


def test_a_server_that_asks_for_a_certificate_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate(home, "self", None, is_authority=False)
    context = secured(home, "self")
    context.verify_mode = ssl.CERT_REQUIRED
    # With TLS 1.3, the client's request and the server's refusal cross, and the reason may be lost.
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with hostile_s3(context) as server:
        port = server.server.host.rpartition(":")[2]
        set_all(monkeypatch, KEYS | {"AWS_ENDPOINT_URL": f"https://localhost:{port}"})
        monkeypatch.setenv("AWS_CA_BUNDLE", str(home / "self.pem"))
        with pytest.raises(RemoteRefused, match="refuses the TLS connection .HandshakeFailure"):
            ObjectStore(server.address).client.get("k", 100)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"^\$AWS_CA_BUNDLE is '.*/ca.pem': No such file"),
        ("", r"^\$AWS_CA_BUNDLE is '.*/ca.pem': it has no certificates"),
        ("garbage", r"^\$AWS_CA_BUNDLE is '.*/ca.pem': it has no certificates"),
        (
            "-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n",
            "a certificate is malformed .*check AWS_CA_BUNDLE",
        ),
    ],
)
def test_a_bundle_of_certificates_that_is_unusable_is_named(
    server: HostileS3,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str | None,
    message: str,
) -> None:
    if content is not None:
        (home / "ca.pem").write_text(content)
    set_all(monkeypatch, KEYS | {"AWS_CA_BUNDLE": str(home / "ca.pem")})
    refused(server, RemoteError, message)
