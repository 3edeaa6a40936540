"""What has come from the worker, cut into turns of the event loop. Pure.

Whoever a turn wakes reads before the next turn is handled. So with many streams
the first do not wait until the last is dealt with, and what was just written is
read while it is still at hand.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from executor.messages import Outputs, ToProxy

OUTPUTS_A_TURN_MAX = 24
"""Measured: fewer cost the loop more than they save, and with more the first wait longer."""


def in_turns(messages: Sequence[ToProxy]) -> list[list[ToProxy]]:
    """All of them, in order; a message of many outputs in several parts."""
    turns: list[list[ToProxy]] = []
    num_outputs = OUTPUTS_A_TURN_MAX
    for message in messages:
        for part, size in _parts(message):
            num_outputs += size
            if num_outputs > OUTPUTS_A_TURN_MAX:
                turns.append([])
                num_outputs = size
            turns[-1].append(part)
    return turns


def _parts(message: ToProxy) -> list[tuple[ToProxy, int]]:
    """With the number of outputs that each stands for, one at least."""
    if not isinstance(message, Outputs):
        return [(message, 1)]
    outputs, size = message.outputs, OUTPUTS_A_TURN_MAX
    if len(outputs) <= size:
        return [(message, len(outputs) or 1)]
    first = msgspec.structs.replace(message, outputs=outputs[:size])
    cuts = [outputs[start : start + size] for start in range(size, len(outputs), size)]
    return [(first, size), *((Outputs((), cut), len(cut)) for cut in cuts)]
