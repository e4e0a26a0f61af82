"""Training with Muon on the tiers is that of torch.optim.Muon for matrices and torch.optim.AdamW for the rest.

In float64: what comes after the gradients is then bfloat16 of the same values (`runtime/test_muon.py`). That it is the
same bits wherever data is stored test_same_bits.py has, and of killed runs durable/test_resume.py.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import command_line
import pytest
import torch
from happens_before import on_twin
from safetensors.torch import load_file
from tiered import Harness, gpt2, loss_of, muon, options, outcome, step, tokens
from torch import nn

import gs_compile
from gs_compile.errors import OptimizerError, ResumeError
from gs_compile.machine import parse_bytes
from gs_compile.placement.shards import QUANTUM

KEEPS_CAPTURES = True
CLASSES = ("parameter", "checkpoint", "optimizer")
NUM_STEPS = 4
TOLERANCE = 1e-11  # the relative distance of a tensor
CLIPPED = 1e-6  # the same: what clips is a float32, as torch's is of a model in float32
SETTINGS = {"lr": 0.02, "adamw_lr": 1e-2}
MATRICES = ("mix.weight", "up.weight", "down.weight")
BOUND = 0.5  # of the norm, with which all steps are scaled


@pytest.fixture(scope="module")
def harness():
    return Harness(lambda: gpt2(tied=False).double())


def is_matrix(name: str) -> bool:
    return name.endswith(MATRICES)


def groups_of(model: nn.Module, **told: Any) -> list[dict[str, Any]]:
    """All parameters, those of layers' matrices in a group of what they are told."""
    named = list(model.named_parameters())
    matrices, others = ([p for name, p in named if is_matrix(name) == wanted] for wanted in (True, False))
    return [{"params": matrices, **told}, {"params": others}]


def by_torch(
    model: nn.Module, matrices: list[nn.Parameter], bound: float | None = None, factor: float = 1.0
) -> list[float]:
    """The losses of the same steps with torch; factor: of learning rates, once more in each step."""
    others = [p for p in model.parameters() if all(p is not each for each in matrices)]
    made: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=0.02)] if matrices else []
    made.append(torch.optim.AdamW(others, lr=1e-2, weight_decay=1e-2))
    losses = []
    for number in range(NUM_STEPS):
        loss = loss_of(model, tokens(number))
        loss.backward()
        if bound is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
        for each in made:
            each.step()
            each.zero_grad()
            each.param_groups[0]["lr"] *= factor
        losses.append(float(loss.detach()))
    return losses


def assert_alike(found: dict[str, torch.Tensor], model: nn.Module, tolerance: float = TOLERANCE) -> None:
    for name, parameter in model.named_parameters():
        difference = (found[name] - parameter.detach()).norm() / parameter.detach().norm()
        assert difference < tolerance, name


@pytest.mark.parametrize(
    ("place", "bound"),
    [
        ({"alpha": 0.3}, None),
        ({"alpha": 0.3, "separate_device": True}, BOUND),
        pytest.param({"alpha": 0.3}, BOUND, marks=pytest.mark.slow),
        pytest.param({"alpha": 0.3, "separate_device": True}, None, marks=pytest.mark.slow),
    ],
    ids=["one memory", "two, clipped", "one memory, clipped", "two"],
)
def test_it_learns_what_torch_does(harness, tmp_path, place, bound):
    make = partial(gs_compile.Muon, **SETTINGS, max_grad_norm=bound)
    clip = {} if bound is None else {"clip": "speculative"}
    found = harness.train(lambda groups: make(groups_of(harness.model)), options(tmp_path, **place, **clip), NUM_STEPS)
    model = gpt2(tied=False).double()
    losses = by_torch(model, [p for name, p in model.named_parameters() if is_matrix(name)], bound)
    tolerance = TOLERANCE if bound is None else CLIPPED
    assert found.losses == pytest.approx(losses, rel=tolerance)
    assert_alike(found.values, model, tolerance)


def test_states_are_those_of_each_kind(harness, tmp_path):
    """Of matrices one tensor, and of all else two; so many bytes a layer's elements and others have."""

    def look(number, optimizer):
        units = {unit.unit: unit for unit in optimizer.engine.placement.units}
        assert {units[0].state_itemsize, units["e"].state_itemsize, units["h"].state_itemsize} == {8, 16}
        assert units[0].state_itemsize == 8

    found = harness.train(partial(gs_compile.Muon, **SETTINGS), options(tmp_path), 1, look=look).values
    for name in dict(harness.model.named_parameters()):
        states = {key.removeprefix(f"{name}.") for key in found if key.startswith(f"{name}.")} - {"step"}
        assert states == ({"momentum_buffer"} if is_matrix(name) else {"exp_avg", "exp_avg_sq"}), name


def test_states_before_the_first_call():
    """All of two dimensions are shown as matrices until it is known which are layers'; a loaded state is as it came."""
    model = gpt2(tied=False)
    optimizer = gs_compile.Muon(model.parameters())
    states = optimizer.state_dict()["state"]
    for number, parameter in enumerate(model.parameters()):
        wanted = {"momentum_buffer"} if parameter.dim() == 2 else {"exp_avg", "exp_avg_sq"}
        assert states[number].keys() == {"step", *wanted}


