"""The words and colours of kinds of actions, the same in all pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_fxpipe.simulation.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Kind


@dataclass(frozen=True)
class Look:
    """How actions of a kind look.

    Attributes:
        words: What they are called.
        light: Colours of the first and of the last microbatch on a light ground; those between are mixed of both.
        dark: The same on a dark ground. Dark text can be read on all of them.
    """

    words: str
    light: tuple[str, str]
    dark: tuple[str, str]


LOOKS: Mapping[Kind, Look] = {
    FORWARD: Look("forward", ("#6d9eda", "#cfe0f5"), ("#a9cbf2", "#5f90ca")),
    BACKWARD: Look("backward", ("#f0a35e", "#fbdfc0"), ("#f5bf8c", "#c68445")),
    INPUT_BACKWARD: Look("input backward", ("#e6c04a", "#f8eabb"), ("#efd47e", "#b8952f")),
    WEIGHT_BACKWARD: Look("weight backward", ("#63bd98", "#c9eadb"), ("#98d9bd", "#4f9f7d")),
}
# Of what is no action, such as an optimizer's step.
OTHER = Look("other work", ("#b9a9dc", "#b9a9dc"), ("#bdaee0", "#bdaee0"))
