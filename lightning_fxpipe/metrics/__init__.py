"""Logged values of a step, on every rank as on one device.

- ``metric_calls``: a step's torchmetrics, and what their calls are to those who watch.
- ``metric_states``: their states, sent from the last stage to every rank.
- ``step_log``: calls of ``self.log`` on the last stage, repeated on every rank.
"""
