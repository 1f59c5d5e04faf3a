"""One trainer rank of ``weightlink bench update``: Megatron-Core, tensor-parallel over all ranks, on CPUs."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

# Its CUDA library raises OSError where SGLang expects ImportError.
sys.modules["flash_mla"] = None  # type: ignore[assignment]

# SGLang first: Megatron's patches for CPUs replace classes of torch that it names in annotations.
from weightlink.plugins.bench.update_paths import Paths, Server  # noqa: E402
from weightlink.plugins.megatron import cpu  # noqa: E402

cpu.install_cpu_patches()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import weightlink  # noqa: E402
from weightlink.converters.checkpoint import context_from_checkpoint, read_config  # noqa: E402
from weightlink.hooks.deadline import Deadline  # noqa: E402
from weightlink.hooks.errors import ConfigError, describe  # noqa: E402
from weightlink.hooks.geometry import Layout  # noqa: E402
from weightlink.plugins.bench import update_talk as talk  # noqa: E402
from weightlink.plugins.bench.gathered import buckets  # noqa: E402
from weightlink.plugins.megatron import load_hf  # noqa: E402
from weightlink.plugins.megatron.adapter import MegatronAdapter  # noqa: E402


class Member:
    """This rank's part of the model and, once joined, its link and its references."""

    def __init__(self, setup: talk.Setup) -> None:
        self._rank = setup.rank
        dist.init_process_group(
            "gloo",
            init_method=f"file://{setup.store}",
            rank=setup.rank,
            world_size=setup.world,
            timeout=timedelta(seconds=setup.timeout),
        )
        checkpoint = Path(setup.checkpoint)
        self._chunks = cpu.build_model(read_config(checkpoint), tp=setup.world, dtype=torch.bfloat16)
        load_hf(self._chunks, checkpoint, timeout=setup.timeout)
        self._adapter = MegatronAdapter(self._chunks)
        self.layout = self._adapter.layout(context_from_checkpoint(checkpoint), None)
        self._link: weightlink.Link | None = None
        self._paths: Paths | None = None

    def join(self, command: talk.Join) -> talk.Done:
        """Connect both ways."""
        deadline = Deadline.after(command.timeout)
        self._link = weightlink.connect(self._chunks, [command.engine], token=command.token, timeout=command.timeout)
        layouts = [Layout.unpack(layout) for layout in command.layouts]
        made = buckets(self._adapter.tensors(), layouts, command.bucket_bytes, converts=self._rank == 0)
        server = Server(command.engine, command.token) if self._rank == 0 else None
        self._paths = Paths(server, dist.group.WORLD, made, Path(command.folder))
        self._paths.join(command.engine_ranks, deadline)
        return talk.Done(nbytes=sum(bucket.nbytes for bucket in made))

    def change(self, command: talk.Change) -> talk.Done:
        """Flip one bit of every weight's fraction, another one each time: every byte pattern moves, none explodes."""
        with torch.no_grad():
            for chunk in self._chunks:
                for parameter in chunk.parameters():
                    parameter.view(torch.int16).bitwise_xor_(1 << command.number % 7)
        return talk.Done()

    def update(self, command: talk.Update) -> talk.Done:
        """By one of the paths, from a barrier of the trainer's ranks to the engine's having continued."""
        if self._link is None or self._paths is None:
            raise ConfigError("the member has not joined yet")
        deadline = Deadline.after(command.timeout)
        dist.barrier()
        started = time.perf_counter()
        if command.path == "weightlink":
            report = self._link.push(command.version, timeout=command.timeout)
            return talk.Done(seconds=time.perf_counter() - started, report=report)
        phases = self._paths.run(command.path, command.gather, command.version, deadline)
        seconds = time.perf_counter() - started
        if self._rank == 0:
            self._paths.clean()
        return talk.Done(seconds=seconds, phases=phases)

    def obey(self, command: talk.Command) -> talk.Done:
        """Carry out one command after the first."""
        match command:
            case talk.Join():
                return self.join(command)
            case talk.Change():
                return self.change(command)
            case talk.Update():
                return self.update(command)
            case _:
                raise ConfigError("the member is set up already")

    def close(self) -> None:
        """Leave the engine and the groups."""
        if self._link is not None:
            self._link.close()
        if self._paths is not None:
            self._paths.leave()
        dist.destroy_process_group()


def main() -> int:
    """Exit code 0 after the end of the input, 1 after a failure that was reported."""
    # Libraries print to the output; what they print must not land between the answers.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Other processes open shared tensors by name: the usual way, by descriptor, is for children of one parent only.
    torch.multiprocessing.set_sharing_strategy("file_system")
    member: Member | None = None
    try:
        for line in sys.stdin.buffer:
            command = talk.commands.decode(line)
            if member is not None:
                answer = member.obey(command)
            elif isinstance(command, talk.Setup):
                member = Member(command)
                answer = talk.Done(layout=member.layout.pack())
            else:
                raise ConfigError("the member is not set up yet")
            out.write(talk.line(answer))
        if member is not None:
            member.close()
    except Exception as error:
        out.write(talk.line(talk.Failed(describe(error))))
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
