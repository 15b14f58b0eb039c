#!/usr/bin/env python3
"""Create a bucket as MinIO's client does: `mc alias set NAME URL USER PASSWORD`, `mc mb --ignore-existing NAME/BUCKET`.

The server has no authentication: it is moto's. A request is signed so that moto takes it for one to S3.
"""

import json
import sys
import urllib.request
from pathlib import Path

ALIASES = Path("/tmp/aliases.json")
SIGNED_FOR_S3 = {"Authorization": "AWS4-HMAC-SHA256 Credential=x/20000101/us-east-1/s3/aws4_request"}


def main(verb: str, *arguments: str) -> None:
    if verb == "alias":
        _set, name, url, _user, _password = arguments
        urllib.request.urlopen(url, timeout=5).close()
        ALIASES.write_text(json.dumps({name: url}))
    elif verb == "mb":
        _ignore_existing, path = arguments
        name, _, bucket = path.partition("/")
        url = f"{json.loads(ALIASES.read_text())[name]}/{bucket}"
        urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=SIGNED_FOR_S3), timeout=5).close()
    else:
        sys.exit(f"unknown verb: alias or mb, got {verb}")


if __name__ == "__main__":
    main(*sys.argv[1:])
