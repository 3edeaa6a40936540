"""What the engine's worker does for a frontend with postprocess workers: outputs by bucket.

Each bucket's outputs are packed here, once; the frontend passes the bytes on
without looking. Errors and refusals stay beside: they need no text, and must not
wait for any.
"""

from __future__ import annotations

import msgspec

from executor.engine.seam import EngineOutput
from executor.messages import Outputs
from executor.post.messages import bucket_of, pack_outputs


def divided(message: Outputs, num_buckets: int) -> Outputs:
    """The same, told by bucket; each request's outputs keep their order."""
    direct: list[EngineOutput] = []
    groups: dict[int, list[EngineOutput]] = {}
    for output in message.outputs:
        if output.error is not None:
            direct.append(output)
        else:
            groups.setdefault(bucket_of(output.request_id, num_buckets), []).append(output)
    packed = tuple((bucket, pack_outputs(outputs)) for bucket, outputs in groups.items())
    return msgspec.structs.replace(message, outputs=tuple(direct), buckets=packed)
