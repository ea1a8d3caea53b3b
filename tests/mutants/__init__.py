"""Faults of the kinds that people make, each of which some test must notice: ``python -m tests.mutants``.

- ``mutant``: what one is. ``table``: all of them, by room.
- ``run``: makes one change in a copy of the tree, and runs the tests that must fail.
"""
