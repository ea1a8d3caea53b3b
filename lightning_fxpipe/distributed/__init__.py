"""Ranks: who holds which stage, how they agree, and how all of them end when one fails.

- ``topology``: which rank holds which stage, of which replica.
- ``groups``: process groups that end with what they were made for.
- ``agreement``: collectives for plain values: equal on all ranks, the last stage's, votes.
- ``values``: values with tensors inside, from a rank to another or to all.
- ``commands``: what the last stage tells the others to do.
- ``lifeline``: a connection of our own, on which the ranks hear that one has failed, died or stopped to answer.
- ``decisions``: who records a step anew, asked over it.
- ``news``: what is said on it; ``handshake``: how it is made; ``heartbeat``: how a rank that is stopped is noticed.
- ``gloo_sockets``: frees a rank that waits in a collective for another which is gone.
- ``failure``: what then happens: ends the run on every rank, and lets the user see why.
- ``replica``: to user code all ranks of a pipeline are one replica.
- ``rank_zero``: answers calls that rank 0 alone makes.
- ``replica_calls``: collectives of user code among several replicas.
- ``replica_tensors``: what ``self.all_gather`` and ``sync_dist=True`` are among them.
"""
