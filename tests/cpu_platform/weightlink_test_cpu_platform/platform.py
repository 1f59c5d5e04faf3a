"""The platform class; imports SGLang, so it stays apart from the entry point."""

from __future__ import annotations

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang's CPU device without its compiled CPU kernels, which the published wheel does not carry."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """Attention through torch's own operators."""
        return "torch_native"

    def is_pin_memory_available(self, device: torch.device | None = None) -> bool:
        """A CPU has nothing to copy to asynchronously."""
        return False
