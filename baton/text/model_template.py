"""Chat templates that came with a model or a request. Child processes render them, within limits: strangers wrote them.

A download's template may run for ever, for some chats alone, or want all memory. The rules:

1. This process neither compiles nor renders one. A child keeps the model's compiled, so that a chat costs a message to
   the child.
2. What a client has sent wrongly, its own template included, is InvalidRequest. What of the model's exceeds the limits
   is a fault of the template, TemplateFault.
3. A model's template whose check exceeds the limits is not used: all chats end with that fault, and nothing else does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from baton.errors import BatonError, ConfigError, InvalidRequest, Overloaded, TemplateFault
from baton.model_formats.special_tokens import find_special_tokens
from baton.text.bounded_child import Outcome
from baton.text.bounded_workers import BoundedWorkers, Job, Workers, WorkLimits
from baton.text.chat_template import DEFAULT_TEMPLATE, FIELD, TOOL_USE, TemplateWork, check_variables, read_traits
from baton.text.prompt_template import PromptTemplate, TemplateTraits
from baton.text.template_files import DEFAULT, find_templates, find_tool_call_parser

_log = logging.getLogger(__name__)

TEMPLATE_LIMITS = WorkLimits(cpu_s=2.0, wall_s=10.0, memory_bytes=256 << 20)
"""Limits of one rendering. A chat of 200 messages takes a millisecond, the longest one that a request has some 100."""
_FAULTS_TO_LOG = (1, 3, 10, 100, 1000)
"""After how many faults the log tells it. Clients cause faults, so that they must not fill the log."""


def has_chat_template(model_dir: Path) -> bool:
    """Whether a model directory has a template of its own; raises ConfigError when its files can't be read."""
    return bool(find_templates(model_dir))


