"""The subcommands of ``agentgym-rl`` about evaluations; what they need is imported when they run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym_rl.errors import ConfigError

if TYPE_CHECKING:
    from agentgym_rl.evaluation.usage import Prices


def add_compare(subcommands: Any) -> None:
    parser = subcommands.add_parser("compare", help="results of evaluations side by side, with paired tests")
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="results folders; the first is the base"
    )
    parser.add_argument("--items", type=int, default=20, metavar="N", help="show so many differing items (default: 20)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> None:
    from agentgym_rl.evaluation.compare import compare, read_evaluation
    from agentgym_rl.evaluation.results import as_json

    comparison = compare([read_evaluation(folder) for folder in options.folders])
    print(json.dumps(as_json(comparison), indent=1) if options.json else comparison.table(max_items=options.items))


def add_eval(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "eval",
        help="evaluate a model behind an OpenAI-compatible endpoint",
        description="Several tasks: give --task, --env-addr and --data once for each, in the same order.",
    )
    add = parser.add_argument
    add("--api-base", required=True, metavar="URL", help="what /chat/completions is under: https://api.openai.com/v1")
    add("--model", required=True, metavar="NAME", help="as the server calls it")
    add("--task", dest="tasks", required=True, action="append", metavar="NAME", help="a registered environment")
    add("--env-addr", required=True, action="append", metavar="URL", help="its server, or several with commas between")
    add("--data", required=True, action="append", metavar="PATH", help="item list, or folder with a file per category")
    add(
        "--out", required=True, type=Path, metavar="FOLDER", help="results; the same command goes on from what is there"
    )
    add("--api-key-env", metavar="VAR", help="environment variable with the key; default: at OpenAI, OPENAI_API_KEY")
    add("--max-rounds", type=int, default=10, metavar="N", help="assistant turns (default: 10)")
    add("--n-samples", type=int, default=1, metavar="K", help="trajectories per item (default: 1)")
    add("--agent", default="react", help="way of thinking: react, act, plan, reflect, or package.module:Class")
    add("--action-format", default="react", help="react, function_calling or code_as_action")
    add("--max-trials", type=int, default=3, metavar="N", help="trials of an item, for --agent reflect (default: 3)")
    add("--max-tokens", type=int, default=512, metavar="N", help="of one turn (default: 512)")
    add("--temperature", type=float, default=1.0, help="0 is greedy (default: 1)")
    add("--top-p", type=float, default=1.0, help="(default: 1)")
    add("--seed", type=int, metavar="N", help="send seeds that follow from this one; not all servers know the field")
    add("--body", type=_json_object, default={}, metavar="JSON", help="further fields of requests; null leaves one out")
    add("--concurrency", type=int, default=8, metavar="N", help="trajectories at once (default: 8)")
    add("--requests-per-minute", type=float, metavar="N", help="send no more than that")
    add("--tokens-per-minute", type=float, metavar="N", help="of prompts and answers")
    add("--max-retries", type=int, default=6, metavar="N", help="tries of a request after the first (default: 6)")
    add("--request-timeout", type=float, default=300.0, metavar="S", help="for an answer of the model (default: 300)")
    add("--timeout", type=float, default=3600.0, metavar="S", help="for a trajectory, waits included (default: 3600)")
    add("--price-in", type=float, metavar="P", help="price of a million prompt tokens")
    add("--price-out", type=float, metavar="P", help="price of a million completion tokens")
    add(
        "--price-cached",
        type=float,
        metavar="P",
        help="price of a million cached prompt tokens; default: as --price-in",
    )
    parser.set_defaults(run=_eval)


def _eval(options: argparse.Namespace) -> None:
    from agentgym_rl.agent.strategies import AgentChoice
    from agentgym_rl.hosted.endpoint import HostedModel, find_key
    from agentgym_rl.hosted.evaluation import HostedEvaluation, evaluate_hosted, servers_by_task

    key, key_variable = find_key(options.api_base, options.api_key_env)
    model = HostedModel(
        api_base=options.api_base,
        model=options.model,
        key=key,
        key_variable=key_variable,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        sends_seed=options.seed is not None,
        body=options.body,
        timeout_s=options.request_timeout,
    )
    evaluate_hosted(
        HostedEvaluation(
            model=model,
            servers=servers_by_task(options.tasks, options.env_addr),
            data=options.data,
            out=options.out,
            max_rounds=options.max_rounds,
            n_samples=options.n_samples,
            seed=options.seed or 0,
            agent=AgentChoice(options.agent, options.action_format, options.max_trials),
            concurrency=options.concurrency,
            requests_per_minute=options.requests_per_minute,
            tokens_per_minute=options.tokens_per_minute,
            max_retries=options.max_retries,
            timeout_s=options.timeout,
            prices=_prices(options),
        )
    )


def _prices(options: argparse.Namespace) -> Prices | None:
    from agentgym_rl.evaluation.usage import Prices

    given = (options.price_in, options.price_out)
    if given == (None, None):
        return None
    if None in given:
        raise ConfigError("--price-in and --price-out go together")
    return Prices(options.price_in, options.price_out, options.price_cached)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'must be an object such as {{"top_k": 20}}, is {text}')
    return value
