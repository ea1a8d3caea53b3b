"""Modules that are made without memory: what initialises them is written down, and done by each rank for its own stage.

- ``drawing``: random generators go on as if tensors had been drawn.
- ``remake``: torch calls that are written down, and made again for the tensors that are needed.
- ``construction``: construction without memory.
- ``materialise``: a rank's share gets its values.
"""
