"""`baton doctor`: can this machine serve, and what has to change where it cannot.

Checks yield findings. What could hang or crash (UCX, torch, MPI) is asked in a
process of its own with a time limit; see `probe`.
"""
