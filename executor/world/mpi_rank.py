"""`python -m executor.world.mpi_rank`: one rank of a world that our MPI launcher spawned.

Its orders come from the launcher by MPI. A rank that does not even get so far would leave the
launcher waiting within MPI: it ends its manager instead, and thereby all of them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

from executor.last_words import end
from executor.parent import EXIT_PARENT_GONE
from executor.world.mpi_start import broadcast, forget_shared_memory, load_mpi, meet, read_all
from executor.world.orders import Orders
from executor.world.rank import EXIT_DIED, run_rank

TOLD_S = 0.2
"""For what was printed to pass through the manager that is ended."""


def receive_orders() -> Orders:
    mpi = load_mpi()
    launcher = mpi.Comm.Get_parent()
    if launcher == mpi.COMM_NULL:  # whoever spawned us was cut off meanwhile: we stand alone
        forget_shared_memory()
        end(EXIT_PARENT_GONE)
    orders = read_all(broadcast(launcher, None, root=0))
    meet(mpi.COMM_WORLD)
    forget_shared_memory()
    return orders[int(mpi.COMM_WORLD.rank)]


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        orders = receive_orders()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        time.sleep(TOLD_S)
        os.kill(os.getppid(), signal.SIGKILL)
        end(EXIT_DIED)
    end(run_rank(orders))
