"""The commands `plan`, `simulate` and `probe`: arguments reach the planner, results and refusals the user."""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
from command_line import printed, run
from standin import stand_in
from test_draw import profile, workload
from test_timeline import data_of, simulated

from gs_compile.cli.plan import figure, profile_table
from gs_compile.cli.report.explain import as_dict, report
from gs_compile.machine import format_bytes
from gs_compile.planner.measure import machines
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.measure.shipped import ENVIRONMENT, SHIPPED
from gs_compile.planner.request import Request

# plan -----------------------------------------------------------------------------------------------------------------


def stand_for_planner(monkeypatch, plan):
    """A function of a model and a request plans in the place of the planner."""

    def planner_of(model, request, *, keeps):
        assert keeps, "what it captures serves the next command"
        return SimpleNamespace(plan=lambda: plan(model, request))

    monkeypatch.setattr("gs_compile.planner.plan.planner_of", planner_of)
    monkeypatch.setattr("gs_compile.planner.plan.plan", plan)


@pytest.fixture
def asked(monkeypatch):
    """The requests to the planner; it answers with a plan that is made up."""
    asked = []

    def plan(model, request):
        asked.append((model, request))
        return stand_in()

    stand_for_planner(monkeypatch, plan)
    return asked


def test_what_is_not_given_is_the_planners_choice(asked):
    assert printed("plan", "--model", "gpt-65b") == report(stand_in()) + "\n"
    assert asked == [("gpt-65b", Request())]


def test_the_longest_sequence_is_told(asked, monkeypatch):
    monkeypatch.setattr("gs_compile.planner.fit.longest_sequence", lambda model, request, *, keeps: 4096)
    shown = printed("plan", "--model", "gpt-65b", "--longest")
    assert shown.endswith("The longest sequence of which a sample fits: 4096 tokens\n")
    assert json.loads(printed("plan", "--model", "gpt-65b", "--longest", "--json"))["longest_sequence"] == 4096


def test_what_is_given_is_kept(asked):
    arguments = (
        "--model llama --machine a100.json --sequence 512 --batch-size 64 --micro-batch-size 2 --micro-batches 32 "
        "--alpha 0.25 --ratio parameter=0.5 --ratio optimizer=1 --clip --host-memory 64GiB --device-memory 20GiB "
        "--precision model --states 8bit --wear-years 3 --storage /a --storage /b --gpus 8 --nodes 16 --network 25GB/s --durability 10 --recompute none --masters whole --schedule single --json"
    )
    assert json.loads(printed("plan", *arguments.split())) == json.loads(json.dumps(as_dict(stand_in())))
    settings = {
        "machine": "a100.json", "sequence": 512, "batch_size": 64, "micro_batch_size": 2, "num_micro_batches": 32,
        "alpha": 0.25, "ratios": {"parameter": 0.5, "optimizer": 1.0}, "clip": True, "host_memory": "64GiB",
        "device_memory": "20GiB", "precision": "model", "states": "8bit", "wear_years": 3.0, "storage": [Path("/a"), Path("/b")],
        "schedule": "single", "gpus": 8, "nodes": 16, "network": "25GB/s", "durability": 10,
        "recompute": "none", "masters": "whole",
    }  # fmt: skip
    assert asked == [("llama", Request(**settings))]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "Missing option '--model'"),
        (("--model", "m", "--ratio", "parameter"), "--ratio parameter: not a class and a number"),
        (("--model", "m", "--ratio", "parameter=half"), "--ratio parameter=half: not a class and a number"),
        (("--model", "m", "--ratio", "parameters=1"), "did you mean ratios.parameter?"),
        (("--model", "m", "--ratio", "parameter=2"), "ratios.parameter must be a number from 0 to 1"),
        (("--model", "m", "--durability", "never"), 'durability must be "off", "step" or a whole number of steps'),
        (("--model", "m", "--alpha", "2"), "alpha is 2; it must be a part of each update"),
        (("--model", "m", "--batch", "8"), "--batch-size"),
        (("--model", "m", "--precision", "fp8"), "'--precision'"),
        (("--model", "m", "--states", "4bit"), "'--states'"),
    ],
)
def test_wrong_arguments(asked, arguments, complaint):
    result = run("plan", *arguments)
    assert (result.exit_code, result.stdout, asked) == (2, "", [])
    assert complaint in result.stderr


