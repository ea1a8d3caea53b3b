"""Plans and timelines, for the eye.

- ``page``: what a page shows, as frozen data: a plan, and timelines under each of several alternatives.
- ``replica_grid``: which rank has which stages of which replica, for the page and as text before the first step.
- ``page_data``: the same as plain values, for the page's script.
- ``html_page``: one HTML file that needs no network; its markup, style and scripts are in ``page_parts``.
- ``figure``: a PNG or SVG file of timelines; ``figure_rows``: its rows.
- ``chrome_trace``: timelines as a file for ui.perfetto.dev.
- ``looks``: the words and colours of kinds of actions, the same in all of them.

What is drawn is a ``simulation.timeline.Timeline``, whether it was simulated or measured.
"""

from lightning_fxpipe.pictures.chrome_trace import write_trace as write_trace
from lightning_fxpipe.pictures.figure import save_figure as save_figure
from lightning_fxpipe.pictures.html_page import write_page as write_page
from lightning_fxpipe.pictures.page import Page as Page
from lightning_fxpipe.pictures.page import page_of_layouts as page_of_layouts
from lightning_fxpipe.pictures.page import page_of_simulated_plan as page_of_simulated_plan
from lightning_fxpipe.pictures.page import page_of_timelines as page_of_timelines

__all__ = [
    "Page",
    "page_of_layouts",
    "page_of_simulated_plan",
    "page_of_timelines",
    "save_figure",
    "write_page",
    "write_trace",
]
