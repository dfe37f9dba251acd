"""How much faster are advantages over the flat batch than a Python loop over padded token positions?

``python scripts/bench/advantages.py`` wants 20 times for gae and 10 for the others. Both get the same trajectories,
ours as a `DataProto`, the loop as rows of token positions. All trajectories have the same length, which is the loop's
best case: nothing of its rows is padding. CPU time of the best of several runs each, in turn, on one thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import bench
import torch
from bench import Result

from verl.config import AlgorithmConfig
from verl.protocol import DataProto
from verl.trainer.core_algos import GroupStatistics, compute_advantages

GROUP_SIZE = 8
GAMMA, LAM = 0.99, 0.95
WANTED = {"gae": 20.0}
WANTED_OF_OTHERS = 10.0


def make_batch(num_trajectories: int, length: int, turn: int, observation: int) -> DataProto:
    """Turns of ``turn`` sampled tokens behind observations of ``observation`` tokens; the last turn is paid."""
    generator = torch.Generator().manual_seed(0)
    column_T = torch.arange(num_trajectories * length) % length
    mask_T = (column_T % (turn + observation)) >= observation
    mask_T[column_T == 0] = False
    messages_T = (column_T // (turn + observation) * 2 + mask_T).int()
    scores_B = torch.randint(0, 2, (num_trajectories,), generator=generator).double()
    rewards_T = torch.zeros(num_trajectories * length)
    last = int(mask_T[:length].nonzero()[-1])
    rewards_T[last::length] = scores_B.float()
    return DataProto(
        offsets_B1=torch.arange(num_trajectories + 1) * length,
        input_ids_T=torch.zeros_like(column_T),
        position_ids_T=column_T,
        loss_mask_T=mask_T,
        rollout_log_probs_T=torch.zeros(len(column_T)),
        token_rewards_T=_as_numpy_lays_it(rewards_T),
        scores_B=scores_B,
        masked_B=torch.zeros(num_trajectories, dtype=torch.bool),
        group_ids_B=torch.arange(num_trajectories) // GROUP_SIZE,
        values_T=_as_numpy_lays_it(torch.randn(len(column_T), generator=generator)),
        baselines_B=torch.randint(0, 2, (num_trajectories,), generator=generator).double(),
        message_ids_T=_as_numpy_lays_it(messages_T),
        # Any numbers far apart, as hashes are.
        anchor_ids_T=torch.where(mask_T, messages_T.long() * 0x1E3779B97F4A7C15, 0),
    )


def _as_numpy_lays_it(tensor: torch.Tensor) -> torch.Tensor:
    """The same in memory of NumPy, from which `DataProto` makes its tensors: large arrays lie on large pages there."""
    return torch.from_numpy(tensor.numpy().copy())


# --------------------------------------------------------------------------------- loops over padded token positions
# Axes: ``B`` trajectories, ``L`` token positions.


def loop_gae(
    rewards_BL: torch.Tensor, values_BL: torch.Tensor, mask_BL: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages, whitened, and returns; a position that was not sampled hands on what comes after it."""
    advantage_B, next_value_B = torch.zeros(len(rewards_BL)), torch.zeros(len(rewards_BL))
    columns = []
    for column in reversed(range(rewards_BL.shape[1])):
        sampled_B, value_B = mask_BL[:, column], values_BL[:, column]
        delta_B = rewards_BL[:, column] + GAMMA * next_value_B - value_B
        advantage_B = torch.where(sampled_B, delta_B + GAMMA * LAM * advantage_B, advantage_B)
        next_value_B = torch.where(sampled_B, value_B, next_value_B)
        columns.append(advantage_B)
    advantages_BL = torch.stack(columns[::-1], dim=1)
    return _masked_whiten(advantages_BL, mask_BL), (advantages_BL + values_BL) * mask_BL


