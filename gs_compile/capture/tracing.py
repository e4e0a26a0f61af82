"""tracing: changes to Dynamo, so that it traces into the graph what it would otherwise fix to a number or break at.

* ``torch._check_tensor_all`` is traced like an ``assert``: its condition stays a tensor (`checks`).
* ``torch.nn.functional.ctc_loss`` gives a loss for each sample (`speech`).
* ``torch.nn.functional.gaussian_nll_loss`` is traced into, as it checks variances.
* A branch by the value of a tensor, one way of which only raises, is such a check too.
* A size in a string that also has values of tensors stays a symbol: such a string is not read while tracing.
* ``torch.cat(list(x))`` becomes ``x.flatten(0, 1)``, so that the number of rows stays a symbol. If a list of rows is
  read otherwise, the number is fixed, as Dynamo does.
* ``x.requires_grad_()`` on a value made by the forward is ``x``, as checkpointing does to embeddings; so is
  ``x.requires_grad = True``, as in audio encoders.
* ``self.mask = self.mask.to(x.device)`` does nothing to an nn.Buffer that is there already; Dynamo would break there.
* An integer that the forward changes in a module, or in an object, dict or list of one, such as a count of calls, is a
  symbol: Dynamo would trace again for each number, up to its limit.
* What Lightning logs in a step that is compiled whole (`self.log`) is logged after the graph; Dynamo would break there.
* The result of ``x.item()``, ``float(x)`` or ``int(x)`` is read after the graph, so a forward may return or store it,
  such as a metric next to its loss. If something computes with one, Dynamo breaks at all of them.
* The name of a line's function, for which Dynamo parses whole files, is looked up only when a log needs it: this saves
  a tenth of a trace.

These are in force while Dynamo compiles a frame for this backend (`frame_settings`).
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial, partialmethod
from inspect import signature
from itertools import islice
from typing import Any, NoReturn, cast

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.exc import UnspecializeRestartAnalysis
from torch._dynamo.source import GlobalSource
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables import (
    ConstantVariable,
    ConstDictVariable,
    LazyVariableTracker,
    ListVariable,
    StringFormatVariable,
    TensorVariable,
    TorchInGraphFunctionVariable,
    UserDefinedObjectVariable,
    UserFunctionVariable,
    UserMethodVariable,
    VariableTracker,
    builtin,
)
from torch._dynamo.variables.base import ValueMutationNew
from torch._dynamo.variables.lazy import LazySymNodeFormatString
from torch._dynamo.variables.misc import DebuggingVariable
from torch._logging._internal import LazyString
from torch.nn import functional

from gs_compile.capture.internals import untraced
from gs_compile.capture.speech import ctc_loss

_LIGHTNING = ("pytorch_lightning.core.module", "lightning.pytorch.core.module")  # installed alone, or as a part
_LOGS = ("log", "log_dict")
# Beside a `raise` these may be of use later; a local name, such as of its words, is not.
_STORES = ("STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "STORE_DEREF")
_BEYOND = ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT", *_STORES, "RETURN_", "YIELD_")
READ_LATER = "greedysnake_read_later"  # in the meta of an output whose value is read after the graph
_CONVERSIONS = {"__float__": float, "__int__": int}
_LIST: Any = getattr(builtin, "ListBuiltinVariable", builtin.BuiltinVariable)  # before 2.13 `list` has no own class


def enter(stack: ExitStack, has_symbol: Callable[[str], bool]) -> None:
    """Apply the changes until `stack` is closed.

    has_symbol: whether integers whose source ends with a name are symbols in this trace; in the next one they are.
    """
    stores = {"STORE_ATTR": _store_attribute, "STORE_SUBSCR": _store_entry}
    instructions = _INSTRUCTIONS | {dis.opmap[name]: partial(store, has_symbol) for name, store in stores.items()}
    handlers: dict[Any, Any] = TorchInGraphFunctionVariable._get_handlers()
    for each, handler in _HANDLERS.items():
        stack.callback(handlers.__setitem__, each, handlers.get(each))
        handlers[each] = handler
    for translator in _translators(InstructionTranslatorBase):
        table = translator.dispatch_table
        for opcode, traced in instructions.items():
            stack.callback(table.__setitem__, opcode, table[opcode])
            table[opcode] = traced
    for kind, method, call in (*_METHODS, (TensorVariable, "method_item", partial(_item, list[str]()))):
        plain = getattr(kind, method)
        stack.callback(setattr, kind, method, plain)
        setattr(kind, method, partialmethod(call, plain))


def _translators(kind: type[InstructionTranslatorBase]) -> Iterator[Any]:
    yield kind
    for each in kind.__subclasses__():
        yield from _translators(each)


def _check_all(_: object, translator: Any, *args: Any, **kwargs: Any) -> VariableTracker:
    _assert(translator, next(each for each in (*args, *kwargs.values()) if each.is_tensor()))
    return ConstantVariable.create(None)


def _trace(function: Any, _: object, translator: Any, *args: Any, **kwargs: Any) -> VariableTracker:
    return UserFunctionVariable(function).call_function(translator, [*args], kwargs)


def _assert(translator: Any, condition: VariableTracker) -> None:
    translator.output.create_proxy("call_function", torch._assert_async, (condition.as_proxy(),), {})


def _jump_around_raise(name: str, translator: Any, instruction: Any) -> None:
    """Trace a jump past a ``raise``, or to one, depending on a tensor's value, as a check of that value."""
    value, follows = translator.stack[-1], _raises(translator, translator.instruction_pointer)
    if (
        follows != _raises(translator, translator.indexof[instruction.target])
        and value.is_tensor()
        and value.as_proxy().node.meta["example_value"].numel() == 1
    ):
        translator.pop()
        is_wanted = follows == ("TRUE" in name)
        _assert(translator, value if is_wanted else value.call_method(translator, "logical_not", [], {}))
        if follows:
            translator.jump(instruction)
    else:
        getattr(InstructionTranslatorBase, name)(translator, instruction)


