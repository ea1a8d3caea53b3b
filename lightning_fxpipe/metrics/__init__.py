"""What a step logs, on every rank as on one device.

- ``calls``: a step's torchmetrics, and what their calls are to those who watch.
- ``states``: their states, on every rank.
- ``step_log``: calls of ``self.log`` on the last stage, repeated on every rank.
"""
