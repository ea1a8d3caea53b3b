"""Timelines of the actions of each rank in a training step, and measurements taken from them.

- ``options``: what a user says about it.
- ``clocks``: when something happens on a rank's device.
- ``memory``: how much of it is taken.
- ``recorder``: notes what a rank does in a step.
- ``alignment``: by how much the ranks' clocks differ.
- ``steps``: one timeline of all ranks, and how much of it they idle.
- ``expected``: what a stage's actions took, and the same schedule simulated with it.
- ``files``: what lies in the folder of a recording.
"""
