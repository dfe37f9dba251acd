"""How each command of the documentation is run by the tests: as it stands, small, by another test, or only checked.

The first rule whose ``page`` and ``pattern`` fit a command is its rule. The commands of a page that run are one bash
script, in a folder that looks like the project's root, with these differences: ``models/Qwen2.5-7B-Instruct`` is a tiny
random model, the lists in ``AgentEval`` hold one item per category, and ports are free ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_ONE_PROCESS = "trainer.device=cpu trainer.worker_group=local trainer.num_threads=1"
_ONE_WORKER = f"{_ONE_PROCESS} trainer.nnodes=1 trainer.n_gpus_per_node=1 data.max_prompt_length=6000"
SMALL_TRAINING = (
    f"{_ONE_WORKER} data.max_response_length=100 data.train_batch_size=2 trainer.total_training_steps=1 "
    "actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.max_tokens=8 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=2 trainer.logger=[console,jsonl]"
)
SMALL_EVALUATION = f"{_ONE_WORKER} data.max_response_length=100 rollout.name=hf rollout.max_tokens=8 data.n_samples=2"
SOME_TRAINING = "task=textcraft actor_rollout_ref.model.path=models/Qwen2.5-7B-Instruct"
SOME_EVALUATION = (
    "task=textcraft model.path=models/Qwen2.5-7B-Instruct data.path=AgentEval/textcraft/depth1.json "
    "rollout.rollout_log_dir=results/some"
)


@dataclass(frozen=True)
class Rule:
    """What becomes of a command that ``pattern`` fits from its beginning on."""

    pattern: str
    changes: tuple[tuple[str, str], ...] = ()
    """Patterns in the command and what takes their place, in turn."""
    more: str = ""
    """Appended to it; of a key or option that is given twice, the last one holds."""
    as_script: str = "{}"
    """How it stands in the script, instead of ``{}``; ``FREE`` is a port that nobody listens on."""
    by: str = ""
    """The test that runs it, instead of the script."""
    not_run: str = ""
    """Why nothing runs it; it is still checked for what it names."""
    page: str = ""
    """The only page on which the rule holds; every one if empty."""

    def fits(self, page: str, command: str) -> bool:
        return (not self.page or page == self.page) and re.match(self.pattern, command) is not None

    @property
    def runs(self) -> bool:
        return not (self.by or self.not_run)

    def script(self, command: str) -> str:
        """The command as the page's script has it."""
        for pattern, replacement in self.changes:
            command, count = re.subn(pattern, replacement, command)
            assert count, f"{pattern!r} is not in {command!r}: is the rule still right?"
        return self.as_script.format(f"{command} {self.more}".rstrip())


_ENDED = "up FREE; kill $!; wait $! || true"
_SERVED = "{} --port FREE & " + _ENDED
_TUTORIAL = "tests/examples/test_custom_env.py::test_every_command_of_the_tutorial_runs_and_trains"
_SET_UP = "tests/scripts/test_setup.py::test_another_extra_is_added_to_those_that_are_there"
_EVERY_TASK = "tests/examples/test_scripts.py::test_every_script_of_a_task_runs"
_TEXTCRAFT = "actor_rollout_ref.agentgym.env_addr=http://127.0.0.1:36001"

