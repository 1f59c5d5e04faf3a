"""Megatron-Core on CPUs: for tests and the demo only, never for a real trainer.

Megatron places its tensors with ``torch.cuda`` calls. :func:`install_cpu_patches` redirects them for this process,
before Megatron is imported. The rest builds and trains small models of the families that weightlink knows.
"""

from weightlink.plugins.megatron.cpu.configs import transformer_config
from weightlink.plugins.megatron.cpu.model import build_model
from weightlink.plugins.megatron.cpu.moe import experts_of
from weightlink.plugins.megatron.cpu.patches import install_cpu_patches
from weightlink.plugins.megatron.cpu.training import causal_inputs, train_step, wrap_for_training

__all__ = [
    "build_model",
    "causal_inputs",
    "experts_of",
    "install_cpu_patches",
    "train_step",
    "transformer_config",
    "wrap_for_training",
]
