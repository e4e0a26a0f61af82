from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gs_compile.errors import ProfileError
from gs_compile.planner.measure.profile import FORMAT, MIXED, Profile

LAPTOP = {
    "format": FORMAT,
    "name": "laptop",
    "device": "cpu",
    "host_nbytes": 8 << 30,
    "ssd_nbytes": 1 << 40,
    "matmul_flops_per_second": {"fp32": 1e11},
    "memory_bytes_per_second": 2e10,
    "ssd_read_bytes_per_second": 2e9,
    "ssd_write_bytes_per_second": 1e9,
    "ssd_read_mixed_bytes_per_second": 1e9,
    "ssd_write_mixed_bytes_per_second": 5e8,
    "update_elements_per_second": 1e9,
    "update_mixed_elements_per_second": 4e8,
}
SERVER = LAPTOP | {
    "name": "server",
    "device": "cuda",
    "device_nbytes": 24 << 30,
    "h2d_bytes_per_second": 24e9,
    "d2h_bytes_per_second": 20e9,
    "h2d_mixed_bytes_per_second": 12e9,
    "d2h_mixed_bytes_per_second": 20e9,
}
REQUIRED = [name for name in LAPTOP if name != "format"]
RATES = [name for name in LAPTOP if name.endswith("_per_second") and name != "matmul_flops_per_second"]
NBYTES = ["host_nbytes", "ssd_nbytes", "num_ranks"]


def refusal(given) -> str:
    with pytest.raises(ProfileError) as caught:
        Profile.of(given)
    return caught.value.message


def without(given, *names):
    return {name: value for name, value in given.items() if name not in names}


@given(st.floats(1e-3, 1e15), st.floats(0.01, 1), st.integers(1, 2**60))
def test_a_file_keeps_every_digit(rate, share, nbytes):
    given = LAPTOP | {"update_elements_per_second": rate, "update_mixed_elements_per_second": rate * share}
    profile = Profile.of(given | {"host_nbytes": nbytes, "compute_mixed_speed": share})
    assert Profile.of(json.loads(json.dumps(profile.as_dict()))) == profile


def test_rates_without_a_bound_are_not_written():
    assert not [name for name in Profile.of(LAPTOP).as_dict() if name.startswith(("h2d", "d2h"))]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_entry_is_named(name):
    assert refusal(without(LAPTOP, name)) == f"{name} is missing"


@pytest.mark.parametrize("name", [name for name in SERVER if name.startswith(("h2d", "d2h"))])
def test_a_cuda_device_has_a_link(name):
    others = {mixed: 1e9 for mixed in MIXED.values() if mixed.startswith(name[:3]) and mixed != name}
    assert refusal(without(SERVER | others, name)).startswith(f"{name} is missing: a cuda device has a link")


def test_a_cuda_device_has_memory():
    assert refusal(without(SERVER, "device_nbytes")).startswith("device_nbytes is missing: a cuda device has memory")


IMPOSSIBLE = {
    **{name: [0, -1, math.nan, math.inf, True, "fast", None, [1e9]] for name in RATES},
    **{name: [0, -1, 1.5, math.nan, True, "8GiB", None] for name in NBYTES},
    "name": ["", 3],
    "device": ["tpu"],
    "device_nbytes": [-1],
    "ssd_rated_nbytes": [1.5],
    "compute_mixed_speed": [0, 1.1],
    **{f"compute_{lane}_speed": [0, 1.1] for lane in ("read", "write")},
    **{f"{lane}_compute_speed": [0, 1.1] for lane in ("read", "write")},
    "op_seconds": [-1e-6, 1.0],
    "request_seconds": [math.nan],
    "h2d_bytes_per_second": [0],
    "matmul_flops_per_second": [{}, 1e11, {"fp8": 1e11}, {"fp32": math.inf}, {"fp32": 0}],
    "sources": ["the internet", {"host_nbytes": 3}],
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_value_is_named(name):
    for value in IMPOSSIBLE[name]:
        assert refusal(LAPTOP | {name: value}) == f"{name} is {value!r}, which is not possible"


@pytest.mark.parametrize(("alone", "mixed"), MIXED.items())
def test_nothing_gets_faster_beside_another(alone, mixed):
    message = refusal(SERVER | {alone: 1e9, mixed: 2e9})
    assert message == (f"{mixed} is 2e+09, more than {alone}, 1e+09: a rate cannot be higher while another lane works")


def test_an_unknown_entry_is_named_with_one_that_is_close():
    assert refusal(LAPTOP | {"host_bytes": 1}) == "unknown entry host_bytes; did you mean host_nbytes?"
    assert refusal(LAPTOP | {"colour": "grey"}) == "unknown entry colour"


@pytest.mark.parametrize(
    ("version", "hint"),
    [
        (FORMAT + 1, "it is newer than this release reads: update greedysnake"),
        (0, "probe the machine again"),
        (None, "probe the machine again"),
        ("1", "probe the machine again"),
    ],
)
def test_another_format_is_refused(version, hint):
    assert refusal(LAPTOP | {"format": version}) == f"format is {version!r}, not {FORMAT}; {hint}"


def test_a_newer_format_is_refused_before_its_new_entries():
    assert "newer" in refusal(LAPTOP | {"format": FORMAT + 1, "warp_factor": 9})


def test_a_profile_is_an_object():
    assert refusal([1]) == "a machine profile is a JSON object"


def test_an_error_names_the_file(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(without(LAPTOP, "ssd_nbytes")))
    with pytest.raises(ProfileError, match=r"machine\.json: ssd_nbytes is missing \[profile\]$"):
        Profile.load(path)


@pytest.mark.parametrize("content", ["{", "", b"\xff\xfe\x00", "[" * 100_000])
def test_what_is_not_json_is_refused(tmp_path, content):
    path = tmp_path / "machine.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ProfileError, match="no machine profile can be read there"):
        Profile.load(path)


def test_speeds_are_those_of_lanes_that_disturb_each_other():
    beside = {
        "compute_read_speed": 0.9,
        "compute_write_speed": 0.7,
        "read_compute_speed": 0.8,
        "write_compute_speed": 0.6,
        "update_read_speed": 0.65,
        "update_write_speed": 0.55,
        "read_update_speed": 0.75,
        "write_update_speed": 0.35,
    }
    assert Profile.of(SERVER | {"compute_mixed_speed": 0.8} | beside).speeds() == {
        ("ssd_read", "ssd_write"): 0.5,
        ("ssd_write", "ssd_read"): 0.5,
        ("h2d", "d2h"): 0.5,
        ("cpu", "compute"): 0.4,
        ("compute", "cpu"): 0.8,
        ("compute", "ssd_read"): 0.9,
        ("compute", "ssd_write"): 0.7,
        ("ssd_read", "compute"): 0.8,
        ("ssd_write", "compute"): 0.6,
        ("cpu", "ssd_read"): 0.65,
        ("cpu", "ssd_write"): 0.55,
        ("ssd_read", "cpu"): 0.75,
        ("ssd_write", "cpu"): 0.35,
    }
