"""The body of /v1/completions."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from baton.errors import InvalidRequest
from baton.messages.generation import PromptEmbeds
from baton.messages.request_limits import MAX_PROMPT_BYTES, MAX_PROMPTS
from router.admission.prompt_inputs import NOT_TAKEN
from router.http.bodies.fields import OnlyTrue, TextsOrIds, is_ids
from router.http.bodies.generation import GenerationBody
from router.http.json_body import base64_bytes


def _prompts(value: Any) -> Sequence[str | Sequence[int]]:
    if isinstance(value, str) or (isinstance(value, list) and value and is_ids(value)):
        return (value,)
    if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise ValueError(f"has {len(value)} prompts; at most {MAX_PROMPTS} are taken")
    if not isinstance(value, list) or not value or not all(isinstance(p, str) or is_ids(p) for p in value):
        raise ValueError("must be a string, a list of token ids, or a list of such")
    return tuple(value)


Prompts = Annotated[Sequence[str | Sequence[int]], PlainValidator(_prompts, json_schema_input_type=TextsOrIds)]


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompts: Prompts = Field(default=(), alias="prompt")
    prompt_embeds: str | None = None
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: OnlyTrue = None
    suffix: str | None = None

    def read_prompt_embeds(self, most_bytes: int) -> PromptEmbeds:
        """The rows in `prompt_embeds`, base64 of a safetensors file, which come before the prompt; none is looked into.

        `most_bytes`: of the file; 0: none is taken. Raises InvalidRequest, also for what does not go with rows.
        """
        text = self.prompt_embeds or ""
        if not most_bytes:
            raise InvalidRequest("prompt_embeds", NOT_TAKEN)
        if len(text) > base64_bytes(most_bytes):
            raise InvalidRequest(
                "prompt_embeds", f"has {len(text)} characters; at most {most_bytes} bytes are taken here"
            )
        if len(self.prompts) > 1:
            raise InvalidRequest("prompt", f"has {len(self.prompts)} prompts; prompt_embeds go with one")
        for name in ("echo", "truncate_prompt_tokens", "prompt_logprobs"):
            if getattr(self, name) is not None and getattr(self, name) is not False:
                raise InvalidRequest(name, "does not go with prompt_embeds")
        try:
            return PromptEmbeds(base64.b64decode(text, validate=True))
        except ValueError:
            raise InvalidRequest("prompt_embeds", "is not base64") from None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The alternatives at each token of the prompt; None: no log-probabilities of it.

        As in vLLM, a prompt that is repeated has as many as the output where the request does not say.
        """
        if self.prompt_logprobs is None and self.echo:
            return self.logprobs
        return self.prompt_logprobs

    def check_suffix(self) -> None:
        """Raises InvalidRequest for what does not go with a text behind the gap that the model fills."""
        if not self.suffix:
            return
        for name in ("prompt_embeds", "echo", "truncate_prompt_tokens"):
            if getattr(self, name) not in (None, False):
                raise InvalidRequest(name, "does not go with suffix")
        if not all(isinstance(prompt, str) for prompt in self.prompts):
            raise InvalidRequest("prompt", "must be a text where there is a suffix")
        # The suffix is part of each prompt, and must not multiply the work that a body of this size is.
        if len(self.prompts) * len(self.suffix) > MAX_PROMPT_BYTES:
            raise InvalidRequest(
                "suffix",
                f"has {len(self.suffix)} characters for each of {len(self.prompts)} prompts; all together may have "
                f"{MAX_PROMPT_BYTES}: send fewer prompts in a request",
            )

    def check_echo(self) -> None:
        """Raises InvalidRequest for what does not go with a prompt that is repeated or has log-probabilities."""
        self.check_prompt_logprobs()
        if not self.echo:
            return
        if self.stream and self.logprobs is not None:
            raise InvalidRequest("echo", "does not go with logprobs in a stream")
        if self.max_tokens == 0 and self.stream:
            raise InvalidRequest("max_tokens", "must be at least 1 in a stream")
        if self.max_tokens == 0 and self.min_tokens:
            raise InvalidRequest("min_tokens", f"must be 0 to max_tokens (0), not {self.min_tokens}")
