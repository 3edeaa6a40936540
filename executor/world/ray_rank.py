"""`python -m executor.world.ray_rank`: one rank, started by the Ray actor on its node.

It ends with the actor: the standard input that brought its orders then ends too.
"""

from __future__ import annotations

import sys

from executor.parent import watch_standard_input
from executor.world.orders import read_orders
from executor.world.rank import end, run_rank

if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    orders = read_orders(sys.stdin.buffer)
    watch_standard_input()
    end(run_rank(orders))
