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

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Draft models are built and loaded; drafts.py leaves out what runs them."""
        return True

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        """None of them runs."""
        return True

    def is_pin_memory_available(self, device: torch.device | None = None) -> bool:
        """A CPU has nothing to copy to asynchronously."""
        return False
