"""One SGLang rank's model as a :class:`weightlink.hooks.protocols.InferenceAdapter`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from sglang.srt.model_executor.model_runner_components.weight_updater import _unsupported_derived_weight_cache_error
from sglang.srt.runtime_context import get_model
from sglang.srt.utils.common import DynamicGradMode
from weightlink.converters import replay
from weightlink.converters.snapshot import Snapshot
from weightlink.hooks.errors import ConflictError, LayoutError, NotIdle
from weightlink.hooks.geometry import Layout, ParamSpec, TensorSpec
from weightlink.hooks.messages import PROTOCOL, EngineContext, LayoutKind, RankPlace
from weightlink.hooks.settings import PauseMode


class SGLangAdapter:
    """The target model of one scheduler.

    Created in the scheduler's main thread; what may block is called from weightlink's owner thread.

    :param scheduler: SGLang's scheduler
    :param place: this rank's position
    :param transports: names of the transports that are installed
    """

    def __init__(self, scheduler: Any, place: RankPlace, transports: tuple[str, ...]) -> None:
        self._scheduler = scheduler
        self._place = place
        self._transports = transports
        self._runner = scheduler.tp_worker.model_runner
        self._device = next(iter(self._model.parameters())).device
        self._open = False  # destinations are in the load layout
        self._entered = threading.local()
        self._entered.mode = None  # the main thread is in the right mode already

    @property
    def _model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._runner.model  # asked every time: SGLang's reload from disk replaces it
        return model

    @property
    def place(self) -> RankPlace:
        """This rank's position."""
        return self._place

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self._device

    def _enter(self) -> None:
        """Put the calling thread into the scheduler thread's device and gradient mode, for good.

        Both are per thread. A parameter that SGLang made in inference mode cannot be written outside of it.
        """
        if not hasattr(self._entered, "mode"):
            if self._device.type != "cpu":
                torch.get_device_module(self._device).set_device(self._device)
            mode = DynamicGradMode()
            mode.__enter__()
            self._entered.mode = mode

    def context(self) -> EngineContext:
        """What the trainer needs to know; the front process fills in the state."""
        config = self._runner.model_config
        load_format = str(getattr(get_model().load_format, "value", get_model().load_format))
        versions = {"torch": str(torch.__version__)}
        if self._device.type == "cuda":
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        return EngineContext(
            protocol=PROTOCOL,
            engine="sglang",
            engine_version=importlib.metadata.version("sglang"),
            weightlink_version=importlib.metadata.version("weightlink"),
            hf_config=_plain(config.hf_config.to_dict()),
            architecture=(config.hf_config.architectures or [""])[0],
            dtype=str(config.dtype).removeprefix("torch."),
            quantization=config.quantization or "",
            tp_size=self._place.tp_size,
            pp_size=self._place.pp_size,
            dp_size=self._place.dp_size,
            world=self._place.world,
            device=self._device.type,
            versions=versions,
            transports=self._transports,
            load_format=load_format,
            owns_weights=load_format != "dummy",
            refusal=self._refusal(),
        )

    def _refusal(self) -> str:
        """Why this engine cannot be updated online, or an empty string."""
        derived = _unsupported_derived_weight_cache_error(self._model)
        if derived is not None:
            return str(derived)
        mode = get_model().weight_cache_mode
        args = self._scheduler.server_args
        for unsupported, why in (
            (mode != "off", f"--weight-cache-mode {mode}: the weights are shared with a daemon and other engines"),
            (self._scheduler.draft_worker is not None, "speculative decoding: draft models are not updated yet"),
            (args.disaggregation_mode != "null", "disaggregated prefill and decode is not supported yet"),
            (args.hicache_storage_backend is not None, "--hicache-storage-backend: stored KV has no weight version"),
            (args.enable_lmcache, "--enable-lmcache: stored KV has no weight version"),
        ):
            if unsupported:
                return why
        return ""

    def observe(self, tensors: Sequence[TensorSpec], kind: LayoutKind) -> Layout:
        """This rank's layout for the manifest, in the load layout; resident weights stay as they are."""
        self._enter()
        if self._open:  # a failed update left it so
            return self._replay(tensors)
        self._runner.weight_updater.begin_weight_update()
        try:
            return self._replay(tensors)
        finally:
            self._runner.weight_updater.end_weight_update(run_post_load=False)

    def _replay(self, tensors: Sequence[TensorSpec]) -> Layout:
        model: Any = self._model
        return replay.observe(rank=str(self._place), tensors=tensors, load=model.load_weights, modules=[("", model)])

    def tensors(self, params: Sequence[ParamSpec]) -> Sequence[torch.Tensor]:
        """The live tensors, resolved by name now; raises :class:`LayoutError` for one that is gone or changed."""
        self._enter()
        found = []
        for param in params:
            tensor = self._resolve(param.name)
            is_now = None if tensor is None else (tuple(tensor.shape), _dtype(tensor), tensor.stride())
            if tensor is None or is_now != (param.shape, param.dtype, param.stride):
                raise LayoutError(
                    "a parameter is no longer what was observed at connect",
                    tensor=param.name,
                    rank=str(self._place),
                    expected=(param.shape, param.dtype, param.stride),
                    found=is_now or "nothing",
                    remedy="connect again",
                )
            found.append(tensor.data)
        return found

    def _resolve(self, name: str) -> torch.Tensor | None:
        """A parameter, buffer or tensor attribute by its dotted name."""
        path, _, attribute = name.rpartition(".")
        try:
            found = getattr(self._model.get_submodule(path), attribute)
        except AttributeError:
            return None
        return found if isinstance(found, torch.Tensor) else None

    def require_idle(self, mode: PauseMode) -> None:
        """Raises :class:`ConflictError` unless this scheduler is paused as ``mode`` promises and its weights are there
        and nobody else's. Main thread."""
        scheduler = self._scheduler
        updater = scheduler.weight_updater
        paused = mode == "abort" or scheduler._engine_paused  # an abort pause holds requests back before they get here
        idle = mode == "in_place" or scheduler.is_fully_idle(ignore_waiting=mode == "retract")
        for fine, what in ((paused, "this rank is not paused"), (idle, "this rank still runs a batch")):
            if not fine:
                raise NotIdle(what, rank=str(self._place), expected=f"an engine paused by {mode}")
        for fine, what, remedy in (
            (updater._session is None, "an update session of SGLang's own is open", "call /end_weight_update"),
            ("weights" not in updater.offload_tags, "the weights are released", "call /resume_memory_occupation"),
        ):
            if not fine:
                raise ConflictError(what, rank=str(self._place), remedy=remedy)

    def begin(self) -> None:
        """Put the destinations into the load layout. The runner's own call: the manager's would add a barrier that
        waits for ever for a rank that died."""
        self._enter()
        if not self._open:
            self._runner.weight_updater.begin_weight_update()
            self._open = True

    def synchronize(self) -> None:
        """Wait until the device has done everything that was issued."""
        self._enter()
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """The model's own loader over ``tensors``, in one call, without its post-load processing."""
        self._enter()
        model: Any = self._model
        before = Snapshot([("", model)])
        with _post_load_later(model):
            model.load_weights(iter(tensors))
        moved = [name for name, _, _, existed in before.rebound() if existed]
        moved += before.missing()
        if moved:
            raise LayoutError(
                f"the engine's loader put {len(moved)} tensors into other memory, where nobody looks for them",
                tensor=moved[0],
                rank=str(self._place),
                found=", ".join(moved[:10]),
                remedy="this model cannot be updated online; restart the engine to get rid of what was loaded",
            )

    def finish(self) -> None:
        """SGLang's post-load processing of the whole model, once: the model's own ``post_load_weights``, then every
        quantisation method."""
        self._enter()
        self._runner.weight_updater.end_weight_update(run_post_load=True)
        self._open = False

    def commit(self, version: int, *, flush: bool) -> None:
        """Flush what the old weights produced, then record the version. Main thread."""
        if flush and not self._scheduler.flush_cache(empty_cache=False):
            raise ConflictError("SGLang refused to flush its caches: a batch is running", rank=str(self._place))
        self._scheduler.record_weight_version_change(new_version=str(version))


#: Where SGLang keeps a value of the checkpoint that it has rounded up to suit the number of ranks (on CPUs).
_ROUNDED = {
    "original_num_attention_heads": "num_attention_heads",
    "original_total_num_kv_heads": "num_key_value_heads",
    "original_intermediate_size": "intermediate_size",
    "original_moe_intermediate_size": "moe_intermediate_size",
}


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint's configuration as JSON data."""
    plain: dict[str, Any] = json.loads(json.dumps(config, default=str))
    for kept, name in _ROUNDED.items():
        if kept in plain and name in plain:
            plain[name] = plain.pop(kept)
    return plain


@contextlib.contextmanager
def _post_load_later(model: Any) -> Iterator[None]:
    """``load_weights`` of many models ends with the model's own ``post_load_weights``, for the names that it was given.
    SGLang's end of an update runs it for the whole model, so that it must not run here too."""
    if not hasattr(model, "post_load_weights"):
        yield
        return
    own = vars(model).get("post_load_weights")
    model.post_load_weights = lambda *args, **kwargs: None
    try:
        yield
    finally:
        if own is None:
            del model.post_load_weights
        else:
            model.post_load_weights = own


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
