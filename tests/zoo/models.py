"""All models of the zoo."""

from __future__ import annotations

from tests.zoo import plain, pretrained
from tests.zoo.entry import Entry

ENTRIES: list[Entry] = [*pretrained.ENTRIES, *plain.ENTRIES]
