"""A PNG or SVG file of timelines, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.pictures.figure_rows import INK, Scale, actions_of, colour_between, draw_rows, has_several_stages
from lightning_fxpipe.pictures.looks import LOOKS, OTHER
from lightning_fxpipe.reporting.table import human_seconds
from lightning_fxpipe.simulation.actions import Kind
from lightning_fxpipe.simulation.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg")
_WIDTH_INCHES = 11.0
_PLOT_INCHES = 10.2  # of the width, without the names of ranks
_HEAD_INCHES = 0.75  # above and below the rows of a timeline
_MOST_INCHES = 60.0  # of the height, however many timelines there are
_DOTS_PER_INCH = 130
_MUTED, _GRID = "#5d6878", "#dfe3e9"


def save_figure(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Draws timelines under each other, with the same scale of time.

    Args:
        timelines: What is drawn.
        path: Where it is saved; its ending says as what: ``.png`` or ``.svg``.

    Raises:
        FxPipeError: There is no matplotlib, nothing to draw, or the ending is another one.
        OSError: It cannot be written there.
    """
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        raise FxPipeError(
            "A figure cannot be saved in this format.",
            where=str(path),
            observed=path.suffix or "no suffix",
            expected=" or ".join(ENDINGS),
            todo="Use a file name with one of these suffixes.",
        )
    _figure_of(timelines).savefig(path, dpi=_DOTS_PER_INCH)


def _figure_of(timelines: Sequence[Timeline]) -> Figure:
    make = _figure_class()
    spans = [span for timeline in timelines for rank in timeline.ranks for span in rank]
    if not spans:
        raise FxPipeError(
            "There is no timeline to draw.",
            observed=f"{len(timelines)} timelines without actions",
            expected="at least one action",
            todo="Pass timelines of a step; with simulate_plan, choose schedules that support this number of stages and "
            "microbatches.",
        )
    start, end = min(0.0, *(span.start_seconds for span in spans)), max(span.end_seconds for span in spans)
    unit, factor = next(((name, times) for name, times in (("s", 1.0), ("ms", 1e3)) if end * times >= 1), ("us", 1e6))
    heights = [_HEAD_INCHES + len(timeline.ranks) * _row_inches(timeline) for timeline in timelines]
    figure: Figure = make(figsize=(_WIDTH_INCHES, min(_MOST_INCHES, 0.4 + sum(heights))), layout="constrained")
    all_axes: Any = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes, timeline in zip(all_axes[:, 0], timelines, strict=True):
        _prepare(axes, timeline)
        axes.set_xlim(start * factor, end * factor)
        draw_rows(axes, timeline, Scale(factor, _PLOT_INCHES / (end - start), _row_inches(timeline)))
    all_axes[-1, 0].set_xlabel(unit, color=_MUTED)
    _add_legend(figure, timelines)
    return figure


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure  # comes with the extra `plot`
    except ImportError as error:
        raise FxPipeError(
            "Figures need matplotlib, which is not installed.",
            observed=str(error),
            expected="the package matplotlib",
            todo="Run `pip install 'lightning_fxpipe[plot]'`, or save an HTML page, which needs no extra package.",
        ) from error
    return Figure


def _row_inches(timeline: Timeline) -> float:
    return min(0.3, max(0.085, 6.0 / max(1, len(timeline.ranks))))


def _prepare(axes: Axes, timeline: Timeline) -> None:
    """Title, names of ranks, that of stage 0 on top, and a grid of times."""
    num_ranks = len(timeline.ranks)
    idle = f"{100 * timeline.bubble_fraction:.1f} % idle"
    axes.set_title(f"{timeline.label}: {human_seconds(timeline.seconds)}, {idle}", loc="left", fontsize=10, color=INK)
    axes.set_ylim(num_ranks - 0.5, -0.5)
    every = -(-num_ranks // 16)
    axes.set_yticks(range(0, num_ranks, every), [f"rank {number}" for number in timeline.rank_numbers[::every]])
    axes.tick_params(length=0, labelsize=8, labelcolor=_MUTED)
    axes.grid(axis="x", color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _add_legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    from matplotlib.patches import Patch

    ranks = [spans for timeline in timelines for spans in timeline.ranks]
    kinds = {work.kind for spans in ranks for work in actions_of(spans)}
    looks = [LOOKS[kind] for kind in Kind if kind in kinds]
    if any(isinstance(span.work, str) for spans in ranks for span in spans):
        looks.append(OTHER)
    handles = [Patch(facecolor=colour_between(look, 0.3), label=look.words) for look in looks]
    if any(map(has_several_stages, ranks)):
        handles.append(Patch(facecolor=INK, alpha=0.5, label="stripes: a later stage of the rank"))
    if any(timeline.critical_path for timeline in timelines):
        handles.append(Patch(facecolor="none", edgecolor=INK, label="critical path"))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=8, labelcolor=INK)
