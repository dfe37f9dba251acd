"""What a server counts, and its text form for Prometheus. Worker processes add theirs up by label."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Metrics:
    """Counts of one process."""

    started: float = field(default_factory=time.monotonic)
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Answered calls by path and status, those in batches included."""
    created: int = 0
    closed: int = 0
    expired: int = 0
    faults: int = 0
    environment_s: float = 0.0
    """Seconds in environment code, waiting for a child or a thread included."""

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self.started

    def samples(self, sessions: int, capacity: int) -> list[list[Any]]:
        """``[name, kind, labels, value]`` of everything counted; plain JSON, so that processes can exchange it."""
        gauges = {"sessions": sessions, "capacity": capacity, "uptime_seconds": self.uptime_s}
        counts = {
            "sessions_created_total": self.created,
            "sessions_closed_total": self.closed,
            "sessions_expired_total": self.expired,
            "environment_faults_total": self.faults,
            "environment_seconds_total": self.environment_s,
            "cpu_seconds_total": time.process_time(),
        }
        samples: list[list[Any]] = [[name, "gauge", {}, value] for name, value in gauges.items()]
        samples += [[name, "counter", {}, value] for name, value in counts.items()]
        for (path, status), count in sorted(self.requests.items()):
            samples.append(["requests_total", "counter", {"path": path, "status": str(status)}, count])
        return samples


def as_prometheus(environment: str, samples_by_worker: dict[str, list[list[Any]]]) -> str:
    """Prometheus' text format; the samples of several workers get a label ``worker``."""
    lines: dict[str, list[str]] = {}
    for worker, samples in samples_by_worker.items():
        own = {"worker": worker} if len(samples_by_worker) > 1 else {}
        for name, kind, labels, value in samples:
            block = lines.setdefault(name, [f"# TYPE agentgym_{name} {kind}"])
            block.append(f"agentgym_{name}{{{_labels({'environment': environment, **own, **labels})}}} {value}")
    return "\n".join(_flat(lines.values())) + "\n"


def _flat(blocks: Iterable[list[str]]) -> Iterable[str]:
    return (line for block in blocks for line in block)


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{value}"' for name, value in labels.items())
