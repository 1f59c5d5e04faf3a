"""What every transport must do, against the Protocol, with real processes; then what is special to ``p2p``."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ConfigError, DeadlineExceeded, PlanMismatch, TransferError, WeightlinkError
from weightlink.hooks.manager import PluginManager
from weightlink.hooks.protocols import Channel, Transport
from weightlink.hooks.settings import WireSettings
from weightlink.plugins.transports.backends import Transfer, _environment, backend_name, common_order
from weightlink.plugins.transports.channel import _agree, _Hello
from weightlink.plugins.transports.p2p import P2P
from weightlink.rendezvous import Rendezvous, connect, local_address_towards, new_key

HOST = "127.0.0.1"
LONG = 120.0
"""Seconds of a deadline that must not pass: a test that comes near it has failed by ``LIMIT``."""
LIMIT = 40.0
"""Seconds after which a test's processes are killed."""


@dataclass
class Member:
    """One process of a test's group."""

    transport: Transport
    rank: int
    size: int
    store: dist.Store
    key: str

    def open(self, *, key: str = "", seconds: float = LONG) -> Channel:
        return self.transport.open(
            self.store,
            key=key or self.key,
            rank=self.rank,
            size=self.size,
            host=HOST,
            device=torch.device("cpu"),
            wire=WireSettings(),
            deadline=Deadline.after(seconds),
        )


Body = Callable[[Member], Any]
Run = Callable[[int, Body], list[Any]]


def _member(pipe: Connection, transport: Transport, rank: int, size: int, body: Body) -> None:
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    port, key = pipe.recv()
    try:
        result = body(Member(transport, rank, size, connect(HOST, port, Deadline.after(LONG)), key))
    except Exception as error:
        result = error
    pipe.send(result)
    pipe.recv()  # leave together: an exit looks like a death to the others
    os._exit(0)


@contextlib.contextmanager
def _processes(size: int, transport: Transport, body: Body) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    processes = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_member, args=(theirs, transport, rank, size, body))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    rendezvous = Rendezvous.listen(HOST, Deadline.after(LIMIT))
    try:
        for pipe in pipes:
            pipe.send((rendezvous.port, new_key()[:0] + "link-1"))
        yield pipes
    finally:
        for pipe in pipes:
            with contextlib.suppress(OSError):  # that member is dead, as the test wanted
                pipe.send(None)
            pipe.close()
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        rendezvous.close()


