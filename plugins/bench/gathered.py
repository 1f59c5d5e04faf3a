"""What trainers do without weightlink: gather the shards of a tensor-parallel model and make Hugging Face tensors.

Everything that can be prepared is: memory for gathered shards and flat buckets is allocated once, and every copy from
one to the other is a pair of views. An update then only gathers and copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from weightlink.hooks.errors import LayoutError
from weightlink.hooks.geometry import Layout, TensorSpec


class Bucket:
    """Whole parameters of all ranks, and the Hugging Face tensors that they make.

    :param flat: the tensors' bytes one after the other, in memory that other processes may map; empty on ranks that do
        not convert
    """

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []
        self.flat = torch.empty(0, dtype=torch.uint8)
        self.nbytes = 0
        self._gathers: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        self._sources: list[tuple[Layout, int, torch.Tensor]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def gather(self, group: dist.ProcessGroup, how: str) -> None:
        """Gathers the shards, all at a time. Collective over ``group``.

        :param how: ``all-gather``: one collective per parameter, the whole model on every rank, as trainers do it;
            ``sends``: plain sends to rank 0, which alone converts
        """
        works: list[dist.Work | None] = []
        rank = dist.get_rank(group)
        for full, shard in self._gathers:
            if how == "all-gather":
                works.append(dist.all_gather(full, shard, group, async_op=True))
            elif rank:
                works.append(dist.isend(shard, group=group, group_dst=0))
            else:
                full[0].copy_(shard)
                works += [dist.irecv(full[peer], group=group, group_src=peer) for peer in range(1, len(full))]
        for work in works:
            if work is not None:
                work.wait()

    def convert(self) -> None:
        """Copies what was gathered to its places in ``flat``."""
        for target, source in self._copies:
            target.copy_(source)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of ``flat``."""
        views, at = {}, 0
        for spec in self.specs:
            views[spec.name] = self.flat[at : at + _nbytes(spec)].view(getattr(torch, spec.dtype)).view(spec.shape)
            at += _nbytes(spec)
        return views

    def add(self, number: int, live: torch.Tensor, layouts: Sequence[Layout]) -> None:
        """Takes the parameter ``number`` of all ranks in; ``live`` is this rank's."""
        rows = [np.flatnonzero(layout.regions.param == number) for layout in layouts]
        if len(layouts) == 1 or _boxes(layouts[0], rows[0]) == _boxes(layouts[1], rows[1]):  # every rank has it whole
            full, layouts = live.unsqueeze(0), layouts[:1]
        else:
            full = torch.empty((len(layouts), *live.shape), dtype=live.dtype)
            # As bytes: Gloo does not know every type of weights.
            self._gathers.append(([_raw(shard) for shard in full], _raw(live)))
        names = {spec.name for spec in self.specs}
        for layout, own, shard in zip(layouts, rows, full, strict=False):
            for row in own.tolist():
                spec = layout.tensors[int(layout.regions.tensor[row])]
                if spec.name not in names:
                    names.add(spec.name)
                    self.specs.append(spec)
                    self.nbytes += _nbytes(spec)
                self._sources.append((layout, row, shard))

    def allocate(self) -> None:
        """On a rank that converts."""
        self.flat = torch.empty(self.nbytes, dtype=torch.uint8).share_memory_()
        views = self.tensors()
        for layout, row, shard in self._sources:
            regions = layout.regions
            spec = layout.tensors[int(regions.tensor[row])]
            lo, size, step, stride = (
                getattr(regions, name)[row, : len(spec.shape)].tolist() for name in ("lo", "size", "step", "stride")
            )
            box = tuple(slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(lo, size, step, strict=True))
            source = shard.as_strided(size, stride, shard.storage_offset() + int(regions.offset[row]))
            self._copies.append((views[spec.name][box], source))


def buckets(
    tensors: Sequence[torch.Tensor], layouts: Sequence[Layout], bucket_bytes: int, *, converts: bool
) -> list[Bucket]:
    """All of a model in buckets of at least ``bucket_bytes``, but for the last one.

    :param tensors: this rank's live tensors, one per entry of a layout's ``params``
    :param layouts: of all tensor-parallel ranks
    :param converts: this rank makes the Hugging Face tensors; others only take part in gathering
    :raises LayoutError: if the ranks' parameters do not correspond
    """
    shapes = [[(param.name, param.shape) for param in layout.params] for layout in layouts]
    for layout, found in zip(layouts, shapes, strict=True):
        if found != shapes[0]:
            raise LayoutError("ranks hold different parameters", rank=layout.rank, expected=f"as {layouts[0].rank}")
    made = [Bucket()]
    for number, tensor in enumerate(tensors):
        if made[-1].nbytes >= bucket_bytes:
            made.append(Bucket())
        made[-1].add(number, tensor.detach(), layouts)
    for bucket in made if converts else []:
        bucket.allocate()
    return made


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * int(getattr(torch, spec.dtype).itemsize)


def _boxes(layout: Layout, rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> list[object]:
    return [
        (
            layout.tensors[int(layout.regions.tensor[row])].name,
            *(getattr(layout.regions, c)[row].tolist() for c in ("lo", "size")),
        )
        for row in rows.tolist()
    ]