class ModelTemplate(PromptTemplate):
    """One model's template, or several with names, of which the tools of a chat choose one as in transformers.

    Its methods may be called from any thread, and block it until a child process has answered.
    """

    def __init__(
        self,
        sources: str | Mapping[str, str],
        special_tokens: Mapping[str, str],
        tool_call_parser: str = "",
        workers: Workers | None = None,
    ) -> None:
        """`special_tokens`: the texts of those that the model has, by their names in templates; others are undefined.
        `tool_call_parser`: the format in which the model calls tools, if its files name one. `workers` are closed with
        the template; None: child processes with `TEMPLATE_LIMITS`.
        """
        self._sources = {DEFAULT: sources} if isinstance(sources, str) else dict(sources)
        self.source = "\n".join(self._sources[name] for name in (DEFAULT, TOOL_USE) if name in self._sources)
        """The template of chats in Jinja; where those with tools have another one, both."""
        self.special_tokens = dict(special_tokens)
        self.tool_call_parser = tool_call_parser
        self.is_default = self.source == DEFAULT_TEMPLATE
        """Whether the model has no template of its own."""
        self._workers = workers or BoundedWorkers(TEMPLATE_LIMITS)
        self._lock = threading.Lock()
        self._traits: TemplateTraits | None = None
        self._fault: BatonError | None = None
        """Why the template is not used."""
        self._num_faults = 0
        self._named: dict[str, ModelTemplate] = {}
        """The templates that requests have named, by their names."""

    @classmethod
    def load(cls, model_dir: Path, workers: Workers | None = None) -> Self:
        """The template of a model directory, or the default one; raises ConfigError when its files can't be read."""
        sources = find_templates(model_dir) or DEFAULT_TEMPLATE
        return cls(sources, find_special_tokens(model_dir), find_tool_call_parser(model_dir), workers)

    def check(self) -> str:
        """Check the template once, before the first chat; returns why it is not used.

        Raises ConfigError for one that is not valid Jinja.
        """
        try:
            _ = self.traits
        except (TemplateFault, Overloaded) as error:
            return str(error)
        return ""

    @property
    def traits(self) -> TemplateTraits:
        """What the template has a place for, found once.

        Raises ConfigError for a template that is not valid Jinja, TemplateFault for one whose check exceeds the limits,
        and Overloaded if no child process could find it out now.
        """
        if self._fault is not None:
            raise self._fault.not_raised()
        if self._traits is None:
            self._traits = self._find_traits()
        return self._traits

    def named(self, name: str) -> ModelTemplate | None:
        """The model's template of this name alone, None if none has it; raises InvalidRequest if it is broken."""
        if name not in self._sources:
            return None
        with self._lock:
            template = self._named.get(name)
            if template is None:
                template = ModelTemplate(self._sources[name], self.special_tokens, workers=self._workers)
                self._named[name] = template
        try:
            _ = template.traits
        except ConfigError as error:
            raise InvalidRequest(FIELD, f"{name!r}: {error}") from None
        return template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        now: datetime,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt's text, as `ChatTemplate.render` makes it; raises also what `traits` raises."""
        check_variables(variables)
        _ = self.traits
        work = TemplateWork(
            self._sources,
            self.special_tokens,
            messages,
            now.isoformat(),
            variables or {},
            tools or (),
            {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message},
            is_models=True,
        )
        outcome = self._done("chat_template", work)
        if outcome.exceeds_limits:
            raise self._fault_of(outcome)
        if outcome.reason:
            raise InvalidRequest("messages", outcome.reason)
        return outcome.result

    def close(self) -> None:
        """End the child processes, even while they work. Idempotent."""
        self._workers.close()

    def _find_traits(self) -> TemplateTraits:
        work = TemplateWork(self._sources, self.special_tokens, is_models=True)
        outcome = self._done("template_traits", work)
        if not outcome.reason:
            return read_traits(outcome.result)
        if outcome.exceeds_limits:
            detail = f"the model's chat template is not used, since its check at start {outcome.reason}"
            _log.error("%s; chats are refused, all else is served", detail)
            self._fault = TemplateFault(detail)
        else:
            self._fault = ConfigError(outcome.reason)
        raise self._fault.not_raised()

    def _done(self, job: Job, work: TemplateWork) -> Outcome:
        """The outcome of a job that is not this machine's fault; raises Overloaded."""
        outcome = self._workers.run(job, work.as_json())
        if not outcome.is_lasting:
            raise Overloaded(f"the model's chat template {outcome.reason}")
        return outcome

    def _fault_of(self, outcome: Outcome) -> TemplateFault:
        """The fault of a rendering, which is counted and logged."""
        with self._lock:
            self._num_faults += 1
            count = self._num_faults
        reason = f"the model's chat template {outcome.reason}"
        if count in _FAULTS_TO_LOG:
            level = logging.WARNING if count < _FAULTS_TO_LOG[1] else logging.ERROR
            advice = "" if level == logging.WARNING else ": replace the template in the model's directory"
            _log.log(level, "%d chats have failed since the start of this process: %s%s", count, reason, advice)
        return TemplateFault(reason)


class RequestTemplate(PromptTemplate):
    """A request's template; a counterpart of `ChatTemplate` whose `render` takes bounded time and memory."""

    def __init__(self, workers: Workers, special_tokens: Mapping[str, str], source: str) -> None:
        """`special_tokens`: those of the model, by their names in templates. `source`: the template in Jinja."""
        self._workers = workers
        self._special_tokens = special_tokens
        self._sources = {DEFAULT: source}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        now: datetime,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt's text, as `ChatTemplate.render` makes it. Blocks the thread until a child process has answered.

        Raises InvalidRequest for a template that fails or exceeds its limits, and Overloaded if no child can be
        started.
        """
        check_variables(variables)
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        at = now.isoformat()
        work = TemplateWork(self._sources, self._special_tokens, messages, at, variables or {}, tools or (), options)
        return self._done("chat_template", work)

    @cached_property
    def traits(self) -> TemplateTraits:
        return read_traits(self._done("template_traits", TemplateWork(self._sources, self._special_tokens)))

    def _done(self, job: Job, work: TemplateWork) -> str:
        outcome = self._workers.run(job, work.as_json())
        if outcome.reason:
            raise InvalidRequest(FIELD, outcome.reason)
        return outcome.result
