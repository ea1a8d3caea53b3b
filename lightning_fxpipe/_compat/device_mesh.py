"""The attribute of a LightningModule that has its device mesh. Lightning 2.6; tests/_compat/test_device_mesh.py reads it."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh


def set_device_mesh(module: Any, mesh: DeviceMesh | None) -> None:
    """Makes a mesh what ``self.device_mesh`` gives, which has no setter: Lightning's own strategies set the attribute, too."""
    module._device_mesh = mesh
