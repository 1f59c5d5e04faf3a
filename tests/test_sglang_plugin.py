"""The SGLang plugin on real servers: flags, start-up checks, routes, gates, and an update from a plain trainer."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import toys
from plain import connect
from servers import Server, launch, serve
from weightlink.client import HttpClient
from weightlink.hooks import messages as m
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import AuthError, ConfigError, EngineUnavailable
from weightlink.hooks.settings import EngineSettings
from weightlink.plugins.sglang import flags

TOKEN = "a-token-that-only-this-test-knows"
PROMPT = [5, 17, 42, 99, 3]
SECONDS = 400.0

pytestmark = pytest.mark.timeout(600)


# --- settings, without SGLang ---------------------------------------------------------------------------------------


def parse(*argv: str) -> Any:
    """What SGLang's parser makes of our flags."""
    import argparse

    namespace = argparse.Namespace(
        weightlink=False,
        weightlink_token_file=None,
        weightlink_serve_unready=False,
        weightlink_max_message_bytes=None,
    )
    parser = argparse.ArgumentParser()
    parser.add_argument("--weightlink", action="store_true")
    parser.add_argument("--weightlink-token-file")
    parser.add_argument("--weightlink-serve-unready", action="store_true")
    parser.add_argument("--weightlink-max-message-bytes", type=int)
    return parser.parse_args(list(argv), namespace)


def test_flags_over_environment(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert flags.merge(parse(), {}) == EngineSettings()
    assert flags.merge(parse("--weightlink"), {}) == EngineSettings(enabled=True)
    merged = flags.merge(
        parse("--weightlink-token-file", str(tmp_path / "token"), "--weightlink-max-message-bytes", "4096"),
        {"WEIGHTLINK_ENABLE": "1", "WEIGHTLINK_SERVE_UNREADY": "1"},
    )
    assert merged == EngineSettings(enabled=True, token=TOKEN, serve_unready=True, max_message_bytes=4096)
    assert EngineSettings.from_env({EngineSettings.ENV: merged.to_env()}) == merged


@pytest.mark.parametrize(
    ("argv", "env", "says"),
    [
        (["--weightlink-serve-unready"], {}, "without --weightlink"),
        (["--weightlink", "--weightlink-max-message-bytes", "7"], {}, "max_message_bytes"),
        (["--weightlink", "--weightlink-token-file", "/nowhere"], {}, "/nowhere"),
        ([], {"WEIGHTLINK_ENABLE": "yes"}, "0 or 1"),
    ],
)
def test_unusable_settings_are_named(argv: list[str], env: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        flags.merge(parse(*argv), env)
    assert says in str(error.value)


@pytest.mark.parametrize("version", ["0.5.22", "0.6.0", "0.6.1.dev3", "1.0.0", "unknown"])
def test_other_sglang_versions_are_refused(version: str) -> None:
    with pytest.raises(ConfigError, match="version"):
        flags.check_version(version)


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.24"])
def test_sglang_versions_in_range(version: str) -> None:
    flags.check_version(version)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert flags.is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "some-host", ""])
def test_everything_else_counts_as_the_network(host: str) -> None:
    assert not flags.is_loopback(host)


# --- SGLang's own parser --------------------------------------------------------------------------------------------

_PARSE = """
import json, os, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
load_plugins()
outcomes = []
for argv in json.loads(sys.argv[1]):
    os.environ.pop("WEIGHTLINK_ENGINE_SETTINGS", None)
    try:
        prepare_server_args(["--model-path", "/nowhere", *argv])
        outcomes.append(os.environ.get("WEIGHTLINK_ENGINE_SETTINGS", ""))
    except Exception as error:
        outcomes.append(f"{type(error).__name__}: {error}")
print("OUTCOMES" + json.dumps(outcomes))
"""


