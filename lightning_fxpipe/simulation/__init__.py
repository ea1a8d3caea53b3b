"""Time and memory of a schedule before anything runs: its table of actions, and the time of each action.

- ``actions``: an action, and the table that says which rank does which in what order.
- ``orders``: the tables of GPipe, 1F1B, looped breadth-first, interleaved 1F1B and interleaved zero bubble.
- ``zero_bubble``, ``zero_bubble_v``, ``walk``: tables made to fit given costs and a limit of memory.
- ``fitted``: the better of such a table and of the one for equal costs.
- ``v_shape``: tables in which a rank's two stages lie in a V, for half or a third of the memory.
- ``v_orders``: ZB-V and DualPipeV, by the number of ranks and microbatches.
- ``by_name``: all of these by name, and the entry: what a schedule takes.
- ``costs``: seconds and bytes of a stage's actions, and what a transfer between ranks takes.
- ``devices``: what a rank computes with, and the time that operators take on it.
- ``simulator``: runs a table: when each action begins and ends, what is idle, what decides, what is in memory.
- ``timeline``: what each rank does when, simulated or measured, for pictures.

A table is the very one that the runtime executes (``schedules``). Nothing here knows torch.
"""

from lightning_fxpipe.simulation.actions import ActionTable as ActionTable
from lightning_fxpipe.simulation.by_name import simulate as simulate
from lightning_fxpipe.simulation.costs import Link as Link
from lightning_fxpipe.simulation.costs import Overhead as Overhead
from lightning_fxpipe.simulation.costs import StageCosts as StageCosts
from lightning_fxpipe.simulation.devices import DEVICES as DEVICES
from lightning_fxpipe.simulation.devices import Device as Device
from lightning_fxpipe.simulation.simulator import Simulation as Simulation
from lightning_fxpipe.simulation.timeline import Span as Span
from lightning_fxpipe.simulation.timeline import Timeline as Timeline

__all__ = [
    "DEVICES",
    "ActionTable",
    "Device",
    "Link",
    "Overhead",
    "Simulation",
    "Span",
    "StageCosts",
    "Timeline",
    "simulate",
]
