from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from gs_compile.errors import StorageFullError
from gs_compile.machine import usable_memory
from gs_compile.planner.measure import machines, probe_drive
from gs_compile.planner.measure import probe as probe_module
from gs_compile.planner.measure import rates as rates_module
from gs_compile.planner.measure.machines import Where, free_nbytes, num_ranks, probe
from gs_compile.planner.measure.probe import link_rates
from gs_compile.planner.measure.probe_drive import drive_rates, room_nbytes
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.measure.rates import Figure, at_once, medians
from gs_compile.runtime.lanes import Failure, Lane
from gs_compile.runtime.storage.grid import PAGE
from gs_compile.runtime.stream import Device
from gs_compile.runtime.trace import Trace

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    """Requests of one MiB: for tests of what surrounds the measurement."""
    monkeypatch.setattr(probe_drive, "REQUEST_NBYTES", 1 << 20)


@pytest.fixture
def given(monkeypatch):
    """Figures that are not measured."""
    rates = {f"ssd_{verb}_bytes_per_second": rate for verb, rate in DRIVE.items()} | {"request_seconds": 1e-4}
    for measured, found in (("drive_rates", rates), ("compute_rates", COMPUTE)):
        figures = {name: Figure(rate, "given") for name, rate in found.items()}
        monkeypatch.setattr(machines, measured, lambda *_, figures=figures: dict(figures))


DRIVE = {"read": 4e9, "write": 2e9, "read_mixed": 3e9, "write_mixed": 1e9}
COMPUTE = {
    "matmul_flops_per_second": {"fp32": 1e11},
    "memory_bytes_per_second": 2e10,
    "update_elements_per_second": 1e9,
    "update_mixed_elements_per_second": 4e8,
    "compute_mixed_speed": 0.9,
    "op_seconds": 1e-5,
}


# All of it -------------------------------------------------------------------------------------------------------------


def products() -> float:
    """Computation that takes a moment."""
    return float(torch.mm(torch.ones(64, 64), torch.ones(64, 64))[0, 0])


WORKS = {"compute": (None, products)}


def test_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(probe_drive, "REQUEST_NBYTES", 8 << 20)
    monkeypatch.setattr(probe_module, "NUM_ELEMENTS", 1 << 20)
    monkeypatch.setattr(probe_module, "HOST_SIZES", (64, 256))
    num_threads, state = threading.active_count(), torch.get_rng_state()
    found = probe([tmp_path], seconds=0.5, device=CPU)
    assert torch.equal(torch.get_rng_state(), state), "a run draws the same numbers where the figures are known"
    assert not list(tmp_path.iterdir())
    assert threading.active_count() == num_threads

    assert found.device == "cpu"
    assert not found.device_nbytes
    assert 0 < found.host_nbytes < usable_memory()
    assert found.ssd_nbytes > 0
    for rate in (found.ssd_read_bytes_per_second, found.ssd_write_bytes_per_second):
        assert 1e6 < rate < 1e12
    assert 1e6 < found.update_elements_per_second < 1e11
    assert 1e8 < found.memory_bytes_per_second < 1e13
    assert 1e8 < found.matmul_flops_per_second["fp32"] < 1e14
    assert found.matmul_flops_per_second.keys() == {"fp32", "bf16", "fp16"}
    assert 1e-7 < found.op_seconds < 1e-2
    assert 1e-7 < found.request_seconds < 0.5
    numbers = found.as_dict().keys() - {"format", "name", "device", "sources", "num_ranks"}
    assert found.sources.keys() == numbers - {"device_nbytes", "ssd_rated_nbytes"}
    assert found.sources["op_seconds"].startswith(f"measured {time.strftime('%Y-')}")
    found.save(tmp_path / "machine.json")
    assert Profile.load(tmp_path / "machine.json") == found


