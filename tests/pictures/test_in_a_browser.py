"""The page in a browser: it draws, without complaint, and answers to mouse and keyboard.

Skipped where there is no Chromium on PATH or in FXPIPE_CHROMIUM; on Debian ``apt-get install chromium`` brings one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_fxpipe.distributed.topology import Placement
from lightning_fxpipe.pictures.html_page import write_page
from lightning_fxpipe.pictures.looks import LOOKS
from lightning_fxpipe.pictures.page import Page, page_of_simulated_plan, page_of_timelines
from lightning_fxpipe.pictures.replica_grid import ReplicaGrid
from lightning_fxpipe.simulation.actions import BACKWARD, FORWARD
from tests.pictures.browser import Browser, browser, find_browser
from tests.pictures.examples import WICKED, measured, plan_of, simulated_plan, timeline

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on PATH or in FXPIPE_CHROMIUM")

# The number of pixels of a canvas of which something is true; what it shows; and where it is.
PIXELS = """(canvas => {{
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', {{ willReadFrequently: true }});
    copy.drawImage(canvas, 0, 0);
    const pixels = copy.getImageData(0, 0, canvas.width, canvas.height).data;
    let count = 0;
    for (let index = 0; index < pixels.length; index += 4) {{
        const [red, green, blue] = pixels.slice(index, index + 3);
        count += {condition};
    }}
    return count;
}})(document.querySelectorAll('canvas')[{index}])"""
PICTURE = "document.querySelectorAll('canvas')[{index}].toDataURL()"
BOX = (
    "(({{x, y, width, height}}) => [x, y, width, height])(document.querySelectorAll('canvas')[{index}].getBoundingClientRect())"
)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    with browser(PROGRAM, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def shown(chromium: Browser, tmp_path: Path) -> Iterator[Browser]:
    """The page of three stages and six microbatches under two schedules; nothing may be complained of."""
    show(chromium, page_of_simulated_plan(simulated_plan(3, 6, "1f1b", "v_half")), tmp_path)
    yield chromium
    assert chromium.complaints == []


def show(chromium: Browser, page: Page, folder: Path, *, is_dark: bool = False) -> None:
    write_page(page, folder / "page.html")
    chromium.open(folder / "page.html", is_dark=is_dark)


def text(shown: Browser, selector: str) -> str:
    return str(shown.run(f"document.querySelector({selector!r}).innerText"))


def picture(shown: Browser, index: int = 0) -> str:
    """What a canvas shows: of the first timeline its actions, then what is kept."""
    return str(shown.run(PICTURE.format(index=index)))


def num_pixels(shown: Browser, condition: str, index: int) -> int:
    return int(shown.run(PIXELS.format(condition=condition, index=index)))


def is_colour(colour: str) -> str:
    """The condition that a pixel has a colour, but for rounding."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"Math.hypot(red - {red}, green - {green}, blue - {blue}) < 3"


def inside(shown: Browser, across: float, down: float, index: int = 0) -> tuple[float, float]:
    """The place on the screen of shares of a canvas."""
    shown.run(f"document.querySelectorAll('canvas')[{index}].scrollIntoView({{block: 'center'}})")
    x, y, width, height = shown.run(BOX.format(index=index))
    return x + across * width, y + down * height


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "is_dark"), [(2, 4, False), (2, 4, True), (8, 16, False), (8, 16, True), (64, 128, True)]
)
def test_timelines_and_memory_of_any_number_of_ranks_are_drawn(
    chromium: Browser, tmp_path: Path, num_stages: int, num_microbatches: int, is_dark: bool
) -> None:
    simulated = simulated_plan(num_stages, num_microbatches, "1f1b", "v_half")
    show(chromium, page_of_simulated_plan(simulated), tmp_path, is_dark=is_dark)
    for kind in (FORWARD, BACKWARD):
        of_first_microbatch, _ = LOOKS[kind].dark if is_dark else LOOKS[kind].light
        assert num_pixels(chromium, is_colour(of_first_microbatch), 0) > 200
    assert num_pixels(chromium, "Math.max(green, blue) - red > 60", 1) > 500  # neither text nor grid
    assert chromium.run("document.querySelectorAll('#stage-table tbody tr').length") == num_stages
    # Nothing is wider than the window.
    assert chromium.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert chromium.complaints == []


