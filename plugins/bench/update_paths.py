"""SGLang's own ways to take weights, as trainers use them: one class, run by the trainer's ranks.

Each way starts with the all-gather of tensor-parallel shards and their conversion to Hugging Face tensors, in memory
that was prepared (see :mod:`weightlink.plugins.bench.gathered`), and then:

- ``distributed``: a Gloo broadcast per flattened bucket from trainer rank 0 to all engine ranks;
- ``tensor``: flattened buckets in shared memory, which engine ranks map, as on a GPU they do by CUDA IPC;
- ``disk``: a safetensors file.

Generation is paused as late as each way allows: a paused scheduler keeps its core busy.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch.distributed as dist
from sglang.srt.utils import MultiprocessingSerializer, init_custom_process_group
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ConfigError, EngineUnavailable
from weightlink.plugins.bench.gathered import Bucket
from weightlink.plugins.demo.engine import free_port

GROUP = "weightlink-bench"
_HOST = "127.0.0.1"
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class Server:
    """An SGLang server's own routes."""

    def __init__(self, url: str, token: str) -> None:
        self._http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, trust_env=False)

    def post(self, route: str, deadline: Deadline, **body: object) -> Any:
        """The answer; raises :class:`EngineUnavailable` unless it is one of success."""
        try:
            response = self._http.post(route, json=body, timeout=deadline.check(f"the engine's {route}"))
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"{route} failed: {error}") from error
        if response.status_code != 200:
            raise EngineUnavailable(f"{route} answered HTTP {response.status_code}", found=response.text[:300])
        return response.json() if "json" in response.headers.get("content-type", "") else None

    def close(self) -> None:
        """Safe to repeat."""
        self._http.close()


class Paths:
    """The three ways from this trainer rank. Every method is collective over ``group``.

    :param server: of rank 0, None on the others
    :param group: the tensor-parallel ranks
    :param folder: for checkpoints of the way over the disk; a new one each time, since SGLang maps the files
    """

    def __init__(
        self, server: Server | None, group: dist.ProcessGroup, buckets: Sequence[Bucket], folder: Path
    ) -> None:
        self._server, self._group, self._buckets, self._folder = server, group, buckets, folder
        self._threads = ThreadPoolExecutor(1)
        self._update_group: dist.ProcessGroup | None = None
        self._engine_ranks, self._gather = 0, "all-gather"
        self.phases: dict[str, float] = {}

    def join(self, engine_ranks: int, deadline: Deadline) -> None:
        """Forms the group of trainer rank 0 and all engine ranks."""
        if self._server is None:
            return
        self._engine_ranks = engine_ranks
        port, world = free_port(), 1 + engine_ranks
        asked = self._threads.submit(
            self._server.post, "/init_weights_update_group", deadline,
            master_address=_HOST, master_port=port, rank_offset=1, world_size=world, group_name=GROUP, backend="gloo",
        )  # fmt: skip
        self._update_group = init_custom_process_group(
            backend="gloo",
            init_method=f"tcp://{_HOST}:{port}",
            timeout=deadline.timedelta("the weight update group"),
            world_size=world,
            rank=0,
            group_name=GROUP,
        )
        asked.result()

    def run(self, path: str, gather: str, version: int, deadline: Deadline) -> dict[str, float]:
        """One update; seconds per phase, as this rank saw them. For ``gather`` see :meth:`Bucket.gather`."""
        ways = {"distributed": self._distributed, "tensor": self._tensor, "disk": self._disk}
        if path not in ways:
            raise ConfigError("no such path", expected=", ".join(ways), found=path)
        self.phases, self._gather = {}, gather
        ways[path](str(version), deadline)
        return self.phases

    def _distributed(self, version: str, deadline: Deadline) -> None:
        for number, bucket in enumerate(self._buckets):
            self._fill(bucket)
            if self._server is None:
                continue
            if number == 0:
                self._open(deadline)
            with self._timed("deliver"):
                tensors = bucket.tensors()
                asked = self._threads.submit(
                    self._server.post, "/update_weights_from_distributed", deadline,
                    names=list(tensors),
                    dtypes=[spec.dtype for spec in bucket.specs],
                    shapes=[list(spec.shape) for spec in bucket.specs],
                    group_name=GROUP,
                    load_format="flattened_bucket",
                    flush_cache=False,
                    weight_version=version,
                )  # fmt: skip
                work = dist.broadcast(bucket.flat, 0, self._update_group, async_op=True)
                asked.result()
                work.wait()
        self._close(deadline)

    def _tensor(self, version: str, deadline: Deadline) -> None:
        for bucket in self._buckets:
            self._fill(bucket)
        if self._server is None:
            return
        self._open(deadline)
        with self._timed("deliver"):
            for bucket in self._buckets:
                self._server.post(
                    "/update_weights_from_tensor", deadline,
                    serialized_named_tensors=[_serialized(bucket) for _ in range(self._engine_ranks)],
                    load_format="flattened_bucket",
                    flush_cache=False,
                    weight_version=version,
                )  # fmt: skip
        self._close(deadline)

    def _disk(self, version: str, deadline: Deadline) -> None:
        for bucket in self._buckets:
            self._fill(bucket)
        if self._server is None:
            return
        folder = self._folder / version
        with self._timed("write"):
            folder.mkdir()
            for number, bucket in enumerate(self._buckets):
                _write(bucket, folder / f"model-{number}.safetensors")
        with self._timed("around"):
            self._server.post("/pause_generation", deadline, mode="retract")
        with self._timed("deliver"):
            self._server.post(
                "/update_weights_from_disk", deadline,
                model_path=str(folder), load_format="auto", flush_cache=False, weight_version=version,
            )  # fmt: skip
        self._resume(deadline)

    def clean(self) -> None:
        """Removes the checkpoints; not a part of any update."""
        for folder in self._folder.iterdir():
            shutil.rmtree(folder)

    def _fill(self, bucket: Bucket) -> None:
        with self._timed("gather"):
            bucket.gather(self._group, self._gather)
        with self._timed("convert"):
            bucket.convert()

    def _open(self, deadline: Deadline) -> None:
        if self._server is not None:
            with self._timed("around"):
                self._server.post("/pause_generation", deadline, mode="retract")
                self._server.post("/begin_weight_update", deadline)

    def _close(self, deadline: Deadline) -> None:
        if self._server is not None:
            with self._timed("around"):
                self._server.post("/end_weight_update", deadline)
            self._resume(deadline)

    def _resume(self, deadline: Deadline) -> None:
        if self._server is not None:
            with self._timed("around"):
                self._server.post("/flush_cache", deadline)
                self._server.post("/continue_generation", deadline, torch_empty_cache=False)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - started

    def leave(self) -> None:
        """Safe to repeat."""
        self._threads.shutdown()
        if self._server is not None:
            self._server.close()


def _serialized(bucket: Bucket) -> str:
    """The bucket by reference: one such text for one process, which takes the reference over."""
    metadata, at = [], 0
    for name, tensor in bucket.tensors().items():
        metadata.append(
            FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, at, at + tensor.nbytes, tensor.nbytes)
        )
        at += tensor.nbytes
    held = {"flattened_tensor": bucket.flat, "metadata": metadata}
    return str(MultiprocessingSerializer.serialize(held, output_str=True))


def _write(bucket: Bucket, file: Path) -> None:
    """As safetensors, straight from the flat memory; the library's own writer would copy every tensor before."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec, tensor in zip(bucket.specs, bucket.tensors().values(), strict=True):
        offsets = [at, at + tensor.nbytes]
        header[spec.name] = {"dtype": _DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        bucket.flat.numpy().tofile(out)
