"""Programs that train on the CPU by a framework, hold a session on the pool, and use the framework's callback of ours.

Where a framework is installed (in the Python that RGPU_FRAMEWORKS_PYTHON names, else in this one) its trainer runs.
A program of ``DOCUMENTED`` needs none: it makes the calls that the framework's documentation promises a callback.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

PYTHON = os.environ.get("RGPU_FRAMEWORKS_PYTHON", sys.executable)

_SESSION = """import logging, sys, warnings
warnings.simplefilter("ignore")
logging.basicConfig(stream=sys.stdout, format="%(name)s: %(message)s")
logging.getLogger("rgpu.integrations").setLevel(logging.INFO)
from cuda.core import Device
Device(0).set_current()
"""
_TOLD = """
print("latest", callback.latest.session, callback.latest.image)
"""

REAL = {
    "lightning": _SESSION + """
import lightning.pytorch as pl, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rgpu.integrations.lightning import SessionCheckpoint

class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, number):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

callback = SessionCheckpoint(wait=True)
trainer = pl.Trainer(accelerator="cpu", max_steps=4, logger=False, enable_progress_bar=False, default_root_dir="out",
                     callbacks=[ModelCheckpoint("out", every_n_train_steps=2, save_top_k=-1), callback])
trainer.fit(Line(), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4))
""" + _TOLD,
    "transformers": _SESSION + """
import torch
from transformers import Trainer, TrainingArguments
from rgpu.integrations.transformers import SessionCheckpoint

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x, labels=None):
        return {"loss": self.layer(x).square().mean()}

callback = SessionCheckpoint(wait=True)
data = [{"x": torch.randn(4), "labels": torch.zeros(1)} for _ in range(64)]
trainer = Trainer(Line(), TrainingArguments("out", max_steps=4, save_steps=2, use_cpu=True, report_to=[],
                                            disable_tqdm=True), train_dataset=data, callbacks=[callback])
trainer.train()
""" + _TOLD,
}

#: One checkpoint that is waited for, one that is not, then the session is ended: a warning; with ``strict`` an error.
_CALLS = """
import rgpu
one, other = SessionCheckpoint(wait=True), SessionCheckpoint()
save(one, 1)
print("latest", one.latest.session, one.latest.image)
save(other, 2)
end(other)
print("latest", other.latest.session, other.latest.image)
here = rgpu.current()
here.pool.kill(here.name)
save(one, 3)
strict = SessionCheckpoint(strict=True)
save(strict, 4)
try:
    end(strict)
except rgpu.RgpuError as error:
    print("raised", error.code)
"""
DOCUMENTED = {
    "lightning": _SESSION + """
import types
from rgpu.integrations.lightning import SessionCheckpoint

def save(callback, step):
    callback.on_save_checkpoint(types.SimpleNamespace(global_step=step), object(), {})
def end(callback):
    callback.teardown(types.SimpleNamespace(), object(), "fit")
""" + _CALLS,
    "transformers": _SESSION + """
import types
from rgpu.integrations.transformers import SessionCheckpoint

def save(callback, step):
    callback.on_save(object(), types.SimpleNamespace(global_step=step), object(), model=None)
def end(callback):
    callback.on_train_end(object(), types.SimpleNamespace(global_step=step_of_end), object(), model=None)
step_of_end = 4
""" + _CALLS,
}


@cache
def installed(framework: str) -> bool:
    """Return whether the frameworks' Python has it, with torch."""
    code = f"import importlib.util as u; print(all(u.find_spec(name) for name in ({framework!r}, 'torch')))"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "True"


def base_classes(folder: Path) -> Path:
    """Write packages of the frameworks' names that have the callbacks' base classes only; return their folder."""
    for name, text in (("lightning/__init__.py", ""), ("lightning/pytorch/__init__.py", "class Callback: pass\n"),
                       ("transformers/__init__.py", "class TrainerCallback: pass\n")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder
