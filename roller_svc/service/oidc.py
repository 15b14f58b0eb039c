"""Verify bearer tokens of an OpenID Connect provider (RFC 7519, RFC 9068), with keys from its JWK set."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

from roller_svc.errors import ArgumentError, StoreError
from roller_svc.farm.api_keys import Scope, parse_scopes, with_included
from roller_svc.service.access import VerifiedToken
from roller_svc.settings import is_loopback

# Signatures with public keys only: a token signed with the text of a public key, or with nothing, is rejected.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519", "EdDSA")
KEY_TYPES = frozenset({"RSA", "EC", "OKP"})
LEEWAY_S = 30  # between the clocks of provider and service
MAX_AGE_S = 300.0  # after which the keys are read again
MIN_AGE_S = 30.0  # before which a token with an unknown key does not cause another read
MAX_STALE_S = 3600.0  # how long keys are used while they cannot be read
FETCH_TIMEOUT_S = 5.0
MAX_JWKS_BYTES = 1 << 20
SCOPE_PREFIX = "roller:"  # optional, of scopes in tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupScopes:
    """The claim that has groups, and the scope of the members of each group."""

    claim: str
    scopes: Mapping[str, Scope]

    def of(self, claims: Mapping[str, Any]) -> frozenset[Scope]:
        """Return the scopes of a token's groups. Groups without a scope give none."""
        groups = claims.get(self.claim)
        names = [name for name in groups if isinstance(name, str)] if isinstance(groups, list) else []
        return with_included(self.scopes[name] for name in names if name in self.scopes)


def parse_group_scopes(text: str) -> dict[str, Scope]:
    """Parse ROLLER_OIDC_GROUPS. Raises ArgumentError.

    A group may be a distinguished name with commas and equals signs: the last one is before the scope.
    """
    scopes: dict[str, Scope] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        group, _, name = (word.strip() for word in part.rpartition("="))
        if not group or name not in {scope.value for scope in Scope}:
            known = ", ".join(scope.value for scope in Scope)
            raise ArgumentError(
                f"ROLLER_OIDC_GROUPS: expected GROUP=SCOPE with a scope of {known}, got {part[:80]!r}", code="invalid-setting"
            )
        scopes[group] = Scope(name)
    return scopes


class OidcVerifier:
    """Verifies tokens of one issuer for one audience.

    Args:
        issuer: `iss` of every token.
        audience: must be in `aud` of every token.
        jwks: file, or https URL, of the provider's keys.
        scopes_claim: has the scopes, as a list or separated by spaces.
        groups: the scopes of groups, in addition to these.
        clock: of monotonic seconds.
    """

    def __init__(
        self,
        issuer: str,
        audience: str,
        jwks: str,
        scopes_claim: str,
        groups: GroupScopes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_source(jwks)
        self._issuer = issuer
        self._jwks = jwks
        self._scopes_claim = scopes_claim
        self._groups = groups
        self._clock = clock
        self._keys: KeySet | None = None
        self._read_s = self._tried_s = float("-inf")
        self._reading = asyncio.Lock()
        self._claims = jwt.JWTClaimsRegistry(
            leeway=LEEWAY_S,
            iss={"essential": True, "value": issuer},
            aud={"essential": True, "value": audience},
            exp={"essential": True},
            sub={"essential": True},
        )

    async def verify(self, token: str) -> VerifiedToken | None:
        """Return what a valid token says, or None. Raises StoreError without any keys."""
        await self._refresh(MAX_AGE_S)
        claims = self._valid_claims(token)
        if claims is None and self._has_unknown_key(token):
            await self._refresh(MIN_AGE_S)
            claims = self._valid_claims(token)
        if claims is None:
            return None
        subject = str(claims["sub"])
        identity = f"{self._issuer}\n{subject}".encode("utf-8", "surrogatepass")
        granted = claims.get(self._scopes_claim, [])
        names = granted.split() if isinstance(granted, str) else granted if isinstance(granted, list) else []
        scopes = parse_scopes(name.removeprefix(SCOPE_PREFIX) for name in names if isinstance(name, str))
        return VerifiedToken(f"oidc-{hashlib.sha256(identity).hexdigest()[:16]}", subject, scopes | self._groups.of(claims))

    def _valid_claims(self, token: str) -> dict[str, Any] | None:
        try:
            claims: dict[str, Any] = jwt.decode(token, self._known_keys(), algorithms=ALGORITHMS).claims
            self._claims.validate(claims)
        except (JoseError, ValueError, TypeError):  # claims of other types than the standard's
            return None
        return claims

    def _has_unknown_key(self, token: str) -> bool:
        try:
            jwt.decode(token, self._known_keys(), algorithms=ALGORITHMS)
        except InvalidKeyIdError:
            return True
        except (JoseError, ValueError, TypeError):
            return False
        return False

    def _known_keys(self) -> KeySet:
        if self._keys is None or self._clock() - self._read_s > MAX_STALE_S:
            raise StoreError("the keys of the identity provider cannot be read", code="keys-unreadable")
        return self._keys

    async def _refresh(self, max_age_s: float) -> None:
        """Read the keys if they are older, and not more often than each MIN_AGE_S."""
        if not self._is_due(max_age_s):
            return
        async with self._reading:
            if not self._is_due(max_age_s):
                return
            self._tried_s = self._clock()
            try:
                self._keys = parse_keys(await asyncio.to_thread(_read, self._jwks))
                self._read_s = self._tried_s
            except (OSError, httpx.HTTPError, JoseError, ValueError, TypeError, KeyError) as failure:
                log.warning("the keys of the identity provider are not read: %s", type(failure).__name__)

    def _is_due(self, max_age_s: float) -> bool:
        now_s = self._clock()
        return now_s - self._read_s > max_age_s and now_s - self._tried_s > min(max_age_s, MIN_AGE_S)


def parse_keys(content: bytes) -> KeySet:
    """Return the public keys for signatures of a JWK set. Raises ValueError, TypeError, KeyError or JoseError."""
    document = json.loads(content)
    keys = [key for key in document["keys"] if isinstance(key, dict) and _is_public_for_signatures(key)]
    if not keys:
        raise ValueError("no keys")
    return KeySet.import_key_set({"keys": keys})


def _is_public_for_signatures(key: Mapping[str, object]) -> bool:
    return key.get("kty") in KEY_TYPES and key.get("use", "sig") == "sig"


def _check_source(jwks: str) -> None:
    """Raise ArgumentError for a URL whose response others could change."""
    parts = urlsplit(jwks)
    is_safe = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
    if "://" in jwks and not is_safe:
        raise ArgumentError("ROLLER_OIDC_JWKS: expected a file or an https URL", code="invalid-setting")


def _read(jwks: str) -> bytes:
    """Return the content of the file or of the URL. Raises OSError, ValueError or httpx.HTTPError."""
    if "://" not in jwks:
        return Path(jwks).read_bytes()
    content = bytearray()
    with httpx.stream("GET", jwks, timeout=FETCH_TIMEOUT_S, follow_redirects=False) as response:
        response.raise_for_status()
        for part in response.iter_bytes():
            content += part
            if len(content) > MAX_JWKS_BYTES:
                raise ValueError("too long")
    return bytes(content)
