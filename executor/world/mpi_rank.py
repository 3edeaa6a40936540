"""`python -m executor.world.mpi_rank`: one rank of a world that our MPI launcher spawned.

Its orders come from the launcher by MPI.
"""

from __future__ import annotations

import sys

from executor.parent import EXIT_PARENT_GONE
from executor.world.mpi_start import broadcast, forget_shared_memory, load_mpi, meet, read_all
from executor.world.rank import end, run_rank

if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    MPI = load_mpi()
    launcher = MPI.Comm.Get_parent()
    if launcher == MPI.COMM_NULL:  # whoever spawned us was cut off meanwhile: we stand alone
        forget_shared_memory()
        end(EXIT_PARENT_GONE)
    orders = read_all(broadcast(launcher, None, root=0))
    meet(MPI.COMM_WORLD)
    forget_shared_memory()
    end(run_rank(orders[MPI.COMM_WORLD.rank]))
