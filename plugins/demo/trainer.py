"""One rank of the demo's Megatron-Core trainer; pipeline-parallel over all ranks, on CPUs.

Started by :mod:`weightlink.plugins.demo.trainers`: commands come on the input, one JSON line each, answers go to the
output. The end of the input ends the rank, so that none outlives the demo.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from weightlink.plugins.megatron import cpu

cpu.install_cpu_patches()

import torch  # noqa: E402 - Megatron on CPUs needs the patches first
import torch.distributed as dist  # noqa: E402
import weightlink  # noqa: E402
from weightlink.converters.checkpoint import read_config  # noqa: E402
from weightlink.hooks.deadline import Deadline  # noqa: E402
from weightlink.hooks.errors import ConfigError, describe  # noqa: E402
from weightlink.plugins.demo import talk  # noqa: E402
from weightlink.plugins.megatron import load_hf  # noqa: E402

LEARNING_RATE = 2e-4


class Trainer:
    """This rank's part of the model, its optimizer and, once connected, the link."""

    def __init__(self, checkpoint: Path, timeout: float) -> None:
        self._checkpoint = checkpoint
        self._link: weightlink.Link | None = None
        world = dist.get_world_size()
        hf = read_config(checkpoint)
        chunks = cpu.build_model(hf, pp=world, dtype=torch.bfloat16)
        load_hf(chunks, checkpoint, timeout=timeout)
        self._eos = int(hf["eos_token_id"])
        self._ddp, self._optimizer = cpu.wrap_for_training(chunks, lr=LEARNING_RATE)

    def connect(self, command: talk.Connect) -> talk.Done:
        """Connect the DDP-wrapped chunks to the engine."""
        self._link = weightlink.connect(self._ddp, [command.engine], token=command.token, timeout=command.timeout)
        return talk.Done()

    def push(self, command: talk.Push) -> talk.Done:
        """Push what the parameters hold now."""
        if self._link is None:
            raise ConfigError("push before connect")
        return talk.Done(report=self._link.push(command.version, timeout=command.timeout))

    def train(self, command: talk.Train) -> Iterator[talk.Step | talk.Done]:
        """Optimizer steps on one text; the loss counts the answer and the end of the text only."""
        deadline = Deadline.after(command.timeout)
        batch = self._batch(command.prompt, command.answer)
        number, loss = 0, float("inf")
        while number < command.steps and not loss < command.loss:
            deadline.check("the training steps")
            # Only the last stage has the loss.
            shared = torch.tensor([cpu.train_step(self._ddp, self._optimizer, [batch])])
            dist.broadcast(shared, dist.get_world_size() - 1)
            number, loss = number + 1, float(shared)
            yield talk.Step(number, loss)
        yield talk.Done(steps=number, loss=loss)

    def _batch(self, prompt: str, answer: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and labels, both ``[1, length]``; labels of the prompt are negative and do not count."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self._checkpoint / "tokenizer.json"))
        first = tokenizer.encode(prompt).ids
        ids = torch.tensor([[*first, *tokenizer.encode(answer).ids, self._eos]])
        labels = ids[:, 1:].clone()
        labels[:, : len(first) - 1] = -1
        return ids[:, :-1], labels

    def obey(self, command: talk.Command) -> Iterator[talk.Event]:
        """Carry one command out."""
        if isinstance(command, talk.Train):
            yield from self.train(command)
        else:
            yield self.connect(command) if isinstance(command, talk.Connect) else self.push(command)

    def close(self) -> None:
        """Leave the engine."""
        if self._link is not None:
            self._link.close()


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 after the end of the input, 1 after a failure that was reported."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True, help="a file that the ranks meet at")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True, help="seconds")
    options: Any = parser.parse_args(arguments)
    # Libraries print to the output; what they print must not land between the answers.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{options.store}",
            rank=options.rank,
            world_size=options.world,
            timeout=timedelta(seconds=options.timeout),
        )
        trainer = Trainer(options.checkpoint, options.timeout)
        out.write(talk.line(talk.Done()))
        serve(trainer, sys.stdin.buffer, out)
        trainer.close()
    except Exception as error:
        out.write(talk.line(talk.Failed(describe(error, rank=f"trainer {options.rank}"))))
        raise
    dist.destroy_process_group()
    return 0


def serve(trainer: Trainer, commands: IO[bytes], out: IO[bytes]) -> None:
    """Answer commands until their end."""
    for line in commands:
        for event in trainer.obey(talk.commands.decode(line)):
            out.write(talk.line(event))


if __name__ == "__main__":
    sys.exit(main())