def test_the_drive_moves_memory_that_is_pinned_for_the_device(small, tmp_path):
    pinned, device = [], Device(CPU)
    device.has_own_memory = True
    device.pin = lambda address, nbytes: pinned.append(nbytes)
    drive_rates([tmp_path], 0.1, WORKS, device)
    assert [pinned.count(nbytes) for nbytes in (4096, 1 << 20)] == [1, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_this_machine_with_a_gpu(tmp_path):
    found = probe([tmp_path], seconds=2.0)
    assert found.device == "cuda"
    assert 1 << 30 < found.device_nbytes < torch.cuda.mem_get_info()[1]
    assert 1e9 < found.h2d_mixed_bytes_per_second <= found.h2d_bytes_per_second < 1e12
    assert 1e9 < found.d2h_mixed_bytes_per_second <= found.d2h_bytes_per_second < 1e12
    assert found.matmul_flops_per_second["bf16"] > found.matmul_flops_per_second["fp32"] > 1e12
    assert "pinned" in found.sources["h2d_bytes_per_second"]
    before = torch.cuda.memory_allocated()
    assert len(link_rates(torch.device("cuda"), 0.5)) == 4
    assert torch.cuda.memory_allocated() == before


def test_a_link_that_is_pretended(monkeypatch):
    """The same without a device: copies within host memory, on lanes without streams."""
    monkeypatch.setattr(probe_module, "COPY_NBYTES", 1 << 20)
    num_threads = threading.active_count()
    figures = link_rates(CPU, 0.1)
    rates = {name: figure.value for name, figure in figures.items()}
    assert threading.active_count() == num_threads
    assert 0 < rates["h2d_mixed_bytes_per_second"] <= rates["h2d_bytes_per_second"]
    assert 0 < rates["d2h_mixed_bytes_per_second"] <= rates["d2h_bytes_per_second"]
    assert figures["d2h_bytes_per_second"].how == "copies of 1 MiB of pinned memory, up to 3 rounds"
    assert len(figures) == 4


def test_a_share_of_a_device_is_of_what_the_driver_the_allocator_and_the_model_can_give(tmp_path, monkeypatch):
    asked = []
    for name, found in (("get_memory_info", (1000, 4000)), ("memory_reserved", 700), ("memory_allocated", 200)):
        monkeypatch.setattr(torch.accelerator, name, lambda device, found=found: (asked.append(device), found)[1])
    where = Where(torch.device("cuda", 1), leaving_nbytes=100)
    assert free_nbytes([tmp_path], where)["device_nbytes"] == int(0.9 * (1000 + 700 - 200 + 100))
    assert set(asked) == {where.device}


# Other work ------------------------------------------------------------------------------------------------------------


def test_a_busy_machine_is_warned_of_and_an_idle_one_not(tmp_path, given, monkeypatch, caplog):
    for load, words in (
        (0.2, []),
        (900.0, ["this machine was busy in the last minute (load 900.0): measure it again"]),
    ):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        found = probe([tmp_path], device=CPU)
        assert [message.removesuffix(" when it is idle") for message in caplog.messages] == words
        assert f" at load {load}, " in found.sources["op_seconds"]


# Ranks -----------------------------------------------------------------------------------------------------------------


def test_ranks_share_memory_and_drives(tmp_path, given, monkeypatch):
    monkeypatch.setattr(machines, "available_memory", lambda: 1000)
    monkeypatch.setattr(machines, "room_nbytes", lambda storage: 1000)
    alone = probe([tmp_path], device=CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    shared = probe([tmp_path], device=CPU)
    assert alone.sources["host_nbytes"].startswith("80% of what was free on ")
    assert (alone.num_ranks, alone.host_nbytes, alone.ssd_nbytes) == (1, 800, 1000)
    assert (shared.num_ranks, shared.host_nbytes, shared.ssd_nbytes) == (4, 200, 250)
    assert shared.ssd_read_bytes_per_second == alone.ssd_read_bytes_per_second / 4
    assert shared.ssd_write_mixed_bytes_per_second == alone.ssd_write_mixed_bytes_per_second / 4
    assert shared.request_seconds == alone.request_seconds
    assert shared.update_elements_per_second == alone.update_elements_per_second


def test_the_number_of_ranks(monkeypatch):
    for value, count in {"": 1, "many": 1, "0": 1, "3": 3}.items():
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
        assert num_ranks() == count


def test_a_full_machine_still_has_a_byte(tmp_path, monkeypatch):
    for name in ("available_memory", "room_nbytes"):
        monkeypatch.setattr(machines, name, lambda *_: 0)
    assert free_nbytes([tmp_path], Where(CPU)) == {"host_nbytes": 1, "ssd_nbytes": 1}


# Drives ----------------------------------------------------------------------------------------------------------------


def test_what_was_there_stays_and_nothing_else_is_left(tmp_path, small):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("words")
    found = drive_rates([tmp_path / "mine", tmp_path / "one" / "a", tmp_path / "one" / "b"], 0.1, WORKS)
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["mine", "mine/thesis.txt"]
    rates = {name: figure.value for name, figure in found.items()}
    assert rates["ssd_read_mixed_bytes_per_second"] <= rates["ssd_read_bytes_per_second"]
    assert rates["ssd_write_mixed_bytes_per_second"] <= rates["ssd_write_bytes_per_second"]


@pytest.mark.parametrize(
    ("first_byte", "small_seconds", "expected"), [(1e-4, 6e-3, 2e-3), (3e-3, 6e-3, 3e-3), (1e-4, 1.8e-3, 1e-4)]
)
def test_a_request_costs_what_its_bytes_do_not(small, tmp_path, monkeypatch, first_byte, small_seconds, expected):
    """Of 1 MiB at 1 GiB/s, half of it beside computation; where noise hides it, the seconds to the first byte."""
    monkeypatch.setattr(probe_drive, "_read_seconds", lambda *_: first_byte)
    rates, alone = probe_drive._rates, float(1 << 30)
    beside = {("read",): alone, ("read", "compute"): alone / 2, ("small read", "compute"): (1 << 20) / small_seconds}
    monkeypatch.setattr(probe_drive, "_rates", lambda *given: rates(*given) | beside)
    found = drive_rates([tmp_path], 0.1, WORKS)
    assert found["request_seconds"].value == pytest.approx(expected, rel=0.03)


def test_a_drive_without_room_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(probe_drive, "free_storage", lambda folder: 4096)
    with pytest.raises(StorageFullError, match=r"4\.0 KiB are free: make room or choose another storage="):
        drive_rates([tmp_path], 0.1, WORKS)
    assert not list(tmp_path.iterdir())


def test_a_small_drive_is_measured_with_small_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(probe_drive, "free_storage", lambda folder: 64 << 20)
    figures = drive_rates([tmp_path], 0.1, WORKS)
    assert "requests of 1 MiB" in figures["ssd_read_bytes_per_second"].how


def test_filesystems_add_their_room_and_directories_of_one_share_it(tmp_path, monkeypatch):
    shm = Path("/dev/shm")
    monkeypatch.setattr(probe_drive, "free_storage", lambda folder: 100 if folder == shm else 1000)
    assert room_nbytes([tmp_path]) == room_nbytes([tmp_path / "a", tmp_path / "b"]) == 1000
    assert room_nbytes([tmp_path, shm]) == 1100


def test_the_update_is_measured_in_float32_whatever_the_default_dtype(monkeypatch):
    seen = []
    monkeypatch.setattr(probe_module.ADAMW.__class__, "update", lambda rule, *given: seen.extend(given[:2]))
    torch.set_default_dtype(torch.float64)
    try:
        probe_module._update(2048)()
    finally:
        torch.set_default_dtype(torch.float32)
    assert [each.dtype for each in seen] == [torch.float32] * 2
    assert not any(each.data_ptr() % PAGE for each in seen), "it is mapped, as a run's is: with huge pages"


# Rates -----------------------------------------------------------------------------------------------------------------


def test_works_go_on_side_by_side():
    lane, both, pieces = Lane("cpu", Failure(), Trace()), threading.Barrier(2), []

    def meeting():
        both.wait(60)  # for the other: neither ends where works go one after the other
        return 1.0

    def going_on():
        pieces.append(meeting() if not pieces else time.sleep(0.001) or 1.0)
        return 1.0

    def long():
        meeting()
        while len(pieces) < 4:  # whoever asks is never alone
            time.sleep(0.001)
        return 1.0

    assert at_once({None: long, lane: going_on}, 0.0).keys() == {None, lane}
    lane.close()


def test_a_lane_ends_where_the_asking_thread_fails():
    """As at Ctrl-C: it would go on for good, and whoever closes it wait for that."""
    lane = Lane("cpu", Failure(), Trace())
    with pytest.raises(ZeroDivisionError):
        at_once({None: lambda: 1 / 0, lane: lambda: time.sleep(0.001) or 1.0}, 0.0)
    lane.submit("behind it", int).wait()
    lane.close()


def test_a_round_that_is_disturbed_does_not_count(monkeypatch):
    monkeypatch.setattr(rates_module, "OVERRUN_SECONDS", 600.0)  # three rounds, however slow the machine is
    amounts = iter([10.0, 1e9, 10.0])
    (rates,) = medians([{None: lambda: time.sleep(0.01) or next(amounts)}], 0.0, 3)
    assert rates[None] < 1001


def test_long_pieces_leave_time_for_fewer_rounds(monkeypatch):
    monkeypatch.setattr(rates_module, "OVERRUN_SECONDS", 0.01)
    pieces = []
    medians([{None: lambda: time.sleep(0.02) or pieces.append(1) or 1.0}], 0.0, 50)
    assert len(pieces) == 1
