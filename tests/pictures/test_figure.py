"""Figures of few and of many ranks can be read back, and show what they should; errors say what is missing."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from lightning_fxpipe import FxPipeError
from lightning_fxpipe.pictures.figure import save_figure
from lightning_fxpipe.simulation.by_name import SimulatedSchedule
from lightning_fxpipe.simulation.timeline import Timeline
from tests.pictures.examples import measured, timeline

matplotlib = pytest.importorskip("matplotlib")


def pixels(path: Path) -> object:
    """Of a PNG file, by row and column, as red, green, blue and opacity."""
    from matplotlib import image

    return image.imread(path)


def num_pixels(path: Path, colour: str) -> int:
    """How many pixels have a colour, nearly."""
    import numpy

    wanted = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    near = numpy.abs(numpy.asarray(pixels(path))[..., :3] - wanted).max(axis=-1) < 0.02
    return int(near.sum())


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (8, 16), (64, 128)])
@pytest.mark.parametrize("schedule", ["1f1b", "v_half"])
def test_a_figure_of_any_number_of_ranks_is_drawn(
    tmp_path: Path, schedule: SimulatedSchedule, num_ranks: int, num_microbatches: int
) -> None:
    found = timeline(schedule, num_ranks, num_microbatches)
    save_figure([found], tmp_path / "one.png")
    backward = "#f0a35e" if schedule == "1f1b" else "#e6c04a"  # that of the first microbatch
    assert num_pixels(tmp_path / "one.png", "#6d9eda") > 50
    assert num_pixels(tmp_path / "one.png", backward) > 50
    save_figure([found, found], tmp_path / "two.svg")
    root = ElementTree.parse(tmp_path / "two.svg").getroot()
    assert root.tag.endswith("svg")
    assert (tmp_path / "two.svg").stat().st_size < 3e6


def test_several_timelines_are_under_each_other(tmp_path: Path) -> None:
    found = timeline()
    save_figure([found], tmp_path / "one.png")
    save_figure([found, measured(found)], tmp_path / "two.png")
    one, two = (num_pixels(tmp_path / name, "#ffffff") for name in ("one.png", "two.png"))
    assert two > 1.5 * one
    assert num_pixels(tmp_path / "one.png", "#b9a9dc") == 0
    assert num_pixels(tmp_path / "two.png", "#b9a9dc") > 50  # the optimizer's step


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FxPipeError, match="A figure cannot be saved in this format") as caught:
        save_figure([timeline()], tmp_path / "step.docx")
    assert caught.value.observed == ".docx"


@pytest.mark.parametrize("timelines", [[], [Timeline("nothing", ((), ()))]])
def test_nothing_is_not_drawn(tmp_path: Path, timelines: list[Timeline]) -> None:
    with pytest.raises(FxPipeError, match="There is no timeline to draw"):
        save_figure(timelines, tmp_path / "step.png")


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FxPipeError, match="Figures need matplotlib, which is not installed") as caught:
        save_figure([timeline()], tmp_path / "step.png")
    assert "pip install 'lightning_fxpipe[plot]'" in str(caught.value)
