"""Processes: how they start, and how none is left behind.

- ``launcher``: starts the other ranks unless a launcher does.
- ``launching``: in which way.
"""
