"""What every transport must do, against the Protocol, with real processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from functools import partial

import pytest
import torch
import torch.distributed as dist
from members import (
    DTYPES,
    LONG,
    Member,
    Run,
    error_of,
    pattern,
    poisoned,
    run_members,
    same,
    succeeded,
)
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ConfigError, DeadlineExceeded, TransferError
from weightlink.plugins.transports.p2p import P2P


@pytest.fixture(params=[P2P()], ids=lambda transport: transport.name)
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a body in every process of a group, on each transport."""
    return partial(run_members, request.param)


class TestConformance:
    """Of any transport."""

    @pytest.mark.parametrize(("trainers", "engines"), [(1, 1), (2, 2), (2, 3), (3, 1)])
    def test_rounds_in_both_directions(self, run: Run, trainers: int, engines: int) -> None:
        def body(member: Member) -> bool:
            channel = member.open()
            assert (channel.rank, channel.size) == (member.rank, trainers + engines)
            left, right = range(trainers), range(trainers, member.size)
            shape, deadline = (7, 33), Deadline.after(LONG)
            for dtype in DTYPES:
                for sources, destinations in ((left, right), (right, left)):
                    sends, receives = [], []
                    if member.rank in sources:
                        sends = [(peer, pattern(member.rank, peer, shape, dtype)) for peer in destinations]
                    else:
                        receives = [(peer, poisoned(shape, dtype)) for peer in sources]
                    channel.post(sends, receives, deadline).wait(deadline)
                    for peer, tensor in receives:
                        assert same(tensor, pattern(peer, member.rank, shape, dtype)), (peer, dtype)
            channel.barrier("the end of the test", deadline)
            channel.close()
            return True

        succeeded(run(trainers + engines, body))

    def test_both_directions_in_one_round(self, run: Run) -> None:
        def body(member: Member) -> bool:
            channel, deadline = member.open(), Deadline.after(LONG)
            peers = [rank for rank in range(member.size) if rank != member.rank]
            large = (3, 1 << 18)  # more than a socket buffers, so sending first and receiving then would deadlock
            receives = [(peer, poisoned(large)) for peer in peers]
            channel.post([(peer, pattern(member.rank, peer, large)) for peer in peers], receives, deadline).wait(
                deadline
            )
            return all(same(tensor, pattern(peer, member.rank, large)) for peer, tensor in receives)

        assert succeeded(run(3, body)) == [True] * 3

    def test_order_within_a_pair_over_overlapping_rounds(self, run: Run) -> None:
        def body(member: Member) -> list[int]:
            channel, deadline = member.open(), Deadline.after(LONG)
            buffers = [torch.full((129,), -1 - i, dtype=torch.int64) for i in range(12)]
            pending = deque()
            for start in range(0, 12, 3):
                mine = buffers[start : start + 3]
                if member.rank == 0:
                    for i, tensor in enumerate(mine):
                        tensor.fill_(start + i)
                    pending.append(channel.post([(1, tensor) for tensor in mine], [], deadline))
                else:
                    pending.append(channel.post([], [(0, tensor) for tensor in mine], deadline))
                if len(pending) == 2:
                    pending.popleft().wait(deadline)
            while pending:
                pending.popleft().wait(deadline)
            assert all(len(tensor.unique()) == 1 for tensor in buffers)
            return [int(tensor[0]) for tensor in buffers]

        assert succeeded(run(2, body))[1] == list(range(12))

    def test_large_tiny_and_empty_messages(self, run: Run) -> None:
        sizes = [64 << 20, 1, 0, 4097, 3]

        def body(member: Member) -> bool:
            channel, deadline = member.open(), Deadline.after(LONG)
            if member.rank == 0:
                channel.post([(1, pattern(0, 1, (size,), torch.uint8)) for size in sizes], [], deadline).wait(deadline)
                channel.barrier("the end of the test", deadline)
                return True
            tensors = [poisoned((size,), torch.uint8) for size in sizes]
            channel.post([], [(0, tensor) for tensor in tensors], deadline).wait(deadline)
            channel.barrier("the end of the test", deadline)
            return all(
                same(tensor, pattern(0, 1, (size,), torch.uint8)) for size, tensor in zip(sizes, tensors, strict=True)
            )

        assert succeeded(run(2, body)) == [True, True]

    def test_a_scalar_and_a_parameter_that_needs_a_gradient(self, run: Run) -> None:
        def body(member: Member) -> float:
            channel, deadline = member.open(), Deadline.after(LONG)
            scalar = torch.tensor(3.5 if member.rank == 0 else 0.0)
            weight = torch.nn.Parameter(torch.full((3, 5), 2.0 if member.rank == 0 else 0.0))
            messages = [(1 - member.rank, scalar), (1 - member.rank, weight)]
            channel.post(messages if member.rank == 0 else [], messages if member.rank else [], deadline).wait(deadline)
            channel.barrier("the end of the test", deadline)
            return float(scalar + weight.sum())

        assert succeeded(run(2, body)) == [33.5, 33.5]

    def test_an_empty_round_and_a_group_of_one(self, run: Run) -> None:
        def body(member: Member) -> bool:
            channel, deadline = member.open(), Deadline.after(LONG)
            channel.post([], [], deadline).wait(deadline)
            channel.barrier("nobody", deadline)
            channel.close()
            return True

        assert succeeded(run(1, body)) == [True]

    def test_two_channels_on_one_store_do_not_mix(self, run: Run) -> None:
        def body(member: Member) -> list[int]:
            deadline = Deadline.after(LONG)
            channels = [member.open(key=key) for key in ("link-1/epoch-1", "link-1/epoch-2")]
            if member.rank == 0:
                pending = [
                    channel.post([(1, torch.full((50,), number))], [], deadline)
                    for number, channel in enumerate(channels)
                ]
                tensors = [torch.tensor([0]), torch.tensor([1])]
            else:  # in the other order
                tensors = [torch.full((50,), -1), torch.full((50,), -1)]
                pending = [channels[i].post([], [(0, tensors[i])], deadline) for i in (1, 0)]
            for one in pending:
                one.wait(deadline)
            channels[0].close()
            channels[1].barrier("the second channel after the first is closed", deadline)
            return [int(tensor[-1]) for tensor in tensors]

        assert succeeded(run(2, body)) == [[0, 1], [0, 1]]

    @pytest.mark.parametrize("waiting", ["receive", "send", "barrier"])
    def test_a_killed_peer_is_a_transfer_error_at_once(self, run: Run, waiting: str) -> None:
        def body(member: Member) -> None:
            channel, deadline = member.open(), Deadline.after(LONG)
            if member.rank == 1:
                time.sleep(0.3)  # the others wait by now
                os.kill(os.getpid(), signal.SIGKILL)
            large = torch.zeros(4 << 20)
            # Rank 2 waits for rank 0 only, which is alive: it must hear of it all the same.
            peer = 1 if member.rank == 0 else 0
            if waiting == "barrier":
                channel.barrier("a barrier", deadline)
            elif waiting == "receive":
                channel.post([], [(peer, large)], deadline).wait(deadline)
            else:
                channel.post([(peer, large)], [], deadline).wait(deadline)

        first, killed, third = run(3, body)
        assert killed is None
        assert "rank 1" in error_of(first, TransferError)
        assert "rank 0" in error_of(third, TransferError)

    def test_a_silent_peer_is_named_by_the_deadline(self, run: Run) -> None:
        def body(member: Member) -> None:
            channel, deadline = member.open(), Deadline.after(1.0)
            if member.rank == 0:
                tensors = [torch.zeros(9) for _ in range(3)]
                channel.post([], list(zip((1, 2, 3), tensors, strict=True)), deadline).wait(deadline)
            elif member.rank == 2:
                channel.post([(0, torch.ones(9))], [], deadline).wait(deadline)
            time.sleep(2.0)

        text = error_of(run(4, body)[0], DeadlineExceeded)
        assert "rank 1" in text
        assert "rank 3" in text
        assert "rank 2" not in text

    def test_a_message_that_nobody_takes_is_named_by_the_deadline(self, run: Run) -> None:
        def body(member: Member) -> None:
            channel, deadline = member.open(), Deadline.after(1.0)
            if member.rank == 0:
                channel.post([(1, torch.zeros(4 << 20))], [], deadline).wait(deadline)
            time.sleep(2.0)

        assert "rank 1" in error_of(run(2, body)[0], DeadlineExceeded)

    def test_a_deadline_that_has_passed_already(self, run: Run) -> None:
        def body(member: Member) -> None:
            channel, deadline = member.open(), Deadline.after(0.01)
            time.sleep(0.1)
            if member.rank == 0:
                channel.post([], [(1, torch.zeros(9))], deadline).wait(deadline)
            else:
                channel.barrier("a late barrier", deadline)

        late_wait, late_barrier = run(2, body)
        assert "rank 1" in error_of(late_wait, DeadlineExceeded)
        assert "a late barrier" in error_of(late_barrier, DeadlineExceeded)

    def test_a_barrier_without_one_member_names_what_and_whom(self, run: Run) -> None:
        def body(member: Member) -> None:
            channel = member.open()
            if member.rank == 1:
                time.sleep(2.0)
            else:
                channel.barrier("every rank to finish its copies", Deadline.after(1.0 if member.rank == 0 else LONG))

        first, _, third = run(3, body)
        text = error_of(first, DeadlineExceeded)
        assert "every rank to finish its copies" in text
        assert "rank 1" in text
        assert "rank 2" not in text
        assert "every rank to finish its copies" in error_of(third, TransferError)  # at once, not at its own deadline

    def test_abort_wakes_the_waiting_thread_and_the_peers(self, run: Run) -> None:
        def body(member: Member) -> None:
            channel, deadline = member.open(), Deadline.after(LONG)
            if member.rank == 0:
                timer = threading.Timer(0.3, channel.abort)
                timer.start()
                try:
                    channel.post([], [(1, torch.zeros(9))], deadline).wait(deadline)
                finally:
                    timer.join()
                    channel.abort()
            elif member.rank == 1:
                channel.post([], [(0, torch.zeros(9))], deadline).wait(deadline)
            else:
                channel.barrier("a barrier", deadline)

        aborted, *woken = run(3, body)
        assert "aborted" in error_of(aborted, TransferError)
        for result in woken:
            assert "rank 0" in error_of(result, TransferError)

    def test_abort_wakes_living_peers_although_another_is_dead(self, run: Run) -> None:
        def body(member: Member) -> None:
            channel, deadline = member.open(), Deadline.after(LONG)
            if member.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if member.rank == 0:
                time.sleep(0.5)
                channel.abort()
                time.sleep(2.0)
            else:
                channel.post([], [(0, torch.zeros(9))], deadline).wait(deadline)

        _, killed, woken = run(3, body)
        assert killed is None
        assert "rank 0" in error_of(woken, TransferError)

    def test_closing_twice_and_using_it_afterwards(self, run: Run) -> None:
        def body(member: Member) -> None:
            channel, deadline = member.open(), Deadline.after(LONG)
            channel.barrier("both ranks", deadline)
            channel.close()
            channel.close()
            channel.abort()
            with pytest.raises(TransferError, match="closed"):
                channel.post([], [], deadline)
            channel.barrier("a closed channel", deadline)

        for result in run(2, body):
            assert "closed" in error_of(result, TransferError)

    @pytest.mark.parametrize("reason", ["not contiguous", "elsewhere", "not a peer"])
    def test_what_cannot_be_sent_is_refused_before_it_is_posted(self, run: Run, reason: str) -> None:
        def body(member: Member) -> bool:
            channel, deadline = member.open(), Deadline.after(LONG)
            bad = {
                "not contiguous": (1 - member.rank, torch.zeros(4, 6)[:, :3]),
                "elsewhere": (1 - member.rank, torch.empty(3, device="meta")),
                "not a peer": (2, torch.zeros(3)),
            }[reason]
            for sends, receives in (([bad], []), ([], [bad])):
                with pytest.raises(ConfigError, match=reason):
                    channel.post(sends, receives, deadline)
            channel.barrier("the channel is still good", deadline)
            return True

        assert succeeded(run(2, body)) == [True, True]

    def test_a_member_that_never_comes_is_named(self, run: Run) -> None:
        def body(member: Member) -> None:
            if member.rank == 1:
                time.sleep(2.0)
            else:
                member.open(seconds=1.0 if member.rank == 0 else 1.5)

        first, _, third = run(3, body)
        for result in (first, third):
            text = error_of(result, DeadlineExceeded)
            assert "rank 1" in text
            assert "rank 2" not in text

    def test_the_default_group_is_neither_made_nor_touched(self, run: Run) -> None:
        def body(member: Member) -> bool:
            def use_a_channel(key: str) -> None:
                channel, deadline = member.open(key=key), Deadline.after(LONG)
                tensor = torch.full((5,), member.rank)
                sends = [(1, tensor)] if member.rank == 0 else []
                channel.post(sends, [] if sends else [(0, tensor)], deadline).wait(deadline)
                channel.barrier("both ranks", deadline)
                channel.close()
                assert tensor.tolist() == [0] * 5

            assert not dist.is_initialized()
            use_a_channel("without")
            assert not dist.is_initialized()
            dist.init_process_group(
                "gloo", store=dist.PrefixStore("framework", member.store), rank=1 - member.rank, world_size=2
            )
            known = list(dist.distributed_c10d._world.pg_map)
            use_a_channel("with")
            assert list(dist.distributed_c10d._world.pg_map) == known
            total = torch.tensor([member.rank + 1])
            dist.all_reduce(total)
            dist.destroy_process_group()
            return bool(total.item() == 3)

        assert succeeded(run(2, body)) == [True, True]

    def test_nothing_grows_over_many_channels(self, run: Run) -> None:
        def resources() -> tuple[int, int]:
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

        def body(member: Member) -> tuple[tuple[int, int], tuple[int, int]]:
            tensor = torch.full((1000,), member.rank)
            for cycle in range(20):
                channel, deadline = member.open(key=f"epoch-{cycle}"), Deadline.after(LONG)
                sends = [(1, tensor)] if member.rank == 0 else []
                channel.post(sends, [] if sends else [(0, tensor)], deadline).wait(deadline)
                channel.barrier("both ranks", deadline)
                channel.close()
                if cycle == 2:
                    early = resources()
            return early, resources()

        for early, late in succeeded(run(2, body)):
            assert late == early
