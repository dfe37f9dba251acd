"""Writes the item lists of SearchQA's built-in questions, which are made from the World Factbook.

    python scripts/make_searchqa_items.py [ROOT]

writes ``AgentItemId/searchqa_train.json``, ``AgentEval/searchqa/searchqa_test.json`` and one
``AgentEval/searchqa/<category>.json`` per kind of question under ROOT (default: this repository). The questions of a
fifth of the countries are for evaluation.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from agentgym_rl.envs.searchqa.factbook import open_factbook
from agentgym_rl.envs.searchqa.files import read_rows


def write_items(path: Path, rows: list[dict[str, Any]]) -> None:
    """One row per line; what is asked is for human readers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n", encoding="utf-8")


def main(root: Path) -> None:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as cache:
        for number, (_, row) in enumerate(read_rows(open_factbook(Path(cache)).questions)):
            item = {"item_id": f"searchqa_{number}", "question": row["question"]}
            groups[row["group"]].append(item)
            if row["group"] == "test":
                groups[row["category"]].append(item)
    write_items(root / "AgentItemId" / "searchqa_train.json", groups.pop("train"))
    write_items(root / "AgentEval" / "searchqa" / "searchqa_test.json", groups.pop("test"))
    for category, rows in groups.items():
        write_items(root / "AgentEval" / "searchqa" / f"{category}.json", rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
