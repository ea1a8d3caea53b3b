"""The page's file: what is in it is the simulation, and no name of the user's is taken for markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lightning_fxpipe.pictures.html_page import html_of, json_of, write_page
from lightning_fxpipe.pictures.page import Page, page_of_simulated_plan, page_of_timelines
from lightning_fxpipe.simulation.by_name import SimulatedSchedule
from lightning_fxpipe.simulation.timeline import Span, Timeline
from tests.pictures.examples import WICKED, WIDTH, measured, simulated_plan, timeline

VOID = {"meta", "link"}


class Markup(HTMLParser):
    """What a browser makes of a file: elements, and the texts in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.append((self.open[-1], data))

    def only(self, tag: str) -> str:
        """The text of the only element of a kind."""
        return "".join(data for name, data in self.texts if name == tag)


def data_in(text: str) -> dict[str, Any]:
    """The block of data of a page."""
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    return dict(json.loads(block))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "v_half"])
def test_the_data_has_every_action_of_the_simulation_and_its_time(schedule: SimulatedSchedule) -> None:
    simulated = simulated_plan(4, 8, schedule)
    simulation = simulated.simulations[schedule]
    (found,) = data_in(html_of(page_of_simulated_plan(simulated)))["alternatives"][0]["timelines"]
    assert found["label"] == f"{schedule}, simulated"
    assert found["seconds"] == pytest.approx(simulation.seconds, rel=1e-8)
    assert found["idle"] == pytest.approx(simulation.bubble_fraction)
    assert [rank["number"] for rank in found["ranks"]] == ([0, 1, 2, 3] if schedule == "v_half" else [3, 2, 1, 0])
    for rank, events in zip(found["ranks"], simulation.ranks, strict=True):
        assert rank["work"] == [str(event.action) for event in events]
        assert rank["starts"] == pytest.approx([event.start_seconds for event in events], rel=1e-8)
        assert rank["ends"] == pytest.approx([event.end_seconds for event in events], rel=1e-8)
        assert [rank["work"][index] for index in rank["critical"]] == [
            str(event.action) for event in events if event in simulation.critical_path
        ]


def test_the_data_has_what_is_kept_wherever_it_changes() -> None:
    found = Timeline("a", ((Span("x", 0.0, 3.0),),), (((0.0, 5.0), (1.0, 5.0), (2.0, 7.4), (3.0, 5.0)),))
    (rank,) = data_in(html_of(page_of_timelines("T", {"a": [found]})))["alternatives"][0]["timelines"][0]["ranks"]
    assert (rank["keptSeconds"], rank["keptBytes"]) == ([0, 2, 3], [5, 7, 5])


def test_peaks_of_memory_are_those_of_the_simulation() -> None:
    simulated = simulated_plan(3, 6, "1f1b")
    (found,) = data_in(html_of(page_of_simulated_plan(simulated)))["alternatives"][0]["timelines"]
    assert [max(rank["keptBytes"]) for rank in found["ranks"]] == pytest.approx(simulated.simulations["1f1b"].peak_bytes)


def test_the_data_has_stages_parameters_and_bytes_at_the_cuts() -> None:
    simulated = simulated_plan(3, 6, "gpipe")
    plan = data_in(html_of(page_of_simulated_plan(simulated)))["plan"]
    assert [stage["numParameters"] for stage in plan["stages"]] == [WIDTH * WIDTH] * 3
    assert [stage["outputBytes"] for stage in plan["stages"]] == [2 * WIDTH * 4, 2 * WIDTH * 4, 0]
    assert [stage["stateBytes"] for stage in plan["stages"]] == [1e9, 1e9 + 1, 1e9 + 2]
    assert [stage["activationBytes"] for stage in plan["stages"]] == [2e9] * 3
    assert plan["parameters"][1:] == [
        ["net.1.weight", [WIDTH, WIDTH], [1]],
        ["net.2.weight", [WIDTH, WIDTH], [2]],
        ["head.bias", [3], [2]],
        ["teacher.weight", [2, 2], []],
    ]
    assert plan["text"] == str(simulated.plan)


def test_timelines_that_are_measured_have_no_critical_path_and_keep_nothing_that_is_known() -> None:
    page = page_of_timelines("T", {"1f1b": [timeline(), measured(timeline())]})
    first, second = data_in(html_of(page))["alternatives"][0]["timelines"]
    assert any(rank["critical"] and rank["keptBytes"] for rank in first["ranks"])
    assert not any(rank["critical"] or rank["keptBytes"] for rank in second["ranks"])
    assert [rank["work"][-1] for rank in second["ranks"]] == ["optimizer step"] * 2


def test_the_page_is_closed_markup_with_a_language_a_title_and_a_heading() -> None:
    text = html_of(page_of_simulated_plan(simulated_plan(2, 2, "gpipe"), title="Step & <time>"))
    markup = Markup(text)
    assert text.startswith("<!DOCTYPE html>")
    assert markup.open == []
    assert dict(markup.elements)["html"] == {"lang": "en"}
    assert markup.only("title") == markup.only("h1") == "Step & <time>"
    ids = [attributes["id"] for _, attributes in markup.elements if "id" in attributes]
    assert len(ids) == len({*ids})


def test_no_name_ends_the_data_or_becomes_markup() -> None:
    found = Timeline(WICKED, ((Span(WICKED, 0.0, 1.0),),))
    page = page_of_timelines(WICKED, {WICKED: [found]}, plan=simulated_plan(2, 2).plan, notes=[WICKED])
    markup = Markup(html_of(page))
    assert [name for name, _ in markup.elements if name in ("b", "i")] == []
    assert [name for name, _ in markup.elements].count("script") == 2
    assert markup.only("h1") == WICKED
    assert not {*"<>&\u2028"} & {*json_of(page)}
    data = json.loads(json_of(page))
    assert data["title"] == data["notes"][0] == data["alternatives"][0]["timelines"][0]["ranks"][0]["work"][0] == WICKED
    assert data["plan"]["parameters"][0][0] == f"net.{WICKED}.weight"


def test_the_page_asks_for_nothing_from_anywhere() -> None:
    text = html_of(page_of_simulated_plan(simulated_plan(2, 2, "gpipe")))
    links = [value for _, attributes in Markup(text).elements for name, value in attributes.items() if name in ("src", "href")]
    assert links == ["data:,"]
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|@import|fetch\(|XMLHttpRequest", text)


def test_a_page_is_written_in_utf_8_and_needs_neither_plan_nor_timelines(tmp_path: Path) -> None:
    write_page(Page(title="Nichts – 無"), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_bytes().decode("utf-8")
    assert Markup(text).only("title") == "Nichts – 無"
    assert data_in(text)["plan"] is None
    assert data_in(text)["alternatives"] == []
