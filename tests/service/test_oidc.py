"""OIDC tokens, signed with keys made here: what is accepted, what is rejected, how keys are read."""

from __future__ import annotations

import asyncio
import base64
import hmac
import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from builders import BODY, Builder, digest_of
from httpx import Client
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, OctKey, OKPKey, RSAKey
from serving import running

from roller_svc.errors import ArgumentError, StoreError
from roller_svc.farm.api_keys import Scope
from roller_svc.service import oidc
from roller_svc.service.access import VerifiedToken
from roller_svc.service.app import create_app
from roller_svc.service.oidc import MAX_AGE_S, MAX_STALE_S, MIN_AGE_S, GroupScopes, OidcVerifier, parse_group_scopes
from roller_svc.settings import Settings

ISSUER, AUDIENCE = "https://login.example", "roller"
KEYS = {
    "RS256": RSAKey.generate_key(2048, {"kid": "rsa"}),
    "PS256": RSAKey.generate_key(2048, {"kid": "pss"}),
    "ES256": ECKey.generate_key("P-256", {"kid": "ec"}),
    "Ed25519": OKPKey.generate_key("Ed25519", {"kid": "ed"}),
}
STRANGER = RSAKey.generate_key(2048, {"kid": "stranger"})


def jwks(*keys: Any) -> bytes:
    return json.dumps(KeySet(list(keys or KEYS.values())).as_dict(private=False)).encode()


NO_GROUPS = GroupScopes("groups", {})


def token(alg: str = "RS256", key: Any = None, header: dict[str, Any] | None = None, **changes: Any) -> str:
    signer = key or KEYS[alg]
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": int(time.time()) + 60, "scope": "openid compile"}
    claims = {name: value for name, value in (claims | changes).items() if value is not None}
    return jwt.encode({"alg": alg, "kid": signer.kid} | (header or {}), claims, signer, algorithms=[alg])


@pytest.fixture
def verifier(tmp_path: Path) -> OidcVerifier:
    file = tmp_path / "jwks.json"
    file.write_bytes(jwks())
    return OidcVerifier(ISSUER, AUDIENCE, str(file), "scope", NO_GROUPS)


def verified(verifier: OidcVerifier, text: str) -> VerifiedToken | None:
    return asyncio.run(verifier.verify(text))


@pytest.mark.parametrize("alg", KEYS)
def test_a_token_of_the_provider_is_accepted(verifier: OidcVerifier, alg: str) -> None:
    result = verified(verifier, token(alg))
    assert result is not None
    assert result.client.startswith("oidc-")
    assert "alice" not in result.client
    assert (result.subject, result.scopes) == ("alice", {Scope.READ, Scope.COMPILE})
    assert verified(verifier, token(alg, sub="bob", aud=["other", AUDIENCE])) != result


def made_by_hand(alg: str, claims: dict[str, Any], secret: bytes = b"") -> str:
    """A token that no library makes: unsigned, or signed with HMAC."""

    def encoded(content: bytes) -> str:
        return base64.urlsafe_b64encode(content).decode().rstrip("=")

    signed = ".".join(encoded(json.dumps(part).encode()) for part in ({"alg": alg, "kid": "rsa"}, claims))
    signature = encoded(hmac.digest(secret, signed.encode(), "sha256")) if secret else ""
    return f"{signed}.{signature}"


