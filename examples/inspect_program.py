"""Run one step of a tiny GPT-2, and print it as a program.

pip install '.[hf]'  # from a checkout
python examples/inspect_program.py
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gs_compile


def main() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=64, n_head=4, vocab_size=512, use_cache=False))
    model.compile(backend="greedysnake", options={"micro_batch_size": 2, "expert": {"compiler": "eager"}})

    token_ids = torch.randint(512, (4, 32))  # the whole batch of a step: two micro-batches of two samples
    model(input_ids=token_ids, labels=token_ids).loss.backward()

    inspection = gs_compile.inspect(model)
    print(inspection)  # sizes, classes of layers, how the loss is put together, and the program that runs

    print("The layers' order alone, before the other passes:\n")
    print(inspection.program("vertical"))

    print("What runs beside what:\n")
    print(inspection.timetable())

    (layers,) = inspection.classes
    print(f"Layers {layers.units} share one forward of {len(layers.forward.graph.nodes)} ATen nodes,")
    print(f"and one backward of {len(layers.backward.graph.nodes)}; the step is a {inspection.graph_module()}")


if __name__ == "__main__":
    main()