def _raises(translator: Any, pointer: int) -> bool:
    """Whether the instructions from here on only raise, without a handler in this function; false for an ``assert``."""
    for each in islice(translator.instructions, pointer, None):
        if each.opname == "RAISE_VARARGS":
            return each.exn_tab_entry is None
        if each.opname.startswith(_BEYOND) or "JUMP" in each.opname:
            break
    return False


def _build_string(translator: InstructionTranslatorBase, instruction: Any) -> None:
    parts = translator.stack[-instruction.arg :]
    if any(isinstance(part, StringFormatVariable) for part in parts):
        translator.stack[-instruction.arg :] = map(_unread, parts)
    InstructionTranslatorBase.BUILD_STRING(translator, instruction)


def _unread(part: VariableTracker) -> VariableTracker:
    """A size that is part of a string, and is formatted only if the string is read."""
    value = part.original_value() if isinstance(part, LazyVariableTracker) and not part.is_realized() else None
    if isinstance(value, LazySymNodeFormatString):
        return StringFormatVariable(value.fmt_var.as_python_constant(), [value.sym_node_var], {})
    return part


class _Rows(ListVariable):
    """The rows of a tensor whose number is a symbol; becomes an ordinary list as soon as its items are read."""

    def __init__(self, tensor: TensorVariable, translator: Any) -> None:
        VariableTracker.__init__(self, mutation_type=ValueMutationNew())
        self.tensor, self.translator = tensor, translator

    def __getattr__(self, name: str) -> Any:
        if name != "items":
            raise AttributeError(name)
        self.items = self.tensor.unpack_var_sequence(self.translator)
        del self.tensor, self.translator
        cast(Any, self).__class__ = ListVariable
        return self.items

    def is_python_constant(self) -> bool:
        return False

    def clone(self, **kwargs: Any) -> VariableTracker:
        return ListVariable(self.items).clone(**kwargs)


def _list(builtin: Any, plain: Any, translator: Any, args: Any, kwargs: Any) -> Any:
    rows = args[0].unwrap() if builtin.as_python_constant() is list and len(args) == 1 and not kwargs else None
    if isinstance(rows, TensorVariable):
        example = rows.as_proxy().node.meta["example_value"]
        if example.dim() > 1 and isinstance(example.shape[0], torch.SymInt):
            return _Rows(rows, translator)
    return plain(builtin, translator, args, kwargs)


