"""Ranks: who holds which stage, how they agree, and how all of them end when one fails.

- ``topology``: which rank holds which stage.
- ``groups``: process groups that end with what they were made for.
- ``agreement``: values that all ranks must have alike, votes.
- ``commands``: what the last stage tells the others to do.
- ``connections``, ``lifeline``: says at once when a rank has failed or died, and frees those that wait for it.
- ``failure``: ends the run on every rank, and lets the user see why.
- ``replica``: to user code all ranks are one replica.
"""
