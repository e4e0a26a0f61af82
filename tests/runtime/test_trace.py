from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from gs_compile.program.ir import LANES
from gs_compile.runtime.trace import Label, Total, Trace


def traced() -> Trace:
    trace = Trace(events=True)
    trace.add(Label("ssd_read", "load(w1)", 400, "parameter", "forward 1"), 11.0, 13.0)
    trace.add(Label("compute", "forward(x0_0)", stage="forward 0"), 10.0, 12.0)
    trace.add(Label("compute", "forward(x1_0)", stage="forward 1"), 13.0, 14.0)
    trace.add(Label("ssd_read", "load(s1)", 100, "state", "forward 1"), 12.0, 12.5)
    return trace


def test_totals():
    totals = traced().totals()
    assert list(totals) == ["compute", "ssd_read"]
    assert totals["compute"] == Total(3.0)
    assert totals["ssd_read"] == Total(2.5, 500, {"parameter": 400, "state": 100})


def test_totals_are_a_copy_and_need_no_events():
    trace = Trace()
    trace.add(Label("h2d", "upload(w1)", 8, "parameter"), 1.0, 2.0)
    totals = trace.totals()
    trace.add(Label("h2d", "upload(w2)", 8, "parameter"), 2.0, 3.0)
    assert totals == {"h2d": Total(1.0, 8, {"parameter": 8})}
    trace.reset()
    assert trace.totals() == {}
    assert trace.events() == []


def test_chrome_format(tmp_path):
    traced().save(tmp_path / "trace.json")
    loaded = json.loads((tmp_path / "trace.json").read_text())
    assert set(loaded) == {"traceEvents", "displayTimeUnit"}
    complete = [event for event in loaded["traceEvents"] if event["ph"] == "X"]
    assert [event["ts"] for event in complete] == sorted(event["ts"] for event in complete)
    assert complete[1] == {
        "ph": "X",
        "name": "load(w1)",
        "cat": "ssd_read",
        "pid": 1,
        "tid": LANES.index("ssd_read"),
        "ts": 1e6,
        "dur": 2e6,
        "args": {"kind": "parameter", "stage": "forward 1", "bytes": 400},
    }


def test_chrome_rows_are_the_lanes_in_their_order():
    events = Trace(events=True).chrome()["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert tuple(names[tid] for tid in sorted(order, key=order.__getitem__)) == LANES
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["greedysnake"]


def test_any_thread_may_add():
    trace = Trace(events=True)

    def work(lane: str) -> None:
        for number in range(1000):
            trace.add(Label(lane, "op", 1, "x"), float(number), number + 0.5)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, ("compute", "compute", "cpu")))
    assert len(trace.events()) == 3000
    assert {lane: total.nbytes for lane, total in trace.totals().items()} == {"compute": 2000, "cpu": 1000}
