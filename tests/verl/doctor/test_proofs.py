"""Proofs on a sound model, template and server pass; each planted fault fails its own row and no other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.environments import Script
from support.machines import say_that_the_machine_is_sound
from support.models import tiny_qwen2
from support.parity import TASK, parity_spec
from support.rollouts import make_generation, make_trajectory
from support.servers import serve
from support.tokenizers import CHATML, make_tokenizer

from agentgym_rl.cli import main
from agentgym_rl.doctor.findings import Finding, Verdict
from agentgym_rl.envs.registry import register
from agentgym_rl.envs.server import build_app
from agentgym_rl.errors import ConfigError
from agentgym_rl.rollout.handler import RolloutHandler
from agentgym_rl.types import Generation, Item
from verl.doctor import proofs
from verl.doctor.proofs import LOG_PROBS, MASKS, PACKING, RESUME, TEMPLATE, prove
from verl.models.policy import PolicyModule
from verl.trainer.ppo import PPOTrainer

pytestmark = pytest.mark.server

ROWS = [TEMPLATE, MASKS, LOG_PROBS, PACKING, RESUME]
Diagnose = Callable[..., dict[str, Finding]]


def save_model(folder: Path, *, template: str = CHATML) -> Path:
    tokenizer = make_tokenizer(template)
    tiny_qwen2(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def script() -> Script:
    return Script(turns=4)


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    spec = parity_spec(script)
    register(spec)
    with serve(build_app(spec)) as url:
        yield url


@pytest.fixture
def diagnose(model: Path, url: str) -> Diagnose:
    """The rows by name."""

    def run(path: Path = model, *, quick: bool = True) -> dict[str, Finding]:
        overrides = ["trainer.device=cpu", "actor_rollout_ref.rollout.max_tokens=8"]
        return {each.name: each for each in prove(str(path), TASK, url, overrides=overrides, quick=quick)}

    return run


def failures(findings: dict[str, Finding]) -> list[str]:
    return [name for name, finding in findings.items() if finding.verdict == Verdict.FAILED]


def test_a_sound_model_template_and_server_pass_every_row(
    model: Path, url: str, script: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say_that_the_machine_is_sound(monkeypatch)
    arguments = ["doctor", "--model", str(model), "--task", TASK, "--env-addr", url, "trainer.device=cpu"]
    assert main([*arguments, "actor_rollout_ref.rollout.max_tokens=8"]) == 0
    printed = capsys.readouterr().out
    for row in ROWS:
        [line] = [line for line in printed.splitlines() if line.startswith(row)]
        assert "passed" in line
    assert "agree to the last digit, weights included" in " ".join(printed.split())
    assert script.open == 0


def test_a_template_that_cannot_be_grown_fails_its_row_with_the_first_difference(
    diagnose: Diagnose, tmp_path: Path
) -> None:
    """From the sixth message on, headers are others."""
    broken = CHATML.replace("{{ m.role }}", "{{ m.role if loop.index < 6 else 'late ' + m.role }}")
    findings = diagnose(save_model(tmp_path / "model", template=broken))
    assert failures(findings) == [TEMPLATE]
    assert "turn by turn has" in findings[TEMPLATE].seen and "the whole render" in findings[TEMPLATE].seen


def test_a_template_that_rewrites_history_is_not_judged_by_its_renders(diagnose: Diagnose, tmp_path: Path) -> None:
    rewriting = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1] }}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    findings = diagnose(save_model(tmp_path / "model", template=rewriting))
    assert findings[TEMPLATE].verdict == Verdict.NOT_APPLICABLE and failures(findings) == []


def test_a_mask_that_covers_what_was_not_sampled_fails_its_row(
    diagnose: Diagnose, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = RolloutHandler.append_observation

    def marks_the_observation(self: RolloutHandler, *arguments: Any) -> bool:
        before = self.num_tokens
        fits = append(self, *arguments)
        self._tokens.loss_mask[before : before + 2] = 1
        return fits

    monkeypatch.setattr(RolloutHandler, "append_observation", marks_the_observation)
    findings = diagnose()
    assert MASKS in failures(findings) and TEMPLATE not in failures(findings)
    assert "is marked and is" in findings[MASKS].seen


def test_a_mask_that_misses_the_last_sampled_token_fails_its_row(
    diagnose: Diagnose, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = RolloutHandler.append_generation

    def misses_the_last(self: RolloutHandler, generation: Generation, *arguments: Any) -> str:
        text = append(self, generation, *arguments)
        marked = self.loss_mask.nonzero()[0]
        self._tokens.loss_mask[marked[-1]] = 0
        return text

    monkeypatch.setattr(RolloutHandler, "append_generation", misses_the_last)
    assert MASKS in failures(diagnose())


def test_a_trainer_at_another_temperature_fails_the_rows_of_log_probs(
    diagnose: Diagnose, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = PolicyModule.__init__

    def cold(self: PolicyModule, model: Any, temperature: float = 1.0, *arguments: Any) -> None:
        make(self, model, 0.7, *arguments)

    monkeypatch.setattr(PolicyModule, "__init__", cold)
    findings = diagnose()
    assert failures(findings) == [LOG_PROBS, PACKING]
    assert "sampled token 0: engine -" in findings[LOG_PROBS].seen


def test_rows_that_see_their_neighbours_fail_the_row_of_packing(
    diagnose: Diagnose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The padded computation is right and the packed one is not."""
    padded = proofs.padded_log_probs

    def off(*arguments: Any) -> torch.Tensor:
        values_S = padded(*arguments)
        values_S[5] += 0.01
        return values_S

    monkeypatch.setattr(proofs, "padded_log_probs", off)
    findings = diagnose()
    assert failures(findings) == [PACKING]
    assert "sampled token 5: packed" in findings[PACKING].seen and "1 of" in findings[PACKING].seen


