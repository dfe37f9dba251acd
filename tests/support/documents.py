"""What the pages of the documentation hold: code blocks, commands, rows of tables."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Every page that users read, in the site or beside the code."""
    inside = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "agentgym_rl").rglob("*.md")]
    return sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *inside])


def blocks(page: Path, language: str) -> list[str]:
    """The page's code blocks of a language; an empty one stands for blocks that name none."""
    found = _BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [match["text"] for match in found if match["language"] == language]


def commands(script: str) -> Iterator[str]:
    """The commands of a script as bash takes them: a loop, a function or a quoted text of several lines is one."""
    lines: list[str] = []
    for line in script.splitlines():
        if lines or (line.strip() and not line.lstrip().startswith("#")):
            lines.append(line)
        if lines and not line.endswith("\\") and _is_whole("\n".join(lines)):
            yield "\n".join(lines)
            lines = []
    assert not lines, f"not bash: {lines}"


def _is_whole(script: str) -> bool:
    if not re.search(r"""['"`({<]|\b(if|for|while|until|case|do|then)\b""", script):
        return True  # most commands, without a process for each
    return subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False).returncode == 0


def rows(page: Path, header: str) -> list[list[str]]:
    """The cells of all tables whose header line begins with ``header``."""
    found: list[list[str]] = []
    is_inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith(header):
            is_inside = True
        elif not line.startswith("|"):
            is_inside = False
        elif is_inside and not line.startswith("|---"):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def code(text: str) -> list[str]:
    """The code spans of a text."""
    return re.findall(r"`([^`]+)`", text)
