"""Hugging Face's Trainer: a checkpoint of the session whenever the trainer saves one of its own."""

from __future__ import annotations

from typing import Any

import rgpu
from rgpu.integrations.taking import Taking

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as missing:
    if missing.name != "transformers":
        raise
    raise ImportError("Hugging Face's transformers is not installed: pip install 'rgpu-live[transformers]'") from None


class SessionCheckpoint(TrainerCallback):
    """A callback of the trainer that checkpoints this process's session beside each checkpoint of the trainer.

    ``wait``: training waits until it is durable. ``strict``: a failure ends the training, otherwise it is a warning
    of the logger ``rgpu.integrations``. Does nothing outside `rgpu run`.
    """

    def __init__(self, *, wait: bool = False, strict: bool = False) -> None:
        self._taking = Taking(wait=wait, strict=strict)

    @property
    def latest(self) -> rgpu.Checkpoint | None:
        """The newest checkpoint of the session that counts."""
        return self._taking.latest

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Take one. Called in every rank, after the trainer's checkpoint is written."""
        self._taking.take(int(state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Wait for one that is being written."""
        self._taking.finish()
