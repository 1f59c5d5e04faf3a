"""The whole thing on real parts: Megatron-Core ranks push into running SGLang servers. Judged by SGLang's own load of
the same checkpoint (its checksum of every tensor on every rank) and by the tokens that it generates."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import toys
from megatron_cpu import Megatron
from safetensors.torch import load_file
from servers import Server, serve

SECONDS = 600
PROMPT = [3, 14, 15, 92, 65, 35]

pytestmark = [pytest.mark.server, pytest.mark.timeout(1500)]


class Engine:
    """A server with what SGLang's own load of the checkpoint looks like."""

    def __init__(self, server: Server, checkpoint: Path) -> None:
        self.server, self.checkpoint = server, checkpoint
        self.native = server.checksums()
        self.tokens = server.generate(PROMPT)

    @property
    def next(self) -> int:
        """A version that the engine will take."""
        version = self.status()["version"]
        return 1 if version is None else version + 1

    def status(self) -> dict:
        return self.server.http.get("/weightlink/v1/status").json()

    def poison(self) -> None:
        self.server.poison()
        poisoned = self.server.checksums()
        assert all(set(a) == set(b) for a, b in zip(poisoned, self.native, strict=True))
        changed = [name for a, b in zip(poisoned, self.native, strict=True) for name in a if a[name] != b[name]]
        assert len(changed) == sum(len(rank) for rank in self.native), "some tensor was not poisoned"

    def expect_native(self, version: int) -> None:
        assert self.server.checksums() == self.native
        self.expect_serving(version)

    def expect_serving(self, version: int | None) -> None:
        assert self.status()["state"] == "ready"
        if version is not None:
            assert self.server.http.get("/model_info").json()["weight_version"] == str(version)
        assert self.server.http.get("/ready").status_code == 200
        assert self.server.generate(PROMPT) == self.tokens


@pytest.fixture(scope="module")
def megatron() -> Iterator[Megatron]:
    with Megatron() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Engine]]:
    """Servers by name, each started when it is first asked for."""
    folder = tmp_path_factory.mktemp("update")
    paths = {family: Path(toys.make(family, folder / family)) for family in ("qwen3", "llama_tied")}
    wanted = {"qwen3-tp2": ("qwen3", 2), "qwen3-tp1": ("qwen3", 1), "llama-tp2": ("llama_tied", 2)}
    ready: dict[str, Engine] = {}
    with contextlib.ExitStack() as stack:

        def get(name: str) -> Engine:
            if name not in ready:
                family, tp = wanted[name]
                server = stack.enter_context(serve(paths[family], folder / name, seconds=SECONDS, tp=tp))
                ready[name] = Engine(server, paths[family])
            return ready[name]

        yield get


