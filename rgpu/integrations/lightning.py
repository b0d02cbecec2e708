"""PyTorch Lightning: a checkpoint of the session whenever the trainer saves one of its own.

The callback is one of the package that the program has imported, ``lightning`` or ``pytorch_lightning``; their trainers
take callbacks of their own package only.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import rgpu
from rgpu.integrations.taking import Taking

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback() -> Any:
    """The base class, of the package that is imported already, else of the first that is there."""
    for name in sorted(PACKAGES, key=lambda one: one not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise ImportError("PyTorch Lightning is not installed: pip install 'rgpu-live[lightning]'")


_Callback: Any = _callback()


class SessionCheckpoint(_Callback):
    """A callback of the trainer that checkpoints this process's session beside each checkpoint of the trainer.

    ``wait``: training waits until it is durable. ``strict``: a failure ends the training, otherwise it is a warning
    of the logger ``rgpu.integrations``. Does nothing outside `rgpu run`.
    """

    def __init__(self, *, wait: bool = False, strict: bool = False) -> None:
        super().__init__()
        self._taking = Taking(wait=wait, strict=strict)

    @property
    def latest(self) -> rgpu.Checkpoint | None:
        """The newest checkpoint of the session that counts."""
        return self._taking.latest

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take one. Called in every rank, before the trainer's file is written."""
        self._taking.take(int(trainer.global_step))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wait for one that is being written."""
        self._taking.finish()
