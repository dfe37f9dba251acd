"""The page as text: nodes of Chromium's form, made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from agentgym_rl.envs.webarena.tree import Numbering, boxes_of, in_view, render_tree


def node(number: int, role: str, name: str = "", *, children: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
    properties = [
        {"name": key, "value": {"type": "boolean" if isinstance(value, bool) else "token", "value": value}}
        for key, value in more.pop("properties", {}).items()
    ]
    return {
        "nodeId": str(number),
        "backendDOMNodeId": number,
        "role": {"value": role},
        "name": {"value": name},
        "childIds": [str(child) for child in children],
        "properties": properties,
        **more,
    }


SEEN, BELOW = (0.0, 0.0, 100.0, 20.0), (0.0, 800.0, 100.0, 20.0)


def text_of(nodes: list[dict[str, Any]], below: tuple[int, ...] = ()) -> str:
    boxes = {each["backendDOMNodeId"]: BELOW if each["backendDOMNodeId"] in below else SEEN for each in nodes}
    return render_tree(nodes, boxes, Numbering()).text


def test_lines_are_number_role_name_and_properties_indented_by_tabs() -> None:
    nodes = [
        node(70, "RootWebArea", "Shop", children=(71, 72), properties={"focused": True, "url": "http://x"}),
        node(71, "link", "It's here"),
        node(72, "textbox", "Search", properties={"required": False, "editable": "plaintext"}, value={"value": "lamp"}),
    ]
    assert text_of(nodes) == (
        "[1] RootWebArea 'Shop' focused: True\n\t[2] link \"It's here\"\n"
        "\t[3] textbox 'Search' required: False value: 'lamp'"
    )


def test_what_says_nothing_is_left_out_and_its_children_take_its_place() -> None:
    nodes = [
        node(1, "RootWebArea", "Shop", children=(2, 3, 4)),
        node(2, "generic", children=(5,)),
        node(3, "button", "Hidden", ignored=True, children=(6,)),
        node(4, "listitem", children=(7,)),
        node(5, "link", "A", children=(8,)),
        node(6, "button", "B"),
        node(7, "StaticText", "  "),
        node(8, "StaticText", "A", children=(9,)),
        node(9, "InlineTextBox", "A"),
    ]
    assert text_of(nodes) == "[1] RootWebArea 'Shop'\n\t[2] link 'A'\n\t[3] button 'B'"


def test_only_what_is_in_view_is_shown_and_options_are_seen_with_their_list() -> None:
    nodes = [
        node(1, "RootWebArea", "Shop", children=(2, 3, 5)),
        node(2, "link", "Below"),
        node(3, "combobox", "Sort", children=(4,)),
        node(4, "option", "price"),
        node(5, "combobox", "Far", children=(6,)),
        node(6, "option", "never seen"),
    ]
    boxes = {1: SEEN, 2: BELOW, 3: SEEN, 5: BELOW}
    tree = render_tree(nodes, boxes, Numbering())
    assert tree.text == "[1] RootWebArea 'Shop'\n\t[2] combobox 'Sort'\n\t\t[3] option 'price'"
    assert [element.backend_id for element in tree.elements.values()] == [1, 3, 4]


@pytest.mark.parametrize(
    ("box", "seen"),
    [
        ((0, 0, 1280, 720), True),
        ((0, 700, 100, 20), True),
        ((0, 700, 100, 40), False),  # half of it
        ((0, 710, 100, 15), True),  # two thirds
        ((0, -5000, 1280, 9000), True),  # fills the view
        ((0, 600, 1280, 9000), False),  # a sixth of the view
        ((-200, 0, 100, 20), False),
        ((10, 10, 0, 20), False),
    ],
)
def test_a_box_is_in_view_when_most_of_it_is_or_it_fills_most_of_the_view(
    box: tuple[float, float, float, float], seen: bool
) -> None:
    assert in_view(box) is seen


def test_places_are_relative_to_the_viewport_of_a_scrolled_page() -> None:
    document = {
        "nodes": {"backendNodeId": [10, 11, 12]},
        "layout": {"nodeIndex": [0, 2, 2], "bounds": [[0, 0, 1280, 3000], [5, 900, 50, 20], [7, 920, 50, 20]]},
        "scrollOffsetX": 0,
        "scrollOffsetY": 720,
    }
    assert boxes_of({"documents": [document]}) == {10: (0, -720, 1280, 3000), 12: (5, 180, 50, 20)}


def test_numbers_stay_on_a_page_and_begin_anew_on_the_next() -> None:
    first = [node(1, "RootWebArea", "A", children=(2,)), node(2, "link", "x")]
    grown = [node(1, "RootWebArea", "A", children=(3, 2)), node(3, "link", "new"), node(2, "link", "x")]
    numbering, boxes = Numbering(), {1: SEEN, 2: SEEN, 3: SEEN}
    numbering.begin("page 1")
    render_tree(first, boxes, numbering)
    numbering.begin("page 1")
    assert render_tree(grown, boxes, numbering).text == "[1] RootWebArea 'A'\n\t[3] link 'new'\n\t[2] link 'x'"
    numbering.begin("page 2")
    assert render_tree(grown, boxes, numbering).text == "[1] RootWebArea 'A'\n\t[2] link 'new'\n\t[3] link 'x'"


def test_a_very_deep_page_is_no_trouble() -> None:
    depth = 5000
    nodes = [node(number, "button", "b", children=(number + 1,)) for number in range(1, depth)] + [node(depth, "link")]
    assert len(text_of(nodes).splitlines()) == depth
