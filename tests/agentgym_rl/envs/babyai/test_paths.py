"""Ways through small grids, counted by hand."""

from __future__ import annotations

from minigrid.core.actions import Actions

from agentgym_rl.envs.babyai.paths import Ground, can_face, moves_to_face, reachable

RIGHT, DOWN, LEFT, UP = range(4)
LEFT_TURN, RIGHT_TURN, STEP = Actions.left, Actions.right, Actions.forward


def ground(*rows: str) -> Ground:
    """``#`` is in the way."""
    cells = "".join(rows)
    return Ground(len(rows[0]), lambda cell: cells[cell] != "#")


ROOM = ground(
    "#####",
    "#   #",
    "# # #",
    "#   #",
    "#####",
)


def at(x: int, y: int) -> int:
    return 5 * y + x


def test_facing_what_is_ahead_takes_no_move() -> None:
    assert moves_to_face(ROOM, (at(1, 1), RIGHT), at(2, 1)) == ()


def test_turning_is_a_move_and_so_is_a_step() -> None:
    assert moves_to_face(ROOM, (at(1, 1), RIGHT), at(3, 1)) == (STEP,)
    assert moves_to_face(ROOM, (at(1, 1), RIGHT), at(1, 2)) == (RIGHT_TURN,)
    assert moves_to_face(ROOM, (at(1, 1), DOWN), at(2, 1)) == (LEFT_TURN,)
    assert moves_to_face(ROOM, (at(1, 1), LEFT), at(2, 1)) == (LEFT_TURN, LEFT_TURN)


def test_the_way_leads_round_what_is_in_the_way() -> None:
    moves = moves_to_face(ROOM, (at(2, 1), DOWN), at(2, 4))
    assert moves is not None and sorted(moves) == sorted(
        [LEFT_TURN, STEP, RIGHT_TURN, STEP, STEP, RIGHT_TURN, STEP, LEFT_TURN]
    )


def test_what_cannot_be_reached_has_no_way() -> None:
    closed = ground("#####", "# # #", "#####")
    assert reachable(closed, 6) == {6}
    assert moves_to_face(closed, (6, RIGHT), 8) is None
    assert not can_face(closed, {6}, 8)
    assert can_face(closed, {6}, 7)


def test_a_step_into_what_is_in_the_way_goes_nowhere() -> None:
    assert ROOM.after((at(1, 1), LEFT), STEP) == (at(1, 1), LEFT)
    assert ROOM.after((at(1, 1), RIGHT), STEP) == (at(2, 1), RIGHT)
    assert [ROOM.after((at(1, 1), UP), turn)[1] for turn in (LEFT_TURN, RIGHT_TURN)] == [LEFT, RIGHT]