def _cat(function: Any, plain: Any, translator: Any, args: Any, kwargs: Any) -> Any:
    if function.value is torch.cat:
        rows, *others = [each.unwrap() for each in (*args, *kwargs.values())]
        if isinstance(rows, _Rows) and [each.as_python_constant() for each in others] in ([], [0]):
            ends = [ConstantVariable.create(0), ConstantVariable.create(1)]
            return rows.tensor.call_method(translator, "flatten", ends, {})
    return plain(function, translator, args, kwargs)


def _store_attribute(
    has_symbol: Callable[[str], bool], translator: InstructionTranslatorBase, instruction: Any
) -> None:
    value, holder = (each.unwrap() for each in translator.stack[-2:])
    is_same = False
    if isinstance(holder, UserDefinedObjectVariable) and _is_of_module(holder):
        before = getattr(holder.value, "__dict__", {}).get(instruction.argval)
        _restart_where_changed(has_symbol, f".{instruction.argval}", before, value)
        is_same = _is_buffer(translator, holder, instruction.argval, value)
    is_made = isinstance(holder, TensorVariable) and holder.source is None
    is_asked = is_made and instruction.argval == "requires_grad" and value.is_python_constant()
    if is_same or (is_asked and value.as_python_constant()):
        translator.popn(2)
    else:
        InstructionTranslatorBase.STORE_ATTR(translator, instruction)


def _is_buffer(translator: Any, module: Any, name: str, value: VariableTracker) -> bool:
    """Whether a tensor is already the buffer of this name, as one that was moved to where it is."""
    if not _is_tensor(value) or name not in getattr(module.value, "_buffers", ()):
        return False
    own = module.var_getattr(translator, name)
    return _is_tensor(own) and _example(own) is _example(value)


def _example(tensor: VariableTracker) -> Any:
    return tensor.realize().as_proxy().node.meta["example_value"]


def _store_entry(has_symbol: Callable[[str], bool], translator: InstructionTranslatorBase, instruction: Any) -> None:
    value, holder, key = (each.unwrap() for each in translator.stack[-3:])
    holder = holder.realize()  # it may be unread; the store would read it anyway
    entries: Any = getattr(holder, "_base_vt", None) or holder  # if its class is the user's, or of `collections`
    is_dict, is_list = isinstance(entries, ConstDictVariable), isinstance(entries, ListVariable)
    if (is_dict or is_list) and _is_of_module(entries) and key.is_python_constant():
        is_there = key in entries if is_dict else type(key.as_python_constant()) is int
        entry = entries.getitem_const(translator, key) if is_there else None
        if entry is not None and entry.source is not None and isinstance(entry.unwrap(), ConstantVariable):
            name = str(entry.source.name() if callable(entry.source.name) else entry.source.name)
            _restart_where_changed(has_symbol, name[name.rfind(".") :], entry.unwrap().as_python_constant(), value)
    InstructionTranslatorBase.STORE_SUBSCR(translator, instruction)


def _is_of_module(holder: VariableTracker) -> bool:
    """Whether it is a module or belongs to one: Dynamo guards the values of numbers there."""
    if holder.source is None:
        return False
    kind: Any = holder.source.guard_source
    return bool((kind() if callable(kind) else kind).is_unspecialized_nn_module())


def _restart_where_changed(has_symbol: Callable[[str], bool], name: str, before: Any, value: VariableTracker) -> None:
    """If a number gets another value, restart the trace with symbols for integers whose source ends with `name`."""
    stays = type(before) is not int or (value.is_python_constant() and value.as_python_constant() == before)
    if not stays and not has_symbol(name):
        raise UnspecializeRestartAnalysis(restart_reason=f"greedysnake: {name} changes from call to call")


