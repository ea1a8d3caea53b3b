"""Canary of the device mesh that a LightningModule shows."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytorch_lightning

from lightning_fxpipe._compat.device_mesh import set_device_mesh


def test_the_mesh_is_what_the_module_shows() -> None:
    mesh: Any = object()
    for module in (L.LightningModule(), pytorch_lightning.LightningModule()):
        assert module.device_mesh is None
        set_device_mesh(module, mesh)
        assert module.device_mesh is mesh
