"""Who sends a request, and what they may do: principals, and the scopes that routes require."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from fastapi import Depends, FastAPI, Request
from fastapi.routing import APIRoute

from roller_svc.errors import ForbiddenError
from roller_svc.farm.api_keys import Scope

OPEN_PATHS = frozenset({"/healthz", "/readyz"})  # without a key
PAGE_PATHS = re.compile(r"/|/[km]/[^/]*|/m|/farm|/page/[^/]*")  # files of the page, the same for everybody
PROBE_PATHS = OPEN_PATHS | {"/metrics"}  # on connections of their own
EVERY_SCOPE = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class Principal:
    """The client of a request. `client` is the id of its key and never reveals the key."""

    client: str
    scopes: frozenset[Scope]
    max_alive: int | None = None  # operations of this client that are not done, if its key limits them


@dataclass(frozen=True, slots=True)
class VerifiedToken:
    """The claims of a valid token of an identity provider. `client` is a hash of the issuer and of the subject."""

    client: str
    subject: str
    scopes: frozenset[Scope]


class RequiredScope:
    """A dependency of a route that rejects clients without a scope."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    async def __call__(self, request: Request) -> None:
        check_scope(principal_of(request), self.scope)


def needs_key(path: str) -> bool:
    """Whether a request for a path is only answered to known clients, unless the service is open."""
    return path not in OPEN_PATHS and PAGE_PATHS.fullmatch(path) is None


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


def routes_of(app: FastAPI) -> Iterator[APIRoute]:
    """Yield the routes of an application, those of its routers included."""
    waiting: list[Any] = list(app.routes)
    while waiting:
        route = waiting.pop(0)
        if isinstance(route, APIRoute):
            yield route
        else:
            router = getattr(route, "original_router", route)  # versions of FastAPI copy routes, or refer to routers
            waiting += getattr(router, "routes", [])


def methods_of(routes: Iterable[APIRoute], path: str) -> frozenset[str]:
    """Return the methods that routes have for a path; none for an unknown path."""
    return frozenset(method for route in routes if route.path_regex.match(path) for method in route.methods or ())