def test_a_group_says_otherwise(harness, tmp_path):
    """A head by Muon, the layers' matrices by AdamW, in units that have their other kind of state."""

    def make(_):
        groups = groups_of(harness.model, use_muon=False)
        head = harness.model.lm_head.weight
        groups[1]["params"] = [p for p in groups[1]["params"] if p is not head]
        return gs_compile.Muon([*groups, {"params": [head], "use_muon": True}], **SETTINGS)

    found = harness.train(make, options(tmp_path, alpha=0.3), NUM_STEPS)
    model = gpt2(tied=False).double()
    by_torch(model, [model.lm_head.weight])
    assert_alike(found.values, model)
    assert {"lm_head.weight.momentum_buffer", "transformer.h.0.up.weight.exp_avg_sq"} <= found.values.keys()


def test_a_group_says_where_its_matrices_are_cut(harness, tmp_path):
    """Each is updated as if it were a parameter of its own."""

    def make(_):
        up = [p for name, p in harness.model.named_parameters() if name.endswith("up.weight")]
        others = [p for p in harness.model.parameters() if all(p is not each for each in up)]
        return gs_compile.Muon([{"params": up, "cut": (0, 96, 32)}, {"params": others}], **SETTINGS)

    found = harness.train(make, options(tmp_path, alpha=0.3), NUM_STEPS)
    model = gpt2(tied=False).double()
    parts: list[nn.Parameter] = []
    for block in model.transformer.h:
        halves = nn.ParameterList(block.up.weight.detach().split((96, 32)))
        block.up = Joined(halves, block.up.bias)
        parts += [*halves, block.mix.weight, block.down.weight]
    by_torch(model, parts)
    for number, block in enumerate(model.transformer.h):
        joined = torch.cat([each.detach() for each in block.up.parts])
        assert (found.values[f"transformer.h.{number}.up.weight"] - joined).norm() < TOLERANCE * joined.norm()


class Joined(nn.Module):
    """A linear layer of several matrices, one above the other."""

    def __init__(self, parts: nn.ParameterList, bias: nn.Parameter) -> None:
        super().__init__()
        self.parts, self.bias = parts, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, torch.cat(list(self.parts)), self.bias)


def test_a_scheduler_changes_both_learning_rates(harness, tmp_path):
    """`adamw_lr` follows the one that schedulers know."""

    def look(number, optimizer):
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.param_groups[1]["lr"] *= 0.5

    found = harness.train(
        lambda _: gs_compile.Muon(groups_of(harness.model), **SETTINGS), options(tmp_path), NUM_STEPS, look=look
    )
    model = gpt2(tied=False).double()
    by_torch(model, [p for name, p in model.named_parameters() if is_matrix(name)], factor=0.5)
    assert_alike(found.values, model)


