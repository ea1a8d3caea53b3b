"""Names that a user types: spellings of one name, and the nearest name to a wrong one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def canonical_name(text: str, names: Iterable[str]) -> str | None:
    """Returns the name that a text spells, whatever its case, underscores and hyphens; None if there is none."""
    return {_letters(name): name for name in names}.get(_letters(text))


def suggestion(text: str, names: Iterable[str]) -> str:
    """Returns ``; did you mean 'name'?`` with the nearest name; nothing if no name is near."""
    by_letters = {_letters(name): name for name in names}
    nearest = get_close_matches(_letters(text), by_letters, n=1)
    return f"; did you mean {by_letters[nearest[0]]!r}?" if nearest else ""


def _letters(text: str) -> str:
    return "".join(character for character in text.lower() if character.isalnum())
