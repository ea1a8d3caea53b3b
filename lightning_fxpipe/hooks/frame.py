"""A hook that is running."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_fxpipe.distributed.rank_zero import Shared
from lightning_fxpipe.hooks.whole_model import WholeView
from lightning_fxpipe.user_code.files import writing


@dataclass(kw_only=True)
class Frame:
    """A hook that is running.

    Attributes:
        name: Its name, for messages.
        view: The mode that shows it the whole model.
        values: Values of placeholders, once a rank has read one.
        gradients: Gradients of placeholders, once a rank has read one.
        has_states: True once states of optimizers have been brought.
        touched: True once it has used what every rank has, which it may have changed on this one only.
        logged: The numbers that it has logged: arguments of ``self.log``.
        zeros: The call of Lightning or torch that rank 0 made in the last vote, and its value; None if it made none.
        files: The files that it writes.
        is_joint: Whether all ranks run the same code, and so come to each :meth:`Hooks.suspend` together.
    """

    name: str
    view: WholeView
    files: writing
    is_joint: bool
    values: dict[int, Tensor] | None = None
    gradients: dict[int, Tensor | None] | None = None
    has_states: bool = False
    touched: bool = False
    logged: list[dict[str, Any]] = field(default_factory=list)
    zeros: Shared | None = None
