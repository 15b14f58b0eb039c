"""Find the principal of a request: by a key of the environment, a key of the database, or an OIDC token."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Mapping
from importlib import import_module
from typing import Protocol

from roller_svc.errors import ArgumentError, StoreError
from roller_svc.farm.api_keys import KEYS_MARK, ApiKey, ApiKeys, has_key, id_of_key
from roller_svc.farm.objects import Objects
from roller_svc.service.access import EVERY_SCOPE, Principal, VerifiedToken
from roller_svc.service.client_uses import UseRecorder
from roller_svc.service.key_cache import KeyCache
from roller_svc.service.shares import ANONYMOUS
from roller_svc.settings import Settings, is_loopback

ENVIRONMENT_KEY = "a key of ROLLER_API_KEYS"  # the name of its client

log = logging.getLogger(__name__)


class TokenVerifier(Protocol):
    """Verifies bearer tokens of an identity provider."""

    async def verify(self, token: str) -> VerifiedToken | None:
        """Return what a valid token says, or None."""


class Authenticator:
    """Finds principals. Keys of the environment have every scope."""

    def __init__(self, settings: Settings, keys: ApiKeys, objects: Objects, uses: UseRecorder) -> None:
        self._settings = settings
        self._uses = uses
        self._keys = keys
        self._objects = objects
        self._has_mark = objects.info(KEYS_MARK) is not None
        self._environment = {form: client_id_of(key) for key in settings.accepted_keys for form in _key_encodings(key)}
        self._cache = KeyCache(self._read_keys)
        self._cache.load()
        self._tokens = _token_verifier(settings)

    @property
    def is_open(self) -> bool:
        """Whether clients need no key: nobody ever made one, and only this machine can connect."""
        return not self._environment and self._tokens is None and self._cache.is_empty

    def check_address(self) -> None:
        """Raise ArgumentError if the service would be open where it must not be."""
        if not self.is_open:
            return
        if self._has_mark:
            raise ArgumentError(
                "refusing to serve without an API key: the store says that there were keys, and the database has none",
                code="keys-lost",
                hint="restore the database, see ROLLER_DATABASE; or make a key by `roller keys add NAME`; "
                f"or remove {KEYS_MARK} from the store to open the service",
            )
        if self._settings.require_key or not is_loopback(self._settings.host):
            raise ArgumentError(
                f"refusing to listen on {self._settings.host} without an API key",
                code="no-api-key",
                hint="roller keys add NAME, or set ROLLER_API_KEYS, or listen on 127.0.0.1 without ROLLER_REQUIRE_KEY",
            )

    def _read_keys(self) -> list[ApiKey]:
        """Read the keys; note in the store that there are some, so that a lost database opens nothing."""
        keys = self._keys.all()
        if keys and not self._has_mark:
            try:
                self._objects.write(KEYS_MARK, b"")
                self._has_mark = True
            except StoreError as failure:  # the next read tries again
                log.warning("the store does not know yet that there are API keys: %s", failure.message)
        return keys

    async def authenticate(self, headers: Mapping[str, str]) -> Principal | None:
        """Return the principal of a request, or None if its credentials are missing or wrong. Raises StoreError."""
        await self._cache.refresh()
        if self.is_open:
            return Principal(ANONYMOUS, EVERY_SCOPE)
        offered = _credentials(headers)
        client = self._environment_client(offered)
        if client is not None:
            self._uses.note(client, ENVIRONMENT_KEY)
            return Principal(client, EVERY_SCOPE)
        key_id = id_of_key(offered)
        if key_id is not None:
            key = await self._cache.find(key_id)
            if not has_key(key, offered) or key is None:
                return None
            self._uses.note(key.id, key.name)
            return Principal(key.id, key.scopes, key.quota)
        verified = None if self._tokens is None else await self._tokens.verify(offered)
        if verified is None:
            return None
        self._uses.note(verified.client, verified.subject)
        return Principal(verified.client, verified.scopes)

    def _environment_client(self, offered: str) -> str | None:
        text = offered.encode("latin-1")  # as the header was decoded
        # compare with every key, so that the time reveals nothing
        clients = [client for key, client in self._environment.items() if hmac.compare_digest(text, key)]
        return clients[0] if clients else None


def client_id_of(key: str) -> str:
    """Return an identifier of the client of an environment's key that does not reveal the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _credentials(headers: Mapping[str, str]) -> str:
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    return credentials.strip(" ") if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _key_encodings(key: str) -> tuple[bytes, ...]:
    """Return a key's bytes as clients may send them: in UTF-8 and, if possible, in Latin-1."""
    forms = [key.encode("utf-8", "surrogateescape")]
    if all(ord(letter) < 256 for letter in key):
        forms.append(key.encode("latin-1"))
    return tuple(forms)


def _token_verifier(settings: Settings) -> TokenVerifier | None:
    """Return the verifier of the settings' identity provider. Raises ArgumentError."""
    given = [bool(value) for value in (settings.oidc_issuer, settings.oidc_audience, settings.oidc_jwks)]
    if not any(given):
        return None
    if not all(given):
        raise ArgumentError("OIDC needs ROLLER_OIDC_ISSUER, ROLLER_OIDC_AUDIENCE and ROLLER_OIDC_JWKS", code="invalid-setting")
    try:
        oidc = import_module("roller_svc.service.oidc")
    except ModuleNotFoundError as failure:
        raise ArgumentError(
            f"OIDC needs a package that is not installed: {failure.name}",
            code="invalid-setting",
            hint="pip install 'roller-svc[oidc]'",
        ) from failure
    verifier: TokenVerifier = oidc.OidcVerifier(
        settings.oidc_issuer,
        settings.oidc_audience,
        settings.oidc_jwks,
        settings.oidc_scopes_claim,
        oidc.GroupScopes(settings.oidc_groups_claim, oidc.parse_group_scopes(settings.oidc_groups)),
    )
    return verifier
