"""token_rows: tokens that a layer sorts, as by their expert, and brings back to their order.

    ids     = topk(scores)                 [tokens, each]; viewed as [tokens * each] it has `each` rows for a token
    sorted, perm = sort(ids)               sorted rows, and their places in the order of the tokens
    given   = index(x, perm // each)       sorted rows
    ends    = cumsum(histc(sorted))        where the rows of each expert end
    made    = grouped_mm(given, w, ends)   sorted rows, each times the matrix of its expert
    back    = sort(perm)                   for each row in the order of the tokens, its place among the sorted ones
    y       = index(made, back)            rows in the order of the tokens

A row's content does not depend on the other tokens; only its place does. A piece sorts its own rows, so its places
differ from those of the whole. Therefore no place may be a result, and no sorted rows may leave the part
(`codegen.token_wise` checks both).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from gs_compile.capture.graph import packet_of
from gs_compile.capture.inductor import named_arguments
from gs_compile.codegen.token_axes import MOVING, Form, Rows, args_of, aten, mix, rank_of, shifted

VIEWS = {aten.view, aten._unsafe_view, aten.reshape}
CASTS = {aten._to_copy, aten.clone, aten.detach, aten.alias}
ADDING = {aten.index_add, aten.index_put}  # add rows to others, or write them, at places
KEEPING = {*VIEWS, *CASTS, *MOVING, aten.squeeze, aten.expand}  # change no values
EXACT = {torch.int32, torch.int64, torch.float32, torch.float64}  # dtypes that represent all keys exactly
CHOOSING = {aten.topk, aten.sort, aten.max, aten.min}  # their second result is places along a dimension, which are >= 0
GROUPED = {"aten._grouped_mm", "transformers.grouped_mm_fallback"}  # of left, right, ends of groups, and perhaps more

Forms = Mapping[fx.Node, Form]


def form_of_rows(node: fx.Node, forms: Forms) -> Form | None:
    """The form of an operation that sorts rows, reads or counts sorted ones, or brings them back; None: of any other.

    Raises `MixesTokensError` if its result for a token depends on other tokens.
    """
    packet, first = packet_of(node), node.args[0] if node.args else None
    form = forms.get(first) if isinstance(first, fx.Node) else None
    if packet is aten.sort and form and rank_of(args_of(node)[0]) == len(form.axes) == 1:
        return _sorted(node, form)
    if form and packet in (aten.floor_divide, aten.div) and form.places:
        return _divided(node, form)
    if packet is aten.histc:
        return _counted(node, forms)
    if packet is aten.cumsum and form and form.groups == "counts":
        return form._replace(groups="ends")
    if packet in (aten.index, aten.index_select):
        return _picked(node, forms)
    if str(packet) in GROUPED:
        return _multiplied(node, forms)
    read = [forms[each] for each in node.all_input_nodes if each in forms]
    keeps = packet in CASTS or (packet in KEEPING | ADDING and not any(each.groups for each in read))
    return None if keeps or not any(each.places or each.groups for each in read) else mix()


def form_of_item(node: fx.Node, forms: Forms) -> Form:
    """The form of one of an operation's results. A sort of rows gives the rows, and the places that they had."""
    source, number = args_of(node)
    form = forms[source]
    is_sort_of_rows = form.rows.order is source
    if not is_sort_of_rows:
        return mix() if form.places and number == 0 else form
    return form if number == 0 else form._replace(places=forms[args_of(source)[0]].rows)


def is_inverse(node: fx.Node, forms: Forms) -> bool:
    """Whether it inverts a permutation: for the places that sorted rows had, it writes i to the i-th place."""
    if packet_of(node) is aten.index_put and len(args_of(node)[1]) == 1 and not named_arguments(node)["accumulate"]:
        (places,), numbers = args_of(node)[1:3]
    elif node.target is aten.scatter.src:
        places, numbers = args_of(node)[2:4]
    else:
        return False
    form = forms.get(places)
    if form is None or not _is_permutation(form) or packet_of(numbers) is not aten.arange:
        return False
    is_counting = numbers.target is aten.arange.default or args_of(numbers)[0] == 0
    shapes = {tuple(each.meta["val"].shape) for each in (args_of(node)[0], places, numbers)}
    return is_counting and numbers.target is not aten.arange.start_step and len(shapes) == 1


