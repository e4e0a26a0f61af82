"""Texts that may be in the place of a manifest: each a change of a sound one that no run makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from stored_run import name_of, stored_run

from gs_compile.runtime.storage.manifest import NAME, encoded

SOUND = encoded(stored_run(Path("/storage/greedysnake-run"), Path("/other/greedysnake-run"), on_disk=False))
FREE = ("versions", "groups", "random", "states", "user", "plan")  # what a run puts there is its own
BIG = 1 << 19


def change(*pairs):
    """The text of the manifest with entries changed: each path, as "parts.0.nbytes", and its new value, or a function
    of the old one.
    """
    made = json.loads(SOUND)
    for path, value in zip(pairs[::2], pairs[1::2], strict=True):
        inner, last = place(made, path)
        inner[last] = value(inner[last]) if callable(value) else value
    return json.dumps(made).encode()


def without(path):
    made = json.loads(SOUND)
    inner, last = place(made, path)
    del inner[last]
    return json.dumps(made).encode()


def place(made, path):
    *way, last = [int(word) if word.isdigit() else word for word in path.split(".")]
    for word in way:
        made = made[word]
    return made, last


def put(old, new):
    assert old in SOUND, old
    return SOUND.replace(old, new, 1)


def twice(entries):
    return [*entries, entries[0]]


PARAMETER = b'{"name":"p%d","unit":"e","offset":0,"shape":[0],"trained":false}'
TEXTS: dict[str, bytes | Callable[[], bytes]] = {  # large ones are made when they are asked for
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "an empty object": b"{}",
    "a number": b"7",
    "cut in the middle": SOUND[: len(SOUND) // 2],
    "cut at the end": SOUND[:-1],
    "more after it": SOUND + b"{}",
    "zeros": bytes(4096),
    "invalid UTF-8": put(b'"note":"', b'"note":"\xff\xfe'),
    "UTF-16": SOUND.decode().encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + SOUND,
    "half a surrogate": put(b"AdamW", b"\\ud800"),
    "a pickle": b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94",
    "deep lists": lambda: put(b'"sample":17', b'"sample":' + b"[" * 100_000 + b"]" * 100_000),
    "deep objects": lambda: put(b'"sample":17', b'"sample":' + b'{"a":' * 50_000 + b"0" + b"}" * 50_000),
    "too many lists": lambda: b"[" * (60 << 20),
    "a million parameters": lambda: put(b'"parameters":[', b'"parameters":[' + b",".join(PARAMETER % n for n in range(10**6)) + b","),
    "many parameters of one name": lambda: put(b'"parameters":[', b'"parameters":[' + b",".join([PARAMETER % 1] * 100_000) + b","),
    "wrong parameters": lambda: put(b'"parameters":[', b'"parameters":[' + b"0," * BIG),
    "empty parts": lambda: put(b'"parts":[', b'"parts":[' + b"{}," * (BIG // 2)),
    "wrong dimensions": lambda: put(b'"shape":[64,100]', b'"shape":[' + b"1152921504606846976," * BIG + b"1]"),
    "many chunks": lambda: put(b'"chunks":[8192', b'"chunks":[' + b"0," * BIG + b"8192"),
    "many files": lambda: change(
        "parts.0.chunks", lambda chunks: [*chunks, *[0] * 50_000],
        "parts.0.files", lambda files: [*files, *[{**files[0], "nbytes": 0, "sums": "", "name": name_of(f"w{n}a")} for n in range(50_000)]],
        "rest.0.offset", 1,
    ),
    "many unknown fields": lambda: put(b'"world":1', b'"world":1,' + b",".join(b'"%d":0' % n for n in range(BIG)) + b',"x":0'),
    "many keys": lambda: put(b'"sample":17', b",".join(b'"%d":0' % n for n in range(20_000))),
    "a long unknown field": lambda: put(b'"world":1', b'"world":1,"' + b"a" * (60 << 20) + b'":0'),
    "a long run": lambda: put(b'"run":"', b'"run":"' + b"a" * (60 << 20)),
    "many escaped letters": lambda: put(b'"note":"', b'"note":"' + b"\\u4e00" * (9 << 20)),
    "a number of many digits": lambda: put(b'"step":3', b'"step":' + b"9" * 10_000_000),
    "many numbers of many digits": lambda: put(b'"step":3', b'"step":[' + b",".join([b"9" * 49] * BIG) + b"]"),
    "many fractions": lambda: put(b'"step":3', b'"step":[' + b",".join([b"1." + b"7" * 48] * BIG) + b"]"),
    "an entry twice": put(b'"step":3', b'"step":3,"step":4'),
    "an inner entry twice": put(b'"offset":0', b'"offset":0,"offset":1'),
    "an unknown field": put(b'"world":1', b'"world":1,"command":"rm"'),
    "an unknown inner field": put(b'"offset":0', b'"offset":0,"more":1'),
    "a newer format": change("format", 3),
    "an older format": change("format", 0),
    "a run of another form": change("run", "../../ab"),
    "a run of another form and nothing else": change(
        "run", "../../ab", "units", [], "parts", [], "parameters", [], "rest", []
    ),
    "a run in capitals": change("run", "0123ABCD"),
    "a rank that there is not": change("rank", 1),
    "no ranks": change("world", 0),
    "ranks without end": change("world", 1 << 40),
    "no units": change("units", []),
    "a unit twice": change("units", twice),
    "an empty unit twice": change("units", lambda units: [*units, *[{**units[0], "unit": 5, "groups": []}] * 2]),
    "a unit of another name": change("units.1.unit", "x"),
    "a unit below the first": change("units.1.unit", -1),
    "a unit far above": change("units.1.unit", 1 << 40),
    "a dtype of no torch": change("units.1.dtype", "float4"),
    "a dtype that runs code": change("units.1.dtype", "load"),
    "a dtype of whole numbers": change("units.0.dtype", "int32"),
    "a dtype of another size": change("units.0.dtype", "bfloat16"),
    "an element of no bytes": change("units.0.itemsize", 0),
    "gradients of another size": change("units.1.gradient_itemsize", 2),
    "states of another size": change("units.1.state_itemsize", 13),
    "states in 8 bits that are cut within a block": change(
        *("units.1.state", ["float32", "int8", "uint8"], "units.1.state_itemsize", 6.03125),
        *("units.1.groups.0.w.0.stop", 4000, "units.1.groups.0.s.0.stop", 4000),
        *("units.1.groups.1.w.0.start", 4000, "units.1.groups.1.s.0.stop", 4192),
    ),
    "states of no size": change("units.1.state_itemsize", float("nan")),
    "states without end": change("units.1.state_itemsize", 1 << 50),
    "a master without states": change("units.0.has_master", True),
    "a state of no torch": change("units.1.state.1", "load"),
    "a state of whole numbers": change("units.1.state.1", "int32"),
    "a state too many": change("units.1.state", lambda state: [*state, "float32"]),
    "halves of masters that are whole": change("units.1.state.0", "int16", "units.1.state_itemsize", 10),
    "states too few": change("parameters.1.components", ["momentum_buffer"], "parameters.2.components", ["momentum_buffer"]),
    "second moments that begin among the first ones": change("parameters.1.second", 2048, "parameters.2.second", 2048),
    "second moments within a quantum": change("parameters.2.second", 100),
    "second moments of another parameter": change("parameters.1.second", 8192, "parameters.2.second", 8192),
    "second moments of what is frozen": change("parameters.0.second", 8192),
    "a gap between parts": change("units.1.groups.1.w.0.start", 4097),
    "a gap between parts that are large enough": change(
        "units.1.groups.1.w.0.start", 4097, "units.1.groups.1.w.0.stop", 8193
    ),
    "parts that overlap": change("units.1.groups.1.w.0.start", 4095),
    "a part that ends before it begins": change("units.1.groups.1.w.0.stop", 4000),
    "a part that ends far away": change("units.1.groups.1.w.0.stop", 1 << 59),
    "a gap in the states": change("units.1.groups.0.s.0.start", 1),
    "states beyond the group": change("units.1.groups.0.s.0.stop", 4097),
    "states of what is frozen": change("units.0.groups.0.s", [{"letter": "a", "tier": "ssd", "start": 0, "stop": 8192}]),
    "a trained group without states": change("units.1.groups.0.s", []),
    "a letter twice": change("units.1.groups.1.w.0.letter", "a"),
    "a group twice": change("units.1.groups.1.letter", "a"),
    "a group that is a path": change("units.1.groups.1.letter", "/"),
    "a letter that is a path": change("units.1.groups.1.w.0.letter", "/"),
    "another tier": change("units.1.groups.1.w.0.tier", "tape"),
    "another time": change("units.1.groups.1.when", "sometimes"),
    "no parts": change("parts", []),
    "a part too few": change("parts", lambda parts: parts[1:]),
    "a part twice": change("parts", twice),
    "a part twice in other files": change(
        "parts", lambda parts: [*parts, {**parts[0], "files": [{**each, "name": name_of("wec")} for each in parts[0]["files"]]}]
    ),
    "a part too many": change(
        "parts", lambda parts: [*parts, {**parts[0], "value": "w9a", "files": [{**each, "name": name_of("wec")} for each in parts[0]["files"]]}]
    ),
    "a part of no unit": change("parts.0.value", "w9a"),
    "a part that is a path": change("parts.0.value", "../w"),
    "a part that is too small": change("parts.0.nbytes", 32764),
    "a part of no bytes": change("parts.0.nbytes", 0),
    "a part larger than its rows": change("parts.0.nbytes", 1 << 40),
    "a part as large as numbers go": change("parts.0.nbytes", (1 << 63) - 1),
    "no rows": change("parts.0.num_rows", 0),
    "rows without end": change("parts.0.num_rows", 1 << 61),
    "chunks that are no pages": change("parts.0.chunks", [8191, 8193]),
    "chunks of nothing": change("parts.0.chunks", [0, 0]),
    "no chunks": change("parts.0.chunks", []),
    "a chunk below nothing": change("parts.0.chunks.0", -8192),
    "a chunk too few": change("parts.0.chunks", [16384]),
    "no files": change("parts.0.files", []),
    "a file twice": change("parts.1.files.0.name", name_of("wea")),
    "a file of two parts": change("parts.1.files", lambda _: json.loads(SOUND)["parts"][0]["files"]),
    "a file that is too short": change("parts.0.files.0.nbytes", 4096),
    "a file that is too long": change("parts.0.files.0.nbytes", 1 << 50),
    **{
        f"a file called {name!r}": change("parts.0.files.0.name", name)
        for name in ("", "..", "../../etc/passwd", "/etc/passwd", ".lock", NAME, "a/b", name_of("wea") + "\0",
                     name_of("wea") + "\n", name_of("wea", run="ffffffff"), "w0-a", "x" * 300)
    },
    **{
        f"a folder called {folder[:40]!r}": change("parts.0.files.0.folder", folder)
        for folder in ("", "greedysnake-run", "/etc", "/", "/storage/../etc/greedysnake-run", "//storage/./greedysnake-run",
                       "/storage/greedysnake-run/..", "/sto\nrage/greedysnake-run", "/sto\0rage/greedysnake-run",
                       "/storage/greedysnake-run-x", "/" + "a/" * 10_000_000 + "greedysnake-run")
    },
    "no sums": change("parts.0.files.0.sums", ""),
    "a sum too many": change("parts.0.files.0.sums", lambda sums: sums + "0" * 16),
    "sums cut short": change("parts.0.files.0.sums", lambda sums: sums[:-1]),
    "sums in capitals": change("parts.0.files.0.sums", lambda sums: "A" * len(sums)),
    "sums of other letters": change("parts.0.files.0.sums", lambda sums: "g" * len(sums)),
    "sums of other digits": change("parts.0.files.0.sums", lambda sums: "١" * len(sums)),
    "no step": without("step"),
    "a file without sums": without("parts.0.files.0.sums"),
    "a name twice": change("parameters.2.name", "layers.0.weight"),
    "parameters that overlap": change("parameters.2.offset", 6399),
    "a parameter beyond its unit": change("parameters.1.offset", 8192),
    "a parameter far beyond its unit": change("parameters.2.offset", 1 << 60),
    "a parameter of no unit": change("parameters.0.unit", 7),
    "a frozen parameter among trained": change("parameters.1.trained", False),
    "a trained parameter among frozen": change("parameters.0.trained", True),
    "a shape below nothing": change("parameters.1.shape", [-64, -100]),
    "a shape without end": change("parameters.1.shape", [1 << 60] * 60),
    "a shape of NaN": put(b'"shape":[64,100]', b'"shape":[NaN,100]'),
    "NaN bytes": put(b'"nbytes":32768', b'"nbytes":NaN'),
    "endless bytes": put(b'"nbytes":32768', b'"nbytes":Infinity'),
    "bytes as a fraction": put(b'"nbytes":32768', b'"nbytes":32768.0'),
    "bytes as a power": put(b'"nbytes":32768', b'"nbytes":3e4'),
    "a tensor of another dtype": change("rest.0.dtype", "object"),
    "a tensor beyond its part": change("rest.0.offset", 1),
    "tensors that overlap": change("rest", lambda rest: [*rest, {**rest[0], "name": "x", "offset": 4, "shape": [2]}]),
    "a tensor twice": change("rest", twice),
    "a tensor without end": change("rest.0.shape", [1 << 60] * 1000),
}  # fmt: skip


def text(kind: str) -> bytes:
    found = TEXTS[kind]
    return found() if callable(found) else found
