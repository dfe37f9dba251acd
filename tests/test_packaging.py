"""What is installed and what imports what: the base stays light, the storeys stay apart, the wheel is whole."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("agentgym_rl", "verl")
# Everything that only the extras bring.
HEAVY = ("accelerate", "gguf", "hydra", "omegaconf", "pyarrow", "ray", "tensorboard", "torch", "transformers", "vllm")
# Third-party names at the rim, and how the paths of the only places begin that may know them.
RIM = {
    "hydra": ("verl/agent_trainer/",),
    "ray": ("verl/single_controller/ray.py",),
    "vllm": ("verl/workers/rollout/vllm_",),
    "uvicorn": ("agentgym_rl/envs/serving.py",),
}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_modules(source: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import in a file, the ones inside functions included."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, node.module or ""


def imports_of(name: str, package: str) -> list[str]:
    """``file:line`` of each place in ``package`` that imports ``name`` or something below it."""
    return [
        f"{source.relative_to(ROOT)}:{line}"
        for source in sources(package)
        for line, module in imported_modules(source)
        if module.split(".")[0] == name
    ]


def light_modules() -> list[str]:
    names = (source.relative_to(ROOT).with_suffix("") for source in sources("agentgym_rl"))
    return [".".join(name.parts).removesuffix(".__init__") for name in names]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_agentgym_rl_never_imports_verl() -> None:
    assert imports_of("verl", "agentgym_rl") == []


@pytest.mark.parametrize("name", RIM)
def test_third_party_names_stay_at_the_rim(name: str) -> None:
    strangers = [
        place for package in PACKAGES for place in imports_of(name, package) if not place.startswith(RIM[name])
    ]
    assert strangers == []


def test_every_module_of_agentgym_rl_imports_without_anything_heavy() -> None:
    program = (
        "import importlib, sys\n"
        f"for name in {light_modules()!r}: importlib.import_module(name)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    result = run_python("-c", program)
    assert result.stderr == ""
    assert result.stdout.strip() == "[]"


# A base installation, in which the heavy names cannot be imported at all.
BASE_INSTALLATION = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def test_the_command_line_shows_its_help_in_a_base_installation() -> None:
    program = BASE_INSTALLATION + "from agentgym_rl.cli import main; sys.exit(main(['--help']))"
    result = run_python("-c", program)
    assert result.returncode == 0, result.stderr
    assert "serve" in result.stdout


def test_the_entry_points_name_things_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    references = [*project["scripts"].values(), *project["entry-points"]["agentgym_rl.envs"].values()]
    program = f"from pkgutil import resolve_name\nfor reference in {references!r}: resolve_name(reference)"
    result = run_python("-c", program)
    assert result.returncode == 0, result.stderr


def test_the_base_requires_nothing_heavy_and_every_promised_extra_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {requirement.split(">")[0].split("=")[0] for requirement in project["dependencies"]}
    assert base.isdisjoint(HEAVY)
    assert {"train", "gpu", "envs", "viewer", "dev"} <= set(project["optional-dependencies"])


@pytest.fixture(scope="module")
def wheel_members(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel, built from a copy so that no build folder is left in the checkout."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = [
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(out),
        str(copy),
    ]
    result = run_python(*build)
    assert result.returncode == 0, result.stderr
    (wheel,) = out.glob("agentgym_rl-*-py3-none-any.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_every_file_of_both_packages(wheel_members: set[str]) -> None:
    files = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files - wheel_members == set()


def test_the_wheel_holds_the_two_packages_the_licence_and_nothing_else(wheel_members: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_members}
    assert tops - {name for name in tops if name.endswith(".dist-info")} == set(PACKAGES)
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in wheel_members)


# The foreign package does the worst it can when somebody runs it.
FOREIGN_INIT = "raise SystemExit('the foreign package was run')\n"


def make_foreign_verl(folder: Path, *, distribution: bool) -> None:
    """Lay a package `verl` of somebody else into ``folder``, with or without a distribution's metadata."""
    (folder / "verl").mkdir(parents=True)
    (folder / "verl" / "__init__.py").write_text(FOREIGN_INIT)
    if distribution:
        metadata = folder / "verl-0.7.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.7.0\n")


def run_with_path(program: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with ``folders`` at the front of the module search path, in this order."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    return subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, env=environment
    )


def test_our_own_verl_is_not_reported() -> None:
    result = run_with_path("from agentgym_rl.install import find_foreign_verl; print(find_foreign_verl())", ROOT)
    assert result.stdout.strip() == "None", result.stderr


def test_a_second_distribution_named_verl_stops_the_import_with_the_commands_that_repair_it(tmp_path: Path) -> None:
    make_foreign_verl(tmp_path, distribution=True)
    result = run_with_path("import verl", ROOT, tmp_path)
    assert result.returncode == 1
    assert f"The distribution 'verl' 0.7.0 is installed in {tmp_path}" in result.stderr
    assert f"{sys.executable} -m pip uninstall -y verl\n" in result.stderr
    assert f"{sys.executable} -m pip install --force-reinstall --no-deps -e {ROOT}" in result.stderr


def test_a_folder_that_shadows_our_verl_is_named_without_running_its_code(tmp_path: Path) -> None:
    make_foreign_verl(tmp_path, distribution=False)
    result = run_with_path("from agentgym_rl.install import check_verl; check_verl()", tmp_path, ROOT)
    assert result.returncode == 1
    assert f"'import verl' finds {tmp_path / 'verl' / '__init__.py'}" in result.stderr
    assert "PYTHONPATH" in result.stderr
    assert "the foreign package was run" not in result.stderr


def test_files_of_a_stranger_written_over_ours_are_recognised(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "agentgym_rl", tmp_path / "agentgym_rl", ignore=shutil.ignore_patterns("__pycache__"))
    make_foreign_verl(tmp_path, distribution=False)
    result = run_with_path("from agentgym_rl.install import check_verl; check_verl()", tmp_path)
    assert result.returncode == 1
    assert f"'import verl' finds {tmp_path / 'verl' / '__init__.py'}" in result.stderr


def test_a_missing_verl_is_reported(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "agentgym_rl", tmp_path / "agentgym_rl", ignore=shutil.ignore_patterns("__pycache__"))
    program = (
        "import sys\n"
        f"sys.path[:] = [p for p in sys.path if p != {str(ROOT)!r}]\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
        "from agentgym_rl.install import find_foreign_verl; print(find_foreign_verl())"
    )
    result = run_with_path(program, tmp_path)
    assert f"'verl' is missing from {tmp_path}" in result.stdout, result.stderr
