"""Parameters that no gradient comes to, as those that only choose: no optimizer of torch touches them."""

from __future__ import annotations

import copy

import pytest
import torch
from tiered import options
from torch import nn
from torch.nn import functional
from zoo import GPT, VOCAB, WIDTH, Feed, batch, compile_model, loss_of

import gs_compile

SETTINGS = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.5}
OURS = {
    "AdamW": lambda p: gs_compile.AdamW(p, **SETTINGS),
    "Muon": lambda p: gs_compile.Muon(p, weight_decay=0.5, adamw_weight_decay=0.5),
    "torch": lambda p: torch.optim.AdamW(p, **SETTINGS),
}


class Choosing(Feed):
    """A block that leaves tokens out, by a mask that all blocks share and a score of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x_BTD: torch.Tensor, mask_BT1: torch.Tensor) -> torch.Tensor:
        mask_BT1 = mask_BT1 & (self.score(x_BTD) > 0)  # operator.and_ changes nothing in place
        return torch.where(mask_BT1, super().forward(x_BTD), x_BTD)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Choosing() for _ in range(2))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x_BTD, mask_BT1 = self.embedding(ids), (ids > 20)[..., None]
        for block in self.blocks:
            x_BTD = block(x_BTD, mask_BT1)
        return functional.cross_entropy(self.head(x_BTD).flatten(0, 1), labels.flatten())


class Both(nn.Module):
    """A block that hands on two tensors, as of video and audio."""

    def __init__(self) -> None:
        super().__init__()
        self.video, self.audio = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, video_BTD, audio_BTD):
        video_BTD = video_BTD + self.video(audio_BTD).tanh()
        return video_BTD, audio_BTD + self.audio(video_BTD).tanh()


class TwoResults(nn.Module):
    """Its loss is of the first result, to which the last block's `audio` and `of_audio` bring nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seen, self.heard = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Both() for _ in range(3))
        self.of_video, self.of_audio = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, ids: torch.Tensor):
        video_BTD, audio_BTD = self.seen(ids), self.heard(ids)
        for block in self.blocks:
            video_BTD, audio_BTD = block(video_BTD, audio_BTD)
        return self.of_video(video_BTD), self.of_audio(audio_BTD)


class Logging(GPT):
    """Writes what `seen` makes to a table that the loss does not read, beside one that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.kind = nn.Linear(WIDTH, 1), nn.Parameter(torch.ones(WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor):
        x_BTD = self.embedding(ids)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        table_B2, scaled_BTD = x_BTD.new_zeros(len(x_BTD), 2), self.kind.new_zeros(x_BTD.shape)
        table_B2[:, 0] = self.seen(x_BTD).mean((1, 2))
        scaled_BTD[..., 1:] = x_BTD[..., 1:]
        scaled_BTD[..., :4].mul_(self.scale[:4])
        return functional.cross_entropy(self.head(scaled_BTD).flatten(0, 1), labels.flatten()), table_B2


def of_loss(model, ids, labels):
    return model(ids, labels)


def of_loss_alone(model, ids, labels):
    return model(ids, labels)[0]


def of_first(model, ids, labels):
    return model(ids)[0].square().mean()


def trained(model, optimizer, loss_of=of_loss):
    losses = []
    for seed in range(3):
        losses.append(loss_of(model, *batch(4, seed=seed)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach(), {name: value.clone() for name, value in model.state_dict().items()}


IDLE = {  # by the model: the loss, and names of what gets no gradient
    Model: (of_loss, "score"),
    TwoResults: (of_first, "blocks.2.audio of_audio"),
    Logging: (of_loss_alone, "seen kind"),
}


@pytest.mark.parametrize(
    ("make", "name"),
    [  # each model, and each optimizer
        pytest.param(make, name, marks=[pytest.mark.slow] * (make is not Model and name != "AdamW"))
        for make in IDLE
        for name in OURS
    ],
)
def test_what_never_gets_a_gradient_stays_as_it_is(make, name, tmp_path):
    (loss_of, names), model = IDLE[make], make()
    first, plain = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
    losses, values = trained(plain, torch.optim.AdamW(plain.parameters(), **SETTINGS), loss_of)
    optimizer = OURS[name](model.parameters())
    if name == "torch":
        compile_model(model, 2)
    else:
        model.compile(backend="greedysnake", options=options(tmp_path))
    found, learned = trained(model, optimizer, loss_of)
    idle = [each for each in first if any(part in each for part in names.split())]
    for each in idle:
        torch.testing.assert_close(values[each], first[each], rtol=0, atol=0)
        torch.testing.assert_close(learned[each], first[each], rtol=0, atol=0)
    if name != "Muon":
        torch.testing.assert_close(found, losses)
        torch.testing.assert_close(learned, values)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_gradient_from_outside_reaches_it(name, tmp_path):
    """As of a penalty of the user's own: in such a step, its first, it is trained as in plain PyTorch."""
    model = Model()
    plain = copy.deepcopy(model)
    results = []
    for each, kind in ((plain, getattr(torch.optim, name)), (model, getattr(gs_compile, name))):
        optimizer = kind(each.parameters(), **(SETTINGS if name == "AdamW" else {"lr": 0.1, "weight_decay": 0.5}))
        if each is model:
            model.compile(backend="greedysnake", options=options(tmp_path, accumulate=True))
        for seed in range(2):
            loss = each(*batch(4, seed=seed))
            if seed:
                loss = loss + each.blocks[1].score.weight.square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append({name: value.clone() for name, value in each.state_dict().items()})
    torch.testing.assert_close(*results)


