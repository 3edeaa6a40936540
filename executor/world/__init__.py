"""The worker world of one server: n ranks, started, watched and ended by the process that owns it.

`World` (world.py) is the owner's side; `table.py` holds its decisions, pure; `launch.py` is
the seam behind which ranks are started; `rank.py` is what runs inside each of them.
"""
