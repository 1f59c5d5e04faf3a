"""The control request on SGLang's own path from the front process to every scheduler: our message as one field."""

from __future__ import annotations

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types


class WeightlinkReqInput(BaseReq):  # type: ignore[misc]
    """A command. ``seq`` comes back in the reply; empty ``data`` asks for the engine's context."""

    seq: int
    data: bytes


class WeightlinkReqOutput(BaseReq):  # type: ignore[misc]
    """The answer of a replica's rank 0."""

    seq: int
    replica: int
    data: bytes


# SGLang decodes a closed set of types when it does not use pickle (SGLANG_USE_PICKLE_IPC=0).
hook_custom_types(WeightlinkReqInput, WeightlinkReqOutput)
