"""Which contents an object has, by its class, and what is left alone."""

from __future__ import annotations

import re
from argparse import Namespace
from collections import ChainMap, UserDict, UserList
from datetime import date, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from logging import Logger
from pathlib import PurePath
from queue import LifoQueue, PriorityQueue, Queue
from types import GetSetDescriptorType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from lightning_fxpipe.user_code.code_contents import OF_CODE
from lightning_fxpipe.user_code.code_names import is_followed
from lightning_fxpipe.user_code.contents import ATTRIBUTES, CONTAINERS, OTHERS, SLOTS, Kind, slots
from lightning_fxpipe.user_code.iterators import ITERATOR, Rewindable


def kinds_of(value: Any) -> tuple[Kind, ...]:
    """The kinds of contents that an object has, by its class; none for what cannot change or is left alone."""
    cls: Any = type(value)
    return kinds_of_class(cls)


@lru_cache(maxsize=4096)
def kinds_of_class(cls: type) -> tuple[Kind, ...]:
    """Returns the kinds of contents that the objects of a class have."""
    for base, kind in CONTAINERS:
        if issubclass(cls, base):
            return (kind, *_object_kinds(cls)) if cls is not base and is_users(cls) else (kind,)
    if issubclass(cls, Tensor):
        return ()
    for base, kind in (*OTHERS, *OF_CODE, (Rewindable, ITERATOR)):
        if issubclass(cls, base):
            return (kind,)
    return _object_kinds(cls) if is_users(cls) or _holds_data(cls) else ()


def is_users(cls: type) -> bool:
    """Returns True if a class is one of user code or of a library of models, and no part of torch, Lightning or Python
    itself.
    """
    if cls in _PLAIN_HOLDERS:
        return True
    if not is_followed(str(cls.__module__)) or issubclass(cls, BaseException):
        return False
    # A Trainer, strategy or loop of the user's own holds the whole run.
    return not any(base.__module__.startswith(_RUNS) for base in cls.__mro__)


def _holds_data(cls: type) -> bool:
    """True for a library's class whose objects user code fills and changes: datasets, samplers and callbacks."""
    if issubclass(cls, (Dataset, Sampler)):
        return True
    bases = {base.__name__ for base in cls.__mro__ if base.__module__.startswith(_CALLBACKS)}
    return "Callback" in bases and "ProgressBar" not in bases


def is_unchanging(cls: type) -> bool:
    """True if objects of a class without contents cannot change: such as a path, a fraction, a dtype or a function of C."""
    is_function = any("__call__" in vars(base) for base in cls.__mro__)
    return issubclass(cls, _UNCHANGING) or (is_function and not cls.__dictoffset__)


_UNCHANGING = (
    *(Enum, PurePath, range, slice, Decimal, Fraction, date, timedelta, re.Pattern, ModuleType, Logger),
    *(np.generic, np.dtype, torch.dtype, torch.device),
)
_PLAIN_HOLDERS = (
    *(Namespace, SimpleNamespace, UserDict, UserList, ChainMap),
    *(WeakKeyDictionary, WeakValueDictionary, WeakSet, Queue, LifoQueue, PriorityQueue),
)
_CALLBACKS = ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks")
_RUNS = tuple(
    f"{top}.{part}"
    for top in ("lightning.pytorch", "pytorch_lightning")
    for part in ("trainer", "strategies", "loops", "accelerators", "loggers", "profilers", "plugins")
)


def _object_kinds(cls: type) -> tuple[Kind, ...]:
    has_slots = bool(slots(cls))
    # A member of a class that is written in C, as SimpleNamespace.
    kinds = (GetSetDescriptorType, MemberDescriptorType)
    has_dict = any(isinstance(vars(base).get("__dict__"), kinds) for base in cls.__mro__)
    return (*((SLOTS,) if has_slots else ()), *((ATTRIBUTES,) if has_dict else ()))
