"""The plan, carried out copy by copy in numpy, must put every canonical element where the engine's layout wants it."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import canonical, contiguous, local_values, random_side, random_tensors
from weightlink.hooks.errors import CoverageError, LayoutError, PlanMismatch
from weightlink.hooks.geometry import Layout, ParamSpec, RegionBuilder, TensorSpec
from weightlink.hooks.settings import WireSettings
from weightlink.plan import EngineLayouts, build_plan, make_plan
from weightlink.program import Program, verify_local, verify_receive
from weightlink.relays import source_of
from weightlink.survey import Survey

WIRE = WireSettings(bucket_bytes=4096, direct_bytes=64)


def served(plan, number):
    """The engine whose programs the trainer has for this one, which may be at the end of a chain."""
    return source_of([e.relay for e in plan.engines], number)


def carry_out(plan, trainers, engine, number, values):
    """Move data by the ranks' own programs alone; destinations poisoned first."""
    sources = [[a.reshape(-1) for a in local_values(t, values)] for t in trainers]
    targets = [[np.full(int(np.prod(p.shape)), np.nan) for p in t.params] for t in engine.layouts]
    sent = {}
    for rank, tensors in enumerate(sources):
        program = plan.send_program(served(plan, number), rank)
        c = program.copies
        for n in range(len(c)):
            source, size = tensors[c.param[n]], c.size[n].tolist()
            stride = [s * source.itemsize for s in c.stride[n].tolist()]
            key = (rank, int(program.buckets.id[c.bucket[n]]), int(c.at[n]))
            sent[key] = np.lib.stride_tricks.as_strided(source[c.offset[n] :], size, stride)
    for rank, tensors in enumerate(targets):
        program = plan.receive_program(number, rank)
        c = program.copies
        for n in range(len(c)):
            target, size = tensors[c.param[n]], c.size[n].tolist()
            stride = [s * target.itemsize for s in c.stride[n].tolist()]
            bucket = c.bucket[n]
            key = (int(program.buckets.peer[bucket]), int(program.buckets.id[bucket]), int(c.at[n]))
            np.lib.stride_tricks.as_strided(target[c.offset[n] :], size, stride)[...] = sent.pop(key)
    assert not sent, "something was sent that nobody takes"
    for rank, layout in enumerate(engine.layouts):
        f = layout.fills
        for n in range(len(f)):
            target = targets[rank][f.param[n]]
            np.lib.stride_tricks.as_strided(
                target[f.offset[n] :], f.size[n].tolist(), [s * target.itemsize for s in f.stride[n].tolist()]
            )[...] = f.value[n]
    return [
        [a.reshape(p.shape) for a, p in zip(t, e_.params, strict=True)]
        for t, e_ in zip(targets, engine.layouts, strict=True)
    ]


def random_case(seed, dims=5):
    rng = random.Random(seed)
    tensors = random_tensors(rng, rng.randint(1, 4), dims=dims)
    trainers = random_side(rng, "trainer", tensors, rng.randint(1, 4), padding=True, replicas=True)
    engines = [
        EngineLayouts(f"e{n}", random_side(rng, "rank", tensors, rng.randint(1, 3), padding=True, replicas=True))
        for n in range(rng.randint(1, 2))
    ]
    return tensors, trainers, engines


@given(st.integers(0, 10**9))
@settings(max_examples=150, deadline=None)
def test_every_element_arrives(seed):
    tensors, trainers, engines = random_case(seed)
    values = canonical(tensors)
    plan = build_plan(trainers, engines, WIRE)
    for number, engine in enumerate(engines):
        arrived = carry_out(plan, trainers, engine, number, values)
        for got, layout in zip(arrived, engine.layouts, strict=True):
            for have, want in zip(got, local_values(layout, values), strict=True):
                np.testing.assert_array_equal(have, want)
        needed = [int(layout.regions.numel.sum()) * 4 for layout in engine.layouts]
        assert plan.engines[number].received.tolist() == needed  # nothing travels twice


@given(st.integers(0, 10**9))
@settings(max_examples=100, deadline=None)
def test_programs_of_both_ends_agree_and_prove_themselves(seed):
    _, trainers, engines = random_case(seed)
    plan = build_plan(trainers, engines, WIRE)
    tensor_of = np.arange(len(plan.manifest))
    for number, engine in enumerate(engines):
        senders = [Program.unpack(plan.send_program(served(plan, number), r).pack()) for r in range(len(trainers))]
        receivers = [Program.unpack(plan.receive_program(number, r).pack()) for r in range(len(engine.layouts))]
        for rank, (program, layout) in enumerate(zip(senders, trainers, strict=True)):
            verify_local(program, layout, tensor_of, rank=layout.rank)
            for peer in program.peers():
                other = receivers[peer - len(trainers)]
                assert program.pair_digest(peer) == other.pair_digest(rank)
        for program, layout in zip(receivers, engine.layouts, strict=True):
            verify_receive(program, layout, plan_digest=plan.digest, rank=layout.rank)
        assert (plan.engines[number].bucket_bytes <= WIRE.bucket_bytes).all()


