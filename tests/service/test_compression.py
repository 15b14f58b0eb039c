"""Which requests accept gzip (RFC 9110, 12.5.3)."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from roller_svc.service.compression import accepts_gzip


@pytest.mark.parametrize(
    ("values", "is_accepted"),
    [
        ([], False),
        ([""], False),
        (["gzip"], True),
        (["br, GZip ; Q=0.001"], True),
        (["gzip;q=0"], False),
        (["gzip;q=0.000, *"], False),
        (["*"], True),
        (["*;q=0"], False),
        (["deflate, gzip;q=0.5, identity;q=0.5"], True),
        (["gzip;q=0.5, identity"], False),
        (["gzipped"], False),
        (["gzip;q=2"], False),
        (["gzip;q=nan"], False),
        (["br", "gzip"], True),
        (["x-gzip"], True),
    ],
)
def test_weights_decide(values: list[str], is_accepted: bool) -> None:
    headers = Headers(raw=[(b"accept-encoding", value.encode()) for value in values])
    assert accepts_gzip(headers) is is_accepted
