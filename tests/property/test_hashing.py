"""The hash chain against what it stands for: equal prefixes, and nothing else, hash equal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.hashing import block_hashes, prompt_digest, root_hash
from protos.tokens import pack_token_ids, unpack_token_ids

TOKENS = st.lists(st.integers(0, 3), max_size=20)


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_hashes_are_equal_exactly_as_far_as_the_blocks_are(
    left: list[int], right: list[int], tokens_per_block: int
) -> None:
    root = root_hash("model")
    chains = [block_hashes(pack_token_ids(t), tokens_per_block, root) for t in (left, right)]
    assert [len(chain) for chain in chains] == [
        len(left) // tokens_per_block,
        len(right) // tokens_per_block,
    ]
    for index, (a, b) in enumerate(zip(*chains, strict=False)):
        end = (index + 1) * tokens_per_block
        assert (a == b) == (left[:end] == right[:end])


@given(TOKENS)
def test_other_models_and_salts_share_nothing(tokens: list[int]) -> None:
    packed = pack_token_ids(tokens)
    roots = [root_hash("a"), root_hash("b"), root_hash("a", "salt")]
    chains = [block_hashes(packed, 1, root) for root in roots]
    for index in range(len(tokens)):
        assert len({chain[index] for chain in chains}) == 3


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packing_round_trip(tokens: list[int]) -> None:
    assert list(unpack_token_ids(pack_token_ids(tokens))) == tokens


@given(TOKENS, TOKENS)
def test_digest_names_the_whole_prompt(left: list[int], right: list[int]) -> None:
    digests = [prompt_digest(pack_token_ids(tokens)) for tokens in (left, right)]
    assert (digests[0] == digests[1]) == (left == right)
