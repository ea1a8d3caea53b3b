"""The rows of a figure: what a rank does, as blocks on the axes of matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_fxpipe.pictures.looks import LOOKS, OTHER, Look
from lightning_fxpipe.simulation.actions import Action
from lightning_fxpipe.simulation.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#1c2430"
# An SVG with an element for each of so many actions would be slow to open: they are pixels in it.
_MOST_SHAPES = 4000
_LABEL_SIZES = (7.0, 5.5)  # in points
_CHARACTER_INCHES = 0.009  # for each point of the size


@dataclass(frozen=True)
class Scale:
    """Units of a timeline's seconds on the axes.

    Attributes:
        factor: Of the axes' unit in a second.
        inches_per_second: On paper.
        row_inches: Height of a row.
    """

    factor: float
    inches_per_second: float
    row_inches: float


def draw_rows(axes: Axes, timeline: Timeline, scale: Scale) -> None:
    """Draws what each rank does, rank r at height r."""
    critical = frozenset(timeline.critical_path)
    num_microbatches = 1 + max((work.microbatch for spans in timeline.ranks for work in actions_of(spans)), default=0)
    is_raster = sum(map(len, timeline.ranks)) > _MOST_SHAPES
    for rank, spans in enumerate(timeline.ranks):
        colours = [_colour(span, num_microbatches) for span in spans]
        line = 0.0 if is_raster else 0.5
        axes.broken_barh(
            _bars(spans, scale),
            (rank - 0.4, 0.8),
            facecolors=colours,
            edgecolors="white",
            linewidth=line,
            rasterized=is_raster,
            snap=False,
        )
        later = _bars(_of_later_stages(spans), scale)
        axes.broken_barh(later, (rank + 0.29, 0.11), facecolors=INK, alpha=0.5, linewidth=0, rasterized=is_raster, snap=False)
        outlined = _bars([span for span in spans if span.work in critical], scale)
        line = 0.4 if is_raster else 1.1
        axes.broken_barh(
            outlined, (rank - 0.4, 0.8), facecolors="none", edgecolors=INK, linewidth=line, rasterized=is_raster, snap=False
        )
        if scale.row_inches > 0.14 and not is_raster:
            _label(axes, rank, spans, scale)


def actions_of(spans: Sequence[Span]) -> list[Action]:
    """The actions among spans."""
    return [span.work for span in spans if isinstance(span.work, Action)]


def has_several_stages(spans: Sequence[Span]) -> bool:
    """Returns True if a rank has actions of more than one stage."""
    return len({work.stage for work in actions_of(spans)}) > 1


def colour_between(look: Look, share: float) -> tuple[float, float, float]:
    """A share of the way from the colour of the first microbatch to that of the last, in red, green and blue."""
    first, last = ([int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)] for text in look.light)
    red, green, blue = (a + (b - a) * share for a, b in zip(first, last, strict=True))
    return red, green, blue


def _colour(span: Span, num_microbatches: int) -> tuple[float, float, float]:
    if isinstance(span.work, str):
        return colour_between(OTHER, 0.0)
    return colour_between(LOOKS[span.work.kind], span.work.microbatch / max(1, num_microbatches - 1))


def _bars(spans: Sequence[Span], scale: Scale) -> list[tuple[float, float]]:
    return [(span.start_seconds * scale.factor, span.seconds * scale.factor) for span in spans]


def _of_later_stages(spans: Sequence[Span]) -> list[Span]:
    """Selects the spans of all but the first stage of a rank, which get a stripe."""
    first = min((work.stage for work in actions_of(spans)), default=0)
    return [span for span in spans if isinstance(span.work, Action) and span.work.stage != first]


def _label(axes: Axes, rank: int, spans: Sequence[Span], scale: Scale) -> None:
    """Microbatches, and words for what is no action, where there is room."""
    for span in spans:
        text = str(span.work.microbatch) if isinstance(span.work, Action) else span.work
        room = span.seconds * scale.inches_per_second - 0.02
        size = next((size for size in _LABEL_SIZES if size * _CHARACTER_INCHES * len(text) < room), None)
        if size is not None:
            middle = (span.start_seconds + span.end_seconds) / 2 * scale.factor
            axes.text(middle, rank, text, ha="center", va="center", fontsize=size, color=INK)
