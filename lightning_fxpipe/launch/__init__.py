"""Processes: how they start, and how none is left behind.

- ``launcher``: starts the other ranks where nobody else does.
- ``launching``: in which way.
"""
