"""The command line with real plugins from real distributions, and the parts of the demo that need no language model."""

from __future__ import annotations

import importlib.metadata
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ConfigError
from weightlink.plugins.demo import checkpoint, processes
from weightlink.plugins.demo.story import LEARNED, Check, Result
from weightlink.plugins.demo.trainers import Trainers

BF16_BYTES = 2 * 134515008
"""SmolLM2-135M's parameters as its card counts them, the tied matrix once."""

GREETER = """
from weightlink.hooks import hookimpl

@hookimpl
def weightlink_cli_commands(app):
    @app.command()
    def greet() -> None:
        print("hello from a third party")
"""


def weightlink(*arguments: str, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command, with the distributions in ``path`` installed beside the others."""
    environment = {name: value for name, value in os.environ.items() if name != "SGLANG_PLUGINS"} | env
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), environment.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-m", "weightlink.cli", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )


def distribution(folder: Path, name: str, source: str) -> Path:
    """An installed distribution whose module ``NAME_plugin`` is a weightlink plugin."""
    info = folder / f"{name}-3.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.1\n")
    (info / "entry_points.txt").write_text(f"[weightlink]\n{name} = {name}_plugin\n")
    (folder / f"{name}_plugin.py").write_text(source)
    return folder


class TestPlugins:
    def test_a_third_party_adds_a_command_and_is_listed_with_its_hooks(self, tmp_path: Path) -> None:
        path = distribution(tmp_path, "greeter", GREETER)
        assert weightlink("greet", path=path).stdout == "hello from a third party\n"
        listed = {item["name"]: item for item in json.loads(weightlink("plugins", "--json", "-", path=path).stdout)}
        assert listed["greeter"] == {
            "name": "greeter",
            "origin": "greeter 3.1",
            "hooks": ["weightlink_cli_commands"],
        }
        assert "weightlink_transports" in listed["weightlink.plugins.transports"]["hooks"]

    def test_a_plugin_that_does_not_load_is_named_without_a_traceback(self, tmp_path: Path) -> None:
        path = distribution(tmp_path, "wreck", "raise RuntimeError('no such device')")
        result = weightlink("plugins", path=path)
        assert result.returncode == 1
        assert "plugin 'wreck' of wreck 3.1 failed to load: RuntimeError: no such device" in result.stderr
        assert "Traceback" not in result.stderr
        report = tmp_path / "report.json"
        assert weightlink("doctor", "--json", str(report), path=path).returncode == 1
        (fault,) = faults(json.loads(report.read_text()))
        assert "wreck 3.1" in fault["found"]


def faults(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item for item in findings if item["status"] == "fault"]


class TestDoctor:
    def test_a_whole_installation_has_no_fault(self) -> None:
        result = weightlink("doctor", "--json", "-")
        findings = {item["subject"]: item for item in json.loads(result.stdout)}
        assert (result.returncode, faults(list(findings.values()))) == (0, [])
        assert (findings["sglang"]["status"], findings["sglang"]["found"]) == ("ok", "0.5.23")
        assert findings["entry point sglang.srt.plugins"]["found"] == "weightlink.plugins.sglang:register"

    @pytest.mark.parametrize(("value", "code"), [("other", 1), ("other, weightlink", 0)])
    def test_a_list_of_plugins_without_weightlink_is_a_fault(self, value: str, code: int) -> None:
        result = weightlink("doctor", "--json", "-", SGLANG_PLUGINS=value)
        assert result.returncode == code
        found = faults(json.loads(result.stdout))
        assert [item["remedy"].endswith("SGLANG_PLUGINS=other,weightlink") for item in found] == [True] * code


class TestDemo:
    def test_without_checks_nothing_has_held(self) -> None:
        assert not Result().held
        assert Result(checks=[Check("a", True, "")]).held
        assert not Result(checks=[Check("a", True, ""), Check("b", False, "")]).held

    def test_the_missing_model_is_an_error_that_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpoint, "PACKAGE", "weightlink-no-such-model")
        with pytest.raises(ConfigError, match="weightlink-no-such-model") as raised:
            checkpoint.gguf_file()
        assert "weightlink[demo]" in raised.value.remedy

    def test_the_first_rank_that_fails_is_raised_and_none_stays(self, tmp_path: Path) -> None:
        deadline = Deadline.after(120)
        trainers = Trainers(tmp_path / "nowhere", tmp_path, 2, deadline)
        try:
            with pytest.raises(ConfigError, match=r"cannot read .*nowhere/config\.json"):
                trainers.wait(deadline)
        finally:
            trainers.stop()
        assert not [
            child for child in psutil.Process().children() if "weightlink.plugins.demo.trainer" in child.cmdline()
        ]

    def test_stopping_ends_children_that_ignore_it_and_removes_their_shared_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(processes, "GRACE", 1.0)
        shared = Path(f"/dev/shm/weightlink-test-{os.getpid()}")
        child = (
            "import mmap, signal, sys, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "file = open(sys.argv[1], 'r+b')\n"
            "kept = mmap.mmap(file.fileno(), 0)\n"
            "open(sys.argv[2], 'w').close()\n"
            "time.sleep(300)\n"
        )
        parent = (
            "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', *sys.argv[1:]])\ntime.sleep(300)\n"
        )
        shared.write_bytes(bytes(mmap.PAGESIZE))
        command = [sys.executable, "-c", parent, child, str(shared), str(tmp_path / "ready")]
        process = processes.start(command, env=os.environ, log=tmp_path / "log", folder=tmp_path)
        try:
            deadline = Deadline.after(60)
            while not (tmp_path / "ready").exists():
                deadline.check(processes.tail(tmp_path / "log"))
                time.sleep(0.02)
            (grandchild,) = psutil.Process(process.pid).children()
            processes.stop(process)
            assert process.poll() is not None
            assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
            assert not shared.exists()
            processes.stop(process)
        finally:
            shared.unlink(missing_ok=True)

    @pytest.mark.server
    @pytest.mark.timeout(400)
    @pytest.mark.skipif(
        not list(importlib.metadata.distributions(name=checkpoint.PACKAGE)), reason="needs the demo's model"
    )
    def test_the_whole_story(self, tmp_path: Path) -> None:
        result = weightlink("demo", "--json", str(tmp_path / "demo.json"), "--timeout", "360")
        assert result.returncode == 0, result.stdout + result.stderr
        told = json.loads((tmp_path / "demo.json").read_text())
        assert [check["held"] for check in told["checks"]] == [True] * 9
        noise, first, second = told["answers"]
        assert "Paris" not in noise
        assert first.startswith(" Paris")
        assert second == LEARNED
        assert [update["version"] for update in told["updates"]] == [1, 2]
        assert {update["engines"][0]["bytes"] for update in told["updates"]} == {BF16_BYTES}
