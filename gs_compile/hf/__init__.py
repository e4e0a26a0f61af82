"""hf: this package in the tools of HuggingFace, which only this package imports, when they are used.

trainer = transformers.Trainer(model, args, train_dataset=data)
gs_compile.hf.attach(trainer, storage="/mnt/nvme0/me", host_memory="48GiB")
trainer.train()
"""

from gs_compile.hf.images import encode_ahead
from gs_compile.hf.loop import prepare
from gs_compile.hf.trainer import TrainerMixin, attach

__all__ = ["TrainerMixin", "attach", "encode_ahead", "prepare"]
