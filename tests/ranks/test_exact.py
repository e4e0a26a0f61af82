"""Ranks learn what DistributedDataParallel learns on the same batches, and the same bits wherever data is stored."""

from __future__ import annotations

import copy
import math
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import zoo
from launch import Fleet
from learner import distance, same_tensors
from tiered import Block, Harness, adamw, gpt2, muon, options, outcome, shared, tokens, two_groups
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import gs_compile
from gs_compile.errors import NonFiniteWarning
from gs_compile.model.files import whole
from gs_compile.runtime.optimizer import OptimizerStep

KEEPS_CAPTURES = True  # each process captures its own
NUM_STEPS, FEW = 10, 4  # each number of samples that ranks have comes in four
# gpt2 is tied, of mixtral and routed not every expert is met by every rank, and each balances its own tokens, of llama
# some layers train alone, as adapters do; t5 has two stacks, whose side inputs have gradients.
# Each with a norm that some of its steps are clipped by.
MODELS = {"gpt2": 1.9, "llama": 0.5, "qwen3": 1.75, "mixtral": 1.6, "positional": 1.8, "t5": 1.5, "routed": 1.25}
# Gradients that are zero but for rounding, as those of the keys' biases, differ by as much as they are; with eps 1e-8
# AdamW would make whole steps of them, in either system.
SETTINGS = {"lr": 1e-3, "eps": 1e-4}


# Against DistributedDataParallel --------------------------------------------------------------------------------------


def build(name):
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.1} if name == "mixtral" else {}
    own = {"positional": partial(zoo.build, name), "t5": t5, "routed": Routed}
    model = own.get(name, partial(zoo.small, name, **changes))()
    for parameter_name, parameter in model.named_parameters() if name == "llama" else ():
        parameter.requires_grad_(any(part in parameter_name for part in ("q_proj", "v_proj")))
    return model


class Routing(zoo.Block):
    """What a token gets beside is one of eight vectors: a rank does not choose all of them."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = torch.nn.Linear(zoo.WIDTH, 8), torch.nn.Embedding(8, zoo.WIDTH)

    def forward(self, x_BTD):
        x_BTD = super().forward(x_BTD)
        scores_BTE = self.router(x_BTD)
        return x_BTD + self.experts(scores_BTE.argmax(-1)), scores_BTE


class Routed(zoo.GPT):
    """Chooses as mixtral does, and balances its choices over the tokens of a rank, with what Dynamo soon has read."""

    def __init__(self):
        super().__init__(Routing)

    def forward(self, ids, labels):
        x_BTD, scores = self.embedding(ids), []
        for block in self.blocks:
            x_BTD, scores_BTE = block(x_BTD)
            scores.append(scores_BTE.flatten(0, 1))
        loss = functional.cross_entropy(self.head(self.norm(x_BTD)).flatten(0, 1), labels.flatten())
        return loss + 0.1 * load_balancing_loss_func(tuple(scores), 8, 2)


def t5():
    """Two stacks of two layers."""
    torch.manual_seed(0)
    layers = {"num_layers": 2, "num_heads": 4, "d_model": zoo.WIDTH, "d_kv": 8, "d_ff": 48, "dropout_rate": 0.0}
    config = T5Config(vocab_size=zoo.VOCAB, decoder_start_token_id=0, **layers)
    return T5ForConditionalGeneration(config).train()


def batch(rank, number):
    """Ranks have different numbers of samples, one row in the first batch of one of them, of micro-batches and labels,
    and sequences of different lengths.
    """
    return zoo.batch(1 + (number + 2 * rank) % 4, zoo.TOKENS + rank, seed=10 * number + rank)


def train(info, model, optimizer, clip, backwards, num_steps, *, places=False):
    """Losses, norms and parameters; `clip` returns the norm of a step, which has so many backwards.

    places: the model is given those of tokens, in one row for all samples.
    """
    losses, norms = [], []
    for number in range(num_steps):
        mean = torch.zeros((), dtype=torch.float64)  # of all ranks' losses of the step
        for each in range(backwards):
            ids, labels = batch(info.rank, number + NUM_STEPS * each)
            given = {"position_ids": torch.arange(ids.shape[1])[None]} if places else {}
            output = model(ids, labels=labels, **given)
            loss = output if isinstance(output, torch.Tensor) else output.loss
            (loss / backwards).backward()
            mean += loss.item() / (backwards * info.number)
        norms.append(clip())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        dist.all_reduce(mean)
        assert isinstance(model, DistributedDataParallel) or optimizer.last_step.loss == pytest.approx(mean.item())
    norms = [optimizer.last_step.grad_norm if norm is None else norm for norm in norms]
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def learns(info, tmp_path, name, backwards=1, bound=None, num_steps=NUM_STEPS, **changes):
    """How far from DDP one model is."""
    bound = bound or MODELS[name]
    reference = DistributedDataParallel(model := build(name))
    model = copy.deepcopy(model)
    plain = torch.optim.AdamW(two_groups(reference), **SETTINGS)
    clip = partial(torch.nn.utils.clip_grad_norm_, list(reference.parameters()), bound)
    run = partial(train, info, backwards=backwards, num_steps=num_steps, places=name == "mixtral")
    losses, norms, values = run(reference, plain, lambda: clip().item())
    assert info.number > 2 or min(norms) < bound < max(norms), norms

    if changes.pop("mesh", False):
        changes["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ours = gs_compile.AdamW(two_groups(model), max_grad_norm=bound, **SETTINGS)
    model.compile(
        backend="greedysnake", options={**options(tmp_path, clip="delayed", ratios={"parameter": 0.5}), **changes}
    )
    found = run(model, ours, lambda: ours.grad_norm)
    return {
        "losses": max(abs(a - b) / b for a, b in zip(found[0], losses, strict=True)),
        "norms": max(abs(a - b) / b for a, b in zip(found[1], norms, strict=True)),
        "parameters": distance(found[2], {key.removeprefix("module."): value for key, value in values.items()}),
    }


def learn_all(info, tmp_path, names, **changes):
    return {name: learns(info, tmp_path, name, **changes) for name in names}


def check(found):
    for each in found:
        for name, errors in each.items():
            assert errors["parameters"] <= 1e-6, (name, errors)
            assert max(errors["losses"], errors["norms"]) <= 2e-6, (name, errors)  # of sums in another order, in fp32


@pytest.mark.parametrize(
    ("name", "num_steps"),
    [("routed", FEW), *(pytest.param(name, NUM_STEPS, marks=pytest.mark.slow) for name in MODELS)],
)
def test_two_ranks_against_ddp(pair, tmp_path, name, num_steps):
    check(pair.run(learn_all, tmp_path, names=[name], num_steps=num_steps))


def test_two_ranks_with_several_backwards_a_step_against_ddp(pair, tmp_path):
    """Each adds this rank's share of its gradient to that of the ones before."""
    check(pair.run(learn_all, tmp_path, names=["positional"], backwards=2, bound=1.45, num_steps=FEW, accumulate=True))


