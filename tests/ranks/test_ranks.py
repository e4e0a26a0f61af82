"""Ranks: what they move and agree on, and that one rank's end is the end of all."""

from __future__ import annotations

import pytest
import torch
from launch import Fleet

from gs_compile.errors import RankError
from gs_compile.options import Options
from gs_compile.runtime.ranks import ranks_of

KEEPS_CAPTURES = True  # captures nothing


@pytest.fixture(scope="module")
def pair():
    with Fleet(2) as fleet:
        yield fleet


def moves(info, tmp_path):
    ranks = ranks_of(Options())
    found = {"place": (ranks.rank, ranks.number, ranks.total)}
    for dtype in (torch.float32, torch.bfloat16):
        shard = torch.full((3,), info.rank + 1, dtype=dtype)
        whole = torch.empty(6, dtype=dtype)
        ranks.all_gather(whole, shard)
        found[dtype] = whole.clone()
        ranks.reduce_scatter(shard, whole * (info.rank + 1))
        found[dtype, "sum"] = shard
    numbers = torch.tensor([1.0, info.rank], dtype=torch.float64)
    ranks.all_reduce(numbers)
    values = torch.full((2, 2), info.rank)
    ranks.broadcast(values, 1)
    found |= {"numbers": numbers, "broadcast": values}
    found["agree"] = ranks.agree("letters", {"letter": "ab"[info.rank] * (1 + info.rank)})
    found["made"] = ranks.from_first("a plan", lambda: {"made by": info.rank})
    ranks.close()
    return found


def test_what_ranks_move(pair, tmp_path):
    found = pair.run(moves, tmp_path)
    for rank, each in enumerate(found):
        assert each["place"] == (rank, 2, 2)
        for dtype in (torch.float32, torch.bfloat16):
            assert each[dtype].tolist() == [1, 1, 1, 2, 2, 2]
            assert each[dtype, "sum"].tolist() == [3 * (rank + 1)] * 3
        assert each["numbers"].tolist() == [2, 1]
        assert each["broadcast"].tolist() == [[1, 1], [1, 1]]
        assert each["agree"] == [{"letter": "a"}, {"letter": "bb"}]
        assert each["made"] == {"made by": 0}


def differs(info, tmp_path):
    ranks = ranks_of(Options())
    ranks.require_same("a run", {"precision": "bf16"})
    with pytest.raises(RankError) as facts:
        ranks.require_same("a run", {"precision": "bf16", "micro_batch_size": info.rank + 1})
    with pytest.raises(RankError) as order:
        ranks.agree(f"what rank {info.rank} wants", 1)
    ranks.close()
    return str(facts.value), str(order.value)


def test_ranks_that_differ(pair, tmp_path):
    first, second = pair.run(differs, tmp_path)
    assert first == second
    assert first[0] == "a run: micro_batch_size is 1 on rank 0; 2 on rank 1. It has to be the same on all ranks"
    assert "rank 0: what rank 0 wants, rank 1: what rank 1 wants" in first[1]
