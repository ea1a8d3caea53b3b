"""The list of mutants is about the code and the tests that are there; ``python -m tests.mutants`` runs it."""

from __future__ import annotations

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.table import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_changes_what_is_there_and_names_tests_that_are(mutant: Mutant) -> None:
    assert mutant.applied()
    assert mutant.node_ids()
    assert mutant.old != mutant.new


def test_no_fault_is_there_twice() -> None:
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