class Unfreezing(GPT):
    """Its bottom is run without gradients, up to a block that its calls choose."""

    def forward(self, ids, labels, first):
        with torch.no_grad():
            x_BTD = self.embedding(ids)
            for block in self.blocks[:first]:
                x_BTD = block(x_BTD)
        for block in self.blocks[first:]:
            x_BTD = block(x_BTD)
        return functional.cross_entropy(self.head(self.norm(x_BTD)).flatten(0, 1), labels.flatten())


@pytest.mark.filterwarnings("ignore:the model's blocks are of:gs_compile.errors.UniformityWarning")
def test_what_gets_its_first_gradient_later_takes_its_first_step(tmp_path):
    """Fault: Adam's correction was that of a parameter which had taken part in all steps."""
    model = Unfreezing(num_layers=3)
    plain = copy.deepcopy(model)
    for each, kind in ((plain, torch.optim.AdamW), (model, gs_compile.AdamW)):
        optimizer = kind(each.parameters(), **SETTINGS)
        if each is model:
            model.compile(backend="greedysnake", options=options(tmp_path))
        for seed, first in enumerate((2, 1, 2, 0)):
            each(*batch(4, seed=seed), first).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)


def unfreezing(tmp_path, **changes):
    model = Unfreezing(num_layers=3)
    optimizer = gs_compile.AdamW(model.parameters(), **SETTINGS)
    model.compile(backend="greedysnake", options=options(tmp_path, **changes))
    return model, optimizer


def unfreeze(model, optimizer, firsts, start=0):
    for seed, first in enumerate(firsts, start):
        model(*batch(4, seed=seed), first).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:the model's blocks are of:gs_compile.errors.UniformityWarning")
@pytest.mark.parametrize("firsts", [(1, 1, 1, 0), pytest.param((1, 1, 0, 0), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "how",
    ["resume", *(pytest.param(each, marks=pytest.mark.slow) for each in ("state dicts", "the option", "freezing"))],
)
def test_what_had_no_gradient_so_far_takes_its_first_step_where_training_goes_on(how, firsts, tmp_path):
    """Fault: nobody knew that it had missed steps, in another process or where another parameter was frozen."""
    durable = {"durability": "step"} if how in ("resume", "the option") else {}
    plain = Unfreezing(num_layers=3)
    expected = torch.optim.AdamW(plain.parameters(), **SETTINGS)
    model, optimizer = unfreezing(tmp_path, **durable)
    for each, one in ((plain, expected), (model, optimizer)):
        unfreeze(each, one, firsts[:2])
    if how == "freezing":
        for each in (plain, model):
            each.norm.bias.requires_grad_(False)
    else:
        states = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        optimizer.engine.tiers.close()
        model, optimizer = unfreezing(tmp_path, **durable, **({"resume": "auto"} if how == "the option" else {}))
    if how == "resume":
        gs_compile.resume(model, optimizer, storage=tmp_path)
    elif how == "state dicts":
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    for each, one in ((plain, expected), (model, optimizer)):
        unfreeze(each, one, firsts[2:], start=2)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)
    taken, wanted = (
        {n: float(one["step"]) for n, one in each.state_dict()["state"].items()} for each in (optimizer, expected)
    )
    assert taken == {**dict.fromkeys(taken, 0.0), **wanted}


@pytest.mark.filterwarnings("ignore:the model's blocks are of:gs_compile.errors.UniformityWarning")
def test_an_older_state_is_loaded_beside_what_has_no_gradient(tmp_path):
    """Which has missed more steps since."""
    model, optimizer = unfreezing(tmp_path)
    unfreeze(model, optimizer, (1,))
    states = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    unfreeze(model, optimizer, (1,), start=1)
    values = copy.deepcopy(model.state_dict())
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    unfreeze(model, optimizer, (1,), start=1)
    torch.testing.assert_close(model.state_dict(), values, rtol=0, atol=0)


class Empty(Feed):
    """A block whose last parameter has no elements, and no place of its own in its unit."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return super().forward(x_BTD) + self.empty.sum()


def test_a_parameter_without_elements(tmp_path):
    model, in_memory = GPT(Empty), dict.fromkeys(("parameter", "checkpoint", "optimizer"), 1.0)
    plain = copy.deepcopy(model)
    for each, kind in ((plain, torch.optim.SGD), (model, gs_compile.SGD)):
        optimizer = kind(each.parameters(), lr=0.1)
        if each is model:
            model.compile(backend="greedysnake", options=options(tmp_path, ratios=in_memory))
        loss_of(each, *batch(4)).backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


class Empties(Feed):
    """A block whose first parameters have no elements, and the place of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.empties = nn.ParameterList(torch.empty(shape) for shape in ((0,), (0, 3), (2, 0)))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return super().forward(x_BTD + sum(each.sum() for each in self.empties))


@pytest.mark.filterwarnings("ignore:the model's blocks are of:gs_compile.errors.UniformityWarning")
def test_what_is_behind_a_parameter_without_elements_stays_too(tmp_path):
    """Fault: it was updated by zeros in steps that had no gradient for it."""
    for each, optimizer in (pair := list(both(Unfreezing(Empties, num_layers=3), storage=tmp_path))):
        unfreeze(each, optimizer, (0, 2, 0))
    (plain, _), (model, _) = pair
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)