def test_a_model_from_a_file_on_a_machine_from_a_file(tmp_path):
    """With the real planner."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 64} | sizes
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    machine = Path(__file__).parents[1] / "machine.json"
    settings = (
        "--sequence 32 --micro-batch-size 2 --micro-batches 4 --alpha 0.5 --ratio optimizer=0 --recompute all --json"
    )
    found = json.loads(printed("plan", "--model", tmp_path / "tiny.json", "--machine", machine, *settings.split()))
    assert (found["batch_size"], found["alpha"], found["ratios"]["optimizer"]) == (8, 0.5, 0.0)
    assert found["homes"]["s"].keys() == {"ssd"}
    assert found["traffic"]["ssd_read"]["s"] == found["homes"]["s"]["ssd"]
    assert found["tokens_per_second"] == pytest.approx(8 * 32 / found["seconds"], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--model gtp2", "PlanError: gtp2 is neither the name of a model"),
        ("--model gpt-65b --machine a1000", "ProfileError: unknown machine a1000; did you mean a100?"),
    ],
)
def test_what_the_planner_refuses(arguments, complaint):
    """The code of each kind of error is in test_cli.py."""
    result = run("plan", "--machine", "a100", *arguments.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(complaint)
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_papers_model_on_the_papers_machine():
    found = json.loads(printed("plan", "--model", "gpt-65b", "--machine", "a100", "--sequence", "2048", "--json"))
    assert found["lanes"]["compute"]["share"] > 0.9  # it saturates
    assert found["peaks"]["host"] <= found["budgets"]["host"]


@pytest.mark.slow
def test_the_plan_that_is_explained_in_docs_is_the_one_that_is_printed():
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    command, shown = re.findall(r"What `greedysnake ([^`]*)` prints:\n\n(.*?)\n\n\*", page, re.DOTALL)[0]
    assert dedent(shown) == printed(*command.split()).rstrip()


# simulate -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def plans(monkeypatch):
    """The plans that were asked for: made up around a real simulation."""
    program, simulation = simulated()
    plans = []

    def plan(model, request, **_):
        made = stand_in()
        vars(made).update(
            program=program,
            simulation=simulation,
            seconds=simulation.seconds,
            lanes={lane: (share * simulation.seconds, share) for lane, share in simulation.busy.items()},
            peaks=dict(program.peaks),
            workload=workload(),
            profile=profile(),
            schedule=request.schedule,
            placement=SimpleNamespace(decision=SimpleNamespace(own=None)),
            problem=SimpleNamespace(request=request, builder=None),
        )
        plans.append(made)
        return made

    stand_for_planner(monkeypatch, plan)
    return plans


def test_the_report(plans):
    text = printed("simulate", "--model", "m", "--schedule", "horizontal")
    assert [line for line in text.splitlines() if line.endswith(":")] == [
        "What each lane does in a step:",
        "What the computation waits for:",
        "The critical path, by lane:",
        "Memory at its peak:",
    ]
    (plan,) = plans
    assert plan.schedule == "horizontal"
    waited = text.partition("What the computation waits for:")[2].partition("The critical")[0]
    assert all(cause in waited for cause, seconds in plan.simulation.bubbles.items() if seconds > 0)
    used = text.partition("Memory at its peak:")[2]
    room = {tier: format_bytes(nbytes) for tier, nbytes in plan.simulation.room.items()}
    for tier, nbytes in plan.simulation.peaks.items():
        assert re.search(rf"{tier} +{format_bytes(nbytes)} +{room.get(tier, 'no bound')}$", used, re.M)


def test_files_and_sums(plans, tmp_path):
    trace, page = tmp_path / "step.json", tmp_path / "step.html"
    found = json.loads(printed("simulate", "--model", "m", "--trace", trace, "--html", page, "--json"))
    simulation = plans[0].simulation
    waiting_and_computing = sum(found["bubbles"].values()) + found["lanes"]["compute"]["seconds"]
    assert waiting_and_computing == pytest.approx(found["seconds"], rel=1e-4)
    assert found["simulated"]["peaks"] == simulation.peaks
    assert found["simulated"]["room"] == simulation.room
    assert sum(found["simulated"]["critical_path"].values()) > 0
    assert found["files"] == {"trace": str(trace), "timeline": str(page)}
    assert json.loads(trace.read_text()) == json.loads(json.dumps(simulation.trace().chrome()))
    assert data_of(page.read_text())["lanes"]
    assert "# backward" in page.read_text()
    assert f"trace: {trace}" in printed("simulate", "--model", "m", "--trace", trace)


def test_figures(plans, tmp_path):
    found = json.loads(printed("simulate", "--model", "m", "--figures", tmp_path / "new", "--json"))
    names = "throughput", "traffic", "lanes"
    assert found["files"] == {name: str(tmp_path / "new" / f"{name}.svg") for name in names}
    assert all(Path(path).read_text().startswith("<?xml") for path in found["files"].values())


def test_half_layers_have_no_figures_beside_whole_ones(plans, tmp_path):
    text = printed("simulate", "--model", "m", "--schedule", "single", "--figures", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lanes.svg"]
    assert "What to know:\n  the horizontal order is half as fast" in text


@pytest.mark.parametrize(
    ("flag", "name", "error"),
    [
        ("--html", "no/step.html", "FileNotFoundError"),
        ("--trace", ".", "IsADirectoryError"),
        ("--figures", "file", "FileExistsError"),
    ],
)
def test_what_cannot_be_written_is_refused_before_it_is_planned(flag, name, error, plans, tmp_path):
    (tmp_path / "file").touch()
    result = run("simulate", "--model", "m", flag, tmp_path / name)
    assert (result.exit_code, result.stdout, plans) == (5, "", [])
    assert result.stderr.startswith(f"{error}: ")


def test_a_file_is_written_where_a_link_leads_and_stays_where_nothing_is_planned(plans, tmp_path):
    link, old = tmp_path / "link", tmp_path / "old"
    link.symlink_to(tmp_path / "page.html")
    old.write_text("before")
    assert run("simulate", "--model", "m", "--html", link, "--trace", old, "--alpha", 2).exit_code == 2
    assert (link.is_symlink(), link.exists(), old.read_text()) == (True, False, "before")
    printed("simulate", "--model", "m", "--html", link)
    assert data_of((tmp_path / "page.html").read_text())["lanes"]


# probe ----------------------------------------------------------------------------------------------------------------


def test_every_figure_has_a_row_with_its_source():
    laptop = Profile.load(SHIPPED / "laptop.json")
    _, *rows = (re.split(" {2,}", line) for line in profile_table(laptop).splitlines())
    names = {name.partition(" ")[0] for name, *_ in rows}
    assert names == {name.removesuffix("_per_second") for name in laptop.as_dict()} - {"format", "sources"}
    assert ["host_nbytes", figure("host_nbytes", laptop.host_nbytes), laptop.sources["host_nbytes"]] in rows
    assert {"matmul_flops fp32", "matmul_flops bf16"} <= {name for name, *_ in rows}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("host_nbytes", 2**34, "16.0 GiB"),
        ("device_nbytes", 0, "-"),
        ("ssd_read_mixed_bytes_per_second", 1.5e9, "1.5 GB/s"),
        ("matmul_flops_per_second", 312e12, "312 TFLOP/s"),
        ("update_elements_per_second", 0.6549e9, "0.655 billion/s"),
        ("op_seconds", 12e-6, "12 µs"),
        ("compute_mixed_speed", 0.63649, "0.636"),
        ("num_ranks", 4, "4"),
        ("name", "laptop", "laptop"),
    ],
)
def test_units(name, value, text):
    assert figure(name, value) == text


def test_the_probe(monkeypatch, tmp_path):
    asked = []

    def found(machine, storage, *, refresh, ranks):
        asked.append((machine, storage, refresh, ranks))
        return Profile.load(SHIPPED / "laptop.json")

    monkeypatch.setattr(machines, "profile", found)
    assert "matmul_flops fp32" in printed("probe", "--storage", tmp_path, "--storage", "/b")
    saved, times = tmp_path / "mine.json", tmp_path / "mine.json.code"
    times.write_text("of code on the machine that it was")
    shown = json.loads(printed("probe", "--refresh", "--json", "--output", saved))
    assert not times.exists()
    assert shown == Profile.load(saved).as_dict()
    assert asked == [(None, [tmp_path, Path("/b")], False, None), (None, None, True, None)]


@pytest.mark.parametrize("name", ["mine.json", "mine.json/below"])
def test_the_probe_of_a_file(monkeypatch, tmp_path, name):
    """Also where a drive that has been measured has it."""
    (saved := tmp_path / "mine.json").write_text((SHIPPED / "laptop.json").read_text())
    monkeypatch.setattr(machines, "remembered", lambda *_: saved)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    result = run("probe", "--storage", tmp_path / name)
    assert (result.exit_code, result.stdout) == (5, "")
    assert "Not a directory; storage= has to be a directory" in result.stderr