FIRST_RANKS = 60  # of the tokens: the first of two ranks has their rows of the embedding


class Cut(zoo.GPT):
    """Its embedding gets a gradient as its calls choose."""

    def __init__(self):
        super().__init__(partial(Block, zoo.WIDTH, 0.0))

    def forward(self, ids, labels, reaches):
        x_BTD = self.embedding(ids)
        x_BTD = x_BTD if reaches else x_BTD.detach()
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return functional.cross_entropy(self.head(self.norm(x_BTD)).flatten(0, 1), labels.flatten())


def first_gradients(info, tmp_path, reaches):
    """How far the values are from those of plain PyTorch, with the same batch on all ranks; reaches: of each, by step."""
    model = Cut()
    plain = copy.deepcopy(model)
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5}
    for each, kind in ((model, gs_compile.SGD), (plain, torch.optim.SGD)):
        optimizer = kind(each.parameters(), **settings)
        if each is model:
            each.compile(backend="greedysnake", options=options(tmp_path))
        for number, reached in enumerate(reaches[info.rank]):
            ids, labels = zoo.batch(4, seed=number)
            each(ids % FIRST_RANKS, labels, reached).backward()
            optimizer.step()
            optimizer.zero_grad()
    return distance({name: whole(value) for name, value in model.state_dict().items()}, dict(plain.state_dict()))


def test_what_gets_its_first_gradient_in_a_later_step_is_trained_on_ranks(pair, tmp_path):
    """Fault: it stayed as it was in all steps, without a word; then, where the gradient of a rank's share was zeros."""
    # The first step leaves it as it is, nor has weight decay moved it. The second rank's gradients are zeros in all.
    both = [(False, True, True)] * 2
    assert max(pair.run(first_gradients, tmp_path, reaches=both)) < 1e-6


def test_ranks_that_differ_in_first_gradients_are_told(pair, tmp_path):
    found = pair.outcomes(first_gradients, tmp_path, reaches=[(False, True), (False, False)])
    assert all("the ranks ask for different things" in each.failure for each in found)
    assert all("late first gradients" in each.failure for each in found)


def in_lives(info, tmp_path, lives):
    """Values after steps of several processes, each of which goes on from the one before; lives: as `reaches`, of each."""
    for reaches in lives:
        model = Cut()
        optimizer = gs_compile.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
        given = options(tmp_path / "storage", durability="step", resume="auto")
        model.compile(backend="greedysnake", options=given)
        for reached in reaches:
            model(*zoo.batch(4), reached).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.commit()
        found = {name: whole(value).clone() for name, value in model.state_dict().items()}
        optimizer.engine.tiers.close()
    return found


