"""The repository as a package: what a wheel holds and finds, what type checkers see, and the rules of the tree."""

from __future__ import annotations

import ast
import configparser
import inspect
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from weightlink.hooks import specs

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("hooks", "converters", "core", "plugins")
"""Top-level folders, lowest first; each may import itself and what is before it."""
MOST_LINES = 500


def sources() -> list[Path]:
    """Every module of the package, relative to the repository."""
    return sorted(path.relative_to(ROOT) for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def installed_name(path: Path) -> str:
    """Where a file of the repository lies in an installation."""
    layer, *rest = path.parts
    return "/".join(["weightlink", *([] if layer == "core" else [layer]), *rest])


def module_name(path: Path) -> str:
    return installed_name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def run(*command: str, cwd: Path, **environment: str) -> str:
    """The output of a command; fails the test with it when the command fails."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing left over in the checkout's build folder gets into it."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for layer in LAYERS:
        shutil.copytree(ROOT / layer, copy / layer, ignore=shutil.ignore_patterns("__pycache__"))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), ".", cwd=copy)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def target(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder), str(wheel), cwd=folder)
    return folder


class TestWheel:
    def test_it_holds_every_module_and_nothing_else(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            names = {name for name in archive.namelist() if ".dist-info/" not in name}
        models = {f"weightlink/{path.relative_to(ROOT)}" for path in ROOT.glob("plugins/simulate/models/*.json")}
        assert len(models) == 4
        assert names == {installed_name(path) for path in sources()} | models | {"weightlink/py.typed"}

    def test_its_entry_points_and_licence(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            info = {
                name.rpartition("/")[2]: archive.read(name).decode() for name in archive.namelist() if "info/" in name
            }
        points = configparser.ConfigParser()
        points.read_string(info["entry_points.txt"])
        assert points["console_scripts"]["weightlink"] == "weightlink.cli:main"
        assert points["sglang.srt.plugins"]["weightlink"] == "weightlink.plugins.sglang:register"
        assert "Apache License" in info["LICENSE"]
        assert "License-Expression: Apache-2.0" in info["METADATA"]

    def test_from_inside_the_checkout_everything_comes_from_the_installation(self, target: Path) -> None:
        # The current folder is searched first, as for anybody who starts a script in the checkout.
        code = (
            "import importlib.util, sys\n"
            "assert sys.path[0] == '', sys.path\n"
            "for name in sys.argv[1:]:\n"
            "    print(importlib.util.find_spec(name).origin)\n"
        )
        names = [module_name(path) for path in sources()]
        found = run(sys.executable, "-c", code, *names, cwd=ROOT, PYTHONPATH=str(target)).splitlines()
        assert found == [str(target / installed_name(path)) for path in sources()]

    def test_its_entry_points_load_from_inside_the_checkout(self, target: Path) -> None:
        code = (
            "import importlib.metadata as m, pathlib, sys\n"
            "(dist,) = m.distributions(name='weightlink', path=[sys.argv[1]])\n"
            "for point in dist.entry_points:\n"
            "    assert callable(point.load()), point\n"
            "    assert pathlib.Path(sys.modules[point.module].__file__).is_relative_to(sys.argv[1]), point\n"
        )
        run(sys.executable, "-c", code, str(target), cwd=ROOT, PYTHONPATH=str(target))

    def test_no_folder_hides_an_installed_package(self) -> None:
        assert not (ROOT / "weightlink").exists()


def test_type_checkers_see_the_installation(tmp_path: Path) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text(
        "from weightlink.hooks.geometry import TensorSpec\n"
        'spec = TensorSpec("lm_head.weight", (257, 48), "bfloat16")\n'
        "rows: int = spec.shape[0]\n"
        "wrong: str = spec.shape\n"
    )
    checker = (sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--config-file=", "--cache-dir=cache")
    result = subprocess.run(
        [*checker, probe.name], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    (line,) = result.stdout.splitlines()
    assert line.startswith("probe.py:4: error:")
    assert "tuple[int, ...]" in line


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a module imports, inside functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def layer_of(name: str) -> str | None:
    """The layer that a dotted name belongs to, None when it is not ours."""
    first, _, rest = name.partition(".")
    if first != "weightlink":
        return None
    second = rest.partition(".")[0]
    return second if second in LAYERS and second != "core" else "core"


def parsed() -> Iterator[tuple[Path, ast.Module]]:
    for path in sources():
        yield path, ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))


def test_imports_run_from_plugins_down_to_hooks_only() -> None:
    wrong = []
    for path, tree in parsed():
        allowed = LAYERS[: LAYERS.index(path.parts[0]) + 1]
        for line, name in imported(tree):
            layer = layer_of(name)
            if name.startswith(".") or (layer is not None and layer not in allowed):
                wrong.append(f"{path}:{line} imports {name}")
    assert wrong == []


def test_nothing_is_pickled() -> None:
    modules = {
        "pickle",
        "cloudpickle",
        "dill",
        "marshal",
        "shelve",
        "multiprocessing.reduction",
        "torch.multiprocessing",
    }
    wrong = []
    for path, tree in parsed():
        wrong += [
            f"{path}:{line} imports {name}"
            for line, name in imported(tree)
            if name in modules or name.rpartition(".")[0] in modules
        ]
        for node in ast.walk(tree):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called.endswith(("_object", "_object_list")) or called in ("torch.load", "torch.save"):
                wrong.append(f"{path}:{node.lineno} calls {called}")
    assert wrong == []


def test_no_module_is_longer_than_a_person_reads() -> None:
    lengths = {str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in sources()}
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES} == {}


def hook_functions() -> list[Any]:
    return [value for value in vars(specs).values() if hasattr(value, f"{specs.PROJECT}_spec")]


def test_there_are_hooks() -> None:
    assert len(hook_functions()) >= 5


@pytest.mark.parametrize("hook", hook_functions(), ids=lambda hook: hook.__name__)
def test_every_hook_and_each_of_its_parameters_is_documented(hook: Any) -> None:
    text = inspect.getdoc(hook) or ""
    assert len(text.splitlines()[0]) > 20
    for name in inspect.signature(hook).parameters:
        (description,) = [line for line in text.splitlines() if line.startswith(f":param {name}:")]
        assert len(description.partition(": ")[2]) > 10, name


def test_the_tests_import_this_checkout() -> None:
    assert Path(specs.__file__).resolve() == ROOT / "hooks" / "specs.py"
