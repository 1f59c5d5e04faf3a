"""Engine topologies on real servers: replicas of the model behind one front, attention data parallelism, and draft
models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import toys
from megatron_cpu import Megatron
from plain import connect
from servers import Server, serve
from test_drafts import with_draft

SECONDS = 600

pytestmark = [pytest.mark.server, pytest.mark.timeout(1500)]


def tokens(server: Server, rank: int) -> list[int]:
    """What one data-parallel rank generates."""
    body = {
        "input_ids": [3, 14, 15, 92, 65, 35],
        "sampling_params": {"temperature": 0, "max_new_tokens": 8},
        "routed_dp_rank": rank,
    }
    return list(server.post("/generate", body)["output_ids"])


def test_every_replica_gets_exactly_the_checkpoint_and_shows_one_version(tmp_path: Path) -> None:
    path = toys.make("qwen3", tmp_path / "qwen3")
    with serve(path, tmp_path / "server", seconds=SECONDS, dp=2) as server, connect(server, path, timeout=300) as link:
        native, said = server.checksums(), tokens(server, 0)
        assert native[0] == native[1]
        for version in (1, 2):
            server.poison()
            poisoned = server.checksums()
            assert all(rank[name] != value for rank in poisoned for name, value in native[0].items())
            report = link.push(version)
            assert report.engines[0].bytes == sum(link._attachment.plan.sent_bytes)  # type: ignore[union-attr]
            assert server.checksums() == native
            assert [tokens(server, rank) for rank in (0, 1)] == [said, said]
        assert server.http.get("/model_info").json()["weight_version"] == "2"
        assert server.http.get("/ready").status_code == 200


def test_every_attention_group_gets_exactly_the_checkpoint(tmp_path: Path) -> None:
    """SGLang's idle batches of attention data parallelism need a GPU, so that nothing is generated here."""
    path = toys.make("qwen3_moe", tmp_path / "qwen3_moe")
    flags = ["--attn-dp-size", "2", "--skip-server-warmup"]
    with (
        serve(path, tmp_path / "server", seconds=SECONDS, tp=2, flags=flags) as server,
        connect(server, path, timeout=300) as link,
    ):
        native = server.checksums()
        assert native[0] != native[1]
        for version in (1, 2):
            server.poison()
            poisoned = server.checksums()
            assert all(a[name] != value for a, b in zip(poisoned, native, strict=True) for name, value in b.items())
            link.push(version)
            assert server.checksums() == native


def test_the_models_of_a_server_with_drafts_are_updated_as_selected(tmp_path: Path) -> None:
    """SGLang's real draft worker, which shares the target's embedding and head. Drafting itself needs a GPU."""
    path = with_draft("qwen2", tmp_path)
    flags = [
        *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1", "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "2", "--skip-server-warmup"),
    ]
    env = {"WEIGHTLINK_TEST_DRAFTS": "1"}
    with serve(path, tmp_path / "server", seconds=SECONDS, flags=flags, env=env) as server:

        def checksums() -> dict[str, str]:
            """SGLang's own, over all models."""
            (rank,) = server.post("/weights_checker", {"action": "checksum"})["ranks"]
            return dict(rank["checksums"])

        native = checksums()
        own = {name for name in native if name.startswith("draft.model.") and "embed_tokens" not in name}
        assert len(own) >= 10
        version = 0

        def push(**settings: Any) -> set[str]:
            """The names that differ from SGLang's own load after a push."""
            nonlocal version
            version += 1
            with connect(server, path, timeout=300, **settings) as link:
                assert link.push(version).engines[0].committed
            now = checksums()
            return {name for name in native if now[name] != native[name]}

        server.poison()
        poisoned = checksums()
        assert all(poisoned[name] != value for name, value in native.items())
        assert push() == set()
        server.poison()
        assert push(selector="target", ignore=("model.mtp_layers.*",)) == own
        assert push(selector="draft", ignore=("model.layers.*", "model.norm.weight")) == set()


def test_a_server_takes_from_the_one_before_it_what_the_trainer_sends_once(tmp_path: Path) -> None:
    path = toys.make("qwen3", tmp_path / "qwen3")
    with (
        serve(path, tmp_path / "first", seconds=SECONDS) as first,
        serve(path, tmp_path / "second", seconds=SECONDS) as second,
    ):
        native, servers = first.checksums(), (first, second)
        for server in servers:
            server.poison()
            assert all(server.checksums()[0][name] != value for name, value in native[0].items())
        urls = [server.url for server in servers]
        with Megatron() as megatron:
            ((one, two),) = megatron.run("push_cases:push", 1, path=str(path), urls=urls, versions=[1, 2])
        assert one["bytes"] == 2 * sum(one["sent"]) == two["bytes"]
        for server in servers:
            assert server.checksums() == native
            assert server.http.get("/model_info").json()["weight_version"] == "2"
