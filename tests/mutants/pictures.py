"""Of the room ``pictures``, and of the commands that save what it draws."""

from tests.mutants.mutant import Mutant

_PAGE, _DATA, _HTML, _TRACE = (f"pictures/{name}.py" for name in ("page", "page_data", "html_page", "chrome_trace"))
_ACTIONS = "pictures/test_html_page.py::test_the_data_has_every_action_of_the_simulation_and_its_time"
_NAMES = "pictures/test_html_page.py::test_no_name_ends_the_data_or_becomes_markup"

MUTANTS = [
    Mutant(
        _HTML,
        'separators=(",", ":")).translate(_ESCAPES)',
        'separators=(",", ":"))',
        (_NAMES,),
        "a name ends the page's data",
    ),
    Mutant(_HTML, "title=html.escape(page.title)", "title=page.title", (_NAMES,), "a title is taken for markup"),
    Mutant(
        _DATA,
        "if span.work in critical]",
        "if span.work not in critical]",
        (_ACTIONS,),
        "all but the critical path is outlined",
    ),
    Mutant(_DATA, "_DIGITS = 9", "_DIGITS = 2", (_ACTIONS,), "times of a long step are rounded to nothing"),
    Mutant(
        _DATA,
        "if index == 0 or pair[1] != kept[index - 1][1]]",
        "if index == 0 or pair[1] > kept[index - 1][1]]",
        ("pictures/test_html_page.py::test_the_data_has_what_is_kept_wherever_it_changes",),
        "memory that is given back is not shown",
    ),
    Mutant(
        _PAGE,
        "if len(found.costs) == plan.num_stages)",
        ")",
        ("pictures/test_page.py::test_costs_are_those_of_the_plans_own_stages",),
        "a stage has the bytes of half of it",
    ),
    Mutant(
        _TRACE,
        '"dur": span.seconds * _MICROSECONDS',
        '"dur": span.end_seconds * _MICROSECONDS',
        ("pictures/test_chrome_trace.py::test_each_action_is_a_complete_event_in_microseconds",),
        "an action of a trace ends too late",
    ),
    Mutant(
        "cli/plan.py",
        "simulate_plan(work.model, work.batch, device=_device(work), **options)",
        'simulate_plan(work.model, work.batch, device=_device(work), **(options | {"split_points": ()}))',
        ("cli/test_main.py::test_a_page_has_the_cuts_that_are_asked_for",),
        "the page of a plan shows other cuts than the plan",
    ),
]