@pytest.fixture(params=[P2P()], ids=lambda transport: transport.name)
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a body in every process of a group and returns what each returned, the error it raised, or None if it
    died."""

    def run(size: int, body: Body) -> list[Any]:
        until = time.monotonic() + LIMIT
        results: list[Any] = []
        with _processes(size, request.param, body) as pipes:
            for rank, pipe in enumerate(pipes):
                if not pipe.poll(max(0.0, until - time.monotonic())):
                    pytest.fail(f"rank {rank} is still busy; before it: {results}")
                try:
                    results.append(pipe.recv())
                except (EOFError, ConnectionResetError):
                    results.append(None)
        return results

    return run


def succeeded(results: list[Any]) -> list[Any]:
    for rank, result in enumerate(results):
        if isinstance(result, Exception):
            raise AssertionError(f"rank {rank} failed") from result
        assert result is not None, f"rank {rank} died"
    return results


def error_of(result: Any, kind: type[WeightlinkError]) -> str:
    assert type(result) is kind, repr(result)
    return str(result)


def pattern(source: int, destination: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Bytes that no other pair, shape or dtype has."""
    count = torch.Size(shape).numel()
    itemsize = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(source * 1000 + destination * 10 + count)
    raw = torch.randint(0, 256, (count * itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    itemsize = torch.empty(0, dtype=dtype).element_size()
    return torch.full((torch.Size(shape).numel() * itemsize,), 0xA5, dtype=torch.uint8).view(dtype).view(shape)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit by bit: the patterns hold every NaN there is."""
    return left.shape == right.shape and torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8))


DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.bool)


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


def listening() -> set[str]:
    """Local addresses that this process listens on, from the kernel's tables."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}", encoding="ascii") as file:
            for row in list(file)[1:]:
                fields = row.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    address = fields[1].split(":")[0]
                    raw = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
                    found.add(socket.inet_ntop(socket.AF_INET if table == "tcp" else socket.AF_INET6, raw))
    return found


class TestRendezvous:
    def test_nothing_listens_on_any_other_address(self, run: Run) -> None:
        def body(member: Member) -> set[str]:
            assert listening() == set()
            rendezvous = Rendezvous.listen("localhost", Deadline.after(LONG))
            store = connect(rendezvous.host, rendezvous.port, Deadline.after(LONG))
            store.set("key", "value")
            assert rendezvous.store.get("key") == b"value"
            channel = member.open()
            addresses = listening()
            with pytest.raises(ConnectionRefusedError):  # loopback too, but not ours: a wildcard would answer
                socket.create_connection(("127.0.0.2", rendezvous.port), timeout=5)
            channel.close()
            del channel, store
            rendezvous.close()
            rendezvous.close()
            assert listening() == set()
            return addresses

        for addresses in succeeded(run(2, body)):
            assert addresses <= {HOST, "::1"}
            assert addresses

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "no-such-host.invalid"])
    def test_an_address_that_is_not_ours_is_refused(self, host: str) -> None:
        with pytest.raises(ConfigError, match=host):
            Rendezvous.listen(host, Deadline.after(5))

    def test_a_store_that_is_not_there(self) -> None:
        with socket.socket() as free:
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        with pytest.raises(TransferError, match=f"{HOST}:{port}"):
            connect(HOST, port, Deadline.after(LONG))

    def test_a_store_that_does_not_answer(self) -> None:
        with socket.socket() as mute:
            mute.bind((HOST, 0))
            mute.listen()
            with pytest.raises(DeadlineExceeded, match="store"):
                connect(HOST, mute.getsockname()[1], Deadline.after(1.0))

    def test_the_local_address_of_a_route(self) -> None:
        assert local_address_towards(HOST, 80) == HOST
        with pytest.raises(ConfigError, match="no-such-host"):
            local_address_towards("no-such-host.invalid", 80)

    def test_keys_are_unguessable_and_fit_the_message(self) -> None:
        keys = {new_key() for _ in range(100)}
        assert len(keys) == 100
        assert all(32 <= len(key) <= 64 for key in keys)


