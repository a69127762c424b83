"""What the machine has: versions, and the ceilings that other figures are compared with."""

from __future__ import annotations

import platform

import torch

from gpu.stage import StageContext

SECONDS = 15


def run(context: StageContext) -> None:
    context.report("versions", python=platform.python_version(), torch=torch.__version__)