def _is_permutation(form: Form) -> bool:
    """Whether its values are the places that all rows had before they were sorted."""
    return form.places is not None and form.rows.order is not None and form.places == Rows(form.rows.each)


def _sorted(node: fx.Node, form: Form) -> Form:
    """The form of a sort of rows, or of the places that sorted rows had, which gives the places to bring them back."""
    if form.places is None and form.rows.order is None:
        return form._replace(rows=form.rows._replace(order=node))
    if _is_permutation(form) and not named_arguments(node)["descending"]:
        return form._replace(rows=Rows(form.rows.each), places=form.rows)
    return mix()


def _divided(node: fx.Node, form: Form) -> Form:
    """The form of places divided by a number: places in a value with so many times fewer rows for each token."""
    assert form.places is not None
    by, mode = args_of(node)[1], "floor" if packet_of(node) is aten.floor_divide else node.kwargs.get("rounding_mode")
    if type(by) is not int or by < 1 or form.places.each % by or form.places.order or mode not in ("floor", "trunc"):
        return mix()
    return form._replace(places=Rows(form.places.each // by))


def _counted(node: fx.Node, forms: Forms) -> Form:
    """The form of the numbers of rows by key. Only the largest keys may be left out: if sorted, these come last."""
    source, arguments = args_of(node)[0], named_arguments(node)
    form, keys = forms.get(source), _keys(source, forms)
    if form is None or form.places or form.groups or keys is None or not 0 >= arguments["min"] < arguments["max"]:
        return mix()
    return form._replace(axes=(), rows=Rows(form.rows.each, keys), groups="counts")


def _keys(node: fx.Node, forms: Forms) -> fx.Node | None:
    """The value that keys of rows come from, before they were sorted or reshaped; None: they may be negative."""
    form, packet = forms.get(node), packet_of(node)
    if form is None or form.places or form.groups or node.meta["val"].dtype not in EXACT:
        return None
    source, is_sorted = args_of(node)[0], form.rows.order is args_of(node)[0]
    if is_sorted or packet in VIEWS | CASTS:
        return _keys(args_of(source)[0] if is_sorted else source, forms)
    if form.rows.order is not None:
        places = forms.get(args_of(node)[1][0]) if packet is aten.index else None
        return _keys(source, forms) if places and _is_permutation(places) else None  # indexed by the sort's places
    return node if _is_choice(node) else None


def _is_choice(node: fx.Node) -> bool:
    """Whether its values are indices that were chosen for each token, as by topk."""
    if packet_of(node) in KEEPING | {aten.slice}:
        return _is_choice(args_of(node)[0])
    if node.target is operator.getitem:
        return args_of(node)[1] == 1 and packet_of(args_of(node)[0]) in CHOOSING
    return packet_of(node) in (aten.argmax, aten.argmin)


def _picked(node: fx.Node, forms: Forms) -> Form:
    """The form of rows indexed by places, or of a table indexed by something of each token."""
    source, *rest = args_of(node)
    dim, index = (0, rest[0]) if packet_of(node) is aten.index else (rest[0], [rest[1]])
    given = [(axis, each) for axis, each in enumerate(index, dim) if each is not None]
    if len(given) != 1 or given[0][1] not in forms or given[0][1].meta["val"].dtype in (torch.bool, torch.uint8):
        return mix()
    axis, places = given[0]
    form, of = forms[places], forms.get(source)
    if form.groups or (of and of.groups):
        return mix()
    if form.places is None:
        return mix() if of else shifted(form, axis)
    is_theirs = of is not None and of._replace(places=None) == Form((0,), form.start, form.length, form.places)
    return form._replace(places=of.places) if of and axis == 0 and is_theirs else mix()


def _multiplied(node: fx.Node, forms: Forms) -> Form:
    """The form of rows times the matrix of their group: allowed if they are sorted by the keys that `ends` counts."""
    given: tuple[Any, ...] = (*node.args, *node.kwargs.values(), None)
    left, right, ends, *more = given
    form, counted = forms.get(left), forms.get(ends)
    if form is None or counted is None or right in forms or any(each in forms for each in more):
        return mix()
    sort = form.rows.order
    if form.axes != (0,) or form.places or sort is None or counted.groups != "ends" or rank_of(left) != 2:
        return mix()
    is_rising = not named_arguments(sort)["descending"]
    return form if is_rising and _keys(args_of(sort)[0], forms) is counted.rows.order else mix()
