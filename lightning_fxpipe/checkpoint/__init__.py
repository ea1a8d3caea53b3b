"""Checkpoints: of stages, under the names of the whole model.

- ``atomic``: files and folders that get their name when they are complete.
- ``locations``, ``formats``, ``folders``, ``safetensors_files``: where they lie, and the forms they come in.
- ``stage_state``: a stage's weights and optimizer states to and from checkpoints.
- ``saving``: all ranks write a folder together: in which order, and in the background.
- ``single_file``: as a file of one device, and folders behind URLs.
- ``converting``, ``inspecting``: without a model.
"""
