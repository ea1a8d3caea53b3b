"""Checkpoints: of stages, under the names of the whole model.

- ``atomic``: a file or folder is written under another name, and gets its own once it is complete.
- ``locations``, ``formats``, ``folders``, ``safetensors_files``: where they lie, and the forms they come in.
- ``stage_state``: a stage's weights and optimizer states to and from checkpoints.
- ``saving``: all ranks write a folder together: who writes when, and in the background.
- ``single_file``: as a file of one device, and folders behind URLs.
- ``converting``, ``inspecting``: without a model.
"""
