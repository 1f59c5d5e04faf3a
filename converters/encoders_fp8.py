"""Block FP8: a tensor as ``float8_e4m3fn`` values, and one fp32 scale for every block of rows and columns.

The format of DeepSeek-V3's checkpoints and of most FP8 checkpoints since: ``x.weight`` with ``x.weight_scale_inv``,
where value times scale is the number. A block at the edge of the tensor may be smaller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from weightlink.hooks import hookimpl
from weightlink.hooks.errors import ConfigError, LayoutError
from weightlink.hooks.geometry import EncodedPart, TensorSpec

if TYPE_CHECKING:
    from weightlink.hooks.messages import EngineContext

LARGEST = 448.0
"""The largest number of ``float8_e4m3fn``."""
SMALLEST = 1e-12
"""A block of zeros has the scale of a block with this maximum."""


@dataclass(frozen=True)
class BlockFp8:
    """Block FP8 with blocks of ``rows`` x ``columns``; leading dimensions (experts) have blocks of their own.

    :param powers_of_two: scales are rounded up to a power of two (``scale_fmt`` ``ue8m0``), still stored as fp32
    """

    rows: int
    columns: int
    powers_of_two: bool = False
    dtype: str = "float8_e4m3fn"

    def parts(self, spec: TensorSpec) -> Sequence[EncodedPart]:
        """Values and scales; raises :class:`LayoutError` for anything but a matrix, or a stack of them."""
        if len(spec.shape) < 2:
            raise LayoutError(
                "block FP8 holds matrices only", tensor=spec.name, expected="rows and columns", found=spec.shape
            )
        *stack, rows, columns = spec.shape
        scales = (*stack, -(-rows // self.rows), -(-columns // self.columns))
        ones = (1,) * len(stack)
        return (
            EncodedPart(TensorSpec(spec.name, spec.shape, self.dtype), (*ones, 1, 1)),
            EncodedPart(TensorSpec(f"{spec.name}_scale_inv", scales, "float32"), (*ones, self.rows, self.columns)),
        )

    def encode(self, values: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Scale = largest absolute value of the block / 448; value = number / scale, rounded to the nearest."""
        encoded, scales = parts
        rows, columns = values.shape[-2:]
        # One block row at a time, so that the fp32 copy stays small whatever the tensor's size.
        for n in range(scales.shape[-2]):
            first, last = n * self.rows, min((n + 1) * self.rows, rows)
            band = values[..., first:last, :].float()
            padded = torch.nn.functional.pad(band, (0, -columns % self.columns))
            blocks = padded.unflatten(-1, (-1, self.columns))
            scale = blocks.abs().amax(dim=(-3, -1)).clamp_(min=SMALLEST) / LARGEST
            if self.powers_of_two:
                mantissa, exponent = torch.frexp(scale)
                scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
            scales[..., n, :] = scale
            quotient = (blocks / scale[..., None, :, None]).flatten(-2)[..., :columns]
            encoded[..., first:last, :] = quotient.clamp_(-LARGEST, LARGEST).to(encoded.dtype)


class BlockFp8Encoder:
    """Serves engines whose ``quantization_config`` is block FP8 (``quant_method`` fp8 with a ``weight_block_size``)."""

    name = "block-fp8"

    def encoding(self, context: EngineContext) -> BlockFp8 | None:
        """The engine's block size and kind of scales; None for any other format, FP8 with one scale per tensor too."""
        config = context.hf_config.get("quantization_config")
        if (
            not isinstance(config, Mapping)
            or config.get("quant_method") != "fp8"
            or not config.get("weight_block_size")
        ):
            return None
        size = config["weight_block_size"]
        if not (isinstance(size, Sequence) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
            raise ConfigError("an engine's FP8 blocks are not rows and columns", expected="[128, 128]", found=size)
        for key, known in (("fmt", (None, "e4m3")), ("scale_fmt", (None, "float32", "ue8m0"))):
            if config.get(key) not in known:
                raise ConfigError(
                    f"an engine's block FP8 has an unknown {key}",
                    expected=" or ".join(str(value) for value in known[1:]),
                    found=config.get(key),
                    remedy="install a plugin with a weightlink_encoders hook for this format",
                )
        return BlockFp8(size[0], size[1], powers_of_two=config.get("scale_fmt") == "ue8m0")


@hookimpl
def weightlink_encoders() -> Sequence[BlockFp8Encoder]:
    """The formats that weightlink itself knows."""
    return (BlockFp8Encoder(),)
