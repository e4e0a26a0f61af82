from __future__ import annotations

import ast
import inspect
import pickle
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from gs_compile.errors import OptionError
from gs_compile.machine import parse_bytes
from gs_compile.options import Expert, Options, Ratios

NO_STORAGE = ((), 0, False, b"", {}, [], "", "/a\0")
KNOWN = (
    "micro_batch_size, outputs, storage, host_memory, device_memory, machine, precision, frozen, frozen_skip, group, "
    "mesh, accumulate, deterministic, durability, resume, progress, report, status, expert, mode"
)
KNOWN_EXPERT = (
    "schedule, compiler, snake, alpha, recompute, ratios, clip, separate_device, masters, threads, piece_tokens, "
    "layer_tokens, trace"
)
ENTRY = r"^(\w[\w, ]*): (.*?)(?=^\w[\w, ]*: |\n\n|\Z)"
ROW = r"^\| (`.*?`) \| (.*?) \| (.*) \|$"
TABLES = (Path(__file__).parents[1] / "docs" / "options.md").read_text().partition("\n## ")[0]


@pytest.mark.parametrize("kind", [Options, Expert, Ratios])
def test_the_page_of_options_begins_with_what_docstrings_say(kind):
    """What ``None: `` says at the end is the default of the table; where it says nothing, that is a value."""
    names = {each.name: each for each in fields(kind) if each.init and each.name != "expert"}
    entries = re.findall(ENTRY, inspect.getdoc(kind), re.MULTILINE | re.DOTALL)
    told = {entry: re.sub(r"\s+", " ", text).strip() for entry, text in entries if entry != "expert"}
    assert sorted(names) == sorted(name for entry in told for name in entry.split(", "))
    rows = [(_plain(name), default, _plain(text)) for name, default, text in re.findall(ROW, TABLES, re.MULTILINE)]
    table = {name: (default, text) for name, default, text in rows if name.partition(",")[0] in names}
    assert list(table) == list(told), "in the same order"
    for entry, words in told.items():
        (default, text), (meaning, unset, otherwise) = table[entry], _plain(words).partition(" None: ")
        assert text.startswith(meaning.rstrip("."))
        if unset:
            assert f"{_plain(default)}." == otherwise
            assert names[entry.partition(",")[0]].default in (None, MISSING)
        else:
            value = ast.literal_eval(default.strip("`"))
            assert getattr(kind(**{entry: value}), entry) == getattr(kind(), entry)


