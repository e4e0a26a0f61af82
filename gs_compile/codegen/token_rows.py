"""token_rows: tokens that a layer sorts, as by the expert that is to see them, and brings back to their order.

    ids     = topk(scores)                 [tokens, each]: of tokens; as [tokens * each] `each` rows of a token
    sorted, perm = sort(ids)               rows in the order of the sort; places of rows in the order of the tokens
    given   = index(x, perm // each)       rows in the order of the sort
    ends    = cumsum(histc(sorted))        where the rows of each expert end
    made    = grouped_mm(given, w, ends)   of a row and the matrix of its expert, which is `sorted` there
    back    = sort(perm)                   places of rows in the order of the sort, in that of the tokens
    y       = index(made, back)            rows in the order of the tokens

Each of these has, of the rows of a token, what it would have if no other tokens were there, wherever it stands. Which
rows these are a piece finds by sorting its own. So what must not be is that a place itself is a result, or that rows in
the order of a sort leave the part (`codegen.token_wise` sees to both).
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
ADDING = {aten.index_add, aten.index_put}  # to, and by their places, rows
KEEPING = {*VIEWS, *CASTS, *MOVING, aten.squeeze, aten.expand}  # what has the same values
EXACT = {torch.int32, torch.int64, torch.float32, torch.float64}  # dtypes that have any number of keys exactly
CHOOSING = {aten.topk, aten.sort, aten.max, aten.min}  # give places along a dimension, which are 0 at least, second
GROUPED = {"aten._grouped_mm", "transformers.grouped_mm_fallback"}  # left, right, ends of groups, and perhaps more

Forms = Mapping[fx.Node, Form]


def form_of_rows(node: fx.Node, forms: Forms) -> Form | None:
    """The form of what sorts rows, reads or counts sorted ones, or brings them back; None: it does none of this.

    Raises `MixesTokensError` where what it gives of a token depends on others.
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
    """The form of one of the results of an operation: of a sort of rows, of the places that these had."""
    source, number = args_of(node)
    form = forms[source]
    is_sort_of_rows = form.rows.order is source
    if not is_sort_of_rows:
        return mix() if form.places and number == 0 else form
    return form if number == 0 else form._replace(places=forms[args_of(source)[0]].rows)


def is_inverse(node: fx.Node, forms: Forms) -> bool:
    """Whether it writes to each place of what sorted rows say the places of, all of them once, its number there."""
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
    """Whether they are the places that all rows had before they were sorted."""
    return form.places is not None and form.rows.order is not None and form.places == Rows(form.rows.each)


def _sorted(node: fx.Node, form: Form) -> Form:
    """The form of rows in the tokens' order; or of the places that these had, which sorted are places to go back to."""
    if form.places is None and form.rows.order is None:
        return form._replace(rows=form.rows._replace(order=node))
    if _is_permutation(form) and not named_arguments(node)["descending"]:
        return form._replace(rows=Rows(form.rows.each), places=form.rows)
    return mix()


def _divided(node: fx.Node, form: Form) -> Form:
    """The form of places of rows, by a number of them that a token has: places of what has fewer rows of each token."""
    assert form.places is not None
    by, mode = args_of(node)[1], "floor" if packet_of(node) is aten.floor_divide else node.kwargs.get("rounding_mode")
    if type(by) is not int or by < 1 or form.places.each % by or form.places.order or mode not in ("floor", "trunc"):
        return mix()
    return form._replace(places=Rows(form.places.each // by))


def _counted(node: fx.Node, forms: Forms) -> Form:
    """Rows counted by their keys; keys that are left out are the largest, so that sorted ones stand at the end."""
    source, arguments = args_of(node)[0], named_arguments(node)
    form, keys = forms.get(source), _keys(source, forms)
    if form is None or form.places or form.groups or keys is None or not 0 >= arguments["min"] < arguments["max"]:
        return mix()
    return form._replace(axes=(), rows=Rows(form.rows.each, keys), groups="counts")


def _keys(node: fx.Node, forms: Forms) -> fx.Node | None:
    """Where keys of rows are from, in whatever order and shape they are now; None: they may be below 0."""
    form, packet = forms.get(node), packet_of(node)
    if form is None or form.places or form.groups or node.meta["val"].dtype not in EXACT:
        return None
    source, is_sorted = args_of(node)[0], form.rows.order is args_of(node)[0]
    if is_sorted or packet in VIEWS | CASTS:
        return _keys(args_of(source)[0] if is_sorted else source, forms)
    if form.rows.order is not None:
        places = forms.get(args_of(node)[1][0]) if packet is aten.index else None
        return _keys(source, forms) if places and _is_permutation(places) else None  # picked in that order
    return node if _is_choice(node) else None


def _is_choice(node: fx.Node) -> bool:
    """Whether it says which of several was chosen for each token."""
    if packet_of(node) in KEEPING | {aten.slice}:
        return _is_choice(args_of(node)[0])
    if node.target is operator.getitem:
        return args_of(node)[1] == 1 and packet_of(args_of(node)[0]) in CHOOSING
    return packet_of(node) in (aten.argmax, aten.argmin)


def _picked(node: fx.Node, forms: Forms) -> Form:
    """Rows by their places; or from a table, by what is known of each token."""
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
    """Rows by the matrix of the group that each is of: sorted by the keys that are counted, it is that of its key."""
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
