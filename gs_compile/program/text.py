"""The program's second face: one operation a line, valid Python, and back.

    # gs_compile program 0.1   after snake   3 layers x 2 micro-batches
    # forward 1   micro-batches 1 0
    x2_1.device = forward(x1_1.device, w1.device)
    x2_0.device = forward(x1_0.device, w1.device)

`parse(str(program)) == program`, so a golden test is five lines of text and a bug report is a pasted program.
"""

from __future__ import annotations

import ast
import re

from gs_compile.errors import ProgramError
from gs_compile.program.ir import DRAIN, FILL, KINDS, TIERS, VERSION, Op, Program, Stage, Tier, Unit, Value, shifted
from gs_compile.program.verbs import SIGNATURES, VERBS

_TIERS: dict[str, Tier] = {tier: tier for tier in TIERS}
_HEADER = re.compile(
    r"# gs_compile program (\S+) +after (\S+) +(\d+) layers x (\d+) micro-batches(?: +peak(.*) bytes)?"
)
_STAGE = re.compile(r"# (fill|drain|(?:forward|backward) (?:e|h|\d+)(?: of \d+)?)( +micro-batches.*)?")
_FOLDED = re.compile(r"# (forward|backward) (\d+) \.\. (\d+)(?: of \d+)? +repeat \1 (\d+)( \d+)?")
_KINDS = "|".join(sorted(KINDS, key=len, reverse=True))  # "sharde" is of kind "shard", not "s"
_VALUE = re.compile(rf"({_KINDS})(?:(e|h|t|\d+)([a-z]*))?(?:_(\d+))?(?:\.({'|'.join(_TIERS)}))?(?:\[(\d+)\])?")


def parse(text: str) -> Program:
    """The program that `text` shows, folded or not: the inverse of `Program.text`.

    Indented or surrounded by blank lines, as pasted text is, it reads the same. Raises ProgramError with the line.
    """
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    header = _HEADER.fullmatch(lines[0][1]) if lines else None
    if not header:
        raise ProgramError("line 1: a program starts with: # gs_compile program 0.1   after vertical   3 layers x ...")
    version, made_by, num_layers, num_micro_batches, peaks = header.groups()
    if version != VERSION:
        raise ProgramError(f"line 1: a program of version {version}, and this GreedySnake reads version {VERSION}")
    stages: list[tuple[Stage, list[Op]]] = []
    for number, line in lines[1:]:
        try:
            _read_line(line, stages)
        except (ProgramError, SyntaxError) as error:
            reason = error.message if isinstance(error, ProgramError) else error
            raise ProgramError(f"line {number}: {line}: {reason}") from error
    planned = tuple((tier, int(nbytes)) for tier, nbytes in (peak.split() for peak in (peaks or "").split(",") if peak))
    ops = tuple(op for _, ops in stages for op in ops)
    return Program(ops, int(num_layers), int(num_micro_batches), made_by, planned)


def parse_value(name: str) -> Value:
    """The value a name such as ``x1_0.device`` stands for."""
    match = _VALUE.fullmatch(name)
    if not match:
        raise ProgramError(f"{name} is not the name of a value")
    kind, unit, part, micro_batch, tier, piece = match.groups()
    return Value(
        kind,
        _unit(unit) if unit else None,
        int(micro_batch) if micro_batch else None,
        _TIERS.get(tier),
        part or "",
        int(piece) if piece else None,
    )


def timetable(program: Program) -> str:
    """The operations side by side: one row a compute operation, one column a lane.

    The compute column has one operation; the others have what is issued after it and before the next one.
    """
    others = list(dict.fromkeys(op.lane for op in program.ops if op.lane != "compute"))
    rows = [["stage", "compute", *others]]
    for op in program.ops:
        if op.lane == "compute" or len(rows) == 1:
            rows.append([str(op.stage), "", *("" for _ in others)])
        row, column = rows[-1], rows[0].index(op.lane)
        row[column] += ("; " if row[column] else "") + _short(op)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in padded) + "\n"


def _short(op: Op) -> str:
    if op.lane == "compute":
        return op.verb if op.micro_batch is None else f"{op.verb} {op.stage.unit}_{op.micro_batch}"
    return " ".join([op.verb, *(value.name for value in op.results or op.reads)])


def _read_line(line: str, stages: list[tuple[Stage, list[Op]]]) -> None:
    """Add what one line says: a stage, a run of folded stages, or an operation."""
    if match := _FOLDED.fullmatch(line):
        _, first, last, *models = match.groups()
        step, period = (1 if int(last) >= int(first) else -1), sum(model is not None for model in models)
        if len(stages) < period:
            raise ProgramError("there is nothing before it to repeat")
        for _ in range(abs(int(last) - int(first)) + 1):
            stage, moved = shifted(*stages[-period], step * period)
            stages.append((stage, list(moved)))
    elif match := _STAGE.fullmatch(line):
        stages.append((_stage(match[1]), []))
    elif not stages:
        raise ProgramError("an operation before the first stage heading")
    else:
        stage, ops = stages[-1]
        ops.append(_parse_op(line, stage))


def _stage(name: str) -> Stage:
    match name.split():
        case [("forward" | "backward") as phase, unit, *of]:
            return Stage("forward" if phase == "forward" else "backward", _unit(unit), int(of[1]) if of else None)
        case _:
            return FILL if name == "fill" else DRAIN


def _unit(text: str) -> Unit:
    return "e" if text == "e" else "h" if text == "h" else "t" if text == "t" else int(text)


def _parse_op(line: str, stage: Stage) -> Op:
    match ast.parse(line).body:
        case [ast.Assign([target], ast.Call(ast.Name(verb), reads, keywords))]:
            results = _values(target)
        case [ast.Expr(ast.Call(ast.Name(verb), reads, keywords))]:
            results = ()
        case _:
            raise ProgramError("not of the form: results = verb(reads, into=...)")
    if verb not in VERBS:
        raise ProgramError(f"no verb is called {verb}")
    if [keyword.arg for keyword in keywords] not in ([], ["into"]):
        raise ProgramError("the only keyword is into=")
    values = tuple(value for node in reads for value in _values(node))
    into = _values(keywords[0].value) if keywords else ()
    micro_batches = (value.micro_batch for value in values if value.micro_batch is not None)
    return Op(verb, values, stage, results, into, next(micro_batches, None) if verb in SIGNATURES else None)


def _values(node: ast.expr) -> tuple[Value, ...]:
    nodes = node.elts if isinstance(node, ast.Tuple) else [node]
    return tuple(parse_value(ast.unparse(element)) for element in nodes)
