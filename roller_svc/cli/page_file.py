"""The page as one HTML file with its story inside, which opens from disk without a network."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roller_svc.errors import ArgumentError

FOLDER = Path(__file__).resolve().parents[1] / "service" / "page"  # what web/ was built to
KERNEL, MODEL = "kernel", "model"
_DATA = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>roller: {kind}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body><div id="app"></div><noscript>This page needs JavaScript.</noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def write_page(file: str, kind: str, story: Mapping[str, Any]) -> None:
    """Write the page of a kernel or a model to a file. Raises ArgumentError (unwritable-file)."""
    try:
        Path(file).write_text(make_page(kind, story), encoding="utf-8")
    except OSError as failure:
        raise ArgumentError(f"cannot write to {file}: {failure.strerror}", code="unwritable-file") from failure


def make_page(kind: str, story: Mapping[str, Any]) -> str:
    """Return the page as text. Its policy allows the one script and the one style sheet by their hashes, and no request."""
    script, style = _read("file-*.js"), _read("page-*.css")
    policy = (
        f"default-src 'none'; script-src '{_hash_text(script)}'; style-src '{_hash_text(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = json.dumps({"kind": kind, "data": story}, separators=(",", ":"))
    for character, escaped in _DATA.items():  # no text of the story can end the element
        data = data.replace(character, escaped)
    return _HTML.format(policy=policy, kind=kind, style=style, data=data, script=script)


def _read(pattern: str) -> str:
    (path,) = FOLDER.glob(pattern)
    return path.read_text(encoding="utf-8")


def _hash_text(text: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