def forged() -> Iterator[tuple[str, str]]:
    now = int(time.time())
    yield "expired", token(exp=now - 60)
    yield "not yet valid", token(nbf=now + 600)
    yield "issued in the future", token(iat=now + 600)
    yield "another issuer", token(iss="https://evil.example")
    yield "issuer with a slash", token(iss=ISSUER + "/")
    yield "another audience", token(aud="other")
    yield "audiences without this one", token(aud=["a", "b"])
    for name in ("iss", "aud", "exp", "sub"):
        yield f"without {name}", token(**{name: None})
    yield "exp is text", token(exp="never")
    yield "exp is a list", token(exp=[])
    yield "another key", token(key=STRANGER)
    yield "another key under a known id", token(key=RSAKey.import_key(STRANGER.as_dict(private=True) | {"kid": "rsa"}))
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": now + 60}
    yield "no signature", made_by_hand("none", claims)
    yield "signed with the public key's text", made_by_hand("HS256", claims, KEYS["RS256"].as_pem(private=False))
    whole = token()
    head, payload, signature = whole.split(".")
    other = token(sub="bob").split(".")[1]
    yield "another payload", f"{head}.{other}.{signature}"
    yield "cut", whole[:-4]
    yield "two parts", f"{head}.{payload}"
    yield "five parts", f"{whole}.a.b"
    yield "not base64", "é.é.é"
    yield "empty", ".."
    yield "words", "not a token"


@pytest.mark.parametrize(("name", "text"), list(forged()), ids=[name for name, _ in forged()])
@pytest.mark.filterwarnings("ignore::joserfc.errors.SecurityWarning")
def test_other_tokens_are_rejected(verifier: OidcVerifier, name: str, text: str) -> None:
    assert verified(verifier, text) is None, name


@pytest.mark.parametrize(
    ("claim", "scopes"),
    [
        ("read", {Scope.READ}),
        ("roller:measure x", {Scope.READ, Scope.COMPILE, Scope.MEASURE}),
        (["roller:admin", 7], set(Scope)),
        ("openid profile", set()),
        (["compilers", "Compile"], set()),
        ({"compile": True}, set()),
        (7, set()),
        (None, set()),
    ],
)
def test_scopes_come_from_the_claim(verifier: OidcVerifier, claim: Any, scopes: set[Scope]) -> None:
    result = verified(verifier, token(scope=claim))
    assert result is not None
    assert result.scopes == scopes


@pytest.mark.parametrize(
    ("groups", "scopes"),
    [
        (["builders"], {Scope.READ, Scope.COMPILE, Scope.MEASURE}),
        (["everybody", "cn=root,ou=ops", 7], set(Scope)),
        (["Builders", "builders ", ""], {Scope.READ}),
        ("builders", {Scope.READ}),  # no list
        ({"builders": True}, {Scope.READ}),
        (None, {Scope.READ}),
    ],
)
def test_groups_give_scopes_beside_the_claim(tmp_path: Path, groups: Any, scopes: set[Scope]) -> None:
    file = tmp_path / "jwks.json"
    file.write_bytes(jwks())
    known = GroupScopes("teams", parse_group_scopes(" builders=measure; cn=root,ou=ops=admin ;"))
    result = verified(OidcVerifier(ISSUER, AUDIENCE, str(file), "scope", known), token(scope="read", teams=groups))
    assert result is not None
    assert result.scopes == scopes


@pytest.mark.parametrize("text", ["builders", "=read", "builders=root", "a=read,b"])
def test_groups_without_a_scope_are_refused_at_the_start(tmp_path: Path, text: str) -> None:
    settings = Settings(store=tmp_path, oidc_issuer=ISSUER, oidc_audience=AUDIENCE, oidc_jwks="keys.json", oidc_groups=text)
    with pytest.raises(ArgumentError, match="ROLLER_OIDC_GROUPS: expected GROUP=SCOPE"):
        create_app(settings)


# ---------------------------------------------------------------- keys of the provider


@contextmanager
def provider(content: list[bytes]) -> Iterator[tuple[str, list[str]]]:
    """A provider whose JWK set is the first content, and the paths that were requested."""
    requested: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append(self.path)
            self.send_response(200 if content[0] else 500)
            self.end_headers()
            self.wfile.write(content[0])

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/jwks", requested
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_keys_are_read_from_a_url_and_again_when_they_change() -> None:
    content, now_s = [jwks(KEYS["RS256"])], [1000.0]
    with provider(content) as (url, requested):
        verifier = OidcVerifier(ISSUER, AUDIENCE, url, "scope", NO_GROUPS, lambda: now_s[0])
        for _ in range(5):
            assert verified(verifier, token()) is not None
        assert len(requested) == 1
        content[0] = jwks(KEYS["ES256"])  # the provider changes its key
        for _ in range(5):
            assert verified(verifier, token("ES256")) is None
        assert len(requested) == 1  # tokens with unknown keys cost no more
        now_s[0] += MIN_AGE_S + 1
        assert verified(verifier, token("ES256")) is not None
        assert verified(verifier, token()) is None
        assert len(requested) == 2
        now_s[0] += MAX_AGE_S + 1
        assert verified(verifier, token("ES256")) is not None
        assert len(requested) == 3


