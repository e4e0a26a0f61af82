"""graph_breaks: where and why Dynamo did not capture a forward as one graph, and what to do about it.

Dynamo may break a graph, or give up a whole frame and compile the functions that it calls. Then the backend is called
for parts of the forward, and the reasons are found in Dynamo's records of its compilations. Dynamo also compiles a
frame anew for different arguments, up to a limit; after that the frame runs uncompiled.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from traceback import FrameSummary, walk_stack
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._dynamo.utils import counters, orig_code_map
from torch._dynamo.utils import get_compilation_metrics as get_compilation_metrics

from gs_compile.capture.frame_settings import compiled_frame, modules_in
from gs_compile.errors import ABSENT, GROUPED, CaptureError, GraphBreakError

_TORCH = str(Path(torch.__file__).parent)  # where torch's own code is
_TORCH_MODULES = f"{_TORCH}/nn/modules/"

# Dynamo's words if a size that depends on values decides what the code does, and if any value does.
_UNSIZED = ("Dynamic shape operator", "data-dependent expression")
_BRANCHES = ("Data-dependent branching", "generic_jump Tensor")
TRACE_ANEW = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)  # makes a frame's next call trace again
RAISES = "Observed exception"  # Dynamo's reason if the forward raises and does not catch
_BACKWARD_HOOKS = "Module-level backwards hooks"  # Dynamo's reason for a break at these

_LIGER = (
    "leave the kernels of Liger out that stand in layers (rope=False, rms_norm=False, swiglu=False and their like), as "
    "inductor fuses these operations itself; its losses may stay"
)
_SIZES_OF_IMAGES = r"transformers/.*(vision_utils\.py|grid_thw|real_images)"  # a line that reads them as numbers
_ENCODE = (
    "sizes of images are read as numbers here: have them encoded ahead of each call, by gs_compile.hf.attach(trainer), "
    "or in a loop of your own by gs_compile.hf.encode_ahead(model) before model.compile"
)
_UNHOOK = (
    "remove the hook (its handle's .remove()), which would never be called, because layers run their backward without "
    "their modules. Hooks on forwards are part of the model"
)


def graph_break_of(module: fx.GraphModule) -> GraphBreakError | None:
    """The error for a graph that is a part of a forward; None: it is the whole."""
    found, reason = getattr(module, "compile_subgraph_reason", None), ""
    if found is not None and found.graph_break:
        where, reason = user_line(found.user_stack), str(found.reason)
        if reason == "step_unsupported":  # an inlined call, or a line where Dynamo cannot go on later
            reason = REASONS.new() or "it cannot go on behind this line (step_unsupported)"
    else:
        where = next(filter(None, map(_resumed_at, module.graph.nodes)), "")
    return _graph_break(where, reason or REASONS.latest()) if where else None


class Reasons:
    """Dynamo's reasons for what it cannot capture. Dynamo only counts them; this finds the last one."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, str], int] = {}
        self._latest = ""

    def new(self) -> str:
        """The last reason since the last call, preferably of a graph break; empty: none. Called when each compilation
        ends, so that the reason belongs to it.
        """
        kinds = ("unimplemented", "graph_break")
        counted = {(kind, words): times for kind in kinds for words, times in counters[kind].items()}
        new = [words for (kind, words), times in counted.items() if times > self._counted.get((kind, words), 0)]
        self._counted, self._latest = counted, [self._latest, *new][-1]
        return "".join(new[-1:])

    def latest(self) -> str:
        """The last reason, also from earlier compilations, for a frame that Dynamo resumes after a break."""
        return self.new() or self._latest


REASONS = Reasons()


def user_line(stack: Iterable[FrameSummary]) -> str:
    """The user's line: the innermost that is not torch's; with torch's own line, if Dynamo stopped there."""
    frames = [frame for frame in stack if "torch/_dynamo" not in frame.filename]
    lines = [f"{frame.filename}:{frame.lineno}: {frame.line}" for frame in frames]
    own = [line for line in lines if not line.startswith(_TORCH)]
    if not lines or not own or own[-1] == lines[-1]:
        return lines[-1] if lines else "an unknown line"
    return f"{own[-1]} (inside it, {lines[-1]})"


def _graph_break(where: str, reason: object) -> GraphBreakError:
    if "accelerate/hooks.py" in where:
        return GraphBreakError(f"Dynamo breaks the model's forward at {where}\n{ABSENT}")
    if _BACKWARD_HOOKS in str(reason):
        return GraphBreakError(f"a module that is called at {where}\nhas a hook on its backward: {_UNHOOK}")
    found = GraphBreakError(
        f"the model's forward is not one graph: Dynamo breaks it at {where}\n"
        f"Dynamo's reason: {str(reason).strip()}\n"
        f"greedysnake reorders the whole step, so it needs forward in one graph: {remedy(reason, where)}"
    )
    found.is_of_a_raise = is_raise(reason, where)
    return found


