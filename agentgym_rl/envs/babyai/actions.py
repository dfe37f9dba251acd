"""From the text of an action to what it means; whether it is possible is the environment's to say."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from minigrid.core.world_object import Door

from agentgym_rl.envs.babyai.view import Sighting, state_of


class Verb(StrEnum):
    """Kinds of actions, as they are written."""

    TURN_LEFT = "turn left"
    TURN_RIGHT = "turn right"
    MOVE_FORWARD = "move forward"
    DROP = "drop"
    """Puts what is carried into the cell ahead."""
    TOGGLE = "toggle"
    """Opens or closes the door ahead, with its key where it is locked; opens a box, of which its content remains."""
    CHECK = "check available actions"
    """Takes no step."""
    GO_TO = "go to"
    """Walks until the thing is straight ahead."""
    PICK_UP = "pickup"
    GO_THROUGH = "go through"
    """Walks into an open door and, where nothing stands there, one step further."""
    TOGGLE_THROUGH = "toggle and go through"
    """The same with a door that is to be opened first."""

    @property
    def has_target(self) -> bool:
        return self in (Verb.GO_TO, Verb.PICK_UP, Verb.GO_THROUGH, Verb.TOGGLE_THROUGH)


FORMS = (
    *(verb for verb in Verb if not verb.has_target),
    "go to <color> <type> <k>",
    "pickup <color> <type> <k>",
    "go through <color> open door <k>",
    "toggle and go through <color> closed door <k>",
)
"""The kinds of actions with what must be filled in."""


@dataclass(frozen=True, slots=True)
class Target:
    """A thing as an action names it."""

    color: str
    kind: str
    state: str
    """Of a door; empty when any will do."""
    number: int
    """The how manieth of such things, from near to far."""

    def find(self, sightings: Iterable[Sighting]) -> Sighting | None:
        """The thing that is meant, among things from near to far."""
        fitting = [sighting for sighting in sightings if self._fits(sighting)]
        return fitting[self.number - 1] if 1 <= self.number <= len(fitting) else None

    def _fits(self, sighting: Sighting) -> bool:
        thing = sighting.thing
        if (thing.color, thing.type) != (self.color, self.kind):
            return False
        return not self.state or (isinstance(thing, Door) and state_of(thing) == self.state)

    def __str__(self) -> str:
        return " ".join(filter(None, (self.color, self.state, self.kind, str(self.number))))


@dataclass(frozen=True, slots=True)
class Command:
    """An action that was understood."""

    verb: Verb
    target: Target | None = None
    """Of the verbs that have one."""


_PLAIN = {str(verb): Command(verb) for verb in Verb if not verb.has_target}
_AIMED = re.compile(
    r"(?P<verb>go to|pickup|pick up|go through|toggle and go through) (?:the )?"
    r"(?P<color>red|green|blue|purple|yellow|grey)"
    r"(?: (?P<kind>ball|box|key)|(?: (?P<state>open|closed|locked))? (?P<door>door))"
    r"(?: (?P<number>[0-9]{1,3}))?"
)


def parse(action: str) -> Command | None:
    """What ``action`` says, whatever its case, spaces and underscores; without a number the nearest is meant.

    None when it is no action.
    """
    text = " ".join(action.replace("_", " ").lower().split())
    if text in _PLAIN:
        return _PLAIN[text]
    match = _AIMED.fullmatch(text)
    if match is None:
        return None
    target = Target(match["color"], match["kind"] or "door", match["state"] or "", int(match["number"] or 1))
    return Command(Verb.PICK_UP if match["verb"] == "pick up" else Verb(match["verb"]), target)
