"""An SGLang platform for tests: plain torch operators on the CPU. Selected with ``SGLANG_PLATFORM=torch_cpu``."""


def activate() -> str:
    """The dotted name of the platform class, which SGLang imports when it needs it."""
    return "weightlink_test_cpu_platform.platform.TorchCpuPlatform"
