"""From the command line to a config object: every published key works, every mistake is answered with what is right."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentgym_rl.client.addresses import parse_addresses
from agentgym_rl.errors import ConfigError
from verl.agent_trainer.loading import RENAMED_KEYS, as_yaml, known_keys, load_config, parse_command_line
from verl.config import AgentEvolConfig, DPOConfig, GenerationConfig, PPOConfig, SFTConfig

CASES = Path(__file__).parents[2] / "cases"
ROOTS: dict[str, tuple[type, str]] = {
    "main_ppo": (PPOConfig, "ppo_trainer"),
    "main_generation": (GenerationConfig, "generation"),
    "main_sft": (SFTConfig, "sft_trainer"),
    "main_dpo": (DPOConfig, "dpo_trainer"),
    "main_agentevol": (AgentEvolConfig, "agentevol"),
}
REQUIRED = {
    "main_ppo": (
        "data.train_file=train.json",
        "actor_rollout_ref.agentgym.task_name=textcraft",
        "actor_rollout_ref.agentgym.env_addr=http://127.0.0.1:1",
        "actor_rollout_ref.model.path=model",
    ),
    "main_generation": (
        "data.path=items",
        "agentgym.task_name=textcraft",
        "agentgym.env_addr=http://127.0.0.1:1",
        "model.path=model",
    ),
    "main_sft": ("data.train_file=train.jsonl", "model.path=model"),
    "main_dpo": ("data.train_file=pairs.jsonl", "model.path=model"),
    "main_agentevol": (
        "data.train_file=items",
        "data.val_file=others",
        "agentgym.task_name=textcraft",
        "agentgym.env_addr=http://127.0.0.1:1",
        "model.path=model",
    ),
}
# A value that only makes sense beside another.
COMPANIONS = {
    "algorithm.rounds_ctrl.rounds=[10,20,30]": ("algorithm.rounds_ctrl.type=scaling_inter_stepwise",),
    "algorithm.rounds_ctrl.type=scaling_inter_stepwise": ("algorithm.rounds_ctrl.rounds=[10,20,30]",),
}


def load(program: str, *overrides: str) -> Any:
    root, name = ROOTS[program]
    return load_config(root, parse_command_line([*REQUIRED[program], *overrides], program=program, config_name=name))


def published_overrides() -> Iterator[tuple[str, str]]:
    program = ""
    for line in (CASES / "config-keys.txt").read_text().splitlines():
        if line.startswith("# main:"):
            program = line.rsplit(".", 1)[-1]
        elif line and not line.startswith("#"):
            key, _, values = line.partition("=")
            yield from ((program, f"{key}={value}") for value in values.split("|"))


def value_at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(("program", "override"), list(published_overrides()))
def test_published_overrides_are_accepted(program: str, override: str) -> None:
    config = load(program, override, *COMPANIONS.get(override, ()))
    key, _, text = override.partition("=")
    value = value_at(config, key)
    assert value == (float(text) if isinstance(value, float) else value)
    assert str(value).replace(" ", "") == text or value == float(text)


def test_a_list_of_rounds_becomes_the_schedule() -> None:
    config = load(
        "main_ppo",
        "algorithm.rounds_ctrl.type=scaling_inter_stepwise",
        "algorithm.rounds_ctrl.rounds=[10,20,30]",
        "algorithm.rounds_ctrl.steps_scaling_inter=2",
    )
    scheduler = config.algorithm.rounds_ctrl.scheduler()
    assert [scheduler.rounds(step) for step in range(1, 8)] == [10, 10, 20, 20, 30, 30, 30]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.trian_file=x"], "data.trian_file: unknown key; did you mean data.train_file?"),
        (["actor_rollout_ref.rollout.max_token=9"], "did you mean actor_rollout_ref.rollout.max_tokens?"),
        (["actor.ppo_epochs=2"], "did you mean actor_rollout_ref.actor.ppo_epochs?"),
        (["data.train_files=x"], "data.train_files: unknown key; here it is data.train_file"),
        (["zzz=1"], "zzz: unknown key; docs/configuration.md lists the known keys"),
        (["trainer.total_epochs=2.5"], "trainer.total_epochs=2.5: must be an int"),
        (["trainer.val_before_train=often"], "trainer.val_before_train='often': must be true or false"),
        (["actor_rollout_ref.actor.optim.lr=1e999"], "optim.lr=inf: must be a number, and finite"),
        (["actor_rollout_ref.actor.entropy_coeff=nan"], "entropy_coeff=nan: must be a number, and finite"),
        (["data.task_weights=[1,nan]"], "data.task_weights=[1, nan]: must be a list"),
        (["actor_rollout_ref.actor.optim.lr=fast"], "actor_rollout_ref.actor.optim.lr='fast': must be a number"),
        (["trainer.logger=3"], "trainer.logger=3: must be a list, each a string"),
        (["data=3"], "data=3: is a branch with the keys train_file, val_file"),
        (["trainer.project_name={a: 1}"], "trainer.project_name={'a': 1}: must be a string"),
        (["data.train_batch_size"], "'data.train_batch_size': not of the form key=value"),
        (["data.seed=[1"], "'data.seed=[1': not of the form key=value"),
        (["~data.seed=0"], "only key=value is allowed"),
        (["data.seed=1,2"], "data.seed=[1, 2]: must be an int"),
        (["trainer.logger=[console,paper]"], "trainer.logger='paper': must be one of console, jsonl"),
        (["actor_rollout_ref.rollout.n=1"], "actor_rollout_ref.rollout.n=1 with algorithm.adv_estimator=grpo"),
        (
            ["actor_rollout_ref.rollout.n=1", "algorithm.adv_estimator=rloo"],
            "rollout.n=1 with algorithm.adv_estimator=rloo",
        ),
        (["actor_rollout_ref.rollout.temperature=0"], "temperature=0.0: training needs a temperature above 0"),
        (["algorithm.rounds_ctrl.rounds=[3,2]"], "type=fixed takes one int"),
        (
            ["algorithm.rounds_ctrl.type=scaling_inter_stepwise", "algorithm.rounds_ctrl.rounds=[3,2]"],
            "stages must not fall",
        ),
        (
            ["actor_rollout_ref.actor.ppo_mini_batch_size=5"],
            "ppo_mini_batch_size=5 must divide data.train_batch_size=32",
        ),
        (["trainer.project_name="], "trainer.project_name='': is empty; must be a string"),
        (["algorithm.rounds_ctrl.rounds={a: 1}"], "algorithm.rounds_ctrl.rounds={'a': 1}: must be a value or a list"),
        (["trainer.save_freq=0"], "trainer.save_freq=0: must be at least 1, or -1"),
        (["actor_rollout_ref.actor.optim.lr=nan"], "optim.lr=nan: must be a number, and finite"),
        (["actor_rollout_ref.actor.optim.betas=[0.9]"], "optim.betas=[0.9]: must be two numbers in [0, 1)"),
        (["actor_rollout_ref.actor.clip_ratio_high=-1"], "actor.clip_ratio_high=-1.0: must be at least 0"),
        (["actor_rollout_ref.actor.loss_norm_constant=0"], "actor.loss_norm_constant=0.0: must be above 0"),
        (["actor_rollout_ref.agentgym.timeout=0"], "agentgym.timeout=0.0: must be above 0"),
        (["actor_rollout_ref.agentgym.agent=reakt"], "agentgym.agent='reakt': must be one of react, act"),
        (["actor_rollout_ref.agentgym.action_format=json"], "agentgym.action_format='json': must be one of react, "),
        (["actor_rollout_ref.agentgym.max_trials=9"], "agentgym.max_trials=9: must be from 1 to 8"),
        (
            ["actor_rollout_ref.agentgym.agent=reflect", "algorithm.adv_estimator=remax"],
            "algorithm.adv_estimator=remax with actor_rollout_ref.agentgym.agent=reflect: an agent that tries again",
        ),
        (["actor_rollout_ref.agentgym.strategy=act"], "unknown key; here it is actor_rollout_ref.agentgym.agent"),
        (
            ["algorithm.rounds_ctrl.type=scaling_inter_adaptive"],
            "algorithm.rounds_ctrl.rounds=10: type=scaling_inter_adaptive takes a list of ints",
        ),
        (["algorithm.rounds_ctrl.window=0"], "algorithm.rounds_ctrl.window=0: must be an int >= 1"),
        (["actor_rollout_ref.rollout.max_num_seqs=0"], "rollout.max_num_seqs=0: must be at least 1"),
        (["actor_rollout_ref.rollout.val_kwargs.n=0"], "rollout.val_kwargs.n=0: must be at least 1"),
        (["actor_rollout_ref.rollout.val_kwargs.top_p=0"], "rollout.val_kwargs.top_p=0.0: must be in (0, 1]"),
        (["algorithm.kl_ctrl.kl_coef=-1"], "algorithm.kl_ctrl.kl_coef=-1.0: must be at least 0"),
        (["algorithm.kl_ctrl.type=adaptive"], "kl_coef=0.0 with algorithm.kl_ctrl.type=adaptive: must be above 0"),
        (
            [
                "algorithm.kl_ctrl.type=adaptive",
                "algorithm.kl_ctrl.kl_coef=0.1",
                "actor_rollout_ref.actor.use_kl_loss=True",
            ],
            "algorithm.kl_ctrl.type='adaptive' with actor_rollout_ref.actor.use_kl_loss=True: must be fixed",
        ),
        (["algorithm.kl_ctrl.target_kl=0"], "algorithm.kl_ctrl.target_kl=0.0: must be above 0"),
        (["algorithm.lam=1.5"], "algorithm.lam=1.5: must be in [0, 1]"),
        (["algorithm.gamma_turn=0.9"], "algorithm.gamma_turn=0.9 with algorithm.adv_estimator=grpo: must be 1"),
        (
            ["algorithm.adv_estimator=gigpo", "algorithm.gamma=0.9"],
            "algorithm.gamma=0.9 with algorithm.adv_estimator=gigpo: must be 1; its steps are turns",
        ),
        (["algorithm.gigpo.mode=std"], "algorithm.gigpo.mode='std': must be one of mean_std_norm, mean_norm"),
        (["algorithm.rollout_is_level=turn"], "algorithm.rollout_is_level='turn': must be one of token, sequence"),
        (["algorithm.rollout_is_threshold=0"], "algorithm.rollout_is_threshold=0.0: must be above 0"),
        (["algorithm.filter_groups.metric=reward"], "filter_groups.metric='reward': must be one of score, seq_reward"),
        (["algorithm.filter_groups.max_num_gen_batches=0"], "max_num_gen_batches=0: must be at least 1"),
        (
            [
                "algorithm.filter_groups.enable=True",
                "algorithm.adv_estimator=reinforce_plus_plus",
                "actor_rollout_ref.rollout.n=1",
            ],
            "actor_rollout_ref.rollout.n=1 with algorithm.filter_groups.enable=True: a group needs n >= 2",
        ),
        (
            ["algorithm.adv_estimator=gae", "critic.enable=False"],
            "critic.enable=False with algorithm.adv_estimator=gae: must be True or null",
        ),
        (
            ["trainer.critic_warmup=3"],
            "trainer.critic_warmup=3 with algorithm.adv_estimator=grpo: must be 0, since there is no critic",
        ),
        (
            ["algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=5"],
            "critic.ppo_mini_batch_size=5 must divide data.train_batch_size=32",
        ),
        (["critic.cliprange_value=0"], "critic.cliprange_value=0.0: must be above 0"),
        (["critic.ppo_micro_batch_size=4"], "here it is critic.ppo_micro_batch_size_per_gpu"),
        (["trainer.max_actor_ckpt_to_keep=0"], "trainer.max_actor_ckpt_to_keep=0: must be at least 1"),
        (["trainer.resume_from_path=a/global_step_3"], "a path is used only with resume_mode=resume_path"),
        (["trainer.resume_mode=resume_path"], "resume_mode=resume_path needs trainer.resume_from_path"),
        (["trainer.worker_group=local", "trainer.n_gpus_per_node=2"], "local runs one worker in the driver's process"),
        (
            ["actor_rollout_ref.rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=3", "trainer.nnodes=2"],
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2 must divide trainer.n_gpus_per_node=3",
        ),
        (
            ["critic.fsdp_config.fsdp_size=4", "trainer.n_gpus_per_node=3", "trainer.nnodes=2"],
            "critic.fsdp_config.fsdp_size=4 must divide the number of workers, trainer.nnodes=2 x "
            "trainer.n_gpus_per_node=3 = 6",
        ),
        (
            ["actor_rollout_ref.ref.fsdp_config.fsdp_size=0"],
            "fsdp_config.fsdp_size=0: must be at least 1, or -1 for all",
        ),
        (
            ["actor_rollout_ref.rollout.tensor_model_parallel_size=0"],
            "rollout.tensor_model_parallel_size=0: must be at least 1",
        ),
    ],
)
def test_a_mistake_is_named_with_key_value_and_what_is_allowed(overrides: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("main_ppo", *overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.n=4", "rollout.n=4: an evaluation takes data.n_samples trajectories per item"),
        ("rollout.val_kwargs.n=4", "rollout.val_kwargs: an evaluation samples by rollout.temperature"),
        ("rollout.temperature=-1", "rollout.temperature=-1.0: must be at least 0"),
        ("rollout.top_k=0", "rollout.top_k=0: must be at least 1, or -1 for no cut"),
        ("agentgym.max_rounds=0", "agentgym.max_rounds=0: must be at least 1"),
        ("agentgym.max_concurrency=0", "agentgym.max_concurrency=0: must be at least 1"),
        (
            "rollout.tensor_model_parallel_size=2",
            "rollout.tensor_model_parallel_size=2 must divide trainer.n_gpus_per_node=1",
        ),
    ],
)
def test_an_evaluation_refuses_what_it_would_not_heed(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("main_generation", override)
    assert message in str(caught.value)


def test_kl_in_the_loss_takes_the_place_of_kl_in_the_reward() -> None:
    both = ("algorithm.kl_ctrl.kl_coef=0.001", "actor_rollout_ref.actor.use_kl_loss=True")
    assert load("main_ppo", both[0]).reward_kl_coef == 0.001
    assert load("main_ppo", *both).reward_kl_coef == 0 and load("main_ppo", *both).needs_reference


def test_a_critic_is_as_the_policy_where_nothing_else_is_said() -> None:
    plain = load("main_ppo", "algorithm.adv_estimator=gae", "actor_rollout_ref.model.lora_rank=8")
    policy = plain.actor_rollout_ref.model
    assert plain.needs_critic and plain.critic.model.resolved(policy).path == policy.path
    assert plain.critic.model.resolved(policy).lora_rank == 0 and plain.critic.optim.lr == 1e-5
    own = load("main_ppo", "critic.enable=True", "critic.model.path=other")
    assert own.needs_critic and own.critic.model.resolved(own.actor_rollout_ref.model).path == "other"
    assert not load("main_ppo").needs_critic


def test_flags_may_stand_between_overrides() -> None:
    argv = ["a=1", "--config-name", "mine", "b=2", "--show-config", "c=3"]
    parsed = parse_command_line(argv, program="p", config_name="ppo_trainer")
    assert parsed.overrides == ("a=1", "b=2", "c=3") and parsed.config_name == "mine" and parsed.show


def test_missing_keys_are_listed_together() -> None:
    with pytest.raises(ConfigError, match=r"must be given: .*agentgym\.env_addr.*data\.train_file"):
        load_config(PPOConfig, parse_command_line([], program="p", config_name="ppo_trainer"))


def test_two_trajectories_on_four_workers_are_refused_and_four_are_not() -> None:
    single = ("algorithm.adv_estimator=reinforce_plus_plus", "trainer.n_gpus_per_node=4")
    with pytest.raises(ConfigError) as caught:
        load(
            "main_ppo",
            *single,
            "actor_rollout_ref.rollout.n=1",
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        )
    assert "data.train_batch_size=2 x actor_rollout_ref.rollout.n=1 = 2 trajectories" in str(caught.value)
    assert "4 workers" in str(caught.value)
    assert "the nearest that work are data.train_batch_size=4, or 2 workers" in str(caught.value)
    one = ("data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor_rollout_ref.rollout.n=4")
    assert load("main_ppo", *one, "trainer.n_gpus_per_node=4").trainer.world_size == 4


def test_no_renamed_key_is_a_key_of_every_root() -> None:
    known = [set(known_keys(root)) for root, _ in ROOTS.values()]
    assert not any(all(key in keys for keys in known) for key in RENAMED_KEYS)


def test_a_file_of_the_users_own_is_read_and_checked_like_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults:\n  - ppo_trainer\n  - _self_\ndata:\n  seed: 7\n")
    (tmp_path / "wrong.yaml").write_text("data:\n  sede: 7\n")
    root, _ = ROOTS["main_ppo"]

    def load_file(name: str) -> Any:
        argv = [*REQUIRED["main_ppo"], "--config-dir", str(tmp_path), "--config-name", name]
        return load_config(root, parse_command_line(argv, program="p", config_name="ppo_trainer"))

    assert load_file("mine").data.seed == 7
    assert load_file("mine").actor_rollout_ref.rollout.n == 4
    with pytest.raises(ConfigError, match=r"data\.sede: unknown key; did you mean data\.seed"):
        load_file("wrong")
    with pytest.raises(ConfigError, match="config-name=absent"):
        load_file("absent")


def test_the_printed_config_is_read_back_as_the_same(tmp_path: Path) -> None:
    config = load("main_ppo", "trainer.logger=[console]", "data.val_file=val.json")
    (tmp_path / "again.yaml").write_text(as_yaml(config))
    argv = ["--config-dir", str(tmp_path), "--config-name", "again"]
    assert load_config(PPOConfig, parse_command_line(argv, program="p", config_name="ppo_trainer")) == config


@pytest.mark.parametrize("program", ROOTS)
def test_a_misspelled_key_ends_the_program_in_one_line_before_torch_is_imported(program: str) -> None:
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", f"verl.agent_trainer.{program}", "data.sede=1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    lines = [line for line in run.stderr.splitlines() if not line.startswith("import time:")]
    assert lines == ["error: data.sede: unknown key; did you mean data.seed?"]
    imported = {line.rsplit("|", 1)[-1].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}
    assert not imported & {"torch", "ray", "transformers"}
    assert "omegaconf" in imported


@pytest.mark.parametrize(
    "written", ["[http://a:1,http://b:2/maze/]", "http://a:1,http://b:2/maze/", "'http://a:1, http://b:2/maze'"]
)
def test_several_servers_are_a_list_or_have_commas_between(written: str) -> None:
    config = load("main_ppo", f"actor_rollout_ref.agentgym.env_addr={written}")
    addresses = parse_addresses(config.actor_rollout_ref.agentgym.env_addr)
    assert addresses == ("http://a:1", "http://b:2/maze")


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("127.0.0.1:36001", "must be a URL"),
        ("[http://a:1,7]", "env_addr=7: must be a URL"),
        ("[]", "must be a URL"),
        ("7", "must be a URL"),
        ("null", "must be a URL"),
        ("[http://a:1,http://a:1/]", "http://a:1 stands twice"),
        ("http://a:x", "must be a URL"),
        ("http://user:word@a", "must be a URL"),
    ],
)
def test_what_is_no_address_is_refused_before_anything_starts(written: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        load("main_ppo", f"actor_rollout_ref.agentgym.env_addr={written}")


def test_values_with_commas_between_are_a_list_only_where_the_key_takes_one() -> None:
    assert load("main_ppo", "trainer.logger=console,jsonl").trainer.logger == ["console", "jsonl"]
    with pytest.raises(ConfigError, match=r"data\.train_batch_size=\[8, 16\]: must be an int"):
        load("main_ppo", "data.train_batch_size=8,16")
    with pytest.raises(ConfigError, match="neither deletions nor sweeps"):
        load("main_ppo", "data.train_batch_size=range(1,9)")


@pytest.mark.parametrize(
    ("program", "overrides", "message"),
    [
        ("main_sft", ["trainer.test_freq=5"], "needs data.val_file, agentgym.task_name, agentgym.env_addr"),
        ("main_sft", ["rollout.n=2"], "rollout.n=2: validation samples by rollout.val_kwargs.n"),
        ("main_sft", ["data.truncation=left"], "data.truncation='left': must be one of error, right"),
        ("main_sft", ["trainer.resume_mode=resume_path"], "needs trainer.resume_from_path"),
        ("main_dpo", ["trainer.val_before_train=True"], "validation needs data.val_file"),
        ("main_dpo", ["data.train_batch_size=1", "trainer.n_gpus_per_node=2"], "each needs at least one row"),
        ("main_agentevol", ["algorithm.iterations=0"], "algorithm.iterations=0: must be at least 1"),
        ("main_agentevol", ["algorithm.explored=best"], "must be one of one_per_item, all"),
        ("main_agentevol", ["algorithm.reward_threshold=high"], "must be a number or null, or a list of them"),
        ("main_agentevol", ["algorithm.reward_threshold=[1,2]"], "an entry for each of the 1 tasks"),
        ("main_agentevol", ["trainer.resume_mode=disable"], "must be auto; to begin anew take another"),
        ("main_agentevol", ["trainer.test_freq=5"], "every iteration ends with an evaluation"),
        ("main_agentevol", ["rollout.rollout_log_dir=x"], "each iteration has its folder"),
    ],
)
def test_impossible_trainings_on_data_are_refused(program: str, overrides: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(program, *overrides)
    assert message in str(caught.value)


def test_a_threshold_may_be_one_for_all_tasks_or_one_each() -> None:
    several = ["agentgym.task_name=[textcraft,babyai]", "agentgym.env_addr=[http://127.0.0.1:1,http://127.0.0.1:2]"]
    thresholds = load("main_agentevol", *several, "algorithm.reward_threshold=[1,null]").thresholds
    assert thresholds == {"textcraft": 1, "babyai": None}
    assert load("main_agentevol", *several, "algorithm.reward_threshold=0.5").thresholds["babyai"] == 0.5
