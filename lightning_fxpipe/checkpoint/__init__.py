"""Checkpoints: of stages, under the names of the whole model.

- ``replacing``: files and folders that get their name when they are complete.
- ``locations``, ``formats``, ``folders``, ``safetensors_files``: where they lie, and the forms they come in.
- ``collect``: what the ranks have in parts, on rank 0.
- ``stage_state``: a stage's state to and from checkpoints.
- ``saving``, ``writing``: by all ranks together, and in other forms than a folder.
- ``converting``, ``inspecting``: without a model.
"""
