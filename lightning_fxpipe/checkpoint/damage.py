"""One error for whatever a damaged checkpoint makes its readers raise."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_fxpipe.errors import FxPipeError, text_of


@contextmanager
def damage_told(where: str) -> Iterator[None]:
    """Around the reading of what may be damaged: a bit may change an offset, a name or a size, and so bring about any error.

    Raises:
        FxPipeError: In place of such an error.
        pickle.UnpicklingError: Torch's refusal of a class that it does not know: it says which, and what to do about it.
    """
    try:
        yield
    except (FxPipeError, PermissionError, ConnectionError, TimeoutError):
        raise
    except pickle.UnpicklingError as error:
        if names_a_class(error):
            raise
        raise damage_error(where, error) from error
    except Exception as error:  # MemoryError and RecursionError, too
        raise damage_error(where, error) from error


def names_a_class(error: pickle.UnpicklingError) -> bool:
    """Returns True if torch refuses a class or function of a file, which is no damage."""
    return "GLOBAL" in text_of(error) or "unrecognized function" in text_of(error)


def damage_error(where: str, observed: BaseException | str) -> FxPipeError:
    """The error for a checkpoint that cannot be read."""
    text = observed
    if isinstance(observed, BaseException):
        lines = text_of(observed).splitlines()
        # Torch begins with what one could do if the file were whole.
        line = next((line.strip() for line in lines if "WeightsUnpickler error" in line), "".join(lines[:1]))
        text = f"{type(observed).__name__}: {line}" if line else type(observed).__name__
    lacks_memory = isinstance(observed, MemoryError) or "alloc" in str(text)
    return FxPipeError(
        "The checkpoint cannot be read: "
        + (
            "loading it needs more memory than is available, or the sizes stored in it are wrong." if lacks_memory else _DAMAGED
        ),
        where=where,
        observed=str(text),
        expected="a checkpoint of a Trainer, a state dict, or a safetensors file, unmodified",
        todo="Use an earlier checkpoint.",
    )


_DAMAGED = "it is damaged or is not a checkpoint."


def unknown_error(where: str, observed: str) -> FxPipeError:
    """The error for what may be whole, and is no checkpoint."""
    return FxPipeError(
        "The checkpoint format is not recognised.",
        where=where,
        observed=observed,
        expected="a folder of torch.distributed.checkpoint, a checkpoint of a Trainer, a state dict, or safetensors",
    )
