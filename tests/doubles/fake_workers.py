"""The fake of child processes for untrusted work: the same work, done in this process and without limits."""

from __future__ import annotations

from baton.text.bounded_child import Outcome, answer_to, parse_answer
from baton.text.bounded_workers import Job

_ANY_MEMORY = 1 << 40


class FakeWorkers:
    """Does work in the calling thread, as a child does it. Keeps the jobs that it has done."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.outcomes: list[Outcome] = []
        """Outcomes that the next jobs have, whatever they are."""

    def run(self, job: Job, content: str) -> Outcome:
        self.jobs.append(job)
        return self.outcomes.pop(0) if self.outcomes else parse_answer(answer_to(f"{job} {content}", _ANY_MEMORY))

    def close(self) -> None:
        pass