def test_what_had_its_first_gradient_is_trained_where_a_run_goes_on(pair, tmp_path):
    """Fault: it stayed as it was from there on, without a word, where the first step there had none for it."""
    found = []
    for number, lives in enumerate([[(False, True, False)], [(False, True), (False,)]]):
        (folder := tmp_path / str(number)).mkdir()
        found.append(pair.run(in_lives, folder, lives=lives)[0])
    same_tensors(*found)


def evaluates_first(info, tmp_path):
    model = Cut()
    optimizer = gs_compile.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    model.compile(backend="greedysnake", options=options(tmp_path))
    with torch.no_grad():
        model(*zoo.batch(4), False)
    model(*zoo.batch(4), False)
    return optimizer


def test_no_first_gradient_behind_an_evaluation_is_refused_on_ranks(pair, tmp_path):
    """Fault: weight decay moved the parameter, as the evaluation had not shown that it is idle."""
    found = pair.outcomes(evaluates_first, tmp_path)
    assert any("embedding.weight gets no gradient in this first step" in each.failure for each in found)


class Squared(zoo.GPT):
    def forward(self, ids):
        return super().forward(ids)[0].mean().square()


def refused(info, tmp_path):
    model = Squared()
    optimizer = gs_compile.SGD(model.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path))
    model(zoo.batch(4)[0])
    return optimizer


def test_what_one_rank_computes_behind_the_model_is_refused_with_a_way_out(pair, tmp_path):
    """Fault: nothing said that it is so on several ranks alone."""
    found = pair.outcomes(refused, tmp_path)
    assert any("One rank alone computes this behind the model" in each.failure for each in found)


@pytest.fixture(scope="module")
def four():
    with Fleet(4) as fleet:
        yield fleet


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [*((name, False) for name in MODELS), ("gpt2", True)])
def test_four_ranks_against_ddp(four, tmp_path, name, mesh):
    check(four.run(learn_all, tmp_path, names=[name], mesh=mesh))


# Placements -----------------------------------------------------------------------------------------------------------

CLIPPED, CLIPPED_OF_MUON = 1.25, 1.35  # by which some steps are clipped
SPLIT = {"ratios": dict.fromkeys(("parameter", "checkpoint", "optimizer"), 0.4)}
ON_DEVICE = {"ratios": {"device_parameter": 0.6, "device_checkpoint": 0.5}, "separate_device": True}
PLACES = [  # the first of each norm is what the others are compared with
    (None, {"alpha": 0.0}),
    (None, {"alpha": 0.5, "recompute": "auto", "ratios": dict.fromkeys(("parameter", "checkpoint", "optimizer"))}),
    (CLIPPED, {"clip": "delayed"}),
    (CLIPPED, {"clip": "speculative", "alpha": 0.0, **ON_DEVICE}),
    (CLIPPED, {"clip": "speculative", "alpha": 0.5, **SPLIT}),
]
MORE_PLACES = [  # of slow tests
    *PLACES,
    (None, {"alpha": 1.0, **ON_DEVICE}),
    (None, {"alpha": 0.3, **SPLIT}),
    (CLIPPED, {"clip": "delayed", "separate_device": True, **SPLIT}),
]


