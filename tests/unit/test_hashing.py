"""Guards against hashes that differ between processes or agree for different contents."""

import pytest

from kvferry.runtime.kv.hashing import hash_block, hash_chain, hash_root, salted_root

pytestmark = pytest.mark.core


def test_known_value() -> None:
    """A changed serialisation would silently split a rolling upgrade into two caches."""
    root = hash_root({"model": "m", "dtype": "float32"})
    assert root == hash_root({"dtype": "float32", "model": "m"})
    assert [h.hex() for h in hash_chain(root, list(range(40)), 16)] == [
        hash_block(root, None, list(range(16))).hex(),
        hash_block(root, hash_block(root, None, list(range(16))), list(range(16, 32))).hex(),
    ]


def test_salt_separates_tenants() -> None:
    root = hash_root({"model": "m"})
    assert salted_root(root, "") == root
    assert hash_chain(salted_root(root, "a"), [1] * 16, 16) != hash_chain(salted_root(root, "b"), [1] * 16, 16)


def test_parent_matters() -> None:
    root = hash_root({"model": "m"})
    first, second = hash_chain(root, [7] * 32, 16)
    assert first != second


def test_a_chain_is_its_blocks_hashed_one_after_the_other() -> None:
    """The chain packs all tokens at once; the engine, which seals block by block, must find the same names."""
    root = hash_root({"model": "m"})
    for num_tokens in (0, 1, 15, 16, 17, 64, 100):
        tokens, parent, hashes = [7 * i % 2**32 for i in range(num_tokens)], None, []
        for start in range(0, num_tokens - 15, 16):
            parent = hash_block(root, parent, tokens[start : start + 16])
            hashes.append(parent)
        assert hash_chain(root, tokens, 16) == hashes
