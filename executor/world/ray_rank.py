"""`python -m executor.world.ray_rank`: one rank, started by the Ray actor on its node.

It ends with the actor: killed by the kernel, or by the end of its standard input.
"""

from __future__ import annotations

import os
import sys

from executor.last_words import end
from executor.parent import die_with_parent, watch_standard_input
from executor.world.orders import read_orders
from executor.world.rank import run_rank

if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    orders = read_orders(sys.stdin.buffer)
    die_with_parent(os.getppid())
    watch_standard_input()
    end(run_rank(orders))