def test_refusals_at_start_through_sglangs_own_parser(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    token = ["--weightlink-token-file", str(tmp_path / "token")]
    cases: list[tuple[list[str], list[str]]] = [
        ([], [""]),
        (["--weightlink"], ['"enabled":true', '"token":null']),
        (["--weightlink", "--host", "0.0.0.0"], ["ConfigError", "0.0.0.0", "--weightlink-token-file"]),
        (["--weightlink", "--host", "0.0.0.0", *token], ['"enabled":true', TOKEN]),
        (["--weightlink", "--host", "0.0.0.0", "--api-key", "k"], ['"enabled":true']),
        (["--weightlink", *token, "--api-key", "k"], ["ConfigError", "differs"]),
        (["--weightlink", *token, "--api-key", "k", "--admin-api-key", TOKEN], ['"enabled":true']),
        (["--weightlink", "--tokenizer-worker-num", "2"], ["ConfigError", "--tokenizer-worker-num"]),
        (["--weightlink", "--dp-size", "2"], ['"enabled":true']),
        (["--weightlink", "--tp-size", "2", "--attn-dp-size", "2"], ['"enabled":true']),
        (["--weightlink", "--elastic-ep-backend", "mooncake"], ["ConfigError", "--elastic-ep-backend"]),
        (["--weightlink", "--grpc-port", "1234"], ["ConfigError", "--grpc-port"]),
        (["--weightlink-serve-unready"], ["ConfigError", "without --weightlink"]),
    ]
    done = subprocess.run(
        [sys.executable, "-c", _PARSE, json.dumps([argv for argv, _ in cases])],
        env={**os.environ, "SGLANG_PLATFORM": "torch_cpu"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("OUTCOMES")]
    assert found, done.stderr[-3000:]
    outcomes = json.loads(found[0].removeprefix("OUTCOMES"))
    for (argv, parts), outcome in zip(cases, outcomes, strict=True):
        assert all(part in outcome for part in parts), (argv, outcome)
        assert parts != [""] or outcome == "", (argv, outcome)
    refusals = [outcome for outcome in outcomes if outcome.startswith("ConfigError")]
    assert not any(TOKEN in text for text in refusals)


# --- a hook that does not apply -------------------------------------------------------------------------------------

_BROKEN = """
import sys
if {where}:
    from weightlink.plugins.sglang import install
    real = install.hooks
    gone = install.Hook("sglang.srt.managers.scheduler.Scheduler.gone_in_this_version", "after", lambda *a: None)
    install.hooks = lambda: [*real(), gone]
"""
IN_CHILD = '"--multiprocessing-fork" in sys.orig_argv'


@pytest.mark.server
@pytest.mark.parametrize("where", [IN_CHILD, f"not ({IN_CHILD})"], ids=["scheduler", "main"])
def test_a_hook_that_does_not_apply_stops_the_start(where: str, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_BROKEN.format(where=where))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    server = launch(checkpoint, tmp_path, env={"PYTHONPATH": path})
    try:
        assert server.wait_ended(SECONDS) != 0
    finally:
        server.stop()
    log = server.log.read_text()
    assert "weightlink cannot run in this SGLang" in log
    assert "Scheduler.gone_in_this_version" in log


# --- servers --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(toys.make("qwen3", tmp_path_factory.mktemp("checkpoint") / "qwen3"))


@pytest.fixture(scope="module")
def launched(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Servers that several tests share, started at the same time."""
    folder = tmp_path_factory.mktemp("servers")
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Their loader computes the query norms: those go through it in every update.
    env = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "computed_models", "PYTHONPATH": path}
    with contextlib.ExitStack() as stack:
        started = {
            "loaded": launch(
                checkpoint, folder, tp=2, token=TOKEN, env=env, flags=["--weightlink-max-message-bytes", "65536"]
            ),
            "dummy": launch(checkpoint, folder, tp=2, env=env, flags=["--load-format", "dummy"]),
        }
        for server in started.values():
            stack.callback(server.stop)
        yield started


@pytest.fixture(scope="module")
def loaded(launched: dict[str, Server]) -> Server:
    """TP2 on the checkpoint's weights, with a token."""
    launched["loaded"].wait_up(SECONDS)
    return launched["loaded"]


@pytest.fixture(scope="module")
def dummy(launched: dict[str, Server]) -> Server:
    """TP2 on dummy weights, without a token."""
    launched["dummy"].wait_up(SECONDS)
    return launched["dummy"]


def control(server: Server, request: m.Request | bytes, **headers: str) -> httpx.Response:
    body = request if isinstance(request, bytes) else m.encode(request)
    return server.http.post("/weightlink/v1/control", content=body, headers=headers)


@pytest.mark.server
def test_describes_itself(loaded: Server, checkpoint: Path) -> None:
    response = control(loaded, m.Describe(10))
    assert response.status_code == 200
    context = m.decode_reply(response.content).context
    assert context is not None
    config = json.loads((checkpoint / "config.json").read_text())
    assert context.architecture == config["architectures"][0]
    for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        assert context.hf_config[key] == config[key]
    assert (context.tp_size, context.pp_size, context.world, context.device) == (2, 1, 2, "cpu")
    assert (context.engine, context.owns_weights, context.state, context.refusal) == ("sglang", True, "ready", "")
    assert (context.dtype, context.transports) == ("bfloat16", ("p2p",))


@pytest.mark.server
@pytest.mark.parametrize("header", [{}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}], ids=str)
def test_a_wrong_token_is_refused(loaded: Server, header: dict[str, str]) -> None:
    with httpx.Client(base_url=loaded.url, headers=header, trust_env=False, timeout=30) as stranger:
        for response in (
            stranger.post("/weightlink/v1/control", content=m.encode(m.Describe(10))),
            stranger.post("/weightlink/v1/control", content=b"x" * 100_000),
            stranger.get("/weightlink/v1/status"),
        ):
            assert response.status_code == 401
            assert TOKEN not in response.text
    with pytest.raises(AuthError, match="refused the token"):
        HttpClient(loaded.url, "wrong").send(m.Describe(10), Deadline.after(10))


@pytest.mark.server
def test_a_large_request_is_refused_unread(loaded: Server) -> None:
    response = control(loaded, b"x" * 65_537)
    assert response.status_code == 413
    error = m.decode_reply(response.content).error
    assert error is not None
    assert "65536" in error.expected

    def unsized() -> Iterator[bytes]:
        for _ in range(70):
            yield b"y" * 1024

    assert loaded.http.post("/weightlink/v1/control", content=unsized()).status_code == 413


@pytest.mark.server
@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"x" * 100, m.encode(m.Describe(10))[:-1], b"\x81\xa4type\xa3Foo"], ids=str
)
def test_a_malformed_request_is_refused(loaded: Server, body: bytes) -> None:
    response = control(loaded, body)
    assert response.status_code == 400
    error = m.decode_reply(response.content).error
    assert error is not None
    assert "malformed" in error.message


