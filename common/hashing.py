"""The block hash chain: equal hashes mean equal tokens from the prompt's start.

Each full block's hash covers its parent's hash and its own token ids (int32,
little-endian), so one hash names a whole prefix. BLAKE2b with 16 bytes: a
client cannot make two prompts collide and so read another's KV. The first
parent is a digest of what else the KV depends on: the model, and the salt by
which tenants keep their caches apart.
"""

from __future__ import annotations

import hashlib

HASH_BYTES = 16


def prompt_digest(packed_token_ids: bytes) -> bytes:
    """Names a whole prompt, partial last block included."""
    return hashlib.blake2b(packed_token_ids, digest_size=HASH_BYTES).digest()


def root_hash(model_fingerprint: str, cache_salt: str = "") -> bytes:
    """The parent of a prompt's first block."""
    seed = f"{model_fingerprint}\x00{cache_salt}".encode()
    return hashlib.blake2b(seed, digest_size=HASH_BYTES).digest()


def block_hash(parent: bytes, packed_token_ids: bytes) -> bytes:
    """One link: the hash of a full block whose tokens are `packed_token_ids`."""
    return hashlib.blake2b(parent + packed_token_ids, digest_size=HASH_BYTES).digest()


def block_hashes(packed_token_ids: bytes, tokens_per_block: int, root: bytes) -> tuple[bytes, ...]:
    """The chain over all full blocks; a partial last block has no hash."""
    block_bytes = 4 * tokens_per_block
    hashes: list[bytes] = []
    parent = root
    for start in range(0, len(packed_token_ids) - block_bytes + 1, block_bytes):
        parent = block_hash(parent, packed_token_ids[start : start + block_bytes])
        hashes.append(parent)
    return tuple(hashes)