_EXAMPLE = tuple(
    replace(rule, page="docs/sft-dpo-agentevol.md")
    for rule in (
        Rule(r"OUT=\S+; mkdir -p \$OUT$"),
        Rule("python examples/quickstart/pick_items.py ", as_script="{}; cut $OUT"),
        Rule("python examples/quickstart/make_(demonstrations|model).py "),
        Rule("device="),
        Rule("play=", (("response_length=1024", "response_length=64"),)),
        Rule(r"evaluate\(\) \{", (("n_samples=8", "n_samples=1"),)),
        Rule(r"evaluate \$OUT/(sft|dpo)/huggingface "),
        Rule(
            "python -m verl.agent_trainer.main_sft ",
            (("steps=320", "steps=2"), ("steps=30 ", "steps=1 "), ("batch_size=16", "batch_size=4")),
        ),
        # A model of two steps never succeeds: what is better than its failures, experts play.
        Rule(r"agentgym-rl make-pairs \$OUT/samples ", more="--experts $OUT/demonstrations.jsonl"),
        Rule(
            "python -m verl.agent_trainer.main_dpo ",
            (("steps=30 ", "steps=1 "), ("batch_size=32", "batch_size=2")),
        ),
        Rule("head -1000 "),
        Rule(
            "python -m verl.agent_trainer.main_agentevol ",
            (
                ("iterations=2", "iterations=1"),
                ("steps=70", "steps=1"),
                ("batch_size=16", "batch_size=2"),
                (r"rollout\.n=8 rollout\.val_kwargs\.n=8", "rollout.n=1"),
            ),
        ),
    )
)

