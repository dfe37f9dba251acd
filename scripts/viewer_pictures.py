"""Takes the pictures of docs/viewer.md anew: the viewer's pages over a run, in headless Chromium.

    python scripts/viewer_pictures.py saves/quickstart/RUN --item textcraft_100

The run must have been made with ``trainer.token_values=all``. ``--item``: whose latest failed trajectory is shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from sys import executable

from playwright.sync_api import Page, ViewportSize, sync_playwright

from agentgym_rl.envs.webarena.browser import find_chromium

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "images"
SIZE: ViewportSize = {"width": 1280, "height": 800}
_SCROLLED_MS = 500
"""Pages scroll smoothly. A picture that is taken too early shows another part of the page, no more."""


@contextmanager
def viewer(run: Path) -> Iterator[str]:
    """The address of a viewer of ``run`` that ends with the block."""
    command = [executable, "-m", "agentgym_rl.cli", "view", str(run), "--port", "0"]
    with Popen(command, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def show(page: Page, address: str) -> None:
    """Open a page, and wait until all of it is there."""
    page.goto(address)
    page.wait_for_load_state("networkidle")


def take_all(page: Page, address: str, item: str, out: Path) -> None:
    """Curves, the last step's list, a failed trajectory turn by turn and token by token."""

    def take(name: str) -> None:
        page.wait_for_timeout(_SCROLLED_MS)
        page.screenshot(path=out / f"viewer-{name}.png")

    show(page, address)
    page.locator("main a[href^='#/run/']").first.click()
    page.locator("main canvas").first.wait_for()
    take("run")
    page.get_by_role("link", name="last step, by group").click()
    rows = page.locator("main tbody a[href^='#/trajectory/']")
    rows.first.wait_for()
    take("trajectories")
    show(page, f"{address}/#/trajectories?item=%22{item}%22&success=false&sort=step&descending=true")
    rows.first.click()
    page.get_by_role("link", name="Turn 2").click()
    page.mouse.wheel(0, -10_000)
    take("trajectory")
    page.emulate_media(color_scheme="dark")
    page.get_by_role("tab", name="Tokens").click()
    page.get_by_label("Colour by").select_option(label="Entropy")
    turn = page.locator("main section", has=page.get_by_role("heading", name="turn 2"))
    turn.locator(".token").nth(3).click()
    take("tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder, or one that holds it")
    parser.add_argument("--item", required=True, help="as textcraft_100")
    parser.add_argument("--out", type=Path, default=PICTURES, help="the folder")
    options = parser.parse_args()
    with viewer(options.run) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(find_chromium(None)), chromium_sandbox=False)
        take_all(browser.new_context(viewport=SIZE).new_page(), address, options.item, options.out)
        browser.close()


if __name__ == "__main__":
    main()