@pytest.mark.server
def test_the_token_is_never_logged(loaded: Server) -> None:
    assert TOKEN not in loaded.log.read_text()
    assert TOKEN not in json.dumps(loaded.http.get("/server_info").json())


@pytest.mark.server
def test_stock_routes_work_beside_ours(loaded: Server) -> None:
    assert loaded.http.get("/ready").status_code == 200
    assert loaded.http.get("/health").status_code == 200
    assert len(loaded.generate(PROMPT, 4)) == 4
    loaded.post("/pause_generation", {"mode": "retract"})
    assert loaded.http.get("/ready").status_code == 503
    assert loaded.http.get("/weightlink/v1/status").json()["state"] == "ready"
    loaded.post("/continue_generation", {"torch_empty_cache": False})
    assert loaded.http.get("/ready").status_code == 200


@pytest.mark.server
def test_without_the_flag_there_are_no_routes(checkpoint: Path, tmp_path: Path) -> None:
    with serve(checkpoint, tmp_path, weightlink=False, seconds=SECONDS) as plain:
        assert control(plain, m.Describe(10)).status_code == 404
        assert plain.http.get("/weightlink/v1/status").status_code == 404
        assert len(plain.generate(PROMPT, 4)) == 4
        with pytest.raises(EngineUnavailable, match="runs without weightlink") as caught:
            connect(plain, checkpoint)
        assert "--weightlink" in str(caught.value)


_ENGINE = """
import os, sys
os.environ["WEIGHTLINK_ENABLE"] = "1"
import sglang
from weightlink.hooks.errors import ConflictError, EngineUnavailable
from weightlink.hooks.messages import EngineState

def main():
    engine = sglang.Engine(
        model_path=sys.argv[1], load_format="dummy", device="cpu", attention_backend="torch_native",
        skip_tokenizer_init=True, mem_fraction_static=0.5, max_total_tokens=512, disable_overlap_schedule=True,
    )
    try:
        control = engine.tokenizer_manager.weightlink
        prompt = dict(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 2, "temperature": 0})
        try:
            engine.generate(**prompt)
        except EngineUnavailable as error:
            print("UNAVAILABLE", error)
        context = engine.loop.run_until_complete(control.port.context())
        print("CONTEXT", context.architecture, context.world)
        success, *_ = engine.update_weights_from_disk(sys.argv[1], load_format="auto")
        print("DISK", success, control.front.epoch)
        control.front.state = EngineState.DIRTY
        try:
            engine.update_weights_from_disk(sys.argv[1], load_format="auto")
        except ConflictError as error:
            print("CONFLICT", error)
        print("EPOCH", control.front.epoch)
    finally:
        engine.shutdown()

if __name__ == "__main__":
    main()
"""


