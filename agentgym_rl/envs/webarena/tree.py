"""From a page's accessibility tree to the text that the agent reads.

Nodes come from Chromium's ``Accessibility.getFullAXTree``, their places from ``DOMSnapshot.captureSnapshot``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH, HEIGHT = 1280, 720
"""The viewport in CSS pixels."""
_VISIBLE_SHARE = 0.6
"""A node is shown when so much of it is in view, or of the view is in it."""
_SHOWN_PROPERTIES = (
    "autocomplete", "busy", "checked", "disabled", "expanded", "focused", "hasPopup", "modal", "multiselectable",
    "orientation", "pressed", "required", "selected", "valuemax", "valuemin", "valuetext",
)  # fmt: skip
_NEVER_SHOWN = frozenset({"InlineTextBox", "LineBreak", "none"})
_SHOWN_ONLY_WITH_NAME = frozenset(
    {
        "banner", "emphasis", "generic", "group", "HeaderAsNonLandmark", "image", "img", "LabelText", "LayoutTable",
        "LayoutTableCell", "LayoutTableRow", "Legend", "list", "listitem", "main", "MenuListPopup", "navigation",
        "paragraph", "Section", "strong",
    }
)  # fmt: skip
_TEXT_FIELDS = frozenset({"textbox", "searchbox", "spinbutton"})

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Element:
    """A node that the agent sees."""

    number: int
    backend_id: int
    """Chromium's number of the DOM node; 0 where there is none."""
    role: str
    name: str
    box: Box | None
    """x, y, width, height in the viewport."""


@dataclass(slots=True)
class Numbering:
    """Numbers for nodes, from 1 in order of first appearance: the same for the same page in every browser.

    Chromium's own count on from page to page over all sessions.
    """

    document: str = ""
    """Chromium's name of the loaded document; another one is numbered anew."""
    numbers: dict[str, int] = field(default_factory=dict)

    def begin(self, document: str) -> None:
        if document != self.document:
            self.document, self.numbers = document, {}

    def of(self, key: str) -> int:
        return self.numbers.setdefault(key, len(self.numbers) + 1)


@dataclass(frozen=True, slots=True)
class Tree:
    """The visible part of a page."""

    text: str
    elements: Mapping[int, Element]


def boxes_of(snapshot: Mapping[str, Any]) -> dict[int, Box]:
    """Chromium's node numbers -> their boxes in the viewport, from a DOM snapshot."""
    document = snapshot["documents"][0]
    backend_ids, layout = document["nodes"]["backendNodeId"], document["layout"]
    left, top = document.get("scrollOffsetX", 0), document.get("scrollOffsetY", 0)
    found: dict[int, Box] = {}
    for index, (x, y, width, height) in zip(layout["nodeIndex"], layout["bounds"], strict=True):
        found.setdefault(backend_ids[index], (x - left, y - top, width, height))
    return found


def in_view(box: Box) -> bool:
    """True when most of the box is in the viewport, or most of the viewport in the box."""
    x, y, width, height = box
    if width <= 0 or height <= 0:
        return False
    across = min(x + width, WIDTH) - max(x, 0)
    down = min(y + height, HEIGHT) - max(y, 0)
    if across <= 0 or down <= 0:
        return False
    return across * down >= _VISIBLE_SHARE * min(width * height, WIDTH * HEIGHT)


def render_tree(nodes: Sequence[Mapping[str, Any]], boxes: Mapping[int, Box], numbering: Numbering) -> Tree:
    """Lines ``[number] role 'name' property: value``, indented by tabs; what says nothing is left out."""
    renderer = _Renderer(nodes, boxes, numbering)
    lines = list(renderer.lines())
    return Tree("\n".join(lines), renderer.elements)


class _Renderer:
    def __init__(self, nodes: Sequence[Mapping[str, Any]], boxes: Mapping[int, Box], numbering: Numbering) -> None:
        self._by_id = {node["nodeId"]: node for node in nodes}
        self._root = nodes[0]["nodeId"] if nodes else None
        self._boxes, self._numbering = boxes, numbering
        self.elements: dict[int, Element] = {}

    def lines(self) -> Iterator[str]:
        if self._root is None:
            return
        # (node, depth, whether its parent is in view, name of the nearest node shown); a list, for trees can be deep.
        waiting = [(self._root, 0, True, "")]
        while waiting:
            node_id, depth, parent_seen, context = waiting.pop()
            node = self._by_id.get(node_id)
            if node is None:
                continue
            box = self._boxes.get(node.get("backendDOMNodeId", 0))
            # What has no box of its own, such as an option of a closed list, is seen with its parent.
            seen = node_id == self._root or (parent_seen if box is None else in_view(box))
            children = list(node.get("childIds", ()))
            if seen and self._is_shown(node, context):
                yield "\t" * depth + self._line(node, box)
                depth, context = depth + 1, _name(node) or context
                if _role(node) in _TEXT_FIELDS:
                    children = []  # their text, which the line has as its value
            waiting += [(child, depth, seen, context) for child in reversed(children)]

    def _is_shown(self, node: Mapping[str, Any], context: str) -> bool:
        role, name = _role(node), _name(node)
        if node.get("ignored") or not role or role in _NEVER_SHOWN:
            return False
        if role == "StaticText":
            return bool(name.strip()) and name.strip() not in context
        if role in _SHOWN_ONLY_WITH_NAME and not name.strip():
            return bool(role != "listitem" and _properties(node))
        return True

    def _line(self, node: Mapping[str, Any], box: Box | None) -> str:
        number, backend_id = self._numbering.of(str(node["nodeId"])), node.get("backendDOMNodeId", 0)
        role, name = _role(node), _name(node)
        self.elements[number] = Element(number, backend_id, role, name, box)
        return " ".join([f"[{number}] {role} {name!r}", *_properties(node)])


def _role(node: Mapping[str, Any]) -> str:
    return str(node.get("role", {}).get("value", ""))


def _name(node: Mapping[str, Any]) -> str:
    return str(node.get("name", {}).get("value", ""))


def _properties(node: Mapping[str, Any]) -> list[str]:
    shown = [
        f"{entry['name']}: {_value(entry['value'])}"
        for entry in node.get("properties", ())
        if entry["name"] in _SHOWN_PROPERTIES and "value" in entry["value"]
    ]
    value = node.get("value", {}).get("value", "")
    return [*shown, f"value: {value!r}"] if value not in ("", None) and _role(node) != "StaticText" else shown


def _value(value: Mapping[str, Any]) -> str:
    """As WebArena writes it: True and False with capitals."""
    content = value["value"]
    if value.get("type") in ("boolean", "booleanOrUndefined", "tristate") and content in (0, 1, "true", "false"):
        return str(content in (1, "true"))
    return str(content)
