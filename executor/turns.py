"""What has come from the worker, cut into turns of the event loop. Pure.

Whoever a turn wakes reads before the next turn is handled. So with many streams
the first do not wait until the last is dealt with, and what was just written is
read while it is still at hand. Several frames at a time mean that we are behind:
those are dealt with at once, and their readers read several tokens as one chunk,
which is how we catch up.
"""

from __future__ import annotations

import msgspec

from executor.messages import Outputs, ToProxy

OUTPUTS_A_TURN_MAX = 32
"""Measured: fewer cost the loop more than they save, and with more the first wait longer."""


def in_turns(messages: list[ToProxy]) -> list[list[ToProxy]]:
    """All of them, in order; a lone message of many outputs in several parts."""
    size = OUTPUTS_A_TURN_MAX
    message = messages[0]
    if len(messages) > 1 or not isinstance(message, Outputs) or len(message.outputs) <= size:
        return [messages]
    outputs = message.outputs
    parts: list[ToProxy] = [msgspec.structs.replace(message, outputs=outputs[:size])]
    parts += [Outputs((), outputs[at : at + size]) for at in range(size, len(outputs), size)]
    return [[part] for part in parts]