@pytest.mark.server
def test_python_engines_pass_the_same_gates(checkpoint: Path, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(_ENGINE)
    done = subprocess.run(
        [sys.executable, str(script), str(checkpoint)],
        env={**os.environ, "SGLANG_PLATFORM": "torch_cpu"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "UNAVAILABLE not ready" in done.stdout
    assert "CONTEXT Qwen3ForCausalLM 1" in done.stdout
    assert "DISK True 1" in done.stdout
    assert "CONFLICT update_weights_from_disk is refused" in done.stdout
    assert "EPOCH 1" in done.stdout


# --- a trainer that holds a plain checkpoint ------------------------------------------------------------------------


def held_back(server: Server) -> None:
    """The server answers no generation request, and says so."""
    assert server.http.get("/ready").status_code == 503
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
    for path, content in (("/generate", body), ("/generate", {**body, "stream": True}), ("/v1/completions", {})):
        response = server.http.post(path, json=content)
        assert response.status_code == 503, (path, response.text)
        assert "not ready" in response.json()["error"]["message"]


REFUSED = {
    "/continue_generation": {},
    "/begin_weight_update": {},
    "/end_weight_update": {},
    "/update_weights_from_disk": {"model_path": "/nowhere"},
    "/update_weights_from_tensor": {"serialized_named_tensors": []},
    "/update_weights_from_distributed": {"names": [], "dtypes": [], "shapes": []},
    "/update_weights_from_ipc": {"zmq_handles": {}},
    "/update_weight_version": {"new_version": "9"},
    "/init_weights_update_group": {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 0, "world_size": 2},
    "/destroy_weights_update_group": {"group_name": "g"},
    "/release_memory_occupation": {"tags": ["weights"]},
    "/resume_memory_occupation": {"tags": ["weights"]},
    "/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
    "/load_lora_adapter_from_tensors": {},
    "/weights_checker": {"action": "reset_tensors"},
}


def closed(server: Server) -> None:
    """Every foreign control call is refused with 409; reading goes on."""
    for path, body in REFUSED.items():
        response = server.http.post(path, json=body)
        assert response.status_code == 409, (path, response.status_code, response.text)
        assert response.json()["success"] is False
    assert len(server.checksums()) == server.world


@pytest.mark.server
def test_from_dummy_weights_to_served_versions(loaded: Server, dummy: Server, checkpoint: Path) -> None:
    """One story on one server: pending, an update given up, version 1, a foreign write, a failed update, version 3."""
    native, tokens = loaded.checksums(), loaded.generate(PROMPT)
    status = lambda: dummy.http.get("/weightlink/v1/status").json()  # noqa: E731

    assert status() == {"state": "pending", "serving": False, "version": None, "update": "", "epoch": 0}
    assert '"POST /generate HTTP/1.1" 200' in dummy.log.read_text()  # SGLang's own warm-up
    assert dummy.http.get("/health").status_code == 200  # alive, though not ready
    held_back(dummy)

    client = HttpClient(dummy.url, None)
    before = dummy.checksums()
    with connect(dummy, checkpoint) as link:
        assert dummy.checksums() == before  # observing changes nothing
        begin = m.Begin(60, link.id, "given-up", 1)
        assert client.send(begin, Deadline.after(60)).state == "updating"
        assert status()["update"] == "given-up"
        closed(dummy)
        held_back(dummy)
        assert control(dummy, m.Begin(60, link.id, "another", 1)).status_code == 409
        assert client.send(m.Abort(60, link.id, "given-up"), Deadline.after(60)).state == "pending"
    assert dummy.checksums() == before
    assert dummy.http.get("/ready").status_code == 503

    dummy.poison()
    assert status()["epoch"] == 1
    with connect(dummy, checkpoint) as link:
        norms = {f"model.layers.{n}.self_attn.q_norm.weight" for n in range(2)}
        assert {name for name, _ in link.engines[0].opaque} == norms
        report = link.push(1)
        assert report.engines[0].staged == link.engines[0].staged == 2 * 48 * 2
        assert dummy.checksums() == native
        assert dummy.generate(PROMPT) == tokens
        assert dummy.http.get("/model_info").json()["weight_version"] == "1"
        assert dummy.http.get("/ready").status_code == 200
        assert (status()["state"], status()["version"]) == ("ready", 1)

        dummy.poison()
        assert status()["epoch"] == 2
        link.push(2)
        assert dummy.checksums() == native

    with connect(dummy, checkpoint) as link:
        assert link._attachment is not None
        channel = link._attachment.legs[0].channel
        client.send(m.Begin(60, link.id, "broken", 3), Deadline.after(60))
        channel.barrier("the engine to start to receive", Deadline.after(30))
        channel.abort()  # a trainer that dies in the middle
        while (reply := client.send(m.Status(30, 1.0), Deadline.after(60))).state == "updating":
            pass
        assert reply.state == "dirty"
        assert reply.failures
        closed(dummy)
        held_back(dummy)
        assert dummy.http.get("/model_info").json()["weight_version"] == "2"
    with connect(dummy, checkpoint) as link:
        link.push(3)
    assert dummy.checksums() == native
    assert dummy.generate(PROMPT) == tokens
    assert status() == {"state": "ready", "serving": True, "version": 3, "update": status()["update"], "epoch": 2}
    client.close()