def run(info, harness, given, bound, spoiled=(), state_dtype=None, optimizer=adamw, num_steps=6):
    """Some steps, with what is `spoiled` on the last rank: losses, gradients, or an element of one, by step."""
    torch.manual_seed(1)
    losses, norms, skipped, words = [], [], [], []
    bad = dict(spoiled) if info.rank == info.number - 1 else {}
    reduce_scatter = OptimizerStep.reduce_scatter

    def spoil(self, op, gradient, *others):
        if bad.get(len(losses)) == "element" and op.reads[0].unit == 1:
            gradient.flat[5] = math.inf
        reduce_scatter(self, op, gradient, *others)

    make = partial(optimizer, max_grad_norm=bound, state_dtype=state_dtype)
    with pytest.MonkeyPatch.context() as patched, harness.fresh(make, given) as one:
        patched.setattr(OptimizerStep, "reduce_scatter", spoil)
        for number in range(num_steps):
            ids = tokens(number, 5 + 3 * info.rank * (number < num_steps // 2))  # later ones are the same on all ranks
            labels = torch.full_like(ids, -100) if bad.get(number) == "loss" else ids
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", NonFiniteWarning)
                loss = harness.model(input_ids=ids, labels=labels).loss
                (loss * math.nan if bad.get(number) == "gradient" else loss).backward()
                one.step()
                one.zero_grad()
            losses.append(loss.item() if loss.isfinite() else math.inf)  # equal to itself
            assert bool(one.engine.placement.decision.shares) == (given["expert"]["recompute"] != "all")
            norms.append(one.last_step.grad_norm)
            skipped.append(one.last_step.skipped)
            words += [str(warning.message) for warning in caught]
        return outcome(harness.model, one, losses, norms), skipped, words


def places(info, tmp_path, precision, state_dtype, of, optimizer, num_steps):
    """How each place differs from the first, and the losses of that."""
    norms = torch.float32 if precision == "mixed" else None
    harness = Harness(partial(gpt2, dropout=0.3, norms=norms), "model" if norms else precision)
    found, firsts, clipped = {}, {}, CLIPPED_OF_MUON if optimizer is muon else CLIPPED
    for is_clipped, given in of:
        bound = clipped if is_clipped else None
        if precision == "model":  # what is updated in the type it is computed in does not live on the device
            given = {**given, "ratios": {**given.get("ratios", {}), "device_parameter": 0.0}}
        how = {"state_dtype": state_dtype, "optimizer": optimizer, "num_steps": num_steps}
        one, skipped, _ = run(info, harness, options(tmp_path, **given), bound, **how)
        assert not any(skipped)
        found[str(given)] = one.differences(firsts.setdefault(bound, one))
    norms = firsts[clipped].norms
    assert min(norms) < clipped < max(norms), norms
    return found, firsts[None].losses


@pytest.mark.parametrize(
    ("precision", "state_dtype", "of", "optimizer", "num_steps"),
    [
        ("mixed", None, PLACES[:-1], adamw, 4),  # bf16, with norms in fp32; split parts are also in test_planning.py
        *(
            pytest.param(*types, MORE_PLACES, optimizer, 6, marks=pytest.mark.slow)
            for types, optimizer in (
                (("model", None), adamw),
                (("bf16", None), adamw),
                (("bf16", "8bit"), adamw),
                (("mixed", None), muon),
                (("model", None), muon),
                (("bf16", torch.bfloat16), muon),
            )
        ),
    ],
)
def test_the_same_bits_wherever_data_is_stored(pair, tmp_path, precision, state_dtype, of, optimizer, num_steps):
    """With dropout, whose masks are of a rank and a step."""
    given = {
        "precision": precision,
        "state_dtype": state_dtype,
        "of": of,
        "optimizer": optimizer,
        "num_steps": num_steps,
    }
    (found, losses), (others, other_losses) = pair.run(places, tmp_path, **given)
    assert {place: names for place, names in (found | others).items() if names} == {}
    assert losses[num_steps // 2 :] != other_losses[num_steps // 2 :], "the same batches, with masks of each rank's own"


# What is not finite ---------------------------------------------------------------------------------------------------

SPOILED = {1: "gradient", 2: "element", 3: "loss"}
NUM_SPOILED = 5  # steps: a good one before and after
UPDATES = {
    "early": (None, {"alpha": 0.0}),
    **{str(given["clip"]): (bound, given) for bound, given in MORE_PLACES if bound},
}


def spoils(info, tmp_path):
    harness, first = shared(), None
    found = {}
    for name, (bound, given) in UPDATES.items():
        one, skipped, words = run(info, harness, options(tmp_path, **given), bound, SPOILED, num_steps=NUM_SPOILED)
        first = one if name == "delayed" else first
        losses = [loss for loss in one.losses if math.isfinite(loss)]
        found[name] = skipped, words, first.differences(one) if name == "speculative" else [], losses
    return found


def test_what_is_not_finite_on_one_rank_is_skipped_on_all(pair, tmp_path):
    first, second = pair.run(spoils, tmp_path)
    for name in UPDATES:
        skipped, words, differences, losses = first[name]
        assert (skipped, words) == second[name][:2]
        assert skipped == [number in (1, 2) for number in range(NUM_SPOILED)]  # of a loss alone gradients are zeros
        assert [text.split(" is not finite: step ")[0] for text in words] == ["a gradient", "a gradient"]
        assert all(text.endswith("was skipped [non-finite-warning]") for text in words)
        assert (differences, second[name][2]) == ([], [])
        assert (len(losses), len(second[name][3])) == (NUM_SPOILED, NUM_SPOILED - 1)


def spoils_a_replica(info, tmp_path):
    """Nothing counts in the last rank's second batch, so its loss is not finite, and its gradients are zeros, which are
    in the mean of all as any other, as with DistributedDataParallel.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    one, skipped, _ = run(
        info, Harness(gpt2), {**options(tmp_path, clip="delayed"), "mesh": mesh}, CLIPPED, {1: "loss"}
    )
    return skipped, one.norms


@pytest.mark.slow
def test_a_loss_that_is_not_finite_in_one_replica_leaves_the_step_of_all(four, tmp_path):
    found = four.run(spoils_a_replica, tmp_path)
    for skipped, norms in found:
        assert not any(skipped)
        assert norms == found[0][1]
