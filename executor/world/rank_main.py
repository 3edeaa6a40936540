"""`python -m executor.world.rank_main`: one rank, spawned plainly by the world's owner.

Its orders come by standard input.
"""

from __future__ import annotations

import sys

from executor.last_words import end
from executor.parent import die_with_parent
from executor.world.orders import read_orders
from executor.world.rank import run_rank

if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    orders = read_orders(sys.stdin.buffer)
    if orders.dies_with_parent_thread:
        die_with_parent(orders.owner.pid)
    end(run_rank(orders))
