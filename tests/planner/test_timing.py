"""The code of a tiny GPT-2 is timed on this machine, and nothing of the user's is touched."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import zoo
from torch.nn import functional

from gs_compile.codegen.compiled import compilations_of
from gs_compile.codegen.layout import lay_out
from gs_compile.planner.cost import known_times, timing
from gs_compile.planner.cost.known_times import KnownTimes
from gs_compile.planner.cost.timing import LayerLevels, timed, timed_levels
from gs_compile.planner.cost.workload import levelled, workload_of
from gs_compile.runtime.formats import types_of

pytestmark = pytest.mark.usefixtures("measured")


def ran(model, step=lambda model: zoo.train(model, *zoo.batch()), **options):
    """A model that has run one step: its layout, and its workload."""
    torch._dynamo.reset()
    zoo.compile_model(model, 2, **(options or {"outputs": "loss"}))
    step(model)
    compilation = compilations_of[next(p for p in model.parameters() if p.requires_grad)][-1]
    layout = next(iter(compilation.models.values()))
    types = partial(types_of, moments=[None, None], pairs=False)
    laid_out = lay_out(layout.split, compilation.captured, types, share=(0, 1), codecs={}, matrices=None)
    return layout, workload_of(layout, laid_out.sizes)


@pytest.fixture(scope="module")
def gpt2():
    return ran(zoo.small("gpt2", dropout=0.1))


def test_every_unit_is_timed_and_equal_ones_once(gpt2):
    layout, workload = gpt2
    state = torch.get_rng_state()
    found = timed(workload, layout)
    assert torch.equal(torch.get_rng_state(), state)
    assert found.costs.keys() == workload.costs.keys()
    assert all(min(cost.seconds) > 0 for cost in found.costs.values())
    assert {id(found.costs[layer]) for layer in range(2)} == {id(found.costs[0])}
    forward, backward = found.costs["h"].seconds
    assert forward < backward
    assert [c.forward_flops for c in found.costs.values()] == [c.forward_flops for c in workload.costs.values()]


def test_an_input_that_is_expanded_to_the_batch_is_timed():
    """Its samples share their memory."""
    ids, labels = zoo.batch()
    positions = torch.arange(ids.shape[1]).expand_as(ids)

    def step(model):
        model(ids, position_ids=positions, labels=labels).loss.backward()

    layout, workload = ran(zoo.small("gpt2"), step)
    assert min(timed(workload, layout).costs["e"].seconds) > 0


def test_levels_are_held_against_the_code_that_saves_nothing(gpt2, monkeypatch):
    """In turns, so that only their ratio to it counts; one that is not timed is as fast as the one below."""
    layout, workload = gpt2
    ticks = iter(range(10**6))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(ticks)))
    costs = {unit: replace(cost, seconds=(2.0, 6.0)) for unit, cost in workload.costs.items()}
    plain = levelled(replace(workload, costs=costs), layout)
    found = timed_levels(plain, layout, [2])
    assert [cost.seconds for cost in found.costs[0].levels] == [(2.0, 6.0), (2.0, 6.0)]
    assert plain.costs[0].levels[0].seconds != (2.0, 6.0)
    assert len({id(found.costs[layer].levels) for layer in range(2)}) == 1


def test_known_code_is_timed_in_part_and_anew_where_that_part_differs(gpt2, monkeypatch):
    """By a clock that counts in place of the machine's: each run takes `tick` seconds, or 10 where it is disturbed."""
    layout, workload = gpt2
    tick, now, asked, disturbed = 1.0, 0.0, [], 0

    def clock():
        nonlocal now, disturbed
        now += 10 * tick if disturbed > 0 else tick
        disturbed -= 1
        return now

    measure = timing._timed
    monkeypatch.setattr(timing.time, "perf_counter", clock)
    monkeypatch.setattr(timing, "_timed", lambda *given: asked.append(given[2].unit) or measure(*given))
    known = KnownTimes()
    first = timed(workload, layout, known)
    classes = len(asked)
    assert classes == len(set(layout.uniform.keys))
    levels = timed_levels(first, layout, [1], known)
    tick = 1.0 + 0.9 * known_times.SAME
    assert timed(workload, layout, known) == first
    disturbed = 5  # looks at the clock: longer than a check takes, whose two runs look twice
    assert timed(workload, layout, known) == first
    monkeypatch.setattr(timing, "_timed_levels", lambda *_: pytest.fail("timed again"))
    assert timed_levels(first, layout, [1], known) == levels
    assert len(asked) == classes
    tick = 1.0 + 1.1 * known_times.SAME
    slower = timed(workload, layout, known)
    assert len(asked) == 2 * classes
    assert slower.costs[0].seconds[0] > first.costs[0].seconds[0]
    assert known.get(f"{layout.fingerprint} [1]") is None


@pytest.mark.parametrize(("compiled", "timed_ones"), [(True, [1]), (False, [1, 2])])
def test_levels_that_spare_no_product_are_not_compiled(gpt2, monkeypatch, compiled, timed_ones):
    layout, workload = gpt2
    asked = []
    monkeypatch.setattr(
        timing, "timed_levels", lambda workload, _, chosen, known: asked.append(list(chosen)) or workload
    )
    saving = LayerLevels([layout], lambda: workload, compiled=compiled)
    assert replace(workload, costs=saving.costs(last=False)).num_levels == 2
    assert asked == [timed_ones]


