"""Solutions of the tasks on the small sites.

They are written by roles and names. Which numbers these have on the pages to come is found out by playing them in an
environment of their own: the numbers are the same in every browser.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentgym_rl.envs.webarena.environment import WebArena
from agentgym_rl.errors import EnvServerError

Step = tuple[str, ...]
"""``(action, role, name, more...)`` for an element, else ``(action, argument)``."""


def _click(role: str, name: str) -> Step:
    return ("click", role, name)


def _type(name: str, text: str, *, enter: bool = False) -> Step:
    return ("type", "textbox", name, text, "1" if enter else "0")


_STOP: Step = ("stop", "")

SOLUTIONS: Mapping[int, tuple[Step, ...]] = {
    0: (_type("Search the store", "iron pan", enter=True), ("stop", "$39.00")),
    1: (_click("link", "Blue Enamel Kettle"), ("stop", "Sven, Tilda")),
    2: (_click("link", "Lamps"), _click("option", "price"), _click("button", "Sort"), _STOP),
    3: (
        _click("link", "Oak Cutting Board"),
        _click("textbox", "Quantity"),
        ("press", "ctrl+a"),
        ("press", "Backspace"),
        _type("Quantity", "2", enter=True),
        _STOP,
    ),
    4: (_click("link", "Tall Floor Lamp"), _click("button", "Add to Wish List"), _STOP),
    5: (_click("link", "My Orders"), ("stop", "$65.50")),
    6: (
        _click("link", "Clip-On Reading Light"),
        _click("option", "4"),
        _type("Summary", "Handy"),
        _type("Review", "Fits any book"),
        _click("button", "Submit Review"),
        _STOP,
    ),
    7: (_click("link", "Reviews"), ("stop", "2")),
    8: (
        ("goto", "http://luma.com/admin/products/wool-blanket-grey"),
        _click("textbox", "Price"),
        ("press", "ctrl+a"),
        ("press", "Delete"),
        _type("Price", "69.90", enter=True),
        _STOP,
    ),
    9: (_click("link", "Orders"), _click("link", "Order 104"), _click("button", "Cancel Order"), _STOP),
    10: (_click("link", "Reviews"), _click("button", "Approve 0"), _STOP),
    11: (_click("link", "Forums"), _click("link", "gardening"), _click("link", "Top"), _STOP),
    12: (("goto", "http://reddit.com/f/cycling/top"), ("stop", "jonas")),
    13: (
        _click("link", "Submit"),
        _type("Title", "Rye bread"),
        _type("Body", "Which flour do you take?"),
        _click("option", "baking"),
        _click("button", "Create post"),
        _STOP,
    ),
    14: (
        ("goto", "http://reddit.com/f/cycling"),
        _click("link", "Rain trousers that breathe"),
        _click("button", "Upvote"),
        _STOP,
    ),
    15: (
        _click("link", "My account"),
        _click("link", "Edit biography"),
        _click("textbox", "Biography"),
        ("press", "ctrl+a"),
        ("press", "Backspace"),
        _type("Biography", "Mostly beans and bread"),
        _click("button", "Save"),
        _STOP,
    ),
    16: (
        _click("link", "liam/tide-table"),
        _click("link", "Issues"),
        _click("option", "bug"),
        _click("button", "Filter"),
        ("stop", "2"),
    ),
    17: (
        ("goto", "http://gitlab.com/liam/knit-chart/-/issues/new"),
        _type("Title", "Dark mode"),
        _click("option", "feature"),
        _click("option", "olga"),
        _click("button", "Create issue"),
        _STOP,
    ),
    18: (
        _click("link", "liam/tide-table"),
        _click("link", "Members"),
        _type("User name", "pavel"),
        _click("option", "Maintainer"),
        _click("button", "Invite"),
        _STOP,
    ),
    19: (
        _click("link", "mina/bird-songs"),
        _click("button", "Star"),
        ("new_tab",),
        ("goto", "http://reddit.com/f/gardening/3"),
        _type("Comment", "mina/bird-songs"),
        _click("button", "Post"),
        _STOP,
    ),
}
"""Index of the task -> what to do."""


def solution(environment: WebArena) -> list[str]:
    """Actions that solve the task of a freshly reset environment."""
    number = environment.task.task_id
    rehearsal = environment.another()
    try:
        rehearsal.reset(number)
        return [_perform(rehearsal, step) for step in SOLUTIONS[number]]
    finally:
        rehearsal.close()


def _perform(environment: WebArena, step: Step) -> str:
    """Do one step; returns the action that it is here."""
    name, *arguments = step
    if name in ("click", "type"):
        number = environment.number_of(arguments[0], arguments[1])
        arguments = [str(number), *arguments[2:]]
    action = " ".join([name, *(f"[{argument}]" for argument in arguments)])
    result = environment.step(f"```{action}```")
    if result.fail_error:
        raise EnvServerError(f"task {environment.task.task_id}: {action}: {result.fail_error}")
    return f"```{action}```"
