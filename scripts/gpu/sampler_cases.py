"""What starts the kernels of the sampler, on arrays of any content, for compiling them where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from baton.runner.backends.cuda.sampling.draw import draw
from baton.runner.backends.cuda.sampling.report import report
from baton.runner.backends.cuda.sampling.survey import survey
from baton.runner.execution.sampling_arrays import Drawing, Field, Real, ReportField


def sampler_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """A name, and what starts kernels."""
    logits, results = torch.empty(2, 128256), torch.empty(64, dtype=torch.int64)
    numbers = torch.empty(8, dtype=torch.int32)
    fields, reals = torch.empty(2, len(Field), dtype=torch.int64), torch.empty(2, len(Real), dtype=torch.float64)
    masks = torch.empty(1, 4008, dtype=torch.int32)
    given = Drawing(fields, reals, numbers, torch.empty(8), numbers, numbers, numbers, masks)
    reports = torch.empty(2, len(ReportField), dtype=torch.int64)
    yield "sampler: survey", partial(survey, logits, results)
    yield "sampler: draw", partial(draw, logits, results, given)
    yield "sampler: report", partial(report, logits, results, masks, reports)
