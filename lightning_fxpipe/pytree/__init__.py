"""Nested values: what is in a batch, an argument or a result, and how it is opened and built again.

- ``containers``: the containers that people use.
- ``structure``: the tensors inside a value of any type, and new values with other tensors.
- ``sending``: values on their way to other ranks.
- ``shapes``: which dimensions vary from batch to batch, and which of them together.
- ``sizes``: symbolic sizes as arguments, numbers and bytes of tensors.
"""
