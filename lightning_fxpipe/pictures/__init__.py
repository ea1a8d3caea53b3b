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
