"""Makes what a SearchQA server reads (the World Factbook's questions, an index) ahead of its first start.

python -m agentgym_rl.envs.searchqa [the settings of agentgym-rl serve searchqa]
"""

from __future__ import annotations

import argparse
import sys

from agentgym_rl.envs.options import add_settings, configured_spec
from agentgym_rl.errors import AgentGymError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m agentgym_rl.envs.searchqa", description="Make SearchQA's data.")
    parser.set_defaults(task="searchqa")
    add_settings(parser, ["searchqa"])
    try:
        print(configured_spec(parser.parse_args()).data_version())
    except (AgentGymError, OSError) as error:
        print(f"searchqa: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
