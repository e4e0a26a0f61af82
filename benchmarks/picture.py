"""Draw the step that README.md shows: lanes of a simulated step that fill as it runs.

    python -m benchmarks.picture    # docs/figures/step.svg

The model is five layers of Mistral 7B's size, the machine `a100`, and everything is on SSD, a third of each update
late. The picture has no background and its text is grey, so that it can be read on white and on black. Where someone
has asked for less motion it stands still.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from xml.sax.saxutils import escape

from transformers import AutoConfig

from benchmarks.common import FIGURES, ON_SSD, ROOT
from gs_compile.cli.report.draw import COLOURS, bars
from gs_compile.planner.plan import plan
from gs_compile.planner.simulate.simulator import Simulation
from gs_compile.program.ir import WORDS
from gs_compile.program.verbs import SIGNATURES

TARGET = FIGURES / "step.svg"
NUM_LAYERS, NUM_MICRO_BATCHES, MICRO_BATCH_SIZE, SEQUENCE = 5, 4, 24, 2048
LANES = {  # as the picture calls them
    "ssd_read": "SSD reads",
    "h2d": "host to GPU",
    "compute": "GPU computes",
    "d2h": "GPU to host",
    "cpu": "CPU updates",
    "ssd_write": "SSD writes",
}
LEFT, WIDTH, TOP, ROW, BAR = 104, 880, 44, 30, 22  # pixels
LOOP = 14  # seconds of a viewer
LABEL, NUMBER = 40, 7  # pixels of a layer's name, and of a micro-batch's number
NARROW = 0.6  # pixels; a bar is at least as wide, and nearer ones are drawn as one
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #7a828c }
.small { font-size: 10px }
.number { font-size: 10px; fill: #fff; text-anchor: middle }
.dim { opacity: .3 }
.now { stroke: #d55e00; stroke-width: 2 }
@media (prefers-reduced-motion: no-preference) { .done { clip-path: url(#done) } }
@media (prefers-reduced-motion: reduce) { .now { display: none } }
"""


def simulated() -> Simulation:
    """The step."""
    config = AutoConfig.from_pretrained(ROOT / "benchmarks" / "models" / "mistral-7b.json")
    config.num_hidden_layers = NUM_LAYERS
    return plan(
        config,
        machine="a100",
        sequence=SEQUENCE,
        micro_batch_size=MICRO_BATCH_SIZE,
        num_micro_batches=NUM_MICRO_BATCHES,
        precision="bf16",
        recompute="all",
        alpha=1 / 3,
        ratios={**ON_SSD, "device_parameter": 0.0, "device_checkpoint": 0.0},
    ).simulation


def svg(simulation: Simulation) -> str:
    """The picture: bars pale, and again in full up to a line that goes from left to right."""
    height = TOP + ROW * len(LANES) + 34
    shapes = "\n".join(_bars(simulation))
    labels = "\n".join([*_stages(simulation), *_legend(height)])
    names = "\n".join(
        f'<text x="0" y="{TOP + ROW * row + BAR / 2 + 4:g}">{name}</text>' for row, name in enumerate(LANES.values())
    )
    moves = f'dur="{LOOP}s" repeatCount="indefinite"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="a step">
<title>A step, layer by layer: what the drives, the links, the GPU and the CPU do side by side</title>
<style>{STYLE}</style>
<clipPath id="done"><rect x="{LEFT}" y="0" width="{WIDTH - LEFT}" height="{height}">
<animate attributeName="width" from="0" to="{WIDTH - LEFT}" {moves}/></rect></clipPath>
<defs><g id="bars">
{shapes}
</g></defs>
<use href="#bars" class="dim"/>
<g class="done"><use href="#bars"/></g>
{names}
{labels}
<line class="now" x1="{LEFT}" x2="{LEFT}" y1="{TOP - 6}" y2="{TOP + ROW * len(LANES) - 2}">
<animateTransform attributeName="transform" type="translate" from="0 0" to="{WIDTH - LEFT} 0" {moves}/></line>
</svg>
"""


def _bars(simulation: Simulation) -> Iterator[str]:
    """A path for each lane and kind, and the numbers of micro-batches on what computes."""
    for (lane, kind), pieces in bars(simulation, 0.0, simulation.seconds).items():
        top, seconds = TOP + ROW * list(LANES).index(lane), simulation.seconds
        edges = (
            (_x(simulation, max(start, 0.0)), _x(simulation, min(start + size, seconds))) for start, size in pieces
        )
        path = "".join(f"M{left:.1f} {top}h{right - left:.1f}v{BAR}H{left:.1f}z" for left, right in _merged(edges))
        yield f'<path fill="{COLOURS[kind]}" d="{path}"/>'
    for span in simulation.spans:
        left, right = _x(simulation, span.start_seconds), _x(simulation, span.stop_seconds)
        if span.lane == "compute" and span.op.verb in SIGNATURES and right - left > NUMBER:
            y = TOP + ROW * list(LANES).index("compute") + BAR / 2 + 4
            yield f'<text class="number" x="{(left + right) / 2:.1f}" y="{y:g}">{span.op.micro_batch}</text>'


def _merged(edges: Iterator[tuple[float, float]]) -> list[tuple[float, float]]:
    """Bars with a gap of a pixel after wide ones; those that would be one line are one bar."""
    found: list[tuple[float, float]] = []
    for left, right in sorted(edges):
        if found and left - found[-1][1] < NARROW and right - left < 4:
            found[-1] = (found[-1][0], max(right, found[-1][1]))
        else:
            found.append((left, max(right - (right - left > 4), left + NARROW)))
    return found


def _stages(simulation: Simulation) -> Iterator[str]:
    """The phases and the layers above the bars, each from its first computation on."""
    yield f'<text x="0" y="14">one step,</text><text x="0" y="32">{NUM_MICRO_BATCHES} micro-batches</text>'
    codes = [span for span in simulation.spans if span.lane == "compute" and span.op.verb in SIGNATURES]
    starts = [next(spans) for _, spans in groupby(codes, key=lambda span: span.op.stage)]
    for _, phase in groupby(starts, key=lambda span: span.op.stage.phase):
        first = next(phase)
        yield f'<text x="{_x(simulation, first.start_seconds):.1f}" y="14">{first.op.stage.phase}</text>'
    for span, after in pairwise([*starts, codes[-1]]):
        x, unit = _x(simulation, span.start_seconds), span.op.stage.unit
        if isinstance(unit, int):
            label = f"layer {unit}" if _x(simulation, after.start_seconds) - x > LABEL else str(unit)
            yield f'<text class="small" x="{x:.1f}" y="32">{label}</text>'


def _legend(height: int) -> Iterator[str]:
    x = LEFT
    for kind in ("w", "x", "dx", "s", "update", "forward", "backward"):
        word = WORDS.get(kind, kind)
        yield f'<rect x="{x}" y="{height - 18}" width="10" height="10" fill="{COLOURS[kind]}"/>'
        yield f'<text class="small" x="{x + 14}" y="{height - 9}">{escape(word)}</text>'
        x += 30 + 6 * len(word)


def _x(simulation: Simulation, seconds: float) -> float:
    return LEFT + (WIDTH - LEFT) * seconds / simulation.seconds


if __name__ == "__main__":
    TARGET.write_text(svg(simulated()))
    print(f"{TARGET}: {TARGET.stat().st_size / 1024:.0f} KiB")
