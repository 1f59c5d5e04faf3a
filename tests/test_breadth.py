"""Engines with pipeline stages, several engines in one link, and engines in the trainer's own process; all real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import toys
from megatron_cpu import Megatron
from servers import serve
from test_update import Engine

SECONDS = 600

pytestmark = [pytest.mark.server, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def megatron() -> Iterator[Megatron]:
    with Megatron() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(toys.make("qwen3", tmp_path_factory.mktemp("breadth") / "qwen3"))


@pytest.fixture(scope="module")
def single(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A TP1 server."""
    with serve(checkpoint, tmp_path_factory.mktemp("single"), seconds=SECONDS) as server:
        yield Engine(server, checkpoint)


def test_an_engine_with_pipeline_stages_and_another_beside_it(megatron, checkpoint, single, tmp_path):
    """TP2 x PP2 and TP1 in one link, one trainer; checksums of every stage on every rank."""
    second = single.server
    with serve(checkpoint, tmp_path, seconds=SECONDS, tp=2, pp=2) as first:
        engines = [Engine(first, checkpoint), single]
        assert len(engines[0].native) == 4
        assert len({json.dumps(rank, sort_keys=True) for rank in engines[0].native}) == 4
        run = dict(path=str(checkpoint), urls=[first.url, second.url])
        start = single.next
        for version, (world, trainer) in enumerate([(2, {"tp": 2}), (2, {"pp": 2}), (1, {})], start):
            for engine in engines:
                engine.poison()
            (reports, *_) = megatron.run("push_cases:push", world, **run, versions=[version], **trainer)
            for engine in engines:
                engine.expect_native(version)
            report = json.loads(reports[0]["json"])
            assert [e["committed"] for e in report["engines"]] == [True, True]
        # Stages never look at a pause flag, so other pauses are refused, by name, and nothing changes.
        answers = megatron.run("push_cases:refused", 1, **run, settings={"pause_mode": "retract"})
        assert answers[0]["kind"] == "ConfigError"
        assert "pipeline stages" in answers[0]["text"]
        for engine in engines:
            engine.expect_native(start + 2)
        # One trainer breaks half way: every stage of every engine must be let go, and the next push heals all of them.
        results = megatron.run("push_cases:broken_push", 2, **run, version=start + 3, tp=2)
        assert results[0]["healed"] == [True, True]
        for engine in engines:
            engine.expect_native(start + 4)


def test_an_engine_with_pipeline_stages_that_is_serving_is_paused_first(megatron, checkpoint, tmp_path):
    """Requests are running on a PP2 engine when the update begins: they are aborted, begin waits for every stage."""
    import threading

    with serve(checkpoint, tmp_path, seconds=SECONDS, pp=2) as server:
        engine = Engine(server, checkpoint)
        finished: list[str] = []
        body = {"input_ids": [3, 14, 15], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}

        def generate() -> None:
            while len(finished) < 1000 and not stop.is_set():
                response = server.http.post("/generate", json=body)
                reason = response.json().get("meta_info", {}).get("finish_reason") or {}
                finished.append(reason.get("type", str(response.status_code)))

        stop = threading.Event()
        clients = [threading.Thread(target=generate) for _ in range(3)]
        for client in clients:
            client.start()
        try:
            run = dict(path=str(checkpoint), urls=[server.url])
            megatron.run("push_cases:push", 2, **run, versions=[1, 2, 3], pp=2)
        finally:
            stop.set()
            for client in clients:
                client.join(60)
        assert "abort" in finished, finished
        engine.expect_native(3)


def test_an_engine_object_and_a_server_in_one_link(checkpoint, single):
    version = single.next
    single.poison()
    script = Path(__file__).with_name("engine_in_process.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(checkpoint), single.server.url, str(version)],
        env={**os.environ, "SGLANG_PLATFORM": "torch_cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["poisoned"]
    assert result["restored"]
    assert result["tokens"]
    assert result["version"] == version
    assert result["engines"] == [["engine 0 (in process)", True], [single.server.url, True]]
    single.expect_native(version)
