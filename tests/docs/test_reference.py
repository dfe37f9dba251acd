"""What pages say of keys, messages and metrics is what the code has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.documents import ROOT, code, pages, rows
from support.published import published_values

from agentgym_rl.errors import ConfigError
from verl.agent_trainer.loading import RENAMED_KEYS, known_keys, load_config, parse_command_line
from verl.config import AgentEvolConfig, DPOConfig, GenerationConfig, PPOConfig, SFTConfig

MOVING = ROOT / "docs" / "moving.md"
TROUBLES = ROOT / "docs" / "troubleshooting.md"
ROOTS = (PPOConfig, GenerationConfig, SFTConfig, DPOConfig, AgentEvolConfig)
KNOWN = frozenset(key for root in ROOTS for key in known_keys(root))
LEAST_SYMPTOMS = 25


# --------------------------------------------------------------------------------------------------------------- moving

KEYS = [(key, row[1], row[2]) for row in rows(MOVING, "| key | here |") for key in code(row[0])]


@pytest.mark.parametrize(("key", "here"), [(key, here) for key, here, _ in KEYS], ids=lambda text: text)
def test_a_key_is_known_renamed_or_absent_as_the_page_says(key: str, here: str) -> None:
    known = {name for root in (PPOConfig, GenerationConfig) for name in known_keys(root)}
    if (key, here) != ("rollout.n", "`data.n_samples`"):  # known to the class that evaluation shares with training
        assert (key in known) == (here == "same"), f"{key}: {here}"
    if here not in ("same", "absent"):
        assert code(here) and set(code(here)) <= known


def test_every_published_key_is_in_the_tables() -> None:
    published = {key for values in published_values().values() for key in values}
    assert published - {key for key, _, _ in KEYS} == set()


def test_every_key_that_an_error_answers_is_in_the_tables() -> None:
    named = {key: here for key, here, _ in KEYS}
    assert set(RENAMED_KEYS) - set(named) == set()
    for key, answer in RENAMED_KEYS.items():
        assert answer.startswith(("nothing", "python")) == (named[key] == "absent"), key
        if named[key] != "absent":
            assert answer.split()[0].rstrip(",") in code(named[key]), key


@pytest.mark.parametrize("key", [key for key, here, _ in KEYS if here == "absent"])
def test_an_absent_key_stops_a_run(key: str) -> None:
    command_line = parse_command_line([f"{key}=1"], program="p", config_name="ppo_trainer")
    with pytest.raises(ConfigError, match="unknown key"):
        load_config(PPOConfig, command_line)


# ------------------------------------------------------------------------------------------------------------- messages


@cache
def texts() -> tuple[str, ...]:
    """All texts of the sources, a hole of a formatted one as a line break; and all scripts."""
    found = []
    for package in ("agentgym_rl", "verl"):
        for path in (ROOT / package).rglob("*.py"):
            found += [text for node in ast.walk(ast.parse(path.read_text())) for text in _texts(node)]
    return (*found, *(path.read_text() for path in (ROOT / "scripts").glob("*.sh")))


def _texts(node: ast.AST) -> list[str]:
    """What an expression may spell; none where it is no text."""
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else "\n" for part in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in _texts(node.left) for right in _texts(node.right)]
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body), *_texts(node.orelse)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


SEEN = [span for row in rows(TROUBLES, "| what you see |") for span in code(row[0])]
METRIC = re.compile(r"(actor|critic|rollout|training|perf|val|advantages)/[a-z_/.<>N*]+$")
MESSAGES = [span for span in SEEN if " " in span]
OTHERS = {"update", "hf", "torch.OutOfMemoryError", "global_step_<N>.unfinished"}
"""Names in the first column that are neither messages nor metrics."""


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_that_the_code_gives(message: str) -> None:
    """The words between ``...`` stand in one text of the sources, in their order."""
    pieces = [piece for piece in message.split("...") if piece.strip(" :;,()")]
    assert sum(map(len, pieces)) >= 10, message
    pattern = re.compile(".*".join(map(re.escape, pieces)), re.DOTALL)
    assert any(pattern.search(text) for text in texts()), message


@pytest.mark.parametrize("name", sorted({span for span in SEEN if " " not in span} - OTHERS))
def test_a_metric_in_the_first_column_is_one(name: str) -> None:
    assert METRIC.fullmatch(name), name
    assert_metric(name)


def test_every_kind_of_trouble_is_answered() -> None:
    answers = rows(TROUBLES, "| what you see |")
    assert len(answers) >= LEAST_SYMPTOMS and all(len(row) == 3 and all(row) for row in answers)


# ----------------------------------------------------------------------------------------------------- keys and metrics


def assert_metric(name: str) -> None:
    """Its stem is written somewhere in the sources; what follows is a statistic or a name."""
    stem = re.sub(r"(_(mean|max|p95)|(?<=share)_\w+|/?(\.\.\.|\*|<\w+>).*)$", "", name)
    if stem.startswith("val/"):
        stem = stem.replace("val/", "rollout/", 1)
    folder, _, rest = stem.partition("/")
    assert any(text.startswith((stem, f"{folder}/\n")) or stem in text for text in texts()), (name, rest)


def named_keys(page: Path) -> Iterator[str]:
    """Keys in code of a page, complete or from some branch on, without their values."""
    for span in code(page.read_text(encoding="utf-8")):
        match = re.fullmatch(r"((?:[a-z]\w*\.)+[a-z]\w*)(=\S*)?", span)
        if match and match[1].split(".")[0] in BRANCHES:
            yield match[1]


BRANCHES = {"data", "actor_rollout_ref", "critic", "algorithm", "trainer", "ray_init", "agentgym", "rollout", "model"}
BRANCHES |= {"actor", "ref", "optim"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in pages() if page != MOVING], ids=name_of)
def test_keys_that_pages_name_exist(page: Path) -> None:
    branches = {key.rpartition(".")[0] for key in KNOWN}
    for key in named_keys(page):
        is_key = any(known == key or known.endswith(f".{key}") for known in KNOWN)
        is_branch = any(branch == key or branch.endswith(f".{key}") for branch in branches)
        assert is_key or is_branch or key.endswith(".py"), key


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_metrics_that_pages_name_exist(page: Path) -> None:
    for span in code(page.read_text(encoding="utf-8")):
        if METRIC.fullmatch(span):
            assert_metric(span)