def loop_returns(rewards_BL: torch.Tensor, mask_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Discounted returns, whitened and not."""
    running_B = torch.zeros(len(rewards_BL))
    returns_BL = torch.zeros_like(rewards_BL)
    for column in reversed(range(rewards_BL.shape[1])):
        sampled_B = mask_BL[:, column]
        running_B = torch.where(sampled_B, rewards_BL[:, column] + GAMMA * running_B, running_B)
        returns_BL[:, column] = running_B
    return _masked_whiten(returns_BL, mask_BL), returns_BL * mask_BL


def loop_remax(rewards_BL: torch.Tensor, mask_BL: torch.Tensor, baselines_B: torch.Tensor) -> torch.Tensor:
    """Discounted returns minus what is known of each trajectory's greedy rollout."""
    _, returns_BL = loop_returns(rewards_BL, mask_BL)
    return returns_BL - loop_of_scores(baselines_B, mask_BL)


def loop_gigpo(rewards_BL: torch.Tensor, mask_BL: torch.Tensor, advantages_B: torch.Tensor) -> torch.Tensor:
    """Returns without discount, of which nothing but their time counts: statistics of groups are taken as known.

    All turns at the same place of a group's trajectories answer the same, and all is paid at the end: a turn's
    advantage among its likes is that of the trajectory.
    """
    running_B = torch.zeros(len(rewards_BL))
    returns_BL = torch.zeros_like(rewards_BL)
    for column in reversed(range(rewards_BL.shape[1])):
        running_B = running_B + rewards_BL[:, column] * mask_BL[:, column]
        returns_BL[:, column] = running_B
    return loop_of_scores(2 * advantages_B, mask_BL)


def loop_of_scores(advantages_B: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    """One number per trajectory, written to each of its sampled positions."""
    advantages_BL = torch.zeros(mask_BL.shape)
    for column in range(mask_BL.shape[1]):
        advantages_BL[:, column] = advantages_B * mask_BL[:, column]
    return advantages_BL


def _masked_whiten(values_BL: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    count = mask_BL.sum()
    mean = (values_BL * mask_BL).sum() / count
    variance = ((values_BL - mean).square() * mask_BL).sum() / (count - 1)
    return (values_BL - mean) * torch.rsqrt(variance + 1e-8) * mask_BL


def loops(batch: DataProto, num_trajectories: int) -> Mapping[str, Callable[[], torch.Tensor]]:
    """The advantages of each estimator, by a loop; a group estimator's one number per trajectory is taken as known."""
    assert batch.values_T is not None
    mask_BL, rewards_BL, values_BL = (
        values_T.view(num_trajectories, -1) for values_T in (batch.loss_mask_T, batch.token_rewards_T, batch.values_T)
    )
    assert batch.baselines_B is not None
    groups, baselines_B = GroupStatistics.of(batch), batch.baselines_B.float()
    centred_BL = rewards_BL.clone()
    centred_BL[:, int(mask_BL[0].nonzero()[-1])] = groups.centred_B.float()
    return {
        "gae": lambda: loop_gae(rewards_BL, values_BL, mask_BL)[0],
        "reinforce_plus_plus": lambda: loop_returns(rewards_BL, mask_BL)[0],
        "reinforce_plus_plus_baseline": lambda: loop_returns(centred_BL, mask_BL)[0],
        "remax": lambda: loop_remax(rewards_BL, mask_BL, baselines_B),
        "gigpo": lambda: loop_gigpo(rewards_BL, mask_BL, groups.standardised_B.float()),
        "grpo": lambda: loop_of_scores(groups.standardised_B.float(), mask_BL),
        "rloo": lambda: loop_of_scores((groups.centred_B * GROUP_SIZE / (GROUP_SIZE - 1)).float(), mask_BL),
    }


def fastest(work: Mapping[str, Callable[[], torch.Tensor]], repeats: int) -> dict[str, float]:
    """CPU seconds of the fastest run of each, all in turn, so that a disturbance of the machine meets all alike."""
    best = dict.fromkeys(work, float("inf"))
    for _ in range(repeats):
        for name, function in work.items():
            began = time.thread_time()
            function()
            best[name] = min(best[name], time.thread_time() - began)
    return best


def measure(options: argparse.Namespace) -> Iterator[Result]:
    torch.set_num_threads(1)
    batch = make_batch(options.trajectories, options.length, options.turn, options.observation)
    print(f"{options.trajectories} trajectories of {options.length} tokens, {batch.num_sampled_tokens} sampled")
    for name, loop in loops(batch, options.trajectories).items():
        config = AlgorithmConfig(adv_estimator=name, gamma=1.0 if name == "gigpo" else GAMMA, lam=LAM)

        def flat(config: AlgorithmConfig = config) -> torch.Tensor:
            advantages_T = compute_advantages(batch, config).advantages_T
            assert advantages_T is not None
            return advantages_T

        difference = float((flat() - loop().flatten()).abs().max())
        assert difference < 1e-3, f"{name}: the loop's advantages differ by {difference}"
        seconds = fastest({"flat": flat, "loop": loop}, options.repeats)
        yield Result(
            name,
            f"advantages of {name}, flat batch over a loop over padded positions",
            seconds["loop"] / seconds["flat"],
            "x",
            WANTED.get(name, WANTED_OF_OTHERS),
            at_least=True,
            note=f"{1e3 * seconds['flat']:.0f} against {1e3 * seconds['loop']:.0f} ms",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trajectories", type=int, default=1024)
    parser.add_argument("--length", type=int, default=8000, help="tokens of each")
    parser.add_argument("--turn", type=int, default=40, help="sampled tokens of a turn")
    parser.add_argument("--observation", type=int, default=120, help="tokens of what it answers")
    parser.add_argument("--repeats", type=int, default=8)
    return bench.run("advantages", measure, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
