"""A durable run that is killed goes on from its last commit, wherever everything lives from then on: bit for bit.

Each model here lives several lives: it is built anew, goes on from what the life before has left under options of its
own, takes a few steps, and is killed. What it learns is held against one run that nothing has interrupted, that lives
in memory and commits nothing.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from killed import Killed, Taken, clean, resumed, seed, steps
from saving import saving
from tiered import Harness, Make, adamw, gpt2, muon, options, outcome, tokens, two_groups

import gs_compile
from gs_compile.placement.levels import Share
from gs_compile.planner.boundary import FIRST

KEEPS_CAPTURES = True
NUM_STEPS, MANY_STEPS = 7, 20
CLIPPED, SOME_CLIPPED = 0.3, 0.62  # of all steps; of some, so that some speculative updates are rolled back

# What stays in host memory of parameters, checkpoints and optimizer states; alpha; and whatever else.
PLACES: list[dict[str, Any]] = [
    {"ratios": (0.0, 0.0, 0.0), "alpha": 0.5, "storage": "a"},
    {"ratios": (1.0, 0.3, 0.3), "alpha": 1.0, "storage": "ab", "threads": 2},
    {"ratios": (0.3, 0.0, 1.0), "alpha": 0.25, "storage": "b", "separate_device": True, "host_memory": "60MiB"},
    {"ratios": (1.0, 1.0, 1.0), "alpha": 0.0, "storage": "c"},
    {"ratios": (0.3, 0.3, 0.3), "alpha": 1.0, "storage": "ca", "separate_device": True, "device": 0.6},
]


def frozen(seed: int = 0) -> torch.nn.Module:
    """As adapters are trained: most of the model is frozen, and one unit of it as a whole."""
    model = gpt2(tied=False, seed=seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "mix" in name or "ln_" in name
    return model


MODELS: dict[str, Callable[[], Harness]] = {
    "dropout": lambda: Harness(partial(gpt2, dropout=0.1)),
    "bf16": lambda: Harness(gpt2, "bf16"),
    "mixed": lambda: Harness(partial(gpt2, norms=torch.float32)),
    "frozen": lambda: Harness(frozen),
    "frozen bf16": lambda: Harness(frozen, "bf16"),
    "muon": lambda: Harness(partial(gpt2, norms=torch.float32)),
}


def optimizer_of(model: str, max_norm: float | None) -> Make:
    return partial(muon if model == "muon" else adamw, max_grad_norm=max_norm)


class Lives:
    """One capture of each model, and one run that nothing interrupts of each model and bound of the norm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.harness = cache(lambda model: MODELS[model]())
        self.reference = cache(self._reference)

    def given(self, place: dict[str, Any], max_norm: float | None, clip: str = "speculative", **more: Any) -> Any:
        place = {**place, **more}
        ratios = dict(zip(("parameter", "checkpoint", "optimizer"), place.pop("ratios"), strict=True))
        ratios["device_checkpoint"] = place.pop("device", 0.0) * (1 - ratios["checkpoint"])
        if max_norm:
            place["clip"] = clip
            place["alpha"] = 1.0 if clip == "delayed" else place["alpha"]
        durability = place.pop("durability", "step")
        storage = [self.folder / name for name in place.pop("storage")]
        return {**options(storage, ratios=ratios, **place), "durability": durability}

    def _reference(self, model: str, max_norm: float | None, num_steps: int) -> Taken:
        seed()
        given = self.given(PLACES[3], max_norm, "delayed", durability="off")
        with self.harness(model).fresh(optimizer_of(model, max_norm), given) as optimizer:
            return steps(self.harness(model), optimizer, range(num_steps), reads=True)

    def clean(self) -> None:
        for name in "abc":
            clean({"storage": self.folder / name})

    def chain(self, model: str, max_norm: float | None, places: list[Any], num_steps: int, turn: int = 3) -> set[int]:
        """Lives of `turn` steps each, one after the other, each from where a kill has left the one before.

        Gives the numbers of steps that they began after.
        """
        harness, make = self.harness(model), optimizer_of(model, max_norm)
        reference = self.reference(model, max_norm, num_steps)
        self.clean()
        shutil.rmtree(self.folder / "aside", ignore_errors=True)
        at, begun = 0, set()
        former: Killed | None = None
        for number, given in enumerate(itertools.cycle(places)):
            seed()
            aside = Killed(self.folder / "aside" / str(number), given["storage"], Taken(0))
            opened = harness.fresh(make, given)
            if former is not None:
                self.clean()
                found = former.put_back(at)
                assert found.step == at - 1, "of a run that is killed between two steps the last is not sealed"
                at = found.step
                opened = resumed(harness, make, given, former.directories)
            begun.add(at)
            stop = min(at + turn, num_steps)
            with opened as optimizer:
                taken = steps(harness, optimizer, range(at, stop), after=aside.keep_at(stop))
                assert optimizer.num_steps + optimizer.num_skipped == stop
            assert not taken.differences(reference), f"from {at} on, under {given}"
            shutil.rmtree(self.folder / "aside" / str(number - 1), ignore_errors=True)
            at, former = stop, aside
            if at == num_steps:
                return begun
        raise AssertionError


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    found = Lives(tmp_path_factory.mktemp("lives"))
    yield found
    shutil.rmtree(found.folder)