@pytest.mark.parametrize(
    ("engine", "world", "parallel"),
    [
        pytest.param("qwen3-tp2", 2, {"tp": 2}, marks=pytest.mark.proves("qwen3", "server")),
        ("qwen3-tp2", 2, {"pp": 2}),
        ("qwen3-tp2", 1, {}),
        ("qwen3-tp1", 2, {"tp": 2}),
        pytest.param("llama-tp2", 2, {"tp": 2}, marks=pytest.mark.proves("llama", "server")),
        ("llama-tp2", 2, {"pp": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_poisoned_engine_gets_exactly_the_checkpoint(engines, megatron, engine, world, parallel):
    target = engines(engine)
    version = target.next
    target.poison()
    reports = megatron.run(
        "push_cases:push", world, path=str(target.checkpoint), urls=[target.server.url], versions=[version], **parallel
    )
    target.expect_native(version)
    assert all(r == reports[0] for r in reports)
    report = json.loads(reports[0][0]["json"])
    assert report["engines"][0]["committed"]
    weights = load_file(target.checkpoint / "model.safetensors")
    assert reports[0][0]["bytes"] >= sum(t.numel() * t.element_size() for t in weights.values())


def test_other_weights_change_the_answer_and_come_back(engines, megatron):
    """What is served follows what was pushed; no pointer moves, and memory does not grow."""
    target = engines("qwen3-tp2")
    first = target.next
    process = psutil.Process(target.server.process.pid)

    def resident() -> int:
        return sum(child.memory_info().rss for child in process.children(recursive=True))

    run = dict(path=str(target.checkpoint), urls=[target.server.url])
    megatron.run("push_cases:push", 1, **run, versions=[first], factors=[1.5])
    assert target.server.checksums() != target.native
    warm, pointers = resident(), target.server.pointers()
    assert len(pointers[1]) >= 18
    factors = [2.0, 0.5] * 25
    versions = [first + 1 + n for n in range(len(factors))]
    megatron.run("push_cases:push", 1, **run, versions=versions, factors=factors)
    assert resident() - warm < 24 << 20  # the two ranks' weights are 0.7 MiB: keeping them 50 times would be 35
    assert target.server.pointers() == pointers
    megatron.run("push_cases:push", 1, **run, versions=[versions[-1] + 1])
    target.expect_native(versions[-1] + 1)


def test_what_is_pushed_right_after_a_step_is_the_new_weights(engines, megatron):
    """With overlap_param_gather and DP=2 the resident weights are stale after optimizer.step(). The optimizer's own
    fp32 masters are the reference."""
    target = engines("qwen3-tp1")
    path, version = str(target.checkpoint), target.next
    results = megatron.run("push_cases:after_step", 2, path=path, url=target.server.url, version=version)
    assert any(result["stale"] for result in results), "nothing was stale: the test shows nothing"
    assert target.server.checksums() != target.native
    assert results[0]["pushed"]["success"]
    assert results[0]["pushed"] == results[0]["masters"]
    megatron.run("push_cases:push", 1, path=path, urls=[target.server.url], versions=[version + 2])
    target.expect_native(version + 2)


def test_foreign_calls_in_the_middle_of_an_update_get_409(engines, megatron):
    target = engines("qwen3-tp2")
    calls = [
        "/continue_generation", "/begin_weight_update", "/end_weight_update", "/update_weights_from_disk",
        "/release_memory_occupation", "/load_lora_adapter",
    ]  # fmt: skip
    version = target.next
    run = dict(path=str(target.checkpoint), urls=[target.server.url], version=version, calls=calls)
    statuses = megatron.run("push_cases:meddle", 2, **run, tp=2)
    assert statuses[0] == [[409] * len(calls)]
    target.expect_native(version)
    assert target.server.http.post("/continue_generation", json={"torch_empty_cache": False}).status_code == 200


def test_a_broken_transfer_leaves_the_engine_unready_and_the_next_push_heals_it(engines, megatron):
    target = engines("qwen3-tp2")
    version = target.next
    run = dict(path=str(target.checkpoint), urls=[target.server.url], version=version)
    results = megatron.run("push_cases:broken_push", 2, **run, tp=2)
    for result in results:
        assert "this trainer rank breaks" in result["error"]
        assert "trainer 1" in result["error"]
        assert result["healed"] == [True]
    broken = results[0]
    assert broken["state"]["state"] == "dirty"
    assert broken["state"]["version"] == (version - 1 if version > 1 else None)
    assert (broken["ready"], broken["continue"], broken["generate"]) == (503, 409, 503)
    target.expect_native(version + 1)


def unreachable() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"trouble": "unknown"}, "NameMapError", ["oddity"]),
        ({"trouble": "missing"}, "CoverageError", ["down_proj", "rank 0 (tp 0, pp 0)"]),
        ({"trouble": "twice"}, "CoverageError", ["given twice", "down_proj"]),
        ({"trouble": "lost"}, "PlanMismatch", ["another layout of this rank", "rank 0 (tp 0, pp 0)"]),
        ({"trouble": "world"}, "PlanMismatch", ["world size"]),
        (
            {"config": {"intermediate_size": 224}},
            "CoverageError",
            ["gate_proj", "24576 of 28672"],
        ),  # SGLang pads to 192
        ({"config": {"num_hidden_layers": 3}}, "CoverageError", ["model.layers.2."]),
        ({"config": {"num_hidden_layers": 1}}, "CoverageError", ["model.layers.1."]),
        ({"version": 0}, "VersionError", ["higher than the committed"]),
        ({"settings": {"pause_mode": "sideways"}}, "ConfigError", ["pause_mode"]),
        ({"settings": {"transport": "pigeon"}}, "ConfigError", ["pigeon", "p2p"]),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) and "trouble" in value else None,
)
def test_bad_input_is_refused_and_the_engine_serves_on(engines, megatron, options, kind, says):
    target = engines("qwen3-tp2")
    if target.status()["version"] is None:
        run = dict(path=str(target.checkpoint), urls=[target.server.url], versions=[1])
        megatron.run("push_cases:push", 1, **run)
    version = target.status()["version"]
    answers = megatron.run(
        "push_cases:refused", 2, path=str(target.checkpoint), urls=[target.server.url], tp=2, **options
    )
    for answer in answers:
        assert not answer["late"]
        assert answer["kind"] == kind, answer
        for words in says:
            assert words in answer["text"], answer["text"]
    target.expect_native(version)


def test_engines_that_cannot_be_reached_are_named(engines, megatron):
    target = engines("qwen3-tp2")
    url = unreachable()
    (answer,) = megatron.run("push_cases:refused", 1, path=str(target.checkpoint), urls=[url])
    assert answer["kind"] == "EngineUnavailable"
    assert url in answer["text"]
    (answer,) = megatron.run("push_cases:refused", 1, path=str(target.checkpoint), urls=["no url"])
    assert answer["kind"] == "ConfigError"