class TestP2P:
    def test_it_is_found_through_its_hook_and_imports_no_torch(self) -> None:
        assert PluginManager(entry_points=False, builtins=["weightlink.plugins.transports"]).transport("p2p").name
        code = (
            "import sys, weightlink; before = 'torch' in sys.modules; import weightlink.plugins.transports as t;"
            "t.weightlink_transports(); sys.exit(before != ('torch' in sys.modules))"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

    @pytest.mark.parametrize(("sent", "expected"), [(40, 24), (24, 40)])
    def test_a_size_that_differs_neither_arrives_nor_kills(self, run: Run, sent: int, expected: int) -> None:
        def body(member: Member) -> None:
            channel, deadline = member.open(), Deadline.after(1.0)
            if member.rank == 0:
                channel.post([(1, torch.zeros(sent))], [], deadline).wait(deadline)
            else:
                channel.post([], [(0, torch.zeros(expected))], deadline).wait(deadline)

        for result in run(2, body):
            assert isinstance(result, DeadlineExceeded | TransferError)

    def test_members_on_different_backends_are_told_apart_first(self) -> None:
        store, errors = dist.HashStore(), []

        def join(rank: int, hello: _Hello) -> None:
            try:
                _agree(store, rank, 2, hello, Deadline.after(20))
            except PlanMismatch as error:
                errors.append(str(error))

        hellos = [_Hello("nccl", "2.28.3", True), _Hello("gloo", "", True)]
        threads = [threading.Thread(target=join, args=pair) for pair in enumerate(hellos)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(errors) == 2
        assert all("group rank 1" in text and "nccl 2.28.3" in text and "gloo" in text for text in errors)

    def test_one_member_that_cannot_coalesce_decides_for_all(self) -> None:
        store, agreed = dist.HashStore(), {}

        def join(rank: int) -> None:
            agreed[rank] = _agree(store, rank, 3, _Hello("nccl", "2.28.3", rank != 1), Deadline.after(20))

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert agreed == {0: False, 1: False, 2: False}

    @pytest.mark.parametrize("seed", range(20))
    def test_the_common_order_cannot_deadlock(self, seed: int) -> None:
        """Every rank does one blocking operation after the other; only the two ends of one message can proceed."""
        rng = random.Random(seed)
        size, empty = rng.randint(2, 6), torch.empty(0, dtype=torch.uint8)
        queues: list[list[Transfer]] = [[] for _ in range(size)]
        for _ in range(40):
            source, destination = rng.sample(range(size), 2)
            queues[source].append(Transfer(destination, empty, True))
            queues[destination].append(Transfer(source, empty, False))
        for queue in queues:
            rng.shuffle(queue)
        ordered = [deque(common_order(rank, queue)) for rank, queue in enumerate(queues)]
        done = 0
        while any(ordered):
            ready = [
                (rank, queue[0].peer)
                for rank, queue in enumerate(ordered)
                if queue and queue[0].sending and ordered[queue[0].peer]
                if (ordered[queue[0].peer][0].peer, ordered[queue[0].peer][0].sending) == (rank, False)
            ]
            assert ready, "deadlock"
            for rank, peer in ready:
                ordered[rank].popleft()
                ordered[peer].popleft()
                done += 1
        assert done == 40

    def test_variables_are_set_for_a_constructor_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WEIGHTLINK_TEST_A", "old")
        monkeypatch.delenv("WEIGHTLINK_TEST_B", raising=False)
        with pytest.raises(KeyError, match="inside"), _environment(WEIGHTLINK_TEST_A="new", WEIGHTLINK_TEST_B="new"):
            assert (os.environ["WEIGHTLINK_TEST_A"], os.environ["WEIGHTLINK_TEST_B"]) == ("new", "new")
            raise KeyError("inside")
        assert os.environ["WEIGHTLINK_TEST_A"] == "old"
        assert "WEIGHTLINK_TEST_B" not in os.environ

    def test_memory_that_no_backend_moves(self) -> None:
        with pytest.raises(ConfigError, match="meta"):
            backend_name(torch.device("meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestNccl:
    """What one GPU can show: NCCL refuses two ranks on one device."""

    @pytest.fixture(params=[True, False], ids=["coalesced", "one by one"])
    def channel(self, request: pytest.FixtureRequest) -> Iterator[Channel]:
        rendezvous = Rendezvous.listen(HOST, Deadline.after(LIMIT))
        channel = P2P(coalesce=request.param).open(
            rendezvous.store,
            key=new_key(),
            rank=0,
            size=1,
            host=HOST,
            device=torch.device("cuda"),
            wire=WireSettings(),
            deadline=Deadline.after(LONG),
        )
        yield channel
        channel.close()
        rendezvous.close()

    @pytest.mark.parametrize("channel", [True], indirect=True)
    def test_a_round_to_itself(self, channel: Channel) -> None:
        deadline = Deadline.after(LIMIT)
        for dtype in DTYPES:
            sent = pattern(0, 0, (7, 33), dtype).cuda()
            received = poisoned((7, 33), dtype).cuda()
            channel.post([(0, sent)], [(0, received)], deadline).wait(deadline)
            assert same(received.cpu(), sent.cpu())

    def test_the_environment_and_the_default_group_are_left_alone(self, channel: Channel) -> None:
        assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
        assert not dist.is_initialized()

    @pytest.mark.parametrize("channel", [True], indirect=True)
    def test_abort_ends_a_round_that_cannot_finish(self, channel: Channel) -> None:
        deadline = Deadline.after(LONG)
        torch.cuda._sleep(1 << 33)  # holds the stream back
        tensor = torch.zeros(9, device="cuda")
        pending = channel.post([(0, tensor)], [(0, torch.zeros_like(tensor))], deadline)
        threading.Timer(0.3, channel.abort).start()
        with pytest.raises(TransferError, match="aborted"):
            pending.wait(deadline)
