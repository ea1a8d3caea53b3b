"""Nested values: what is in a batch, an argument or a result, and how it is opened and built again.

- ``containers``: the containers that people use (dicts, tuples, dataclasses), one level at a time.
- ``structure``: all tensors inside a value of any type, and new values with other tensors.
- ``portable``: copies of values that other ranks can get.
- ``shapes``: which dimensions vary from batch to batch, and which of them together.
- ``sizes``: symbolic sizes as arguments, numbers and bytes of tensors.
"""