def test_the_table_says_of_each_schedule_what_the_simulation_says(shown: Browser) -> None:
    rows = [line.split() for line in text(shown, "#schedule-table").splitlines() if line.strip()]
    cells = " ".join(word for row in rows for word in row)
    simulations = simulated_plan(3, 6, "1f1b", "v_half").simulations
    for name, found in simulations.items():
        assert f"{name} {found.seconds * 1e3:.3g} ms {100 * found.bubble_fraction:.1f} %" in cells
    assert "over the limit" in cells  # 1F1B keeps three microbatches of 2 GB on the rank of stage 0
    assert "dualpipev There are too few microbatches." in cells
    assert shown.run("document.querySelectorAll('input:disabled').length") == 1


def test_choosing_another_schedule_shows_its_timeline(shown: Browser) -> None:
    before = picture(shown)
    assert text(shown, ".chart h3").startswith("1f1b, simulated")
    shown.run("document.querySelectorAll('input')[0].focus()")
    shown.press("ArrowDown")
    assert text(shown, ".chart h3").startswith("v_half, simulated")
    assert picture(shown) != before
    assert "later stage of a rank" in text(shown, "#legend")


def test_the_wheel_zooms_to_where_it_points_and_a_button_shows_all_again(shown: Browser) -> None:
    whole = picture(shown)
    assert text(shown, "#window") == "the whole step"
    x, y = inside(shown, 0.5, 0.5)
    for _ in range(5):
        shown.point("mouseWheel", x, y, deltaX=0, deltaY=-100)
    assert picture(shown) != whole
    start, _, _, end, unit = text(shown, "#window").split()
    longest = 1e3 * max(found.seconds for found in simulated_plan(3, 6, "1f1b", "v_half").simulations.values())
    assert unit == "ms"
    assert float(start) < longest / 2 < float(end)
    assert 0.2 * longest < float(end) - float(start) < 0.4 * longest
    shown.run("document.getElementById('whole').click()")
    shown.wait_until_drawn()
    assert picture(shown) == whole


def test_dragging_moves_what_a_zoom_shows(shown: Browser) -> None:
    shown.run("document.getElementById('zoom-in').click()")
    shown.wait_until_drawn()
    x, y = inside(shown, 0.5, 0.5)
    before = text(shown, "#window")
    shown.point("mousePressed", x, y, button="left", clickCount=1)
    shown.point("mouseMoved", x + 200, y, button="left")
    shown.point("mouseReleased", x + 200, y, button="left", clickCount=1)
    assert float(text(shown, "#window").split()[0]) < float(before.split()[0])


def test_pointing_at_an_action_tells_all_of_it(shown: Browser) -> None:
    x, y = inside(shown, 0.06, 0.3)  # the first action of the first rank
    shown.point("mouseMoved", x, y)
    told = text(shown, "#tip")
    assert told.startswith("0F0: forward of stage 0, microbatch 0")
    assert "rank 2, from 0 s, takes 1 ms" in told
    assert "on the critical path" in told
    shown.point("mouseMoved", x, 5)
    assert shown.run("document.getElementById('tip').hidden")