def test_a_step_that_goes_on_differently_after_a_stop_fails_its_row(
    diagnose: Diagnose, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume = PPOTrainer._resume

    def forgets_the_seed(self: PPOTrainer, folder: Path) -> None:
        resume(self, folder)
        self._config.trainer.seed += 1

    monkeypatch.setattr(PPOTrainer, "_resume", forgets_the_seed)
    findings = diagnose(quick=False)
    assert failures(findings) == [RESUME]
    assert "without a stop and" in findings[RESUME].seen


def test_weights_that_differ_after_equal_metrics_fail_the_row(tmp_path: Path, model: Path) -> None:
    folders = [tmp_path / "whole", tmp_path / "resumed"]
    for folder in folders:
        shutil.copytree(model, folder / "global_step_2" / "actor" / "huggingface")
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 2, "actor/loss": 0.5, "timing_s/step": 1}) + "\n")
    compare = proofs.compare_steps
    assert compare(*folders, step=2, tolerance=0.0).verdict == Verdict.PASSED
    weights = folders[1] / "global_step_2" / "actor" / "huggingface" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert "the weights do not" in compare(*folders, step=2, tolerance=0.0).seen
    (folders[1] / "metrics.jsonl").write_text(json.dumps({"step": 2, "actor/loss": 0.5001}) + "\n")
    assert "actor/loss is 0.5 without a stop and 0.5001 after one" in compare(*folders, step=2, tolerance=0.0).seen
    assert compare(*folders, step=2, tolerance=1e-3).verdict == Verdict.PASSED


def test_a_server_that_breaks_is_a_result_and_a_model_that_is_not_there_an_error(
    diagnose: Diagnose, script: Script, tmp_path: Path
) -> None:
    script.fails_at = {0: 1, 1: 1}
    findings = diagnose()
    assert failures(findings) == [TEMPLATE, MASKS]
    assert "no episodes: TooManyFailures" in findings[MASKS].seen
    assert findings[LOG_PROBS].verdict == findings[PACKING].verdict == Verdict.NOT_APPLICABLE
    with pytest.raises(ConfigError, match="no such folder"):
        diagnose(tmp_path / "missing")


def test_every_way_in_which_a_record_may_be_wrong_is_told() -> None:
    sound = replace(make_trajectory(Item(TASK, 0)), uid="u")
    given = {f"0/u/{TASK}_0/0/1/1": [replace(make_generation([5, 6]), log_probs=(-0.25, -1.5))]}
    assert proofs.compare_masks([sound], given).verdict == Verdict.PASSED

    def seen(**changes: Any) -> str:
        return proofs.compare_masks([replace(sound, **changes)], given).seen

    changed = {name: getattr(sound, name).copy() for name in ("loss_mask", "rollout_log_probs", "token_rewards")}
    changed["loss_mask"][:] = (0, 1, 0)
    assert "1 tokens are marked, and the engine sampled 2" in seen(loss_mask=changed["loss_mask"])
    changed["rollout_log_probs"][1] = -0.5
    assert "token 1 has log-prob -0.5, the engine gave -0.25" in seen(rollout_log_probs=changed["rollout_log_probs"])
    changed["token_rewards"][0] = 1
    assert "token 0 has a reward and was not sampled" in seen(token_rewards=changed["token_rewards"])
