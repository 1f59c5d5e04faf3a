"""Engine topologies on real servers: replicas of the model behind one front, and attention data parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import toys
from megatron_cpu import Megatron
from servers import serve

SECONDS = 600
PROMPT = [3, 14, 15, 92, 65, 35]

pytestmark = [pytest.mark.server, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def megatron() -> Iterator[Megatron]:
    with Megatron() as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"dp": 2}),
        ("qwen3_moe", {"tp": 2, "flags": ["--attn-dp-size", "2"]}),
    ],
    ids=["replicas", "attention"],
)
def test_every_data_parallel_rank_gets_exactly_the_checkpoint(
    megatron: Megatron, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    path = toys.make(family, tmp_path / family)
    with serve(path, tmp_path / "server", seconds=SECONDS, **options) as server:

        def tokens() -> list[list[int]]:
            sampling = {"temperature": 0, "max_new_tokens": 8}
            bodies = [{"input_ids": PROMPT, "sampling_params": sampling, "routed_dp_rank": rank} for rank in (0, 1)]
            return [server.post("/generate", body)["output_ids"] for body in bodies]

        native, said = server.checksums(), tokens()
        assert len(native) == 2
        for version in (1, 2):
            server.poison()
            assert all(a != b for a, b in zip(server.checksums(), native, strict=True))
            megatron.run("push_cases:push", 2, path=str(path), urls=[server.url], versions=[version], tp=2)
            assert server.checksums() == native
            assert tokens() == said
        assert server.http.get("/model_info").json()["weight_version"] == "2"
        assert server.http.get("/ready").status_code == 200