def test_the_keyboard_goes_from_action_to_action_and_zooms(shown: Browser) -> None:
    before = picture(shown)
    shown.run("document.querySelector('canvas').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        shown.press(key)
    assert text(shown, "#chosen").startswith("1F0: forward of stage 1, microbatch 0; rank 1")
    assert picture(shown) != before
    for _ in range(4):
        shown.press("+")
    start, _, _, end, _ = text(shown, "#window").split()
    assert float(start) < 1.5 < float(end) < 10  # milliseconds: the chosen action is about 1.5
    shown.press("Escape")
    assert text(shown, "#chosen") == ""
    earlier = float(text(shown, "#window").split()[0])
    shown.press("ArrowRight", is_shift=True)
    assert text(shown, "#chosen") == ""
    assert float(text(shown, "#window").split()[0]) > earlier
    shown.press("0")
    assert text(shown, "#window") == "the whole step"


def test_one_ranks_memory_can_be_singled_out(shown: Browser) -> None:
    before = picture(shown, 1)
    shown.run(
        "(select => { select.value = '1'; select.dispatchEvent(new Event('change')); })(document.querySelector('select'))"
    )
    assert picture(shown, 1) != before


def test_a_simulated_and_a_measured_timeline_are_under_each_other(chromium: Browser, tmp_path: Path) -> None:
    found = timeline()
    show(chromium, page_of_timelines("Both", {"1f1b": [found, measured(found)]}), tmp_path)
    headings = chromium.run("[...document.querySelectorAll('.chart h3')].map(each => each.innerText)")
    assert [heading.split(" ")[0] for heading in headings] == ["1f1b,", "measured"]
    assert chromium.run("document.querySelectorAll('canvas').length") == 3  # what was kept is known of one
    ink = is_colour("#1c2430")  # of the critical path, which is known of one, too
    assert num_pixels(chromium, ink, 0) > 100
    assert num_pixels(chromium, ink, 2) < 20  # edges of texts
    assert "other work" in text(chromium, "#legend")
    assert chromium.run("document.getElementById('stages').hidden")
    assert chromium.complaints == []


def test_the_model_is_a_tree_whose_branches_open(shown: Browser) -> None:
    assert WICKED not in text(shown, "#tree")
    shown.run("[...document.querySelectorAll('summary')].find(each => each.innerText.startsWith('net')).focus()")
    shown.press("Enter")
    shown.press(" ")
    shown.press(" ")
    names = shown.run("[...document.querySelectorAll('#tree .name')].map(each => each.textContent)")
    assert names == ["(root)", "net", WICKED, "1", "2", "head", "teacher"]
    assert "every rank" in text(shown, "#tree")
    assert shown.run("document.querySelectorAll('b').length") == 0


def test_replicas_are_a_table_of_ranks(chromium: Browser, tmp_path: Path) -> None:
    placement = Placement(num_ranks=2, stages_per_rank=2, is_v=True)
    grid = ReplicaGrid(num_replicas=3, placement=placement, ranks_per_machine=2, gradient_bytes=(2048.0, 512.0))
    show(chromium, page_of_timelines("Three", {"1f1b": [timeline()]}, plan=plan_of(4), replicas=grid), tmp_path)
    cells = chromium.run(
        "[...document.querySelectorAll('#replica-table tr')].map(row => [...row.cells].map(each => each.innerText))"
    )
    assert [[" ".join(cell.split()) for cell in row] for row in cells] == [
        ["Replica", "Machine", "stages 03", "stages 12"],  # a chip for each
        *([str(replica), str(replica), *map(str, ranks)] for replica, ranks in enumerate(grid.ranks)),
        ["Averaged", "2.0 KiB", "512 B"],
    ]
    assert "3 replicas" in text(chromium, "#summary")
    assert chromium.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert chromium.complaints == []


def test_one_pipeline_has_no_table_of_replicas(shown: Browser) -> None:
    assert shown.run("document.getElementById('replicas').hidden")
    assert "replica" not in text(shown, "body")


def test_a_plan_by_itself_is_shown_with_the_reason(chromium: Browser, tmp_path: Path) -> None:
    show(chromium, Page(title="Plan", plan=plan_of(4), notes=("It cannot be simulated.",)), tmp_path)
    assert "It cannot be simulated." in text(chromium, "header")
    assert chromium.run("document.getElementById('time').hidden && document.getElementById('schedules').hidden")
    assert chromium.run("document.querySelectorAll('#stage-table tbody tr').length") == 4
    assert chromium.complaints == []