@pytest.mark.parametrize(
    ("model", "max_norm", "first"),
    [
        pytest.param("dropout", None, 0, marks=pytest.mark.slow),
        ("dropout", SOME_CLIPPED, 1),
        pytest.param("bf16", CLIPPED, 2, marks=pytest.mark.slow),
        pytest.param("frozen bf16", None, 3, marks=pytest.mark.slow),  # as end_to_end/test_frozen.py, and in place
        ("muon", SOME_CLIPPED, 1),
    ],
)
def test_a_chain_of_killed_runs_is_one_run(lives, model, max_norm, first):
    """Another alpha, other ratios, drives, threads and budgets each time, and another way to clip."""
    clips = itertools.cycle(("speculative", "delayed"))
    places = [lives.given(each, max_norm, next(clips)) for each in (*PLACES[first:], *PLACES[:first])]
    begun = lives.chain(model, max_norm, places, NUM_STEPS)
    assert begun == {0, 2, 4}, "each life but the last is three steps, of which the last is lost"


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [None, SOME_CLIPPED], ids=str)
def test_a_chain_of_runs_that_save_and_keep(lives, max_norm):
    """Activations in host memory and on SSD, parameters from step to step, and halves of split masters."""
    lives.harness("bf16")
    lives.reference("bf16", max_norm, NUM_STEPS)  # saves and keeps nothing
    places = [lives.given(each, max_norm) for each in PLACES[:3]]
    with saving(Share(1, "host", 0.4), Share(2, "ssd", 0.3), carried=FIRST) as made:
        begun = lives.chain("bf16", max_norm, places, NUM_STEPS)
    assert begun == {0, 2, 4}
    assert any(each.carried_values for each in made)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("max_norm", [None, CLIPPED, SOME_CLIPPED, 1000.0], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_run_goes_on_from_every_step(lives, model, max_norm):
    """Each life is two steps, of which the second is lost; settings are drawn, each time others."""
    draw = random.Random(f"{model} {max_norm}")
    shares = (0.0, 0.3, 1.0)

    def place() -> Any:
        drawn = {
            "ratios": tuple(draw.choice(shares) for _ in range(3)),
            "alpha": draw.choice((0.0, 0.25, 0.5, 1.0)),
            "storage": draw.choice(("a", "ab", "b", "c", "bca")),
            "threads": draw.choice((1, 2)),
            "host_memory": draw.choice(("60MiB", "100MiB")),
            "separate_device": draw.random() < 0.5,
        }
        if drawn["separate_device"]:
            drawn["device"] = draw.choice((0.0, 0.6))
        return lives.given(drawn, max_norm, draw.choice(("speculative", "delayed")))

    begun = lives.chain(model, max_norm, [place() for _ in range(MANY_STEPS)], MANY_STEPS, turn=2)
    assert begun == set(range(MANY_STEPS - 1))


@pytest.mark.parametrize("change", [{"micro_batch_size": 1}, {"schedule": "horizontal"}], ids=str)
def test_other_sums_differ_by_rounding(lives, change):
    """Where samples, or micro-batches, are added in another order, float32 rounds otherwise: 6e-8 of each sum, of which
    a gradient here is at most some hundred; the values themselves are those of the commit.
    """
    harness, make = lives.harness("frozen"), partial(adamw, max_grad_norm=CLIPPED)
    reference = lives.reference("frozen", CLIPPED, NUM_STEPS)
    lives.clean()
    former = Killed(lives.folder / "other", [lives.folder / "a"], Taken(0))
    with harness.fresh(make, lives.given(PLACES[0], CLIPPED)) as optimizer:
        seed()
        steps(harness, optimizer, range(4), after=former.keep_at(4))
    assert former.put_back(4).step == 3
    with resumed(harness, make, lives.given(PLACES[0] | change, CLIPPED, "delayed")) as optimizer:
        taken = steps(harness, optimizer, (3, 4), reads=True)
    shutil.rmtree(former.aside)
    assert taken.drawn == reference.drawn[3:5]
    for number in (3, 4):
        assert taken.losses[number - 3] == pytest.approx(reference.losses[number], rel=1e-6)
        assert taken.norms[number - 3] == pytest.approx(reference.norms[number], rel=1e-5)
        for name, value in taken.outcomes[number + 1].values.items():
            expected = reference.outcomes[number + 1].values[name]
            assert (value - expected).norm() <= 1e-5 * expected.norm(), name


def test_skipped_steps_and_states_go_on(lives):
    """What is committed last is a step that its loss scale has spoiled, by `commit()`, where every third step is due."""
    harness, place = lives.harness("dropout"), lives.folder / "a"
    given = options(place, alpha=0.5, clip="speculative", ratios={"optimizer": 0.5, "parameter": 0.5})

    def train(numbers: range, folder: Path | None, kills: int = -1) -> tuple[Any, ...]:
        """The losses, norms, scales and rates of steps, and what is there in the end."""
        found: list[tuple[float, ...]] = []
        durable = {"durability": 3} if folder else {}
        seed()
        with harness.fresh(partial(adamw, max_grad_norm=CLIPPED), given | durable) as optimizer:
            scaler = gs_compile.LossScaler(optimizer, 2.0**140, backoff_factor=2.0**-130, growth_interval=2)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            if folder:
                run = gs_compile.resume(harness.model, optimizer, storage=place, scheduler=scheduler)
                assert (run.step, run.user) == (numbers[0], {"next": numbers[0]} if numbers[0] else None)
            for number in numbers:
                ids = tokens(number)
                loss = harness.model(input_ids=ids, labels=ids).loss
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                info = optimizer.last_step
                assert info is not None
                if not info.skipped:
                    scheduler.step()
                optimizer.zero_grad()
                optimizer.kept.user = {"next": number + 1}
                found.append((loss.item(), info.grad_norm, scaler.get_scale(), scheduler.get_last_lr()[0]))
                if folder and number == 0:
                    optimizer.commit()
                if folder and number == kills:
                    Killed(folder, [place], Taken(0)).keep(number + 1, optimizer)
            assert optimizer.num_skipped == 1
            return found, outcome(harness.model, optimizer, [], [])

    lives.clean()
    whole, wanted = train(range(4), None)
    train(range(2), lives.folder / "spoiled", kills=1)
    lives.clean()
    assert Killed(lives.folder / "spoiled", [place], Taken(0)).put_back(2).step == 1
    found, values = train(range(1, 4), lives.folder / "spoiled")
    assert repr(found) == repr(whole[1:])
    assert not values.differences(wanted)


class Loop:
    """Has a model that its step calls."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.network = model

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        return self.network(input_ids=ids, labels=ids).loss


def test_a_compiled_step_goes_on(tmp_path):
    """The function that is compiled reaches the model as a local, and then as an attribute of what it is a method of."""
    place, aside = tmp_path / "storage", Killed(tmp_path / "aside", [tmp_path / "storage"], Taken(0))
    given = options(place, durability="step")

    def begin(model: torch.nn.Module, step: Callable[..., torch.Tensor], numbers: range, kills: int = -1) -> Any:
        optimizer = adamw(two_groups(model))
        compiled = torch.compile(step, backend="greedysnake", options=given)
        assert gs_compile.resume(model, optimizer, storage=place).step == numbers[0]
        for number in numbers:
            compiled(tokens(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == kills:
                optimizer.commit()
                aside.keep(number + 1, optimizer)
        found = outcome(model, optimizer, [], [])
        optimizer.engine.tiers.close()
        return found

    model = gpt2()
    wanted = begin(model, lambda ids: model(input_ids=ids, labels=ids).loss, range(3), kills=1)
    clean(given)
    names = {each.name for each in aside.put_back(2).parameters}
    assert names == {name for name, _ in model.named_parameters()}
    loop = Loop(gpt2(seed=1))
    assert begin(loop.network, loop.step, range(2, 3)).differences(wanted) == []
