"""Who sends a request, and what they may do: principals, and the scopes that routes require."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from fastapi import Depends, Request

from roller_svc.errors import ForbiddenError
from roller_svc.farm.api_keys import Scope

EVERY_SCOPE = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class Principal:
    """The client of a request. `client` is the id of its key and never reveals the key."""

    client: str
    scopes: frozenset[Scope]
    max_alive: int  # operations of this client that are not done, at most


class RequiredScope:
    """A dependency of a route that rejects clients without a scope."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    async def __call__(self, request: Request) -> None:
        check_scope(principal_of(request), self.scope)


def requires(scope: Scope) -> Any:
    """Return the dependency of a route that requires a scope."""
    return Depends(RequiredScope(scope))


def check_scope(principal: Principal, scope: Scope) -> None:
    """Raise ForbiddenError if the principal lacks the scope."""
    if scope not in principal.scopes:
        scopes = ", ".join(each.value for each in Scope if each in principal.scopes)
        raise ForbiddenError(
            f"this needs the scope {scope.value}, and the API key has {scopes or 'none'}",
            hint=f"roller keys add NAME --scope {scope.value}",
        )


def principal_of(request: Request) -> Principal:
    return cast(Principal, request.state.principal)