@given(st.integers(0, 10**9), st.sampled_from([1, 2, 5]))
@settings(max_examples=50, deadline=None)
def test_rounds_bound_the_peers_of_a_trainer_rank_over_all_its_engines(seed, peers):
    _, trainers, engines = random_case(seed)
    wire = WireSettings(bucket_bytes=4096, direct_bytes=64, max_peers=peers, relay=False)
    plan = build_plan(trainers, engines, wire)
    busy: Counter[object] = Counter()
    load: Counter[object] = Counter()
    for number, engine in enumerate(plan.engines):
        ends = ([(s,) for s in engine.bucket_src.tolist()], [(number, d) for d in engine.bucket_dst.tolist()])
        for ranks in ends:
            busy.update(zip(ranks, engine.bucket_round.tolist(), strict=True))
            load.update(ranks)
    assert max(busy.values(), default=0) <= peers
    assert max(engine.rounds for engine in plan.engines) == -(-max(load.values(), default=0) // peers)


@given(st.integers(0, 10**9))
@settings(max_examples=50, deadline=None)
def test_the_plan_is_deterministic(seed):
    first, second = (build_plan(*random_case(seed)[1:], WIRE) for _ in range(2))
    assert first.digest == second.digest
    other = build_plan(*random_case(seed)[1:], WireSettings(bucket_bytes=8192, direct_bytes=64))
    assert other.digest != first.digest


def receive(program, layout, digest):
    verify_receive(Program.unpack(program.pack()), layout, plan_digest=digest, rank="r")


@given(st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_a_removed_or_doubled_copy_is_refused(seed):
    _, trainers, engines = random_case(seed)
    plan = build_plan(trainers, engines, WIRE)
    rng = random.Random(seed)
    rank = rng.randrange(len(engines[0].layouts))
    count = len(plan.receive_program(0, rank).copies)
    if not count:
        return
    victim = rng.randrange(count)
    for keep in (np.delete(np.arange(count), victim), np.append(np.arange(count), victim)):
        program = plan.receive_program(0, rank)
        for name in program.copies.COLUMNS:
            setattr(program.copies, name, getattr(program.copies, name)[keep])
        with pytest.raises((CoverageError, PlanMismatch)):
            receive(program, engines[0].layouts[rank], plan.digest)


@given(st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_a_survey_that_misquotes_a_rank_is_refused_by_it(seed):
    """One box shifted, lost or doubled, one dtype or tensor exchanged: the ranks do not trust the plan's maker."""
    _, trainers, engines = random_case(seed)
    plan = build_plan(trainers, engines, WIRE)
    rng = random.Random(seed)
    side = rng.choice(["trainers", "engines"])
    held = list(plan.survey.trainers if side == "trainers" else plan.survey.engines[0])
    rank = rng.choice([n for n, h in enumerate(held) if len(h)] or [-1])
    if rank < 0:
        return
    true = held[rank]
    row = rng.randrange(len(true))
    keep = np.arange(len(true))
    wrong = dataclasses.replace(true, tensor=true.tensor.copy(), dtype=true.dtype.copy(), box=true.box.copy())
    kind = rng.choice(["box", "dtype", "lost", "doubled"])
    if kind == "box":
        wrong.box[row, rng.randrange(10)] += 1
    elif kind == "dtype":
        wrong.dtype[row] = (wrong.dtype[row] + 1) % 3
    else:
        keep = np.delete(keep, row) if kind == "lost" else np.append(keep, row)
        wrong = dataclasses.replace(true, tensor=true.tensor[keep], dtype=true.dtype[keep], box=true.box[keep])
    held[rank] = wrong
    told = plan.survey
    trained, taken = (held, told.engines) if side == "trainers" else (told.trainers, (held, *told.engines[1:]))
    survey = Survey.of(told.manifest, trained, taken)

    def bind():
        other = make_plan(Survey.unpack(survey.pack()), WIRE, ignore=["*"])
        if side == "trainers":
            other.send_program(0, rank, trainers[rank])
        else:
            other.receive_program(0, rank, engines[0].layouts[rank])

    with pytest.raises((CoverageError, PlanMismatch)):
        bind()


@given(st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_a_copy_that_reads_or_writes_elsewhere_is_refused(seed):
    """Shifting one address, or one canonical index, contradicts the rank's own layout."""
    _, trainers, engines = random_case(seed)
    plan = build_plan(trainers, engines, WIRE)
    rng = random.Random(seed)
    rank = int(rng.choice(plan.engines[0].bucket_dst.tolist()))
    program, layout = plan.receive_program(0, rank), engines[0].layouts[rank]
    row = rng.randrange(len(program.copies))
    program.copies.offset[row] += 1
    with pytest.raises(PlanMismatch, match="own layout"):
        verify_local(program, layout, np.arange(len(plan.manifest)), rank="r")


@pytest.mark.parametrize(("column", "value"), [("dtype", 99), ("box", 0)])
def test_a_malformed_survey_is_refused(column, value):
    told = build_plan([shard("w", (4, 5))], engine(shard("w", (4, 5))), WIRE).survey
    held = told.trainers[0]
    wrong = dataclasses.replace(held, **{column: np.full_like(getattr(held, column), value)})
    if column == "box":
        wrong.box[:, 0] = 1  # a dimension without elements, not an unused one
    with pytest.raises(PlanMismatch, match="not a survey"):
        Survey.unpack(Survey.of(told.manifest, [wrong], told.engines).pack())


def shard(name, shape, dtype="float32", rank="trainer 0", lo=None, whole=None, storage=0, start=0):
    """A layout with one region: a block of ``name`` from ``lo`` in a contiguous parameter."""
    build = RegionBuilder()
    build.add(0, 0, lo=lo or [0] * len(shape), size=list(shape), offset=0, stride=contiguous(shape))
    spec = ParamSpec(f"local.{name}", tuple(shape), dtype, storage, start, contiguous(shape))
    return Layout(rank, (TensorSpec(name, tuple(whole or shape), "float32"),), (spec,), build.build())


def engine(layout, name="http://engine"):
    return [EngineLayouts(name, [dataclasses.replace(layout, rank="rank 0 (tp 0, pp 0)")])]


def test_missing_rows_are_named_with_the_rank():
    with pytest.raises(CoverageError) as caught:
        build_plan([shard("w", (3, 5), whole=(4, 5))], engine(shard("w", (4, 5))), WIRE)
    assert "w on trainer 0: 5 of 20 missing" in str(caught.value)


def test_overlapping_cuts_are_refused():
    trainers = [shard("w", (3, 5), whole=(4, 5)), shard("w", (2, 5), rank="trainer 1", lo=[2, 0], whole=(4, 5))]
    with pytest.raises(CoverageError, match="another cut"):
        build_plan(trainers, engine(shard("w", (4, 5))), WIRE)


def test_one_tensor_from_two_memories_of_one_rank_is_refused():
    one = shard("w", (4, 5))
    two = dataclasses.replace(
        one,
        params=(*one.params, ParamSpec("again", (4, 5), "float32", 9, 0, (5, 1))),
        regions=type(one.regions).concat([one.regions, shift_param(one.regions)]),
    )
    with pytest.raises(CoverageError, match=r"given twice, by local.w and by again"):
        build_plan([two], engine(one), WIRE)


def shift_param(regions):
    moved = regions.take(np.arange(len(regions)))
    moved.param = moved.param + 1
    return moved


def test_shapes_that_differ_between_trainers_are_refused():
    with pytest.raises(LayoutError, match="disagree about a tensor"):
        build_plan([shard("w", (4, 5)), shard("w", (4, 6), rank="trainer 1")], engine(shard("w", (4, 5))), WIRE)


def test_a_tensor_that_no_engine_rank_takes_is_refused_unless_ignorable():
    one, extra = shard("w", (4, 5)), shard("extra", (2,), rank="trainer 1", storage=1)
    manifest = (*one.tensors, *extra.tensors)
    layout = dataclasses.replace(one, tensors=manifest)
    with pytest.raises(CoverageError, match="extra on http://engine: the engine's loader takes 0 of 2"):
        build_plan([one, extra], engine(layout), WIRE)
    assert build_plan([one, extra], engine(layout), WIRE, ignore=["ext*"]).total_bytes == 80


def test_only_float_casts_travel():
    with pytest.raises(LayoutError, match="only among fp32, bf16 and fp16"):
        build_plan([shard("w", (4, 5))], engine(shard("w", (4, 5), dtype="float8_e4m3fn")), WIRE)
    plan = build_plan([shard("w", (4, 5))], engine(shard("w", (4, 5), dtype="bfloat16")), WIRE)
    assert plan.total_bytes == 40  # the receiver's dtype is on the wire


def test_replicas_share_the_load():
    tensors = [TensorSpec(f"t{n}", (7, 11), "float32") for n in range(40)]

    def whole(rank):
        build = RegionBuilder()
        params = []
        for n, spec in enumerate(tensors):
            build.add(n, n, lo=[0, 0], size=[7, 11], offset=0, stride=[11, 1])
            params.append(ParamSpec(spec.name, (7, 11), "float32", n, 0, (11, 1)))
        return Layout(rank, tuple(tensors), tuple(params), build.build())

    plan = build_plan([whole(f"trainer {r}") for r in range(4)], engine(whole("x")), WIRE)
    assert plan.sent_bytes.max() <= 1.05 * plan.sent_bytes.mean()