def _requires_grad(tensor: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
    wanted = [each for each in (*args, *kwargs.values()) if isinstance(each, VariableTracker)]
    if tensor.source is None and all(each.as_python_constant() for each in wanted):
        return tensor
    return plain(tensor, *args, **kwargs)


def _logged(method: Any, plain: Any, translator: Any, args: Any, kwargs: Any) -> VariableTracker:
    if getattr(method.fn, "__module__", None) not in _LIGHTNING or method.fn.__name__ not in _LOGS:
        return cast(VariableTracker, plain(method, translator, args, kwargs))
    bound = signature(method.fn).bind(method.obj, *args, **kwargs)
    bound.apply_defaults()
    given = [each if isinstance(each, VariableTracker) else ConstantVariable.create(each) for each in bound.args]
    name = translator.output.install_global_by_id("greedysnake_log", log := untraced(method.fn))
    translator.output.root_tx.debug_locals.append((DebuggingVariable(log, source=GlobalSource(name)), given))
    return ConstantVariable.create(None)


class _Number(VariableTracker):
    """The number in a tensor, to be read after the graph; refuse: called if something computes with it.

    method: the method of the tensor that reads it.
    """

    def __init__(self, tensor: VariableTracker, refuse: Callable[..., NoReturn], method: str = "item") -> None:
        super().__init__()
        self.tensor, self.refuse, self.method = tensor, refuse, method

    def as_proxy(self, *_: Any) -> Any:
        self.refuse()

    call_method: Any = as_proxy
    richcompare_impl: Any = as_proxy
    bool_impl: Any = as_proxy  # otherwise Dynamo takes it for an object, which is true

    def python_type(self) -> type:
        dtype = self.tensor.as_proxy().node.meta["example_value"].dtype
        own = float if dtype.is_floating_point else bool if dtype is torch.bool else int
        return _CONVERSIONS.get(self.method, own)

    def reconstruct(self, codegen: Any) -> None:
        def load() -> None:
            codegen(self.tensor)
            codegen.append_output(codegen.create_load_attr(self.method))

        self.tensor.as_proxy().node.meta[READ_LATER] = True
        codegen.add_push_null(load)
        codegen.extend_output(create_call_function(0, push_null=False))


def _item(used: list[str], tensor: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """used: not empty after a restart because something computes with a number: then Dynamo breaks at all of them."""
    translator: Any = InstructionTranslator.current_tx()
    if used or translator.one_graph or dynamo_config.capture_scalar_outputs:
        return plain(tensor, *args, **kwargs)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        used.append("greedysnake: the forward computes with a number of a tensor")
        raise UnspecializeRestartAnalysis(restart_reason=used[0])

    return _Number(tensor.call_method(translator, "detach", [], {}), refuse)


def _convert(function: Any, plain: Any, translator: Any, args: Any, kwargs: Any) -> Any:
    """``float(x)`` and ``int(x)`` of a tensor or of its ``item()`` give what its method of that name does."""
    if function.fn in _CONVERSIONS.values() and len(args) == 1 and not kwargs:
        method = f"__{function.fn.__name__}__"
        given = args[0].realize() if _is_tensor(args[0]) else args[0].unwrap()
        number = given.call_method(translator, "item", [], {}) if _is_tensor(given) else given
        if isinstance(number, _Number) and number.method in ("item", method):
            return _Number(number.tensor, number.refuse, method)
        args = [number]
    return plain(function, translator, args, kwargs)


def _is_tensor(value: VariableTracker) -> bool:
    """Whether it is a tensor of the user's, also one that nobody has read yet; no number that Dynamo has as one."""
    if isinstance(value, LazyVariableTracker) and not value.is_realized():
        return isinstance(value.original_value(), torch.Tensor)
    return type(value.unwrap()) is TensorVariable


def _header(translator: Any, plain: Any, lineno: int | None = None) -> LazyString[[Any, int]]:
    return LazyString(plain, translator, translator.lineno if lineno is None else lineno)


_METHODS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (_LIST, "call_function", _list),
    (builtin.BuiltinVariable, "call_function", _convert),
    (TorchInGraphFunctionVariable, "call_function", _cat),
    (TensorVariable, "method_requires_grad_", _requires_grad),
    (UserMethodVariable, "call_function", _logged),
    (InstructionTranslatorBase, "get_line_of_code_header", _header),
)
_HANDLERS: dict[Any, Callable[..., VariableTracker]] = {
    torch._check_tensor_all: _check_all,
    torch._check_tensor_all_with: _check_all,
    functional.ctc_loss: partial(_trace, ctc_loss),
    functional.gaussian_nll_loss: partial(_trace, functional.gaussian_nll_loss),
}
_JUMPS = [f"POP_JUMP_{way}IF_{value}" for way in ("", "FORWARD_") for value in ("TRUE", "FALSE")]
_INSTRUCTIONS: dict[int, Callable[..., None]] = {
    dis.opmap["BUILD_STRING"]: _build_string,
    **{dis.opmap[name]: partial(_jump_around_raise, name) for name in _JUMPS if name in dis.opmap},
}