def is_raise(reason: object, where: str) -> bool:
    """Whether the forward's own code raises an exception: the line must also say so and not be torch's, because Dynamo
    may fail where the code would not.
    """
    is_raised = re.search(r":\d+: .*\b(raise|assert)\b", where) is not None and _TORCH not in where
    return is_raised and str(reason).startswith(RAISES)


def remedy(reason: object, where: str) -> str:
    """What to do about a graph break, in a line."""
    if "liger_kernel/" in where or ("/triton/" in where and "liger_kernel" in sys.modules):
        return _LIGER
    if _BACKWARD_HOOKS in str(reason):
        return _UNHOOK
    if re.search(_SIZES_OF_IMAGES, where):
        return _ENCODE
    if "transformers/modeling_rope_utils" in where:
        return (
            'rope_type "dynamic" looks whether a sequence is longer than max_position_embeddings: where none is, '
            'rope_type "default" computes the same'
        )
    if "layerdrop" in where or "skip_the_layer" in where:
        return "layers are left out at random here: set layerdrop, encoder_layerdrop and decoder_layerdrop to 0"
    if re.search(r"\.(backward|zero_grad)\(", where):
        return "compile the model alone, and leave backward and the optimizer's step out of what is compiled"
    if any(sign in str(reason) for sign in _UNSIZED):
        return f"here the number of elements depends on values. {GROUPED[0].upper()}{GROUPED[1:]}"
    if re.search(r":\d+: for .* in .*:$", where) and not str(reason).startswith(RAISES):
        return (
            "Dynamo cannot run this loop, as one over the experts that have tokens, whose number depends on values. "
            f"Run it for all, and multiply by zeros what is not to count. {GROUPED[0].upper()}{GROUPED[1:]}"
        )
    if "Attempted to wrap RNN" in str(reason):
        return "Dynamo does not trace nn.RNN, nn.GRU and nn.LSTM: compile a part of the model that has none of them"
    if "_local_scalar_dense" in str(reason):
        return (
            "a number is read from a tensor here, such as a length: take it from a shape, as ids.shape[1], or compute "
            "it before the call and pass it"
        )
    if any(sign in str(reason) for sign in _BRANCHES):
        return (
            "here the value of a tensor decides what runs. Decide it before the call, or compute both and choose by "
            f"torch.where; {GROUPED}"
        )
    return (
        "remove the construct, or move it out of forward (print, .item(), control flow on tensor values are the usual "
        "causes)"
    )


def refuse(error: CaptureError, why: str) -> NoReturn:
    """Raise the error of a call; if the call comes from a frame that Dynamo gave up, Dynamo's reason for that instead.

    The graph of such a call is a part of a forward. why: what else is known about this model's forwards, for a note.
    """
    if isinstance(error, GraphBreakError):
        raise error
    if found := list(_given_up_around(sys._getframe())):
        for frame, *_ in found:  # The next call is traced anew: what Dynamo broke at may be gone, such as a hook.
            set_code_exec_strategy(frame.f_code, TRACE_ANEW)
        _, *words = found[0]
        broken = _graph_break(*words)
        broken.__notes__ = getattr(error, "__notes__", [])
        raise broken from error
    if where := _broken_around(sys._getframe()):
        raise _graph_break(where, REASONS.latest()) from error
    if (name := _passed_over(sys._getframe())) is not None:
        raise GraphBreakError(
            f"the model is itself a torch.nn.{name}: under model.compile() Dynamo skips the forward of torch's own "
            "modules, and captures each block separately. Compile it with torch.compile, which captures it as a whole: "
            'model = torch.compile(model, backend="greedysnake")'
        ) from error
    if why:
        error.add_note(why.removeprefix(". "))
    raise error


def tell_of_wide(error: BaseException, given: Mapping[str, object]) -> None:
    """Add what to do to torch's error of a model that is computed in bf16. given: its inputs and buffers, by name."""
    tensors = {name: each for name, each in given.items() if isinstance(each, torch.Tensor) and each.dim()}
    wide = [name for name, each in tensors.items() if each.dtype in (torch.float32, torch.float64)]
    if wide:
        error.add_note(
            'precision="bf16" has parameters in bf16, and leaves inputs and buffers as they are. Of this model these '
            f"are wider: {', '.join(wide[:5])}. Cast what meets the parameters here to their dtype, as by "
            "x.to(self.weight.dtype)"
        )


def tell_of_wide_in_frame() -> None:
    """`tell_of_wide`, as the compile of a frame ends with an error."""
    if isinstance(error := sys.exception(), TorchRuntimeError):
        values = compiled_frame()["locals"]
        buffers = {name: each for module in modules_in(values).values() for name, each in module.named_buffers()}
        tell_of_wide(error, {**buffers, **values})


