"""Private names of torch and Lightning, and nothing else; each has its reason, its versions and a canary test.

- ``torch``: torch's, but for those of the next eight.
- ``fake_calls``, ``fake_sizes``: of operators on tensors without data, and of arithmetic on their sizes.
- ``operators``: of their schemas.
- ``autograd``: of its autograd engine.
- ``step_hooks``: of the hooks around steps of its optimizers.
- ``modes``: its modes, and their stack.
- ``pipelining``: of the stages of its pipelines.
- ``checkpoints``: around the files of its checkpoints.
- ``roots``: ``lightning`` and ``pytorch_lightning``, the same code under two names.
- ``lightning``: Lightning's; with ``loops``, ``loggers`` and ``device_mesh``.
"""
