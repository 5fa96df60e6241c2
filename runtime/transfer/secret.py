"""Whoever does not know the cluster's secret is not believed: keyed digests of what ends of links say to each other.

A digest stands for the bytes and for who made them; it hides nothing. Source: RFC 7693, section 2.9 (keyed BLAKE2).
"""

from __future__ import annotations

import hmac
from hashlib import blake2b

TAG_BYTES = 16
NO_SECRET = b""
"""Of ranks that are no cluster's: tests, and the library in one process."""


def tag(secret: bytes, *parts: bytes) -> bytes:
    """A digest of `parts`, which are told apart; at most 64 bytes of the secret count."""
    digest = blake2b(digest_size=TAG_BYTES, key=secret[:64])
    for part in parts:
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()


def is_tag(given: bytes, secret: bytes, *parts: bytes) -> bool:
    """In constant time."""
    return hmac.compare_digest(given, tag(secret, *parts))