def refuse_block(models: Iterable[object]) -> None:
    """Raise `CaptureError` if Dynamo captures a numbered part of a model whose forward it gave up.

    models: those that may be such a part. The optimizer's engine would be that of the part only.
    """
    own = list(models)
    frames = (frame for frame, *_ in _given_up_around(sys._getframe()))
    parts = (part for frame in frames for each in modules_in(frame.f_locals).values() for part in each.named_modules())
    if any(part in own and any(map(str.isdigit, name.split("."))) for name, part in parts):
        raise CaptureError("this call is of one block of a model")


def _given_up_around(frame: FrameType) -> Iterator[tuple[FrameType, str, str]]:
    """The frames that Dynamo gave up, among this one and its callers, each with line and reason; innermost first."""
    given_up = _given_up()
    for each, _ in walk_stack(frame):
        found = given_up.get((each.f_code.co_filename, each.f_code.co_firstlineno))
        if found and each.f_code not in orig_code_map:  # code generated by Dynamo is of a captured function
            yield each, *found


def _broken_around(frame: FrameType) -> str:
    """The line at which Dynamo broke a forward before its first operation, if this call is of a module that the forward
    calls there, for example because of its hook; empty: it is not.
    """
    callers = takewhile(lambda each: each.f_code.co_name != "compile_wrapper", (each for each, _ in walk_stack(frame)))
    own, *around = [each for each in callers if each.f_code in orig_code_map] or [frame]
    parts = modules_in(own.f_locals).values()
    for each in around:
        code, models = each.f_code, modules_in(each.f_locals).values()
        is_part = any(part is not model and part in set(model.modules()) for part in parts for model in models)
        if is_part and not code.co_filename.startswith(_TORCH):
            return _line(code.co_filename, each.f_lineno)
    return ""


def _passed_over(frame: FrameType) -> str | None:
    """The class of the module to compile, if it is torch's own: Dynamo skips its forward."""
    for each, _ in walk_stack(frame):
        is_torchs = each.f_code.co_name == "forward" and each.f_code.co_filename.startswith(_TORCH_MODULES)
        if is_torchs and each.f_code not in orig_code_map and _is_compiled(each.f_back):
            return type(each.f_locals["self"]).__name__
    return None


def _is_compiled(frame: FrameType | None) -> bool:
    """Whether a frame runs the function that ``module.compile()`` makes Dynamo compile."""
    around = frame and frame.f_back
    if frame is None or around is None:
        return False
    return frame.f_code.co_name == "_call_impl" and around.f_code.co_filename.startswith(f"{_TORCH}/_dynamo/")


def _given_up() -> dict[tuple[Any, Any], tuple[str, str]]:
    """The user's line and the reason for each function that Dynamo gave up recently, by its file and first line."""
    found = {}
    for each in get_compilation_metrics():
        if each.fail_type and not over_limit(each):
            file, line = each.fail_user_frame_filename, each.fail_user_frame_lineno
            if not file or not line or "torch/_dynamo" in file:  # code generated by Dynamo: the function is named
                file, line = str(each.co_filename), int(each.co_firstlineno or 0)
            found[each.co_filename, each.co_firstlineno] = _line(file, line), str(each.fail_reason)
    return found


def _resumed_at(node: fx.Node) -> str:
    """The line at which Dynamo broke the forward before this node, from the name of the function that it resumed in."""
    found = re.match(r'\s*File "(.*)", line \d+, in torch_dynamo_resume_in_\w*_at_(\d+)', node.stack_trace or "")
    return _line(found[1], int(found[2])) if found else ""


def _line(file: str, number: int) -> str:
    """A line of a file, with its place."""
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"


def over_limit(metrics: Any) -> str:
    """Words on a frame that Dynamo did not compile because of its limit; empty for others."""
    reason = str(metrics.fail_reason)
    if not reason.startswith("Dynamo recompile limit exceeded"):
        return ""
    if "accumulated_recompile_limit" in reason:
        return (
            f"Dynamo has compiled this model's forward {dynamo_config.accumulated_recompile_limit} times, for models "
            "that have ended and calls that were refused as well, which is its limit: models of this class run as they "
            "are written from now on, without greedysnake. torch._dynamo.reset() has Dynamo count anew"
        )
    guard = str(metrics.recompile_reason).partition(": ")[2].partition(" #")[0].strip()  # "0/7: t == 2.0  # def ..."
    return (
        f"Dynamo has compiled this model's forward {dynamo_config.recompile_limit} times, which is its limit: calls of "
        "other kinds run as they are written from now on, without greedysnake. The last one was of another kind: this "
        f"did not hold any more: {guard or 'unknown'}. A number that changes from step to step is to be a tensor, "
        "or a float that tensors are multiplied by, divided by or added to"
    )