@pytest.mark.parametrize(
    "broken", [b"", b"[]", b"{}", b'{"keys": []}', b'{"keys": [7]}', b'{"keys": 7}', b"x" * (oidc.MAX_JWKS_BYTES + 1)]
)
def test_known_keys_are_used_while_the_provider_is_away(broken: bytes) -> None:
    content, now_s = [jwks()], [1000.0]
    with provider(content) as (url, requested):
        verifier = OidcVerifier(ISSUER, AUDIENCE, url, "scope", NO_GROUPS, lambda: now_s[0])
        assert verified(verifier, token()) is not None
        content[0] = broken
        now_s[0] += MAX_AGE_S + 1
        assert verified(verifier, token()) is not None
        assert len(requested) == 2
        now_s[0] += MAX_STALE_S
        with pytest.raises(StoreError) as away:
            verified(verifier, token())
        assert away.value.code == "keys-unreadable"


def test_secret_keys_in_a_set_verify_nothing(tmp_path: Path) -> None:
    secret = OctKey.import_key("a secret of thirty-two characters", {"kid": "oct"})
    file = tmp_path / "jwks.json"
    public = KeySet([KEYS["RS256"]]).as_dict(private=False)["keys"]
    file.write_text(json.dumps({"keys": [*public, secret.as_dict()]}))
    verifier = OidcVerifier(ISSUER, AUDIENCE, str(file), "scope", NO_GROUPS)
    assert verified(verifier, token("HS256", secret)) is None
    assert verified(verifier, token()) is not None


# ---------------------------------------------------------------- the service


@pytest.mark.parametrize("jwks_source", ["http://login.example/jwks", "ftp://login.example/jwks"])
def test_keys_come_from_a_safe_place(tmp_path: Path, jwks_source: str) -> None:
    with pytest.raises(ArgumentError, match="ROLLER_OIDC_JWKS"):
        OidcVerifier(ISSUER, AUDIENCE, jwks_source, "scope", NO_GROUPS)


def test_half_of_the_settings_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="ROLLER_OIDC_AUDIENCE") as refused:
        create_app(Settings(store=tmp_path, oidc_issuer=ISSUER), Builder(), digest_of)
    assert refused.value.code == "invalid-setting"


def test_a_service_with_a_provider(tmp_path: Path) -> None:
    file = tmp_path / "jwks.json"
    file.write_bytes(jwks())
    settings = Settings(
        store=tmp_path / "store",
        oidc_issuer=ISSUER,
        oidc_audience=AUDIENCE,
        oidc_jwks=str(file),
        oidc_scopes_claim="permissions",
        queue_length=3,
    )
    app = create_app(settings, Builder(), digest_of)
    with running(app) as (_, port), Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
        assert client.get("/v1/version").status_code == 401
        for permissions, status in (("", 403), ("read", 403), ("compile", 200)):
            headers = {"Authorization": f"Bearer {token(permissions=permissions)}", "Prefer": "wait=30"}
            assert client.post("/v1/kernels:compile", json=BODY, headers=headers).status_code == status
            assert client.get("/v1/operations", headers=headers).status_code == (200 if permissions else 403)
        assert len(client.get("/v1/operations", headers=headers).json()["operations"]) == 1
        headers = {"Authorization": f"Bearer {token(permissions='admin', key=STRANGER)}"}
        assert client.get("/v1/version", headers=headers).status_code == 401
