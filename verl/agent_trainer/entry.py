"""What every entry point does around its own work: read the config, report errors, exit."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TypeVar

from agentgym_rl.errors import AgentGymError, ConfigError
from agentgym_rl.threads import limit_threads
from verl.agent_trainer.loading import as_yaml, load_config, parse_command_line
from verl.single_controller.base import WorkerError
from verl.single_controller.ending import leave_if_stuck
from verl.single_controller.signals import Terminated

ConfigT = TypeVar("ConfigT")

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


def run(
    argv: Sequence[str], work: Callable[[ConfigT], None], root: type[ConfigT], *, program: str, config_name: str
) -> int:
    """Load the config, do ``work`` and return the exit status of the process.

    0 when done; 2 with one line on stderr when the user's input is wrong; 1 when the run failed (a worker's own
    traceback first); 130 or 143 after SIGINT or SIGTERM, with everything that was started ended. Training saves before
    it ends by SIGTERM, unless a second one comes.
    """
    status = _run(argv, work, root, program=program, config_name=config_name)
    leave_if_stuck(status)
    return status


def _run(
    argv: Sequence[str], work: Callable[[ConfigT], None], root: type[ConfigT], *, program: str, config_name: str
) -> int:
    limit_threads(1)  # The driver only prepares batches; the cores belong to the workers and the servers.
    command_line = parse_command_line(argv, program=program, config_name=config_name)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        config = load_config(root, command_line)
        if command_line.show:
            print(as_yaml(config), end="")
            return 0
        work(config)
    except WorkerError as error:
        return _report_worker_error(error)
    except ConfigError as error:
        return _report(error, EXIT_CONFIG)
    except Terminated as ended:
        print(ended, file=sys.stderr, flush=True)
        return EXIT_TERMINATED
    except AgentGymError as error:
        return _report(error, EXIT_FAILED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except SystemExit:
        # Only our handler raises it, but its status is lost on the way where it meets Ray waiting for a worker.
        print("terminated", file=sys.stderr, flush=True)
        return EXIT_TERMINATED
    return 0


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    # As an exception, so that every `finally` on the way up ends what it started.
    raise SystemExit(EXIT_TERMINATED)


def _report_worker_error(error: WorkerError) -> int:
    """The worker's own words first: an error of the user's input as one line, anything else with its traceback."""
    if isinstance(error.cause, AgentGymError):
        return _report(error.cause, EXIT_CONFIG if isinstance(error.cause, ConfigError) else EXIT_FAILED)
    print(error.worker_traceback.rstrip(), file=sys.stderr)
    return _report(error, EXIT_FAILED)


def _report(error: Exception, status: int) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return status
