"""Finds out whether the package `verl` that Python would import is this project's own.

Another distribution, named ``verl`` like our learner's package, installs a top-level package `verl` as well. Where both
are installed, Python imports one of them, or a mixture of their files, and fails far from the cause.
"""

from __future__ import annotations

import sys
from importlib import metadata, util
from pathlib import Path

from agentgym_rl.errors import AgentGymError

_OWN_FOLDER = Path(__file__).resolve().parent.parent
# A line of our `verl/__init__.py`. It is looked for as text: importing a stranger would run its code.
_MARK = '__distribution__ = "agentgym-rl"'


class ForeignVerlError(AgentGymError, ImportError):
    """Another package named `verl` is in the way; the message says what was found where, and what to do."""


def find_foreign_verl() -> str | None:
    """What is in the way of our `verl` and how to put it right; None when nothing is. Imports nothing."""
    return _other_distribution() or _other_package()


def check_verl() -> None:
    """Raise `ForeignVerlError` when another `verl` is in the way."""
    found = find_foreign_verl()
    if found is not None:
        raise ForeignVerlError(found)


def _other_distribution() -> str | None:
    try:
        other = metadata.distribution("verl")
    except metadata.PackageNotFoundError:
        return None
    # Our files that lie in a folder of both go with the other's, so ours are installed again.
    return (
        f"The distribution 'verl' {other.version} is installed in {other.locate_file('')}. It is another project, "
        "whose package has the name of agentgym-rl's learner: 'import verl' takes either one or a mixture. Repair:\n"
        f"    {sys.executable} -m pip uninstall -y verl\n"
        f"    {sys.executable} -m pip install --force-reinstall --no-deps {_own_requirement()}"
    )


def _own_requirement() -> str:
    """What pip is told to install to get this project again."""
    return f"-e {_OWN_FOLDER}" if (_OWN_FOLDER / "pyproject.toml").is_file() else "agentgym-rl"


def _other_package() -> str | None:
    spec = util.find_spec("verl")
    if spec is None:
        return f"agentgym-rl's package 'verl' is missing from {_OWN_FOLDER}: install agentgym-rl again."
    if spec.origin is not None and _is_ours(Path(spec.origin)):
        return None
    found = spec.origin or ", ".join(spec.submodule_search_locations or ())
    return (
        f"'import verl' finds {found}, not agentgym-rl's package {_OWN_FOLDER / 'verl'}. An earlier folder on sys.path "
        "holds another package of that name: take it off PYTHONPATH, or start from another folder."
    )


def _is_ours(init: Path) -> bool:
    return init.resolve().parent.parent == _OWN_FOLDER and _MARK in init.read_text(encoding="utf-8")
