"""Bodies with a Content-Encoding: unpacked within the limit, or refused with the reason."""

import gzip
import tracemalloc
import zlib

import pytest

from serving.worker.protocol import Refused, inflate
from tests.serving.worker.images import RED, encode, solid

PNG = encode(solid(RED))
BARE = zlib.compressobj(wbits=-15)
DEFLATED_BARE = BARE.compress(PNG) + BARE.flush()


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (PNG, None),
        (PNG, "identity"),
        (gzip.compress(PNG), "gzip"),
        (gzip.compress(PNG), " X-GZIP"),
        (zlib.compress(PNG), "deflate"),
        (DEFLATED_BARE, "deflate"),
    ],
)
def test_a_named_encoding_is_taken_off(body: bytes, encoding: str | None) -> None:
    assert inflate(body, encoding) == PNG
    assert inflate(body, encoding, most=len(PNG)) == PNG


@pytest.mark.parametrize(
    ("body", "encoding", "status", "code"),
    [
        (PNG, "br", 415, "unsupported_encoding"),
        (PNG, "gzip, gzip", 415, "unsupported_encoding"),
        (PNG, "gzip", 400, "bad_encoding"),
        (gzip.compress(PNG)[:-9], "gzip", 400, "bad_encoding"),
        (gzip.compress(PNG) + b"more", "gzip", 400, "bad_encoding"),
        (b"", "deflate", 400, "bad_encoding"),
        (gzip.compress(bytes(2_000_000)), "gzip", 413, "body_too_large"),
        (zlib.compress(bytes(2_000_000)), "deflate", 413, "body_too_large"),
    ],
)
def test_an_encoding_that_does_not_fit_the_body_is_refused(body: bytes, encoding: str, status: int, code: str) -> None:
    with pytest.raises(Refused) as caught:
        inflate(body, encoding, most=1_000_000)
    assert (caught.value.status, caught.value.code) == (status, code)


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    """100 MB of zeros in 100 kB: no more of them than the limit is ever held."""
    bomb = gzip.compress(bytes(100_000_000))
    tracemalloc.start()
    with pytest.raises(Refused):
        inflate(bomb, "gzip", most=1_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000
