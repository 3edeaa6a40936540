"""Token ids as they travel: int32, little-endian, packed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

TOKEN_BYTES = 4


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_token_ids(packed: bytes) -> tuple[int, ...]:
    """Raises ValueError where the length is not a multiple of TOKEN_BYTES."""
    return tuple(np.frombuffer(packed, dtype="<i4").tolist())
