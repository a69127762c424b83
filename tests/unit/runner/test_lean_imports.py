"""Baton's processes have transformers without torch's compiler, and get the compiler when something asks for it."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from baton.runner.lean_imports import import_transformers

import_transformers()
import torch
from transformers.models.llama import modeling_llama

print("torch._dynamo.eval_frame" in sys.modules, "torch.distributed.tensor" in sys.modules)
print(torch.distributed.is_available(), torch._dynamo.disable(len) is len)
torch._dynamo.reset()
print("torch._dynamo.eval_frame" in sys.modules, torch._dynamo.disable(len) is len)
"""


def test_the_compiler_is_imported_on_demand_alone() -> None:
    # This process may have imported it long ago.
    said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["False False", "True True", "True False"]
