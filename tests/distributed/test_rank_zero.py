"""Which value a call gets that perhaps not every rank makes."""

from __future__ import annotations

from lightning_fxpipe.distributed.rank_zero import answer


def test_a_call_waits_while_rank_zero_makes_others() -> None:
    """`if is_global_zero: trainer.log_dir` before a broadcast: the others' broadcast must not get the folder."""
    mine = ("broadcast",), 3
    assert answer(mine, (("broadcast", "log_dir"), "folder"))[0] is False
    assert answer(mine, (("broadcast",), 4)) == (True, 4)
    assert answer(mine, None) == (True, 3)