def both(model, settings=SETTINGS, **given):
    """Torch's optimizer with a copy of a model, then this package's with the model itself."""
    plain = copy.deepcopy(model)
    yield plain, torch.optim.AdamW(plain.parameters(), **settings)
    optimizer = gs_compile.AdamW(model.parameters(), **settings)
    model.compile(backend="greedysnake", options=options(**given))
    yield model, optimizer


def test_state_dicts_have_no_state_of_what_no_gradient_came_to(tmp_path):
    """Fault: the state of such a parameter had the number of the run's steps. One of them that is loaded goes back, too."""
    (plain, theirs), (model, optimizer) = both(Model(), storage=tmp_path)
    found = []
    for each, own in ((plain, theirs), (model, optimizer)):
        trained(each, own)
        found.append(own.state_dict())
    wanted, saved = found
    names = [name for name, _ in model.named_parameters()]
    assert {names[number] for number in wanted["state"].keys() ^ range(len(names))} == {
        f"blocks.{block}.score.{name}" for block in range(2) for name in ("weight", "bias")
    }
    assert saved["state"].keys() == wanted["state"].keys()
    assert all(float(each["step"]) == 3 for each in saved["state"].values())
    theirs.load_state_dict(saved)
    trained(model, optimizer)
    optimizer.load_state_dict(saved)
    assert optimizer.num_steps == 3
    assert optimizer.state_dict()["state"].keys() == wanted["state"].keys()


class Cut(GPT):
    """Its embedding gets no gradient, or one that is exactly zero, as its calls choose."""

    def forward(self, ids, labels, reaches):
        x_BTD = self.embedding(ids)
        x_BTD = x_BTD.detach() + 0.0 * x_BTD if reaches else x_BTD.detach()
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return functional.cross_entropy(self.head(self.norm(x_BTD)).flatten(0, 1), labels.flatten())


def test_a_first_gradient_that_is_zero_is_one(tmp_path):
    """Fault: weight decay, which torch applies from then on, passed the parameter over until a gradient was not zero."""
    for each, optimizer in (pair := list(both(Cut(), storage=tmp_path))):
        for seed, reaches in enumerate((False, True, True)):
            each(*batch(4, seed=seed), reaches).backward()
            optimizer.step()
            optimizer.zero_grad()
    (plain, _), (model, _) = pair
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("accumulate", [False, True])
def test_zeros_that_a_script_gives_are_a_gradient(accumulate, tmp_path):
    """Before the first call, too. Fault: they were refused there, and later they were none."""
    for each, optimizer in (pair := list(both(Model(), storage=tmp_path, accumulate=accumulate))):
        for seed in range(3):
            for parameter in each.parameters() if seed != 1 else ():
                parameter.grad = torch.zeros_like(parameter)
            each(*batch(4, seed=seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
    (plain, _), (model, _) = pair
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)


def test_zeros_behind_the_backward_are_a_gradient(tmp_path):
    """As of ``if p.grad is None: p.grad = zeros``, by which weight decay changes a parameter. Fault: they were lost,
    without a word.
    """
    for each, optimizer in (pair := list(both(Model(), storage=tmp_path))):
        for seed in range(3):
            each(*batch(4, seed=seed)).backward()
            for parameter in each.parameters() if seed != 1 else ():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
    (plain, _), (model, _) = pair
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)


def test_steps_that_were_missed_stay_so_where_others_are_trained(tmp_path):
    """Fault: they counted from the freezing on, so the first step had Adam's correction of a later one."""
    for each, optimizer in (pair := list(both(Model(), storage=tmp_path, accumulate=True))):
        for seed in range(4):
            each.head.bias.requires_grad_(seed < 2)
            loss = each(*batch(4, seed=seed))
            if seed == 3:
                loss = loss + each.blocks[1].score.weight.square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (plain, _), (model, _) = pair
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)
