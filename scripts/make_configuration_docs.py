"""Writes docs/configuration.md: meaning, unit, type and default of every key, and the presets.

    python scripts/make_configuration_docs.py            write it
    python scripts/make_configuration_docs.py --check    exit with 1 when it is not up to date

Everything comes from the dataclasses of verl/config and the YAML files of verl/agent_trainer/config.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verl.config
from verl.agent_trainer.loading import default_values, type_name
from verl.agent_trainer.presets import GROUPS, packaged

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
PROGRAMS: dict[str, tuple[type, str]] = {
    "main_ppo": (verl.config.PPOConfig, "ppo_trainer"),
    "main_generation": (verl.config.GenerationConfig, "generation"),
    "main_sft": (verl.config.SFTConfig, "sft_trainer"),
    "main_dpo": (verl.config.DPOConfig, "dpo_trainer"),
    "main_agentevol": (verl.config.AgentEvolConfig, "agentevol"),
}
INTRODUCTION = """# Configuration

<!-- Written by scripts/make_configuration_docs.py from verl/config; edit that, then run it. -->

Every program takes its options as `key=value`, with the keys below:

```bash
python -m verl.agent_trainer.main_ppo task=textcraft algorithm=scaling_inter_rl hardware=node_8 \\
    actor_rollout_ref.model.path=models/Qwen2.5-7B-Instruct trainer.dry_run=true
```

* `task=`, `model=`, `algorithm=` and `hardware=` choose [presets](#presets), which set many keys at once. A key that is
  given overrides them, wherever it stands. `--config-dir FOLDER --config-name FILE` starts from a YAML file of your
  own, which may build on those here (`defaults: [ppo_trainer, _self_]`); `FOLDER/ppo_trainer/task/mine.yaml` is then
  `task=mine`.
* `trainer.dry_run=true` checks all that can be checked without the model's weights and a server, prints the plan
  (batches, updates, horizons, memory of a device by part), and ends. `--show-config` prints the resolved values.
* An unknown key, a value of the wrong type or an impossible combination ends the program at once, with exit code 2 and
  a line that names the key, the value, what is allowed, and the nearest known key.
* Lists are written `[a,b]`, nothing is `null`, and what the shell would read itself stands in quotes:
  `'trainer.logger=[console,wandb]'`.
"""


@dataclass(frozen=True)
class Branch:
    """Keys that stand together."""

    name: str
    kind: type
    keys: tuple[str, ...]


def document() -> str:
    """The whole text."""
    parts = [INTRODUCTION, *_presets()]
    seen: dict[tuple[type, tuple[str, ...]], str] = {}
    for program, (root, config_name) in PROGRAMS.items():
        defaults = default_values(root, config_name)
        parts.append(f"## {program}\n\n{_sentences(root.__doc__)}\n")
        for branch in branches(root):
            shown = tuple(_default(defaults[f"{branch.name}.{key}"]) for key in branch.keys)
            earlier = seen.setdefault((branch.kind, shown), f"{branch.name} of {program}")
            parts.append(_branch(branch, shown, earlier if earlier != f"{branch.name} of {program}" else None))
    return "\n".join(parts)


def branches(node: type, prefix: str = "") -> Iterator[Branch]:
    """All branches below a root that have keys of their own, in the order of the dataclasses."""
    hints = typing.get_type_hints(node)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(node)}
    keys = tuple(name for name, kind in fields.items() if not dataclasses.is_dataclass(kind))
    if keys and prefix:
        yield Branch(prefix.rstrip("."), node, keys)
    for name, kind in fields.items():
        if dataclasses.is_dataclass(kind):
            yield from branches(typing.cast(type, kind), f"{prefix}{name}.")


def meaning(kind: type, key: str) -> str:
    """The docstring under a field, of the class that says most about it; empty where there is none."""
    return next((texts[key] for owner in kind.__mro__ if key in (texts := _FIELD_TEXTS.get(owner.__name__, {}))), "")


def _field_texts() -> dict[str, dict[str, str]]:
    """class -> field -> the string literal that follows it."""
    trees = [ast.parse(file.read_text()) for file in Path(verl.config.__file__).parent.glob("*.py")]
    texts: dict[str, dict[str, str]] = {}
    for owner in (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)):
        for statement, after in zip(owner.body, owner.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                texts.setdefault(owner.name, {})[statement.target.id] = str(after.value.value)
    return texts


_FIELD_TEXTS = _field_texts()


def _branch(branch: Branch, defaults: tuple[str, ...], earlier: str | None) -> str:
    title = f"### `{branch.name}`\n\n"
    if earlier is not None:
        return f"{title}As `{earlier.split(' of ')[0]}` of {earlier.split(' of ')[1]}.\n"
    hints = typing.get_type_hints(branch.kind)
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, default in zip(branch.keys, defaults, strict=True):
        lines.append(f"| `{key}` | {type_name(hints[key])} | {default} | {_sentences(meaning(branch.kind, key))} |")
    text = _sentences(branch.kind.__doc__)
    introduction = "" if text.startswith(f"{branch.kind.__name__}(") else f"{text}\n\n"
    return f"{title}{introduction}" + "\n".join(lines) + "\n"


def _presets() -> Iterator[str]:
    yield "## Presets\n"
    yield (
        "They lie in [verl/agent_trainer/config](../verl/agent_trainer/config), or shorter in "
        "[configs](../configs): each is a short file of keys.\n"
    )
    for program, (_, folder) in PROGRAMS.items():
        rows = [
            f"| `{group}={name}` | {_first_comment(file)} |"
            for group in GROUPS
            for name, file in packaged(folder, group).items()
            if group != "model" or program == "main_ppo"
        ]
        if rows:
            yield f"### Presets of {program}\n\n| preset | what it is |\n|---|---|\n" + "\n".join(rows) + "\n"
    yield "Presets of `model` serve all programs that start from one.\n"


def _first_comment(file: Path) -> str:
    lines = (line for line in file.read_text().splitlines() if not line.startswith("# @package"))
    return next(lines).removeprefix("# ")


def _sentences(text: str | None) -> str:
    """A docstring as Markdown that fits a table's cell."""
    plain = " ".join((text or "").split()).replace("``", "`").replace("|", "\\|")
    return re.sub(r"`(verl|agentgym_rl)\.([\w.]+)`", r"`\1.\2`", plain)


def _default(value: Any) -> str:
    if value is ...:
        return "must be given"
    if isinstance(value, str):
        return f"`{value}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    options = parser.parse_args()
    if options.check:
        is_current = DOCUMENT.is_file() and DOCUMENT.read_text() == document()
        print("up to date" if is_current else f"{DOCUMENT} is not up to date: run python {sys.argv[0]}")
        return 0 if is_current else 1
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
