"""First paint of the viewer over 10,000 trajectories of 8 turns; at most 1 s is wanted.

``python scripts/bench/viewer.py`` makes them; ``python scripts/bench/viewer.py saves/textcraft`` takes what is there.
Each measurement begins with a viewer that has read nothing yet and a browser that has cached nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import bench
from bench import Result
from playwright.sync_api import Browser, sync_playwright

from agentgym_rl.envs.serving import running
from agentgym_rl.envs.webarena.browser import find_chromium
from agentgym_rl.viewer.app import build_app
from agentgym_rl.viewer.library import Library

NUM_STEPS, NUM_PER_STEP, NUM_TURNS = 50, 200, 8
LIMIT_S = 1.0
PAGES = {"runs": ("#/runs", "tbody a"), "trajectories": ("#/trajectories?sort=score&descending=true", "a.open")}
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"


def write_run(folder: Path) -> None:
    """As many rows as the docstring says, of the size that TextCraft's have: 1,500 tokens, a tenth of them sampled."""
    text = "Thought: I need a log for this.\nAction: get 1 oak log"
    said = [{"from": "human", "loss": None, "value": "Craft the goal item. " * 20}]
    for _ in range(NUM_TURNS):
        said += [
            {"from": "gpt", "loss": True, "value": text},
            {"from": "human", "loss": None, "value": "Got 1 oak log"},
        ]
    mask = ([0] * 168 + [1] * 20) * NUM_TURNS
    turn = {"text": text, "observation": "Got 1 oak log", "reward": 0.0, "done": False, "finish_reason": "stop"}
    turn |= {"num_tokens": 20, "generation_s": 0.5, "env_s": 0.001}
    for step in range(1, NUM_STEPS + 1):
        rows = []
        for index in range(NUM_PER_STEP):
            item = f"textcraft_{index // 8}"
            score = float((step * index) % 100 < step)
            row = {"format": 1, "item_id": item, "category": "", "conversations": said, "reward": score, "score": score}
            row |= {"stop_reason": "done", "uid": f"step{step}/{item}", "sample_index": index % 8, "attempt": 1}
            row |= {"success": score == 1, "prompt_length": 168, "policy_version": step - 1, "max_rounds": 10}
            row |= {"duration_s": 4.5, "error": "", "extra": {}, "turns": [turn] * NUM_TURNS, "loss_mask": mask}
            row |= {"input_ids": [12345] * len(mask), "sequence_ids": [3] * len(mask)}
            row |= {
                "rollout_log_probs": [-0.1234567 * each for each in mask],
                "token_rewards": [[len(mask) - 1, score]],
            }
            rows.append(json.dumps(row) + "\n")
        (folder / f"step{step}").mkdir()
        (folder / f"step{step}" / "0.jsonl").write_text("".join(rows))


def open_page(browser: Browser, root: Path, page_name: str) -> tuple[float, float, float]:
    """Seconds until the first paint, until the first rows, and until all files are read."""
    address, rows = PAGES[page_name]
    with running(build_app(Library(root))) as url:
        context = browser.new_context()
        page = context.new_page()
        began = time.perf_counter()
        page.goto(f"{url}/{address}")
        page.locator(rows).first.wait_for()
        shown_s = time.perf_counter() - began
        page.locator("text=Reading the files").wait_for(state="hidden", timeout=120_000)
        read_s = time.perf_counter() - began
        paint_s = page.evaluate(PAINT) / 1000
        context.close()
    return paint_s, shown_s, read_s


def measure(options: argparse.Namespace) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        root = options.folder or Path(made)
        if not options.folder:
            write_run(root)
        browser = playwright.chromium.launch(executable_path=str(find_chromium(None)), chromium_sandbox=False)
        open_page(browser, root, "runs")  # starts the browser's processes
        for name in PAGES:
            runs = [open_page(browser, root, name) for _ in range(options.repeats)]
            paint_s, shown_s, read_s = map(statistics.median, zip(*runs, strict=True))
            what = f"viewer, {NUM_STEPS * NUM_PER_STEP:,} trajectories, list of {name}: first"
            yield Result(f"{name}_paint", f"{what} paint", paint_s, "s", LIMIT_S)
            yield Result(
                f"{name}_rows", f"{what} rows", shown_s, "s", LIMIT_S, note=f"all files read in {read_s:.1f} s"
            )
        browser.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, nargs="?", help="a run or a folder of runs, instead of one made for this")
    parser.add_argument("--repeats", type=int, default=5)
    return bench.run("viewer", measure, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
