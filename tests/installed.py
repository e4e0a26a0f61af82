"""Whether an installed package works where there is no checkout: `make dist` runs this file in an environment of its own.

It stands alone: a model of torch.nn alone trains from SSD as it does with plain PyTorch, and the command line answers.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import gs_compile
from gs_compile.planner.measure.shipped import known

NUM_STEPS = 3


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(100, 32)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(32, 10)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.encoder(self.embedding(tokens))[:, 0]), labels)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        batch = (torch.randint(high, size, generator=generator) for high, size in ((100, (4, 16)), (10, (4,))))
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    assert "site-packages" in gs_compile.__file__, f"this is no installed package: {gs_compile.__file__}"
    command = Path(sys.executable).with_name("greedysnake")
    said = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout.split()
    assert said == ["greedysnake", importlib.metadata.version("greedysnake")], said
    found = subprocess.run([command, "doctor", "--json"], capture_output=True, text=True, check=False)
    assert found.returncode in (0, 1), found.stderr
    assert json.loads(found.stdout), "the doctor says what it has found"
    told = [importlib.metadata.distribution("greedysnake").read_text(name) for name in ("entry_points.txt", "METADATA")]
    assert "greedysnake = gs_compile.model.backend:greedysnake" in str(told[0])
    assert "Provides-Extra: hf" in str(told[1])
    assert Path(gs_compile.__file__).with_name("py.typed").exists()
    assert "rtx4090" in known(), "profiles of machines are data of the package"

    torch.manual_seed(0)
    model = Classifier()
    plain = copy.deepcopy(model)
    wanted = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    with tempfile.TemporaryDirectory() as storage:
        optimizer = gs_compile.AdamW(model.parameters(), lr=1e-2)
        options = {"micro_batch_size": 2, "storage": storage, "expert": {"compiler": "eager"}}
        losses = train(torch.compile(model, backend="greedysnake", options=options), optimizer)
        del model, optimizer
    assert all(abs(a - b) <= 1e-5 * b for a, b in zip(losses, wanted, strict=True)), (losses, wanted)
    print(f"greedysnake {said[1]} is installed, and trains: losses {losses}")  # noqa: T201


if __name__ == "__main__":
    main()