@pytest.mark.parametrize("asked", [True, False])
def test_code_of_levels_is_compiled_with_all_other(gpt2, monkeypatch, asked):
    """Where a plan has asked what layers may save; else they may never be timed."""
    layout, workload = gpt2
    compiled = []
    monkeypatch.setattr(timing, "_compile", lambda layout, shape, levels: compiled.append(dict(levels)))
    saving = LayerLevels([layout], lambda: timed(workload, layout, None, beside), compiled=True)
    beside = partial(saving.to_compile, workload, last=False)
    if asked:
        saving.levels([layout.x_nbytes])
    saving.costs(last=False)
    alone = {layer: [0, 1] for layer in range(workload.num_layers)}
    assert compiled == [alone if asked else {}, alone]


def test_the_workload_of_a_running_model(gpt2):
    _, workload = gpt2
    assert (workload.num_layers, workload.sequence, workload.micro_batch_size) == (2, zoo.TOKENS, 2)
    assert workload.shape.has_loss


def test_the_backward_is_that_of_a_step(gpt2, monkeypatch):
    """Gradients of all parameters are added up, in fp32."""
    layout, workload = gpt2
    added = []

    class Watched(timing.Gradient):
        def add(self, gradients, among):
            super().add(gradients, among)
            added.append({index: self.views[index].dtype for index in gradients})

    monkeypatch.setattr(timing, "Gradient", Watched)
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    timed(workload, layout)
    classes = len(set(layout.uniform.keys))
    assert len(added) == 2 * classes  # one to warm up, one that counts
    wanted = [len([s for s in unit.specs if s.requires_grad and s.shape != (2, 12, 32)]) for unit in layout.split.units]
    assert sorted(map(len, added)) == sorted(2 * [wanted[0], wanted[1], wanted[-1]])
    assert all(set(dtypes.values()) == {torch.float32} for dtypes in added)


def test_what_has_no_gradient_has_no_backward():
    model = zoo.GPT(num_layers=2)
    model.embedding.requires_grad_(False)
    model.blocks.requires_grad_(False)
    layout, workload = ran(model)
    found = timed(workload, layout)
    assert [found.costs[unit].seconds[1] > 0 for unit in ("e", 0, 1, "h")] == [False, False, False, True]


class FewerClasses(zoo.GPT):
    """The table is larger than the vocabulary, as for kernels that want multiples of 64."""

    def forward(self, ids, labels):
        num_classes = len(self.embedding.weight) // 2
        logits = super().forward(ids)[0][..., :num_classes]
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_labels_are_classes_of_the_loss():
    layout, workload = ran(FewerClasses(num_layers=2), lambda model: model(*(zoo.batch()[0] // 3,) * 2).backward())
    assert timed(workload, layout).costs["h"].seconds[1] > 0


class LastToken(zoo.GPT):
    """Gives the last token of each sequence, as recommenders do, in a head that has no table."""

    def forward(self, ids, lengths):
        x_BTD = self.embedding(ids)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        last = (lengths - 1)[:, None, None].expand(-1, -1, zoo.WIDTH)
        return x_BTD.gather(1, last).squeeze(1)


def test_whole_numbers_are_those_of_a_batch():
    """A length that is made up may be 0, and its last token no index."""
    ids, lengths = zoo.batch()[0], torch.arange(zoo.BATCH) + 1
    layout, workload = ran(LastToken(), lambda model: model(ids, lengths).sum().backward(), outputs="all")
    ids.zero_(), lengths.zero_()  # what a script does with its own later
    assert all(cost.seconds[1] > 0 for cost in timed(workload, layout).costs.values())


class InOrder(zoo.Block):
    def forward(self, x_BTD, order_BT):
        return super().forward(x_BTD.gather(1, order_BT[..., None].expand_as(x_BTD)))


class Ordered(zoo.GPT):
    """Its layers read whole numbers that the embedding makes."""

    def forward(self, ids, labels):
        x_BTD, order_BT = self.embedding(ids), ids.argsort(-1)
        for block in self.blocks:
            x_BTD = block(x_BTD, order_BT)
        return functional.cross_entropy(self.head(x_BTD).flatten(0, 1), labels.flatten())


def test_code_that_does_not_take_what_is_made_up_has_no_seconds():
    layout, workload = ran(Ordered(InOrder))
    seconds = {unit: cost.seconds for unit, cost in timed(workload, layout).costs.items()}
    assert [unit for unit, each in seconds.items() if each is None] == [0, 1]


class Turned(zoo.Block):
    """Its input is turned by a table of complex numbers, as by that of rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(zoo.TOKENS), torch.rand(zoo.WIDTH // 2))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x_BTD):
        turned = torch.view_as_complex(self.norm(x_BTD).unflatten(-1, (-1, 2))) * self.turns
        return super().forward(x_BTD + torch.view_as_real(turned).flatten(-2))


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning")
def test_code_that_reads_complex_numbers_is_timed():
    layout, workload = ran(zoo.GPT(Turned))
    assert all(min(cost.seconds) > 0 for cost in timed(workload, layout).costs.values())


class TwoOutputs(zoo.GPT):
    def forward(self, ids):
        logits, _ = super().forward(ids)
        return logits, logits.exp()


def test_a_loss_of_the_users_own():
    """The step that is planned has the backward that gradients of outputs begin; the head's takes one of each."""
    outputs = {"outputs": "all"}
    layout, workload = ran(
        TwoOutputs(num_layers=2), lambda model: sum(model(zoo.batch()[0])).sum().backward(), **outputs
    )
    assert workload.shape.outside == {"h"}
    found = timed(workload, layout)
    assert all(cost.seconds[1] > 0 for cost in found.costs.values())
