"""Processes: how they start, and how none is left behind.

- ``launcher``: starts the other ranks unless torchrun, SLURM or the like does.
- ``launching``: in which way.
"""
