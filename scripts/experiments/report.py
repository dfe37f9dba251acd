"""Makes figures and tables of ``docs/results.md`` from ``docs/results/<suite>.json``.

    python scripts/experiments/report.py [textcraft babyai]

Tables stand in the page between ``<!-- table: <suite>-... -->`` and ``<!-- end -->``; what is around them is written by
hand. Figures are ``docs/results/<suite>-*.svg``.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Mapping, Sequence

from results import RESULTS, Result, read_results
from suites import SUITES, WARM_UP

PAGE = RESULTS.parent / "results.md"
SCALING, SHORT, LONG = "grpo", "grpo, short horizon", "grpo, long horizon"
HORIZONS = (SHORT, LONG, SCALING)
ON_DATA = ("more sft", "dpo", "agentevol")


def tables(suite: str, results: Sequence[Result]) -> dict[str, str]:
    """Markdown tables by the name of their place in the page; none for a comparison of which nothing is there yet."""
    names = list(dict.fromkeys(result.name for result in results))
    of = {name: [result for result in results if result.name == name] for name in names}
    algorithms = [name for name in names if name not in (WARM_UP, SHORT, LONG, *ON_DATA)]
    groups = {"horizons": [WARM_UP, *HORIZONS]}
    if len(algorithms) > 1:
        groups["algorithms"] = [WARM_UP, *algorithms]
    if any(name in of for name in ON_DATA):
        groups["data"] = [WARM_UP, *ON_DATA, SCALING]
    return {
        f"{suite}-{group}": table([of[name] for name in members if name in of], of.get(WARM_UP, []))
        for group, members in groups.items()
    }


def table(rows: Sequence[Sequence[Result]], start: Sequence[Result]) -> str:
    """A row per kind of run: held-out success over its seeds, by category, the gain over each seed's warm-up, time."""
    categories = list(start[0].evaluation.by_category)
    if len(categories) == 1:
        categories = []  # it would say the same twice
    k = start[0].evaluation.samples
    head = [
        "",
        f"Avg@{k}: mean (each seed)",
        *categories,
        f"Pass@{k}",
        "gain in points: mean (each seed)",
        "turns",
        "CPU min",
    ]
    before = {result.seed: result.evaluation.avg for result in start}
    lines = [_line(head), _line(["---"] * len(head))]
    return "\n".join([*lines, *(_line(_cells(results, categories, before)) for results in rows)])


def _cells(results: Sequence[Result], categories: Sequence[str], before: Mapping[int, float]) -> list[str]:
    gains = [100 * (result.evaluation.avg - before[result.seed]) for result in results if result.name != WARM_UP]
    return [
        title(results[0].name),
        _mean_and_each([result.evaluation.avg for result in results], "{:.3f}"),
        *(_mean([result.evaluation.by_category[name] for result in results], "{:.3f}") for name in categories),
        _mean([result.evaluation.solved for result in results], "{:.3f}"),
        _mean_and_each(gains, "{:+.1f}") if gains else "",
        _mean([result.evaluation.turns for result in results], "{:.1f}"),
        _mean([result.cpu_s["train"] / 60 for result in results], "{:.1f}"),
    ]


def title(name: str) -> str:
    """A run as its reader knows it."""
    return {
        WARM_UP: "warm-up (SFT), the start of all others",
        SCALING: "GRPO, growing horizon (ScalingInter-RL)",
        SHORT: "GRPO, short horizon",
        LONG: "GRPO, long horizon",
        "dpo": "DPO on sampled pairs",
        "agentevol": "AgentEvol, two iterations",
        "more sft": "SFT for as many more steps as AgentEvol",
    }.get(name, f"`{name}`, growing horizon")


def fill(page: str, name: str, text: str) -> str:
    """``page`` with the table of this name replaced; as it was where the page has no such place."""
    begin = f"<!-- table: {name} -->"
    return re.sub(rf"{re.escape(begin)}\n.*?<!-- end -->", lambda _: f"{begin}\n{text}\n<!-- end -->", page, flags=re.S)


def _mean(values: Sequence[float], form: str) -> str:
    return form.format(statistics.mean(values))


def _mean_and_each(values: Sequence[float], form: str) -> str:
    return f"{_mean(values, form)} ({', '.join(form.format(value) for value in values)})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], default=[])
    options = parser.parse_args()
    # Only now: matplotlib takes a second, and the tables need none of it.
    from figures import draw

    page = PAGE.read_text()
    for suite in options.suites or [suite for suite in SUITES if (RESULTS / f"{suite}.json").exists()]:
        results = read_results(suite)
        for name, text in tables(suite, results).items():
            page = fill(page, name, text)
        for figure in draw(suite, results, RESULTS):
            print(figure)
    PAGE.write_text(page)
    print(PAGE)


if __name__ == "__main__":
    main()
