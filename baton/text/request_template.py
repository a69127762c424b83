"""A chat template that came with a request. A stranger wrote it, so child processes render it, within limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from baton.errors import InvalidRequest
from baton.text.bounded_workers import Job, Workers
from baton.text.chat_template import FIELD, check_variables
from baton.text.prompt_template import PromptTemplate, TemplateTraits
from baton.text.template_files import DEFAULT
from baton.text.template_work import TemplateWork, read_traits


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
