"""Block hashes: a name for what a block holds that every process computes alike.

    root          = digest of all that makes KV reusable or not (model identity, dtype, KV format, rope, block size)
    salted root   = digest(root, caller's salt)
    hash(block i) = blake2b-128(key = root, hash(block i-1) ‖ number of tokens ‖ tokens as little-endian u32)

Every field is preceded by a tag and its length, so no two different inputs serialise alike.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from kvferry.runtime.ids import BlockHash

HASH_BYTES = 16
_VERSION = b"kvferry-kv-1"


def _digest(key: bytes, fields: Sequence[tuple[bytes, bytes]]) -> bytes:
    h = blake2b(digest_size=HASH_BYTES, key=key)
    for tag, value in fields:
        h.update(tag)
        h.update(len(value).to_bytes(8, "little"))
        h.update(value)
    return h.digest()


def hash_root(fields: dict[str, str]) -> bytes:
    """16 bytes from named properties (order does not matter)."""
    return _digest(_VERSION, [(k.encode().ljust(16, b"\0"), v.encode()) for k, v in sorted(fields.items())])


def salted_root(root: bytes, salt: str) -> bytes:
    """The root for one tenant's cache; the plain root for the empty salt."""
    return root if not salt else _digest(root, [(b"salt", salt.encode())])


def tenant_salt(tenant: str, salt: str) -> str:
    """A salt that no other tenant can have, whatever salt it asks for. `tenant`: not empty, without a NUL."""
    return f"{tenant}\0{salt}"


def hash_block(root: bytes, parent: BlockHash | None, token_ids: Sequence[int]) -> BlockHash:
    """Name of the block that holds `token_ids` after the chain that ends in `parent`."""
    h = blake2b(parent or b"", digest_size=HASH_BYTES, key=root)
    h.update(struct.pack(f"<?I{len(token_ids)}I", parent is not None, len(token_ids), *token_ids))
    return BlockHash(h.digest())


def hash_chain(root: bytes, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Hashes of all full blocks of `token_ids`: `hash_block` of each, with the tokens packed at once."""
    num_tokens = len(token_ids) - len(token_ids) % block_size
    packed, num_bytes = struct.pack(f"<{num_tokens}I", *token_ids[:num_tokens]), 4 * block_size
    hashes: list[BlockHash] = []
    parent, head = b"", struct.pack("<?I", False, block_size)
    for start in range(0, len(packed), num_bytes):
        parent = blake2b(parent + head + packed[start : start + num_bytes], digest_size=HASH_BYTES, key=root).digest()
        head = struct.pack("<?I", True, block_size) if start == 0 else head
        hashes.append(BlockHash(parent))
    return hashes
