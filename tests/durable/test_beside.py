"""What an optimizer trains beside the compiled model, and what a script makes of buffers, is in a commit, too."""

from __future__ import annotations

import gc

import pytest
import torch
from tiered import GPT2, VOCABULARY, gpt2, options, step, tokens

import gs_compile
from gs_compile.errors import CorruptionError, OptimizerError, ResumeError, StepOrderError
from gs_compile.model.commits import rest_of
from gs_compile.runtime.storage.manifest import read
from gs_compile.runtime.storage.stored import FOLDER, REST


class Trunk(GPT2):
    """Without its head, which runs as it is, beside."""

    def forward(self, input_ids):
        parts = self.transformer
        x_BTD = parts.drop(parts.wte(input_ids) + parts.wpe.weight[: input_ids.shape[1]])
        for block in parts.h:
            x_BTD = block(x_BTD)
        return parts.ln_f(x_BTD) + (self.shift if self.training else self.prior)


class Noted(Trunk):
    """Its evaluations read a parameter that no step does."""

    def forward(self, input_ids):
        found = super().forward(input_ids)
        return found if self.training else found + self.note


class Followed(Trunk):
    """A part of it that no step reads follows it."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.target = torch.nn.Linear(4, 4).requires_grad_(False)


class Remembers(Trunk):
    """Its state dict has a number that no tensor has."""

    epoch = 0

    def get_extra_state(self):
        return {"epoch": self.epoch}

    def set_extra_state(self, state):
        self.epoch = state["epoch"]


def made(folder, kind=Trunk, *, normed=False, **others):
    """The model in its parts, its optimizer, and the step to go on from. normed: the head begins with a batch norm.
    others: options, as `resume` of the first call, which then resumes.
    """
    torch.manual_seed(0)
    trunk, head = kind(2, 32, VOCABULARY, 0.1, tied=False), torch.nn.Linear(32, VOCABULARY)
    head = torch.nn.Sequential(torch.nn.Flatten(0, 1), torch.nn.BatchNorm1d(32), head) if normed else head
    del trunk.lm_head
    trunk.note = torch.nn.Parameter(torch.zeros(32)) if kind is Noted else None
    trunk.register_buffer("shift", torch.zeros(32))
    trunk.register_buffer("prior", torch.zeros(32))
    optimizer = gs_compile.AdamW([*trunk.parameters(), *head.parameters()], lr=1e-2)
    trunk.compile(backend="greedysnake", options=options(folder, outputs="all", durability="step", **others))
    step = 0 if others else gs_compile.resume(trunk, optimizer, storage=folder).step
    return trunk, head, optimizer, step


def trained(folder, last, *, looks=False):
    """Losses of the steps from where the storage is until the last, and what is in memory then; looks: and evaluates
    ahead of them.
    """
    trunk, head, optimizer, first = made(folder)
    if looks:
        with torch.no_grad():
            trunk.eval()(tokens(0))
        trunk.train()
    losses = []
    for number in range(first, last):
        logits = head(trunk(tokens(number)))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens(number).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trunk.shift += loss.item()
        trunk.prior += number == 4  # a commit has more from then on
        losses.append(loss.item())
    with torch.no_grad():
        trunk.eval()(tokens(0))  # which reads another buffer
    optimizer.commit()
    assert len(list((folder / FOLDER).glob("*-rest.*"))) == 2, "others are of no commit any more"
    rest = sum(each.nbytes for each in (*rest_of(optimizer).values(), *trunk.buffers()))
    assert optimizer.engine.planning.files[:2] == [rest, rest], "the plan has them"
    state = optimizer.state_dict()["state"]
    return losses, [each.detach().clone() for each in head.parameters()], [state[len(state) - 1]["exp_avg"].clone()]


def test_buffers_are_those_of_the_run_when_resume_returns(tmp_path):
    """Fault: one that was made at random was another in each process, without a word. What a script had set ahead of the
    first call was what the commit had.
    """
    trunk, head, optimizer, _ = made(tmp_path)
    drawn = trunk.prior.normal_().clone()
    head(trunk(tokens(0))).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    trunk.shift.fill_(1)
    optimizer.commit()
    optimizer.engine.tiers.close()
    trunk, head, optimizer, _ = made(tmp_path)
    assert torch.equal(trunk.prior, drawn)
    assert bool((trunk.shift == 1).all())
    trunk.shift.fill_(2)
    with torch.no_grad():
        trunk(tokens(0))
    assert bool((trunk.shift == 2).all())
    optimizer.engine.tiers.close()


@pytest.mark.parametrize("others", [{}, {"resume": "auto"}])
def test_a_target_network_goes_on(tmp_path, others):
    """Fault: it was in no commit, so a resumed run had its first values beside the trained ones of all else, without a
    word.
    """
    trunk, head, optimizer, _ = made(tmp_path, Followed)
    for number in range(2):
        head(trunk(tokens(number))).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        trunk.target.weight.data.lerp_(torch.ones(4, 4), 0.5)
    optimizer.commit()
    wanted = trunk.target.weight.clone()
    optimizer.engine.tiers.close()
    for _ in range(2):
        trunk, _, optimizer, _ = made(tmp_path, Followed, **others)
        with torch.no_grad():
            trunk.eval()(tokens(0))
        assert torch.equal(trunk.target.weight, wanted)
        optimizer.engine.tiers.close()


def test_the_extra_state_of_modules_goes_on(tmp_path):
    """Fault: `state_dict` has it, and no commit had, without a word."""
    trunk, head, optimizer, _ = made(tmp_path, Remembers)
    head(trunk(tokens(0))).mean().backward()
    optimizer.step()
    trunk.epoch = 3
    optimizer.commit()
    optimizer.engine.tiers.close()
    trunk, *_ = made(tmp_path, Remembers)
    assert trunk.epoch == 3
    trunk, *_ = made(tmp_path, Remembers, resume="auto")
    with pytest.raises(StepOrderError, match="commit's state of extra_state would not be restored"):
        trunk(tokens(1))


def test_an_extra_state_that_no_commit_can_keep_is_refused(tmp_path):
    trunk, *_ = made(tmp_path, Remembers)
    trunk.epoch = {3}
    with pytest.raises(OptimizerError, match=r"extra_state\._extra_state\.epoch: set: not of JSON"):
        trunk(tokens(0))


def test_buffers_beside_the_model_go_on(tmp_path):
    """Fault: running means of an eager module were those of a new one, beside its trained weights, without a word. It
    may have run once more ahead of the call that commits the step.
    """
    trunk, head, optimizer, _ = made(tmp_path, normed=True)
    left = []
    for number in range(3):
        head(torch.ones(1, 2, 32) * number)
        head(trunk(tokens(number))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        left.append([each.clone() for each in head.buffers()])
    beside = sum(each.nbytes for each in (*rest_of(optimizer).values(), *trunk.buffers(), *head.buffers()))
    assert optimizer.engine.planning.files[:2] == [beside, beside]
    optimizer.engine.tiers.synchronize()
    optimizer.engine.tiers.close()
    _, head, optimizer, step = made(tmp_path, normed=True)
    assert step == 2
    assert all(map(torch.equal, head.buffers(), left[1]))
    _, head, _, _ = made(tmp_path / "elsewhere")
    assert not list(head.buffers())


def test_an_eager_head_goes_on_too(tmp_path):
    """The second process and the third evaluate first, which reads another buffer than the one that steps change."""
    whole, head, moments = trained(tmp_path / "whole", 6)
    losses = []
    for last, looks in ((3, False), (4, True), (6, True)):
        found, head_again, moments_again = trained(tmp_path / "broken", last, looks=looks)
        losses += found
        gc.collect()
    assert losses == whole
    assert all(map(torch.equal, [*head, *moments], [*head_again, *moments_again]))


def test_a_parameter_without_elements_is_kept(tmp_path):
    """By such a one people ask a module for its device. Nor has it a state where no gradient comes, in a later process
    either: it was zeros there, of all steps.
    """
    found = []
    for number in range(2):
        model = gpt2()
        model.dummy = torch.nn.Parameter(torch.empty(0))
        optimizer = gs_compile.AdamW(model.parameters(), lr=1e-2)
        model.compile(backend="greedysnake", options=options(tmp_path, durability="step"))
        assert gs_compile.resume(model, optimizer, storage=tmp_path).step == number
        step(model, optimizer, tokens(number))
        optimizer.commit()
        found.append(optimizer.state_dict()["state"].keys())
        optimizer.engine.tiers.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("is_known", [False, True])
def test_an_eager_head_that_was_frozen_stays_as_it_was_trained(tmp_path, is_known):
    """It was in no commit from then on. is_known: to the script that goes on, ahead of its first call."""
    trunk, head, optimizer, _ = made(tmp_path)
    for number in range(2):
        head(trunk(tokens(number))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        head.requires_grad_(False)
    optimizer.commit()
    wanted = [each.clone() for each in head.parameters()]
    optimizer.engine.tiers.close()
    trunk, head, optimizer, first = made(tmp_path)
    head.requires_grad_(not is_known)
    with torch.no_grad():
        trunk(tokens(first))
    assert all(map(torch.equal, head.parameters(), wanted))


def test_an_eager_head_that_is_stepped_alone_keeps_its_moments(tmp_path):
    """Fault: the model's own first step gave it those of the commit again, in a run that goes on."""
    trained(tmp_path, 2)
    gc.collect()
    trunk, head, optimizer, first = made(tmp_path)
    with torch.no_grad():
        trunk.eval()(tokens(0))
    head(torch.ones(1, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    wanted = {name: each.clone() for name, each in optimizer.state[head.weight].items()}
    assert wanted["step"] == 3
    trunk.train()(tokens(first))
    assert all(torch.equal(optimizer.state[head.weight][name], each) for name, each in wanted.items())


def test_what_is_beside_has_its_values_when_resume_returns(tmp_path):
    """Fault: it got them with the model's first call, so an encoder ahead of it had run with others; and what a script
    made of them in between was lost.
    """
    _, (weight, bias), (moment,) = trained(tmp_path, 2)
    gc.collect()
    trunk, head, optimizer, first = made(tmp_path)
    assert torch.equal(head.weight, weight)
    assert torch.equal(optimizer.state[head.bias]["exp_avg"], moment)
    with torch.no_grad():
        head.bias.fill_(0.5)
    trunk(tokens(first))
    assert torch.equal(head.weight, weight)
    assert bool((head.bias == 0.5).all())
    assert torch.equal(optimizer.state[head.bias]["exp_avg"], moment)
    assert not torch.equal(bias, head.bias)


def test_a_head_of_another_shape_is_refused_before_anything_is_changed(tmp_path):
    trained(tmp_path, 1)
    gc.collect()
    trunk, _, _, _ = made(tmp_path / "elsewhere")
    head = torch.nn.Linear(32, VOCABULARY + 1)
    before = head.weight.clone()
    optimizer = gs_compile.AdamW([*trunk.parameters(), *head.parameters()], lr=1e-2)
    with pytest.raises(ResumeError, match="other parameters beside"):
        gs_compile.resume(trunk, optimizer, storage=tmp_path)
    assert torch.equal(head.weight, before)
    assert optimizer.num_steps == 0


def test_room_is_reserved_for_what_an_evaluation_ahead_has_had_on_the_tiers(tmp_path):
    """A commit has it in memory; a full drive was found at the first commit."""
    trunk, head, optimizer, _ = made(tmp_path, Noted)
    with torch.no_grad():
        trunk.eval()(tokens(0))
    head(trunk.train()(tokens(0))).square().mean().backward()
    optimizer.step()
    optimizer.commit()
    rest = rest_of(optimizer)
    assert any(each is trunk.note for each in rest.values())
    assert optimizer.engine.planning.files[0] >= sum(each.nbytes for each in rest.values())


def test_damage_of_what_is_beside_leaves_the_model_its_values(tmp_path):
    trained(tmp_path, 1)
    gc.collect()
    (file,) = (file for part in read(tmp_path / FOLDER).parts if part.value == REST for file in part.files)
    with (tmp_path / FOLDER / file.name).open("r+b") as found:
        found.write(b"damage")
    with pytest.raises(CorruptionError, match="rest"):
        made(tmp_path)
    trunk, _, optimizer, _ = made(tmp_path, resume="auto")
    before = {name: each.clone() for name, each in trunk.state_dict().items()}
    with pytest.raises(CorruptionError, match="rest"):
        trunk(tokens(1))
    after = trunk.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert optimizer.engine is None
