"""What is special to ``p2p``: the store that its members meet at, Gloo's traps, and NCCL as far as one GPU shows it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from members import (
    DTYPES,
    HOST,
    LIMIT,
    LONG,
    Member,
    Run,
    pattern,
    poisoned,
    run_members,
    same,
    succeeded,
)
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ConfigError, DeadlineExceeded, PlanMismatch, TransferError
from weightlink.hooks.manager import PluginManager
from weightlink.hooks.protocols import Channel
from weightlink.hooks.settings import WireSettings
from weightlink.plugins.transports.backends import Transfer, _environment, backend_name, common_order
from weightlink.plugins.transports.channel import _agree, _Hello
from weightlink.plugins.transports.p2p import P2P
from weightlink.rendezvous import Rendezvous, connect, local_address_towards, new_key


@pytest.fixture
def run() -> Run:
    return partial(run_members, P2P())


def listening() -> set[tuple[str, int]]:
    """Local addresses and ports that this process listens on, from the kernel's tables."""
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
                    address, port = fields[1].split(":")
                    raw = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
                    text = socket.inet_ntop(socket.AF_INET if table == "tcp" else socket.AF_INET6, raw)
                    found.add((text, int(port, 16)))
    return found


class TestRendezvous:
    def test_nothing_listens_on_any_other_address(self, run: Run) -> None:
        def body(member: Member) -> set[str]:
            before = listening()  # sockets of earlier tests that this forked process has inherited
            rendezvous = Rendezvous.listen("localhost", Deadline.after(LONG))
            store = connect(rendezvous.host, rendezvous.port, Deadline.after(LONG))
            store.set("key", "value")
            assert rendezvous.store.get("key") == b"value"
            channel = member.open()
            addresses = {address for address, _ in listening() - before}
            with pytest.raises(ConnectionRefusedError):  # loopback too, but not ours: a wildcard would answer
                socket.create_connection(("127.0.0.2", rendezvous.port), timeout=5)
            channel.close()
            del channel, store
            rendezvous.close()
            rendezvous.close()
            assert listening() == before
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

    @pytest.mark.parametrize(("setting", "own"), [(True, True), (False, True), (True, False)])
    def test_the_setting_of_the_link_counts_like_every_member_s_own(self, setting: bool, own: bool) -> None:
        rendezvous, key = Rendezvous.listen(HOST, Deadline.after(LIMIT)), new_key()
        channel = P2P(coalesce=own).open(
            rendezvous.store,
            key=key,
            rank=0,
            size=1,
            host=HOST,
            device=torch.device("cpu"),
            wire=WireSettings(coalesce=setting),
            deadline=Deadline.after(LONG),
        )
        said = dist.PrefixStore(f"{key}/hello", rendezvous.store)
        assert json.loads(said.get("0"))["coalesce"] == json.loads(said.get("verdict"))["coalesce"] == (setting and own)
        channel.close()
        rendezvous.close()

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
        inside = {}

        def construct() -> None:
            with _environment(WEIGHTLINK_TEST_A="new", WEIGHTLINK_TEST_B="new"):
                inside.update(os.environ)
                raise KeyError("failed")

        with pytest.raises(KeyError, match="failed"):
            construct()
        assert (inside["WEIGHTLINK_TEST_A"], inside["WEIGHTLINK_TEST_B"]) == ("new", "new")
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
