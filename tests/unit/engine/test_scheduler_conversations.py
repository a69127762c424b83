"""Golden conversations with the scheduler: its inputs, and what it decides, step by step.

A file begins with a line of limits. Lines with `>` are inputs, and the lines behind one are the answer:

  > add a 8 max_tokens 3        a request with a prompt of 8 tokens; also leg, priority, like (whose prompt it has)
  > step                        decide, compute, commit
  > decide                      the first of these alone
  > commit                      the others, of the first step that has been decided alone
  compute a 8 new 1 2           8 tokens of a, which is new and has blocks 1 and 2
  compute a 1                   a token of a, about which the runner knows everything; `blocks` are added ones
  load a 3 4                    a's KV may be written to these blocks from now on
  out a 0+1                     one token from output index 0 on; then why it ended, if it did
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.engine.batch import EngineCoreOutput, SchedulerOutput
from baton.messages.node import Leg, Outcome
from tests.support.engine_rig import EngineRig, name_of

CONVERSATIONS = sorted((Path(__file__).parent / "scheduler_conversations").glob("*.txt"))
_ENDS = {Outcome.ABORTED: "abort", Outcome.KV_LOST: "error"}
"""The names of these outcomes in the files; all others have the outcome's value."""
_WORDS = ("leg", "like", "preemption_mode", "policy")


def pairs(words: Sequence[str]) -> dict[str, Any]:
    """`max_tokens 3 leg decode` as keyword arguments; each entry of `windows all,5` is one group of layers."""
    return {name: _value(name, value) for name, value in zip(words[::2], words[1::2], strict=True)}


def _value(name: str, value: str) -> Any:
    if name == "windows":
        return tuple(None if window == "all" else int(window) for window in value.split(","))
    return value if name in _WORDS else int(value)


class Conversation:
    """One engine rig, and the text of what it does."""

    def __init__(self, limits: str) -> None:
        self.rig = EngineRig(**pairs(limits.split()))
        self.decided: deque[SchedulerOutput] = deque()
        self.loads: set[str] = set()

    def say(self, line: str) -> list[str]:
        verb, *words = line.split()
        rig = self.rig
        match verb:
            case "add":
                fields = pairs(words[2:])
                like = fields.pop("like", None)
                prompt = rig.requests[like].prompt_token_ids if like else int(words[1])
                rig.add(words[0], prompt, leg=Leg(fields.pop("leg", "whole")), **fields)
                end = rig.ends.get(words[0])
                return [] if end is None else [self.output(end)]
            case "step":
                decided = rig.scheduler.schedule()
                return [*self.decision(decided), *map(self.output, rig.commit(decided))]
            case "decide":
                self.decided.append(rig.scheduler.schedule())
                return [*self.decision(self.decided[-1])]
            case "commit":
                return [*map(self.output, rig.commit(self.decided.popleft()))]
            case "abort":
                return [self.output(output) for output in rig.abort(*words)]
            case "arrived":
                return [self.output(output) for output in rig.complete_transfer(words[0])]
            case "failed":
                return [self.output(output) for output in rig.transfer(failed={words[0]: " ".join(words[1:])})]
            case "released":
                return [self.output(output) for output in rig.transfer(released=words)]
        raise ValueError(line)

    def decision(self, decided: SchedulerOutput) -> Iterator[str]:
        for kind, copies in (("swap out", decided.blocks_to_swap_out), ("swap in", decided.blocks_to_swap_in)):
            if copies:
                yield f"{kind} " + " ".join(f"{copy.source}>{copy.destination}" for copy in copies)
        if decided.blocks_to_copy:
            yield "copy " + " ".join(f"{copy.source}>{copy.destination}" for copy in decided.blocks_to_copy)
        for name in sorted(decided.preempted_req_ids):
            yield f"preempted {name}"
        new = {data.request_id: data for data in decided.scheduled_new_reqs}
        changed = {data.request_id: data for data in decided.scheduled_cached_reqs}
        for name, count in decided.num_scheduled_tokens.items():
            line = f"compute {name} {count}"
            if name in new:
                line += f" new {' '.join(map(str, new[name].block_ids))}"
                line += f" from {new[name].num_computed_tokens}" if new[name].num_computed_tokens else ""
            elif name in changed and changed[name].resumed:
                line += f" again {' '.join(map(str, changed[name].new_block_ids))}"
                line += f" from {changed[name].num_computed_tokens}" if changed[name].num_computed_tokens else ""
            elif name in changed and changed[name].new_block_ids:
                line += f" blocks {' '.join(map(str, changed[name].new_block_ids))}"
            yield line
        for name in self.rig.connector.loads.keys() - self.loads:
            yield f"load {name} {' '.join(map(str, self.rig.connector.loads[name].block_ids))}"
        self.loads = set(self.rig.connector.loads)
        if decided.finished_req_ids:
            yield f"forget {' '.join(sorted(decided.finished_req_ids))}"

    @staticmethod
    def output(output: EngineCoreOutput) -> str:
        line = f"out {name_of(output)}"
        if output.new_token_ids:
            line += f" {output.first_index}+{len(output.new_token_ids)}"
        if output.outcome is not None:
            line += f" {_ENDS.get(output.outcome, output.outcome.value)}"
        return line


def replay(text: str) -> str:
    """The conversation with the present code: comments, limits and inputs of the file, with the present answers."""
    lines = text.splitlines()
    limits = next(line for line in lines if line.startswith("limits"))
    conversation = Conversation(limits.removeprefix("limits"))
    held = []
    for line in lines:
        if line.startswith(("#", "limits", "=")) or not line.strip():
            held.append(line)
        elif line.startswith(">"):
            held += [line, *conversation.say(line.removeprefix(">"))]
    return "\n".join(held) + "\n"


@pytest.mark.parametrize("path", CONVERSATIONS, ids=lambda path: path.stem)
def test_the_scheduler_follows_the_golden_conversation(path: Path) -> None:
    assert replay(path.read_text()) == path.read_text()


def test_conversation_files_are_found() -> None:
    assert len(CONVERSATIONS) >= 8
