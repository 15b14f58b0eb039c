"""Entity tags and caching of files that never change."""

from __future__ import annotations

from typing import Any

from fastapi import Response

MAX_AGE_S = 31_536_000
NOT_MODIFIED: dict[str, Any] = {"description": "the client has it: If-None-Match names it"}


def immutable_headers(name: str, *, is_public: bool, is_weak: bool = False) -> dict[str, str]:
    """Return the headers of a file whose name determines its content; private if a key is needed to read it.

    The tag is weak if the same file is also sent compressed with it: then it does not determine the bytes.
    """
    scope = "public" if is_public else "private"
    return {"ETag": f'{"W/" if is_weak else ""}"{name}"', "Cache-Control": f"{scope}, max-age={MAX_AGE_S}, immutable"}


def not_modified(if_none_match: str | None, headers: dict[str, str]) -> Response | None:
    """Return the response to a client that has the file, or None."""
    if if_none_match is None:
        return None
    tags = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
    if headers["ETag"].removeprefix("W/") not in tags and "*" not in tags:
        return None
    return Response(status_code=304, headers=headers)
