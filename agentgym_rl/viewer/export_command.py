"""The subcommand ``agentgym-rl export``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym_rl.envs.commands import count
from agentgym_rl.errors import ConfigError

if TYPE_CHECKING:
    from agentgym_rl.types import Trajectory
    from agentgym_rl.viewer.export import Side
    from agentgym_rl.viewer.library import Library
    from agentgym_rl.viewer.rows import Summary

_KINDS = ("html", "conversations", "pairs")
_PLACE = re.compile(r"(?:(?P<file>.+):)?(?P<line>\d{1,12})")


def add_export(subcommands: Any) -> None:
    parser = subcommands.add_parser("export", help="one HTML file of a trajectory or two; conversations; pairs")
    parser.add_argument("path", type=Path, help="a run, a folder of runs, or one trajectory file (.jsonl)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".html, .json or .jsonl")
    parser.add_argument("--as", dest="kind", choices=_KINDS, help="default: html for .html, else conversations")
    parser.add_argument(
        "--at",
        action="append",
        default=[],
        metavar="[FILE:]LINE",
        help="the trajectory in that line of a file below the path; twice for an HTML comparison",
    )
    chosen = parser.add_argument_group("which trajectories, without --at")
    chosen.add_argument("--item", default="", metavar="ID", help="of this item")
    chosen.add_argument("--step", type=int, metavar="N", help="of this training step")
    chosen.add_argument("--success", action="store_true", help="successes only")
    chosen.add_argument("--min-score", type=float, metavar="X", help="with at least this score")
    pairs = parser.add_argument_group("pairs")
    pairs.add_argument("--min-gap", type=float, default=0.0, metavar="X", help="scores differ by at least this")
    pairs.add_argument("--threshold", type=float, metavar="X", help="least score of the better one; default: a success")
    pairs.add_argument("--per-item", type=count, default=1, metavar="N", help="pairs of one item at most")
    parser.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> None:
    try:
        from agentgym_rl.viewer.library import Library
        from agentgym_rl.viewer.query import Query
    except ModuleNotFoundError as error:
        raise ConfigError(f"exporting needs the package {error.name}: pip install 'agentgym-rl[viewer]'") from error
    from agentgym_rl.viewer.query import Searches, select

    library = Library(options.path)
    library.refresh()
    if options.at:
        summaries = [_at(library, place) for place in options.at]
    else:
        filters = {
            "item": f'"{options.item}"' if options.item else "",
            "step_min": options.step,
            "step_max": options.step,
            "success": True if options.success else None,
            "score_min": options.min_score,
        }
        summaries = select(library, Query.model_validate(filters), Searches())
    _write(options, library, summaries)


def _at(library: Library, place: str) -> Summary:
    match = _PLACE.fullmatch(place)
    if match is None or (match["file"] is None and not library.root.is_file()):
        raise ConfigError(f"--at {place}: must be FILE:LINE, the file below {library.root}; or LINE of the only file")
    name = match["file"] or library.root.name
    found = library.at(name, int(match["line"]))
    if found is None:
        raise ConfigError(f"--at {place}: there is no trajectory in line {match['line']} of {name} in {library.root}")
    return found


def _write(options: argparse.Namespace, library: Library, summaries: list[Summary]) -> None:
    from agentgym_rl.data.conversations import write_rows
    from agentgym_rl.data.pairs import PairRules
    from agentgym_rl.viewer.export import conversations_of, pairs_of

    kind = options.kind or ("html" if options.out.suffix in (".html", ".htm") else "conversations")
    if kind == "html":
        _write_page(options.out, library, summaries)
        return
    trajectories: list[Trajectory] = [side.trajectory for side in _sides(library, summaries)]
    if kind == "pairs":
        rules = PairRules(min_gap=options.min_gap, threshold=options.threshold, per_item=options.per_item)
        rows = pairs_of(trajectories, rules)
    else:
        rows = conversations_of(trajectories)
    write_rows(options.out, rows)
    print(f"{len(rows)} {kind} of {len(trajectories)} trajectories in {options.out}")


def _write_page(out: Path, library: Library, summaries: list[Summary]) -> None:
    from agentgym_rl.viewer.export import comparison_page, trajectory_page

    if len(summaries) not in (1, 2):
        raise ConfigError(
            f"an HTML file shows one trajectory or two, {len(summaries)} are chosen: name them by --at FILE:LINE"
        )
    sides = _sides(library, summaries)
    out.parent.mkdir(parents=True, exist_ok=True)
    page = trajectory_page(*sides) if len(sides) == 1 else comparison_page(*sides)
    out.write_text(page, encoding="utf-8", errors="replace")
    print(f"{' and '.join(summary.item_id for summary in summaries)} in {out}")


def _sides(library: Library, summaries: list[Summary]) -> list[Side]:
    """Each in the order given; raises `ConfigError` for a row that is no trajectory."""
    from agentgym_rl.viewer.episodes import decoded, read_episode
    from agentgym_rl.viewer.export import Side

    rows = {summary.id: row for summary, row in library.read_rows({summary.id for summary in summaries})}
    sides = []
    for summary in summaries:
        row = rows[summary.id]
        sides.append(Side(summary, read_episode(decoded(row, summary.item_id), summary.item_id), row))
    return sides
