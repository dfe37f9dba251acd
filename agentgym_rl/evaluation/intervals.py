"""Intervals and tests for numbers that come from a few hundred items. Axes: ``I`` items, ``R`` resamples.

The item is the unit that is drawn by chance, and its samples belong together (Miller 2024, "Adding error bars to
evals", https://arxiv.org/abs/2411.00640): all of these take one number per item. Their random numbers have a fixed
seed, so the same results give the same digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
"""Confidence of every interval."""
_Z = 1.959963984540054
"""Quantile of the normal distribution for `LEVEL`, two-sided."""
_RESAMPLES = 10_000
_MOST_DRAWS = 50_000_000
"""Bounds resamples x items, so that 50,000 items take a second; they then have 1,000 resamples, at the least."""
_DRAWS_AT_ONCE = 2_000_000
_EXACT_SIGNS = 14
"""Up to so many items all 2^I sign patterns are gone through."""
_TIE = 1e-12


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95% interval."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.3f}..{self.high:.3f}"


def bootstrap_mean(values_I: Sequence[float]) -> Interval | None:
    """Percentile bootstrap interval of a mean over items (Efron 1979, https://doi.org/10.1214/aos/1176344552).

    None for no items. Items that all agree give an interval of no width: they show no spread to resample.
    """
    if not len(values_I):
        return None
    means_R = _resampled_means(np.asarray(values_I, np.float64))
    low, high = np.quantile(means_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


def wilson(successes: int, trials: int) -> Interval | None:
    """Score interval of a share (Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953); None for no trials.

    Unlike the bootstrap it has a width when all trials agree.
    """
    if not trials:
        return None
    share, z2 = successes / trials, _Z**2
    center = share + z2 / (2 * trials)
    reach = _Z * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    scale = 1 + z2 / trials
    return Interval(max(0.0, (center - reach) / scale), min(1.0, (center + reach) / scale))


def sign_flip_p(differences_I: Sequence[float]) -> float:
    """Two-sided p-value of "the paired differences are as likely in either direction", for their mean.

    Fisher's randomisation test: the share of sign patterns with a mean at least as far from 0. All patterns up to 14
    items; else 10,000 drawn ones with the seen one counted among them (Phipson & Smyth 2010,
    https://doi.org/10.2202/1544-6115.1585). 1 for no items.
    """
    values_I = np.asarray(differences_I, np.float64)
    values_I = values_I[values_I != 0]  # whose sign changes nothing
    if not len(values_I):
        return 1.0
    seen = abs(values_I.sum()) - _TIE * np.abs(values_I).sum()
    if len(values_I) <= _EXACT_SIGNS:
        patterns = (np.arange(2 ** len(values_I))[:, None] >> np.arange(len(values_I))) & 1
        return float(np.mean(np.abs((2 * patterns - 1) @ values_I) >= seen))
    generator = np.random.default_rng(0)
    as_far = sum(
        int(np.sum(np.abs(generator.choice((-1.0, 1.0), (rows, len(values_I))) @ values_I) >= seen))
        for rows in _chunks(_RESAMPLES, len(values_I))
    )
    return (as_far + 1) / (_RESAMPLES + 1)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value of two shares over the same items (McNemar 1947, https://doi.org/10.1007/BF02295996).

    ``only_first``: items that the first alone passed; ``only_second``: the second alone.
    """
    n, least = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(least + 1)) / 2**n) if n else 1.0


def _resampled_means(values_I: np.ndarray) -> np.ndarray:
    generator, count = np.random.default_rng(0), len(values_I)
    resamples = min(_RESAMPLES, max(1_000, _MOST_DRAWS // count))
    return np.concatenate(
        [
            values_I[generator.integers(0, count, (rows, count), dtype=np.int32)].mean(axis=1)
            for rows in _chunks(resamples, count)
        ]
    )


def _chunks(rows: int, columns: int) -> list[int]:
    """Cut so many rows into blocks that fit in memory."""
    block = max(1, _DRAWS_AT_ONCE // columns)
    return [min(block, rows - start) for start in range(0, rows, block)]
