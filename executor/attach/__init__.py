"""Frontends that attach to a worker world which another process owns.

`Broker` (broker.py) stands beside the world's owner and lets frontends in; `broker_table.py`
holds its decisions, pure. `caller.py` is a frontend's side of the same talk, and
`attached_link.py` the executor's link that it leads to: form "attach" over ipc, "rpc" over tcp.
"""