def _plain(text):
    """Without the marks of Markdown."""
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", text).replace("`", "")


def test_defaults_work():
    options = Options.of(None)
    assert options == Options()
    assert (options.micro_batch_size, options.outputs, options.mode) == (1, "all", None)
    assert options.expert == Expert(schedule="vertical", compiler="auto", snake=True)


def test_the_path_of_a_file_is_no_options():
    with pytest.raises(OptionError, match=r"options must be a dict, such as .*; got 'config\.json'"):
        Options.of("config.json")


def test_from_a_mapping():
    options = Options.of({"micro_batch_size": 4, "expert": {"snake": False}}, mode="max-autotune")
    assert options == Options(micro_batch_size=4, expert=Expert(snake=False), mode="max-autotune")
    assert Options.of(options) == options
    assert Options.of(options, "default").mode == "default"
    given = {"micro_batch_size": 4}
    Options.of(given, "default")
    assert given == {"micro_batch_size": 4}  # the user's own mapping


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(
            ({"micro_batch_size": size}, f"micro_batch_size must be a whole number of samples, 1 or more; got {size!r}")
            for size in (0, 2.5, None, True)
        ),
        ({"outputs": "logits"}, "outputs must be one of 'all', 'loss'; got 'logits'"),
        (
            {"expert": {"schedule": "diagonal"}},
            "expert.schedule must be one of 'vertical', 'horizontal', 'single', 'lifetime'; got 'diagonal'",
        ),
        (
            {"expert": {"ratios": {"gradient": 0.5}}},
            "expert.ratios.gradient is 0.5, but gradient sums leave the device between two micro-batches in the "
            "horizontal order, and between two backwards of a step, alone: leave it out, or choose "
            'expert.schedule="horizontal", or accumulate=True',
        ),
        ({"group": 3}, "group must be a torch.distributed.ProcessGroup that this rank is in; got 3"),
        ({"expert": {"compiler": "gcc"}}, "expert.compiler must be one of 'auto', 'inductor', 'eager'; got 'gcc'"),
        ({"micro_batchsize": 2}, "unknown option micro_batchsize; did you mean micro_batch_size?"),
        ({"zzz": False}, f"unknown option zzz; known: {KNOWN}"),
        ({"snake": False}, 'unknown option snake; did you mean {"expert": {"snake": ...}}?'),
        (
            {"max_grad_norm": 1.0},
            "unknown option max_grad_norm; the optimizer has it: gs_compile.AdamW(model.parameters(), max_grad_norm=...)",
        ),
        ({"expert.alpha": 0}, 'unknown option expert.alpha; did you mean {"expert": {"alpha": ...}}?'),
        (
            {"expert": {"parameter": 0}},
            'unknown option expert.parameter; did you mean {"expert": {"ratios": {"parameter": ...}}}?',
        ),
        ({"expert": {"host_memry": 1}}, 'unknown option expert.host_memry; did you mean {"host_memory": ...}?'),
        (
            {"expert": {"zzz": 1}},
            "unknown option expert.zzz; known: " + ", ".join(f"expert.{name}" for name in KNOWN_EXPERT.split(", ")),
        ),
        (
            {"expert": {"ratios": {"parameter": 0.5, "device_parameter": 0.75}}},
            "ratios.parameter is 0.5 and ratios.device_parameter is 0.75: together they are more than "
            "there is, so lower one of them",
        ),
        (
            {"expert": {"ratios": {"optimizer": 1.5}}},
            "ratios.optimizer must be a number from 0 to 1, or None; got 1.5",
        ),
        ({"expert": 3}, "expert must be a dict or gs_compile.Expert; got 3"),
        ({"expert": {"alpha": -0.1}}, "expert.alpha must be a number from 0 to 1, or None; got -0.1"),
        ({"expert": {"alpha": float("nan")}}, "expert.alpha must be a number from 0 to 1, or None; got nan"),
        ({"expert": {"threads": 0}}, "expert.threads must be a whole number, 1 or more, or None; got 0"),
        ({"expert": {"clip": "never"}}, "expert.clip must be one of 'delayed', 'speculative', None; got 'never'"),
        ({"expert": {"separate_device": 1}}, "expert.separate_device must be one of True, False; got 1"),
        ({"precision": "fp16"}, "precision must be one of 'model', 'bf16'; got 'fp16'"),
        *[({"storage": x}, f"storage must be a directory or a list of directories; got {x!r}") for x in NO_STORAGE],
        ({"storage": "$OF_NOBODY/a"}, "storage cannot be $OF_NOBODY/a: no environment variable of that name is set"),
        ({"storage": "s3://mine/a"}, "storage cannot be s3://mine/a: it is an address, and not a path on this machine"),
        ({"storage": 3}, "storage must be a directory or a list of directories; got 3"),
        ({"storage": [""]}, "storage must be a directory or a list of directories; got ['']"),
        ({"storage": {"/a": 1}}, "storage must be a directory or a list of directories; got {'/a': 1}"),
        ({"storage": ["/a", "/a/"]}, "storage names a directory twice; got ['/a', '/a/']"),
        (
            {"host_memory": "lots"},
            'host_memory must be a whole number of bytes, or text such as "6GiB", "512 MiB", "6 GB" or "80%"; got \'lots\'',
        ),
        ({"device_memory": "120%"}, "device_memory must be more than 0% and at most 100%; got '120%'"),
        *(
            ({"durability": x}, f'durability must be "off", "step" or a whole number of steps; got {x!r}')
            for x in (True, "never", -1, 0.5, None)
        ),
        ({"resume": True}, "resume must be one of 'auto', None; got True"),
        (
            {"resume": "auto"},
            'resume is "auto" and durability is "off": give durability="step" or a number of steps, too',
        ),
        ({7: 1}, f"unknown option 7; known: {KNOWN}"),
    ],
)
def test_refused_at_birth(given, message):
    with pytest.raises(OptionError) as caught:
        Options.of(given)
    assert caught.value.message == message


def test_options_stay_hashable_and_pickle():
    options = Options(storage=["/a", "/b"], host_memory="6GiB", expert={"ratios": {"parameter": 0.5}})
    assert {options: 1}[Options.of(options)] == 1
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize("cache", ["/scratch/me", None, "", "relative/is/ignored"])
def test_storage_by_default_is_in_the_users_cache(monkeypatch, cache):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if cache is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
    expected = Path("/scratch/me" if cache == "/scratch/me" else "/home/me/.cache") / "greedysnake"
    assert Options().storage == Options(storage=None).storage == (expected,)


def test_storage_is_a_tuple_of_absolute_paths(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert Options(storage="/a").storage == (Path("/a"),)
    assert Options(storage=["/a", Path("b"), "~/c"]).storage == (Path("/a"), tmp_path / "b", Path("/home/me/c"))
    monkeypatch.setenv("DRIVE", "~/drive")
    assert Options(storage=["$DRIVE/a", "/${DRIVE}"]).storage == (Path("/home/me/drive/a"), Path("/~/drive"))
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/away")
    found = Options(storage=["link/here", "link/../b", "../c"]).storage
    assert found == (tmp_path / "link/here", tmp_path / "far/b", tmp_path.parent / "c"), "commits name no '..'"
    with pytest.raises(OptionError, match=r"storage cannot be '/a\\nb': it has letters that cannot be printed"):
        Options(storage="/a\nb")


def test_storage_of_somebody_unknown():
    with pytest.raises(OptionError, match=r"storage cannot be ~nobody-of-this-name/x: .*; name another directory"):
        Options(storage="~nobody-of-this-name/x")


def test_budgets_become_bytes_and_percentages_wait():
    options = Options(host_memory="6 GiB", device_memory=" 80% ")
    assert (options.host_memory, options.device_memory) == (6 * 2**30, "80%")
    assert Options(host_memory=6 * 2**30) == Options(host_memory="6GiB")
    assert parse_bytes(options.device_memory, whole=1000) == 800


def test_durability_is_a_number_of_steps():
    assert [Options(durability=x).durability for x in ("off", "step", 0, 1, 7, False)] == [0, 1, 0, 1, 7, 0]
    assert Options.of(Options(durability="step", resume="auto")).resume == "auto"


def test_fractions_are_floats():
    expert = Expert(alpha=1, ratios={"checkpoint": 0})
    assert (expert.alpha, expert.ratios) == (1.0, Ratios(checkpoint=0.0))
    assert isinstance(expert.alpha, float)
    assert Expert(ratios=None).ratios == Ratios(checkpoint=None, parameter=None, optimizer=None)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (17, 17),
        ("6 GB", 6 * 10**9),
        ("512MiB", 2**29),
        ("1.5 kib", 1536),
        (" 2tib ", 2**41),
        ("0.5 %", 1),
        ("100%", 200),
    ],
)
def test_parse_bytes(text, nbytes):
    assert parse_bytes(text, whole=200) == nbytes


NO_BYTES = 'cap must be a whole number of bytes, or text such as "6GiB", "512 MiB", "6 GB" or "80%"; got '


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((value, f"{NO_BYTES}{value!r}") for value in ("6", True, 1.5, "-6GiB")),
        ("6G", "cap has an unknown unit; got '6G'; known: B, KB, KiB, MB, MiB, GB, GiB, TB, TiB, %"),
        ("0%", "cap must be more than 0% and at most 100%; got '0%'"),
        ("80%", "cap cannot be a percentage here; got '80%'"),
        (0, "cap must be at least one byte; got 0"),
        ("0 MB", "cap must be at least one byte; got '0 MB'"),
    ],
)
def test_parse_bytes_refuses(value, message):
    with pytest.raises(ValueError, match="cap ") as caught:
        parse_bytes(value, name="cap")
    assert (type(caught.value), caught.value.message) == (OptionError, message)
