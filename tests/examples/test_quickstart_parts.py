"""The parts of the quickstart: item lists, the base model, demonstrations under other names, the final table."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.data.demonstrations import demonstrate
from agentgym_rl.data.items import load_items, overlap
from agentgym_rl.envs.registry import get_spec
from agentgym_rl.envs.textcraft.environment import recipe_book
from agentgym_rl.types import Item, Role
from verl.config import ModelConfig
from verl.models.loading import load_policy

PROJECT = Path(__file__).resolve().parents[2]


def _script(name: str):
    spec = importlib.util.spec_from_file_location(
        f"quickstart_{name}", PROJECT / "examples" / "quickstart" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(monkeypatch, name: str, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    _script(name).main()


@pytest.fixture
def train_file(tmp_path):
    path = tmp_path / "train.json"
    path.write_text(json.dumps([f"textcraft_{index}" for index in range(0, 120, 10)]))
    return path


def test_items_of_the_wanted_depths_are_picked_and_kept_apart(monkeypatch, tmp_path):
    _run(monkeypatch, "pick_items", "--depths", 1, 3, "--out", tmp_path)
    train, held_out = (load_items(tmp_path / name, "textcraft") for name in ("train.json", "eval"))
    book = recipe_book()
    for items in (train, held_out):
        assert {book.depth[book.goals[item.index]] for item in items} == {1, 3}
    assert not overlap(train, held_out)
    assert {item.category for item in held_out} == {"depth1", "depth3"}


def test_the_base_model_loads_and_its_tokenizer_is_exact(monkeypatch, tmp_path, train_file):
    _run(monkeypatch, "make_model", "--train-file", train_file, "--out", tmp_path / "base", "--vocab-size", 500)
    model, tokenizer = load_policy(ModelConfig(path=str(tmp_path / "base")))
    chat = ChatTemplate(tokenizer)
    assert chat.end_of_turn_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == model.config.eos_token_id
    text = "craft 3 Ünknown_wörds using 2 oak logs!"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer) == model.config.vocab_size


def test_the_same_seed_makes_the_same_base_model(monkeypatch, tmp_path, train_file):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        _run(monkeypatch, "make_model", "--train-file", train_file, "--out", tmp_path / name, "--seed", seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_heads_of_the_first_layer_look_back_by_their_offset():
    make_model = _script("make_model")
    model = make_model.make_model(50, hidden_size=96, num_layers=2, num_heads=6, eos_token_id=0)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(torch.arange(3, 43)[None], output_attentions=True).attentions[0][0]
    for head, offset in enumerate((1, 1, 1, 2, 3)):
        assert (attentions[head, 10:].argmax(-1) == torch.arange(10, 40) - offset).float().mean() > 0.9


def test_a_renamed_demonstration_keeps_its_structure_and_none_of_its_names():
    demonstrations = demonstrate([Item("textcraft", i) for i in (4, 150, 300)], get_spec("textcraft"), "act")
    renamer = _script("make_demonstrations").Renamer(demonstrations, random.Random(0))
    book = recipe_book()
    names = "|".join(sorted(map(re.escape, {*book.by_item, *book.raw_items}), key=len, reverse=True))
    for original in demonstrations:
        renamed = renamer.rename(original)
        assert renamed.train_flags == original.train_flags
        assert renamed.messages[:2] == original.messages[:2]
        for old, new in zip(original.messages[2:], renamed.messages[2:], strict=True):
            assert old.role == new.role
            assert re.sub(r"[a-z_ ]+", "", old.content) == re.sub(r"[a-z_ ]+", "", new.content)
            commands = [line for line in new.content.splitlines() if line.startswith("craft ")]
            assert not any(re.fullmatch(rf"craft \d+ (?:{names}) using .*", command) for command in commands)


def test_renamed_actions_name_what_the_renamed_commands_name():
    demonstrations = demonstrate([Item("textcraft", 4)], get_spec("textcraft"), "act")
    renamed = _script("make_demonstrations").Renamer(demonstrations, random.Random(1)).rename(demonstrations[0])
    commands = renamed.messages[2].content.splitlines()
    goal = commands[-1].removeprefix("Goal: craft ").removesuffix(".")
    last = [m.content for m in renamed.messages if m.role == Role.ASSISTANT][-1].removeprefix("Action: ")
    assert last in commands
    assert f" {goal} using " in last


def test_another_world_shows_the_same_goal_among_other_commands():
    environment = get_spec("textcraft").environment()
    seen = set()
    for world in range(3):
        item = Item.parse(_script("pick_items").in_world("textcraft_7", world), "textcraft")
        observation = environment.reset(item.index).observation
        assert observation.endswith(f"Goal: craft {recipe_book().goals[7]}.")
        seen.add(observation)
    assert len(seen) == 3


def test_the_table_shows_before_and_after():
    def report(avg: float) -> dict:
        row = {"name": "overall", "num_items": 5, "avg": avg, "pass_rate": 0.5, "turns_mean": 4.0}
        return {"k": 8, "overall": row, "categories": []}

    text = _script("report").table(report(0.25), report(0.5))
    assert "0.250 -> 0.500" in text
    assert text.endswith("held-out Avg@8 changed by +25.0 points")
