"""Trajectories to take away: single HTML files, conversations, preference pairs.

An HTML file carries its styles, scripts and data, and asks the network for nothing. The data stand in it as JSON, which
the same modules draw that draw the viewer's pages, so that texts become text nodes; a Content-Security-Policy with the
hashes of the file's own script and style lets nothing else act.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from agentgym_rl.data.conversations import Conversation
from agentgym_rl.data.pairs import PairRules, make_pairs
from agentgym_rl.types import Trajectory
from agentgym_rl.viewer.comparison import compare, comparison_json
from agentgym_rl.viewer.panel import panel_beside
from agentgym_rl.viewer.records import record_of
from agentgym_rl.viewer.rows import Summary

_STATIC = Path(__file__).parent / "static"
_MODULES = ("js/dom.js", "js/blocks.js", "js/frames.js", "js/turns.js", "js/comparison.js", "js/exported.js")
"""In the order in which they need each other."""
_STYLES = ("app.css", "episodes.css")
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body class="exported">
<main id="main" tabindex="-1"></main>
<div id="announcer" class="visually-hidden" role="status" aria-live="polite"></div>
<noscript>This file draws itself by JavaScript.</noscript>
<script type="application/json" id="data">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


@dataclass(frozen=True, slots=True)
class Side:
    """A trajectory to be shown."""

    summary: Summary
    trajectory: Trajectory
    row: bytes
    """As it stands in its file."""


def trajectory_page(side: Side) -> str:
    """An HTML file of one trajectory."""
    record = record_of(side.row)
    return _page(
        side.summary.item_id,
        {
            "kind": "trajectory",
            "heading": heading_of(side.summary),
            "summary": msgspec.to_builtins(side.summary),
            "messages": record["messages"],
            "turns": record["turns"],
            "panel": panel_beside(side.trajectory),
        },
    )


def comparison_page(left: Side, right: Side) -> str:
    """An HTML file of two trajectories side by side."""
    return _page(
        f"{left.summary.item_id}: comparison",
        {
            "kind": "comparison",
            "headings": [heading_of(left.summary), heading_of(right.summary)],
            "summaries": [msgspec.to_builtins(side.summary) for side in (left, right)],
            "comparison": comparison_json(compare(left.trajectory, right.trajectory)),
            "panels": [panel_beside(side.trajectory) for side in (left, right)],
        },
    )


def heading_of(summary: Summary) -> str:
    """Which trajectory it is."""
    run = "" if summary.run == "." else f"{summary.run}, "
    trial = f", trial {summary.trial}" if summary.num_trials > 1 else ""
    return f"{summary.item_id} · {run}{summary.phase} step {summary.step}, sample {summary.sample_index}{trial}"


def conversations_of(trajectories: Iterable[Trajectory]) -> list[dict[str, Any]]:
    """Rows to train on, see `agentgym_rl.data.conversations`; faults are left out."""
    return [Conversation.of(trajectory).to_row() for trajectory in trajectories if not trajectory.masked]


def pairs_of(trajectories: Sequence[Trajectory], rules: PairRules) -> list[dict[str, Any]]:
    """Preference pairs, see `agentgym_rl.data.pairs`."""
    return [pair.to_row() for pair in make_pairs(trajectories, rules).pairs]


def as_jsonl(rows: Iterable[Mapping[str, Any]]) -> str:
    """One row a line."""
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


# ------------------------------------------------------------------------------------------------------------ one file


def _page(title: str, data: Any) -> str:
    style = "\n".join((_STATIC / name).read_text(encoding="utf-8") for name in _STYLES)
    script = bundle({name: (_STATIC / name).read_text(encoding="utf-8") for name in _MODULES})
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return _PAGE.format(
        policy=html.escape(policy), title=html.escape(title), style=style, data=_embedded(data), script=script
    )


def _embedded(data: Any) -> str:
    """JSON in which nothing can end the script element that holds it; half a surrogate pair is replaced."""
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    return text.encode(errors="replace").decode()


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def bundle(modules: Mapping[str, str]) -> str:
    """Modules, each after those that it imports, as one script. They import names in braces only, and export only
    functions, constants and classes where they are declared; raises ValueError for any other form."""
    parts = ['"use strict";', "const modules = {};"]
    for path, source in modules.items():
        exported = _EXPORT.findall(source)
        body = _EXPORT.sub("", _IMPORT.sub(r"const {\1} = modules.\2;", source))
        if re.search(r"^(?:import|export)\b", body, re.MULTILINE) or "</script" in body:
            raise ValueError(f"{path} imports or exports in a form that cannot be put into one script")
        parts.append(f"modules.{Path(path).stem} = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();")
    return "\n".join(parts)
