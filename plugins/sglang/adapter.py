"""One SGLang rank's model as a :class:`weightlink.hooks.protocols.InferenceAdapter`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from sglang.srt.environ import envs
from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
from sglang.srt.model_executor.model_runner_components.weight_updater import _unsupported_derived_weight_cache_error
from sglang.srt.model_loader.loader import post_load_weights
from sglang.srt.runtime_context import get_model
from sglang.srt.utils.common import DynamicGradMode
from weightlink.converters import replay
from weightlink.converters.snapshot import Snapshot
from weightlink.hooks.errors import ConflictError, LayoutError, NotIdle
from weightlink.hooks.geometry import Layout, ParamSpec, TensorSpec
from weightlink.hooks.messages import PROTOCOL, EngineContext, LayoutKind, RankPlace
from weightlink.hooks.settings import PauseMode, Selector
from weightlink.plugins.sglang import rewritten


@contextlib.contextmanager
def casts_shown() -> Iterator[None]:
    """Lets SGLang's loaders go through with copies that lose precision. A replay carries none of them out, and has to
    see which parameters are quantised. Some loaders would raise instead of copying."""
    switch = envs.SGLANG_QUANT_ALLOW_DOWNCASTING
    before = switch.get()
    switch.set(True)
    try:
        yield
    finally:
        switch.set(before)


class SGLangAdapter:
    """The models of one scheduler: the one that it serves and those that draft for it.

    Created in the scheduler's main thread; what may block is called from weightlink's owner thread.

    :param scheduler: SGLang's scheduler
    :param place: this rank's position
    :param transports: names of the transports that are installed
    """

    def __init__(self, scheduler: Any, place: RankPlace, transports: tuple[str, ...]) -> None:
        self._scheduler = scheduler
        self._place = place
        self._transports = transports
        self._device = next(iter(scheduler.tp_worker.model_runner.model.parameters())).device
        self._open: dict[str, Any] = {}  # runners, by prefix, whose weights are in the load layout
        self._entered = threading.local()
        self._entered.mode = None  # the main thread is in the right mode already

    def _runners(self, selector: Selector) -> dict[str, Any]:
        """SGLang's own choice of model runners, by the prefix of their parameters' names: none for the target."""
        found: dict[str, Any] = {}
        for role, runner in self._scheduler.weight_updater._select_runners(selector):
            prefix = "" if role == "target" else role
            found[prefix if prefix not in found else f"{prefix}{len(found)}"] = runner
        return found

    def _owners(self, params: Sequence[ParamSpec]) -> dict[str, Any]:
        """The runners that the parameters belong to."""
        runners = self._runners("all")
        prefixes = {_prefix(param.name, runners) for param in params if not param.staged}
        return {prefix: runner for prefix, runner in runners.items() if prefix in prefixes}

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
        config = self._scheduler.tp_worker.model_runner.model_config
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
        for runner in self._runners("all").values():
            derived = _unsupported_derived_weight_cache_error(runner.model)
            if derived is not None:
                return str(derived)
            packed = rewritten.refusal(runner.model)
            if packed:
                return packed
        mode = get_model().weight_cache_mode
        args = self._scheduler.server_args
        for unsupported, why in (
            (mode != "off", f"--weight-cache-mode {mode}: the weights are shared with a daemon and other engines"),
            (args.speculative_token_map is not None, "--speculative-token-map: the draft's head is a copy"),
            (args.disaggregation_mode != "null", "disaggregated prefill and decode is not supported yet"),
            (args.hicache_storage_backend is not None, "--hicache-storage-backend: stored KV has no weight version"),
            (args.enable_lmcache, "--enable-lmcache: stored KV has no weight version"),
        ):
            if unsupported:
                return why
        return ""

    def fingerprint(self, selector: Selector) -> str:
        """Over every parameter's and buffer's name, shape, dtype, strides and storage, and SGLang's map of experts.

        Addresses are not part of it: tensors are resolved at every update."""
        digest = hashlib.blake2b(digest_size=16)
        for prefix, runner in sorted(self._runners(selector).items()):
            storages: dict[int, int] = {}
            model: torch.nn.Module = runner.model
            for name, tensor in [
                *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False),
            ]:  # fmt: skip
                storage = storages.setdefault(tensor.untyped_storage()._cdata, len(storages))
                facts = (prefix, name, tuple(tensor.shape), _dtype(tensor), tensor.stride(), storage)
                digest.update(repr((*facts, tensor.storage_offset())).encode())
        experts = get_global_expert_location_metadata()
        if experts is not None:
            digest.update(experts.physical_to_logical_map_cpu.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def observe(self, tensors: Sequence[TensorSpec], kind: LayoutKind, selector: Selector) -> Layout:
        """This rank's layout for the manifest, in the load layout; resident weights stay as they are."""
        self._enter()
        runners = self._runners(selector)
        opened = [runner for prefix, runner in runners.items() if prefix not in self._open]  # a failed update's are
        for runner in opened:
            runner.weight_updater.begin_weight_update()
        try:
            with casts_shown():
                layout = replay.observe(
                    rank=str(self._place),
                    tensors=tensors,
                    load=[runner.model.load_weights for runner in runners.values()],
                    modules=[(prefix, runner.model) for prefix, runner in runners.items()],
                    finish=lambda: [post_load_weights(runner.model) for runner in runners.values()],
                )
            return self._without_borrowed(layout, selector)
        finally:
            for runner in opened:
                runner.weight_updater.end_weight_update(run_post_load=False)

    def _without_borrowed(self, layout: Layout, selector: Selector) -> Layout:
        """A draft's embedding and head are often the target's. In an update of the draft alone they are the target's
        business, unless the draft's own loader writes them."""
        others = [r.model for prefix, r in self._runners("all").items() if prefix not in self._runners(selector)]
        lent = {p.untyped_storage()._cdata for model in others for p in model.parameters()}
        written = {*layout.regions.param.tolist(), *layout.fills.param.tolist()}
        delivered = {entry.param for entry in layout.opaque}

        def borrowed(number: int, param: ParamSpec) -> bool:
            if param.staged or number in written or number in delivered:
                return False
            tensor = self._resolve(param.name)
            return tensor is not None and tensor.untyped_storage()._cdata in lent

        params = tuple(
            msgspec.structs.replace(p, loaded=False) if borrowed(n, p) else p for n, p in enumerate(layout.params)
        )
        return dataclasses.replace(layout, params=params)

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
                    remedy="push again: the link observes the engine again",
                )
            found.append(tensor.data)
        return found

    def _resolve(self, name: str) -> torch.Tensor | None:
        """A parameter, buffer or tensor attribute by its dotted name."""
        runners = self._runners("all")
        prefix = _prefix(name, runners)
        path, _, attribute = name.removeprefix(f"{prefix}." if prefix else "").rpartition(".")
        try:
            found = getattr(runners[prefix].model.get_submodule(path), attribute)
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

    def begin(self, params: Sequence[ParamSpec]) -> None:
        """Put the parameters' models into the load layout. The runners' own call: the manager's would add a barrier
        that waits for ever for a rank that died."""
        self._enter()
        runners = self._owners(params)
        left = sorted(set(self._open) - set(runners))
        if left:
            raise ConflictError(
                f"a failed update left other models half written: {', '.join(p or 'target' for p in left)}",
                rank=str(self._place),
                remedy="push from a link with selector='all'",
            )
        for prefix, runner in runners.items():
            if prefix not in self._open:
                runner.weight_updater.begin_weight_update()
                self._open[prefix] = runner

    def synchronize(self) -> None:
        """Wait until the device has done everything that was issued."""
        self._enter()
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Every open model's own loader over ``tensors``, in one call each, without its post-load processing."""
        self._enter()
        models = [runner.model for runner in self._open.values()]
        before = Snapshot([(prefix, runner.model) for prefix, runner in self._open.items()])
        with contextlib.ExitStack() as later:
            for model in models:
                later.enter_context(_post_load_later(model))
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
        """SGLang's post-load processing of each whole model, once: the model's own ``post_load_weights``, then every
        quantisation method."""
        self._enter()
        for prefix, runner in list(self._open.items()):
            runner.weight_updater.end_weight_update(run_post_load=True)
            del self._open[prefix]

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


def _prefix(name: str, runners: Mapping[str, Any]) -> str:
    """Which runner's parameter it is."""
    return next((prefix for prefix in runners if prefix and name.startswith(f"{prefix}.")), "")


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
