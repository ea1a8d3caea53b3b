"""Checkpoints: of stages, under the names of the whole model.

- ``atomic``: a file or folder is written elsewhere, apart from what other runs write, and gets its name once it is complete.
- ``damage``, ``checksums``: one error for whatever damage does to readers, and how it is seen at all.
- ``pickles``: files of ``torch.save``; what code of them may run.
- ``locations``, ``formats``, ``folders``, ``safetensors_files``: where they lie, and the forms they come in.
- ``stage_state``: a stage's weights and optimizer states to and from checkpoints.
- ``saving``: all ranks write a folder together: who writes when, and in the background.
- ``single_file``: as a file of one device, and folders behind URLs.
- ``converting``, ``inspecting``: without a model.
"""