def test_a_layer_is_cut_at_its_tensors(harness, tmp_path):
    """And what is no matrix has the elements of its second moments behind it."""

    def look(number, optimizer):
        layer = next(unit for unit in optimizer.engine.placement.units if unit.unit == 0)
        spans = [optimizer.trained_span(p) for p in harness.model.transformer.h[0].parameters()]
        ends = {0, *(span.offset for span in spans), layer.numel}
        assert all({part.start, part.stop} <= ends for part in layer.w.values())
        assert {group.when for group in layer.groups} == {"early", "late"}
        sizes = [stop - start for start, stop in pairwise(sorted(ends))]
        assert sizes == [-(-span.numel // QUANTUM) * QUANTUM * (2 if span.second else 1) for span in sorted_by(spans)]

    harness.train(
        partial(gs_compile.Muon, **SETTINGS), options(tmp_path, alpha=0.3, ratios={"parameter": 0.5}), 1, look=look
    )


def sorted_by(spans):
    return sorted(spans, key=lambda span: span.offset)


def test_by_a_plan_in_little_memory(tmp_path):
    """What is chosen, updates in pieces among it, learns the same bits; a matrix is set aside of the budget."""
    harness = Harness(partial(gpt2, 4, 128, tied=False))
    wanted = harness.train(muon, options(tmp_path / "a", ratios=dict.fromkeys(CLASSES, 1.0), alpha=0.0), 2)
    pieces = set()
    for number, host_memory in enumerate(("5MiB", "40MiB")):
        given = options(tmp_path / str(number), host_memory=host_memory)
        del given["expert"]["ratios"]

        def look(_, optimizer, host_memory=host_memory):
            pieces.add(optimizer.engine.placement.decision.layer_updates)
            largest = 4 * 128 * 512
            set_aside = parse_bytes(host_memory, name="") - optimizer.engine.planning.planner.whole_nbytes
            assert set_aside == 2 * largest

        assert harness.train(muon, given, 2, look=look).differences(wanted) == []
    assert {1} < pieces


def test_on_a_device_of_its_own_stream(tmp_path):
    """Matrices go there and back beside what it computes: nothing is read before it is there."""
    harness = Harness(partial(gpt2, tied=False))
    given = options(tmp_path, alpha=0.3, ratios={"parameter": 0.5, "optimizer": 0.5})
    wanted = harness.train(muon, given, 3)
    with on_twin() as checker:
        found = harness.train(muon, given, 3)
    assert found.differences(wanted) in ([], ["norms"])  # which a device sums in another order
    assert not checker.races


def test_what_the_compiled_model_does_not_read(tmp_path):
    """An eager head of a group that says so has its matrix orthogonalized, in memory."""
    model, head = gpt2(tied=False).double(), nn.Linear(70, 3, bias=False).double()
    weight = head.weight.detach().clone()
    optimizer = gs_compile.Muon([*groups_of(model), {"params": [head.weight], "use_muon": True}], **SETTINGS)
    model.compile(backend="greedysnake", options=options(tmp_path, outputs="all"))
    ids = tokens(0)
    loss = head(model(input_ids=ids).logits).square().mean()
    loss.backward()
    gradient = head.weight.grad.clone()
    optimizer.step()
    reference = nn.Parameter(weight)
    reference.grad = gradient
    torch.optim.Muon([reference], lr=0.02).step()
    torch.testing.assert_close(head.weight.detach(), reference.detach(), rtol=1e-12, atol=1e-14)
    assert set(optimizer.state[head.weight]) == {"momentum_buffer", "step"}


def test_a_commit_is_exported_by_name(harness, tmp_path):
    """The state of each parameter as its optimizer names it, also where its second moments are behind the first."""
    given = options(tmp_path / "run", durability="step")
    with harness.fresh(partial(gs_compile.Muon, **SETTINGS), given) as optimizer:
        step(harness.model, optimizer, tokens(0))
        optimizer.commit()
        wanted = outcome(harness.model, optimizer, [], []).values
    command_line.printed("store", "export", tmp_path / "run", tmp_path / "out", "--states")
    found = {}
    for file in (tmp_path / "out").glob("optimizer-*.safetensors"):
        found |= load_file(file)
    names = {name for name in wanted if name.endswith(("momentum_buffer", "exp_avg", "exp_avg_sq"))}
    assert found.keys() == names
    assert all(torch.equal(found[name], wanted[name]) for name in names)


def test_another_split_is_no_resume(harness, tmp_path):
    given = options(tmp_path, durability="step", resume="auto")
    with harness.fresh(lambda _: gs_compile.Muon(groups_of(harness.model), **SETTINGS), given) as optimizer:
        step(harness.model, optimizer, tokens(0))
        optimizer.commit()
    with (
        harness.fresh(lambda _: gs_compile.Muon(groups_of(harness.model, use_muon=False), **SETTINGS), given),
        pytest.raises(ResumeError, match="was a matrix that updates orthogonalize there"),
    ):
        loss_of(harness.model, tokens(0))


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(8, 4)), nn.Parameter(torch.zeros(4))]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"lr": -1.0}, "Muon: lr must not be negative"),
        ({"momentum": float("nan")}, "Muon: momentum must not be negative, and finite"),
        ({"eps": 0.0}, "Muon: eps must be more than 0"),
        ({"ns_steps": 100}, "Muon: ns_steps must be a whole number up to 99"),
        ({"ns_steps": 2.5}, "Muon: ns_steps must be a whole number"),
        ({"ns_coefficients": (1.0, 2.0)}, "Muon: ns_coefficients must be three numbers"),
        ({"adjust_lr_fn": "mine"}, "Muon: adjust_lr_fn must be None"),
        ({"adamw_betas": (0.9, 1.0)}, "AdamW in Muon: betas must be in"),
        ({"adamw_eps": 0.0}, "AdamW in Muon: eps must be more than 0"),
        ({"state_dtype": "8bit"}, "Muon: state_dtype must be None, torch.float32 or torch.bfloat16"),
        ({"max_grad_norm": 0}, "max_grad_norm must be more than 0"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings, complaint):
    with pytest.raises(OptimizerError, match=complaint):
        gs_compile.Muon(parameters(), **settings)


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        ({"use_muon": True}, r"a parameter of shape \(4,\) is neither a matrix nor"),
        ({"use_muon": "yes"}, "use_muon must be True, False or None"),
        ({"betas": (0.9, 0.95)}, "a group has betas; settings of AdamW are adamw_lr"),
        ({"cut": (0, 4, 3)}, r"a parameter of shape \(8, 4\) cannot be cut along 0 into \(4, 3\)"),
        ({"cut": (2, 8)}, "cut must be the dimension, 0 or 1"),
        ({"cut": (0, 8, 0)}, "cut must be the dimension, 0 or 1"),
        ({"cut": 0.5}, "cut must be the dimension, 0 or 1"),
    ],
    ids=str,
)
def test_groups_that_cannot_be_are_refused(told, complaint):
    with pytest.raises(OptimizerError, match=complaint):
        gs_compile.Muon([{"params": parameters(), **told}])
