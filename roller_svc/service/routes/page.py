"""The page at /, and the files that it loads. They need no key: their data come from /v1.

`web/` has the source; `node build.mjs` there writes roller_svc/service/page/.
"""

from __future__ import annotations

import gzip
import secrets
from functools import cache
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header, HTTPException, Request
from fastapi.responses import Response

from roller_svc.service.caching import NOT_MODIFIED, immutable_headers, not_modified
from roller_svc.service.compression import accepts_gzip

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).resolve().parents[1] / "page"
INDEX = "index.html"
NONCE = "NONCE"  # what index.html has in place of the nonce of a response
NONCE_BYTES = 16
MEDIA_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'nonce-{nonce}'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/")
@router.get("/k/{digest}")
@router.get("/m")
@router.get("/m/{digest}")
@router.get("/farm")
async def page() -> Response:
    """Return the page. Only the style sheet of the editor has the nonce; each response has another."""
    nonce = secrets.token_urlsafe(NONCE_BYTES)
    headers = {
        "Cache-Control": "no-store",
        "Content-Security-Policy": POLICY.format(nonce=nonce),
        "Referrer-Policy": "no-referrer",
    }
    return Response(_files()[INDEX].replace(NONCE.encode(), nonce.encode()), headers=headers, media_type="text/html")


@router.get("/page/{name}", responses={304: NOT_MODIFIED})
async def page_file(
    name: str,
    request: Request,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Return a file of the page, whose name has the hash of its content."""
    media_type = MEDIA_TYPES.get(Path(name).suffix)
    if media_type is None or name not in _files():
        raise HTTPException(404, f"the page has no file {name[:80]!r}")
    is_compressed = accepts_gzip(request.headers)
    headers = immutable_headers(f"{name}.gz" if is_compressed else name, is_public=True) | {"Vary": "Accept-Encoding"}
    if is_compressed:
        headers["Content-Encoding"] = "gzip"
    content = _compressed(name) if is_compressed else _files()[name]
    return not_modified(if_none_match, headers) or Response(content, headers=headers, media_type=media_type)


@cache
def _compressed(name: str) -> bytes:
    return gzip.compress(_files()[name], mtime=0)


@cache
def _files() -> dict[str, bytes]:
    """Return the files of the page by name."""
    return {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir())}