RULES: tuple[Rule, ...] = (
    # ------------------------------------------------------------------------------------------ run by other tests
    Rule("", page="docs/custom-environment.md", by=_TUTORIAL),
    Rule(
        "bash examples/quickstart.sh",
        by="tests/examples/test_quickstart.py::test_the_quickstart_trains_evaluates_and_leaves_nothing_running",
    ),
    Rule(
        r"bash scripts/setup.sh [\w -]+( && source .venv/bin/activate)?$",
        by=_SET_UP,
    ),
    Rule(r"pip install -e '\.\[", by=_SET_UP),
    Rule(
        "bash scripts/setup.sh webarena && bash scripts/chromium.sh$",
        by=_EVERY_TASK,
    ),
    Rule(
        "agentgym-rl serve (sciworld|webarena) --port 3600.$",
        by=_EVERY_TASK,
    ),
    Rule(
        "agentgym-rl serve searchqa --questions|python -m agentgym_rl.envs.searchqa --questions",
        by="tests/agentgym_rl/envs/searchqa/test_over_http.py::test_the_data_is_made_ahead_by_a_command",
    ),
    Rule(
        r"bash scripts/ray_cluster.sh (head|join|wait|stop)\b",
        by="tests/scripts/test_ray_cluster.py::test_each_node_has_its_workers_in_rank_order_and_they_form_one_process_group",
    ),
    Rule(
        "sbatch .*examples/slurm/train.sbatch",
        by="tests/examples/test_slurm.py::test_two_nodes_train_and_the_job_leaves_nothing_behind",
    ),
    Rule("mkdocs serve", by="tests/docs/test_site.py::test_the_site_is_built_without_a_warning"),
    Rule(
        "python scripts/make_configuration_docs.py",
        by="tests/scripts/test_configuration_docs.py::test_the_reference_is_up_to_date",
    ),
    Rule(
        r"python scripts/experiments/cluster_\w+\.py",
        by="tests/scripts/test_cluster_sim.py::test_the_programs_run_as_the_page_shows_them",
    ),
    # ------------------------------------------------------------------------------------------------------ not run
    Rule("bash scripts/test.sh", not_run="it is what runs this test"),
    Rule("ruff check", not_run="scripts/test.sh does so before the tests"),
    Rule("pytest ", not_run="scripts/test.sh runs these tests"),
    Rule(
        r"(\w+=\S+ )*(bash|python) scripts/(bench|experiments)/",
        not_run="takes from minutes to hours; the measured pages come from it",
    ),
    Rule("export (SHOPPING|MAP|WIKIPEDIA)=", not_run="needs the sites of WebArena"),
    Rule("agentgym-rl serve webarena --task-file", not_run="needs the sites of WebArena"),
    Rule(r".*\bwebshop\b", page="agentgym_rl/envs/agentgym_clients/README.md", not_run="needs a server of AgentGym"),
    # -------------------------------------------------------------------------------------------- servers and tools
    Rule(
        r"agentgym-rl serve \w+.* &$",
        ((r"10\.0\.0\.1", "127.0.0.1"),),
        page="docs/multi-node.md",
        as_script="{} up 36001",
    ),
    Rule(r"agentgym-rl serve textcraft --port 36001 &$", as_script="{} up 36001"),
    Rule(
        "agentgym-rl serve (textcraft|babyai) --port 3600.$",
        ((r"--port \d+", "--port FREE"),),
        as_script="{} & " + _ENDED,
    ),
    Rule("agentgym-rl serve (textcraft|searchqa) --(workers|max-answers)", as_script=_SERVED),
    Rule(r"\S*agentgym-rl view saves", as_script="mkdir -p saves/quickstart; " + _SERVED),
    Rule("agentgym-rl play textcraft", as_script=r"printf 'inventory\n:quit\n' | {}"),
    Rule("agentgym-rl check textcraft"),
    Rule("agentgym-rl bench textcraft", more="--seconds 0.5"),
    Rule("agentgym-rl doctor$", as_script="{} || true"),  # the machine of the tests may lack room on its disk
    Rule("agentgym-rl export saves/textcraft --at", ((r"step3/0\.jsonl:17", "step1/0.jsonl:1"),)),
    Rule(
        "agentgym-rl eval --api-base",
        (("https://api.openai.com/v1", "$CHAT_URL"),),
        more="--n-samples 1 --max-rounds 2 --api-key-env OPENAI_API_KEY",
    ),
    Rule("agentgym-rl make-pairs results/one results/two"),
    Rule(r"export (OPENAI_API_KEY|AGENTGYM_TOKEN)="),
    # ------------------------------------------------------------------------------------------- plans of many GPUs
    Rule(r"python -m verl.agent_trainer.main_ppo (?s:.*)trainer.dry_run=true$"),
    Rule(
        "RAY_AUTH_MODE=token python -m verl.agent_trainer.main_ppo (?s:.*)ray_init.address=",
        (("=/shared/", "="),),
        more="trainer.dry_run=true",
    ),
    # ------------------------------------------------------------------------------------------ trainings, evaluations
    Rule("agentgym-rl train ", more=f"{_TEXTCRAFT} {SMALL_TRAINING} trainer.default_local_dir=saves/short"),
    Rule(
        r"python -m verl.agent_trainer.main_ppo \.\.\. ",
        ((r"\.\.\.", f"{SOME_TRAINING} {_TEXTCRAFT}"),),
        more=SMALL_TRAINING,
    ),
    Rule(
        r"python -m verl.agent_trainer.main_ppo (?s:.*) \.\.\.$",
        ((r"\.\.\.$", "actor_rollout_ref.model.path=models/Qwen2.5-7B-Instruct"),),
        more=SMALL_TRAINING,
    ),
    Rule(
        r"python -m verl.agent_trainer.main_ppo (?s:.*)task=textcraft",
        more=f"{_TEXTCRAFT} {SMALL_TRAINING}",
    ),
    Rule("python -m verl.agent_trainer.main_ppo ", more=SMALL_TRAINING),
    Rule(
        r"python -m verl.agent_trainer.main_generation \.\.\. ",
        ((r"\.\.\.", f"{SOME_EVALUATION} agentgym.env_addr=http://127.0.0.1:36001"),),
        more=SMALL_EVALUATION,
    ),
    Rule(
        r"python -m verl.agent_trainer.main_generation (?s:.*)model.path=saves/textcraft/global_step_300/",
        (("global_step_300", "global_step_1"),),
        more=SMALL_EVALUATION,
    ),
    Rule(
        r"python -m verl.agent_trainer.main_generation (?s:.*)model.path=saves/textcraft ",
        more=f"agentgym.env_addr=http://127.0.0.1:36001 {SMALL_EVALUATION}",
    ),
    # ---------------------------------------------------------------------------- the example of SFT, DPO and AgentEvol
    *_EXAMPLE,
)


def rule_of(page: str, command: str) -> Rule | None:
    """The first rule that fits; None for a command that nobody has thought of."""
    return next((rule for rule in RULES if rule.fits(page, command)), None)
