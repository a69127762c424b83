"""The class of offline use: a model that this process computes itself."""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from random import Random
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack

import numpy as np

from baton.engine.stats import SpecDecodingStats
from baton.errors import BatonError, ConfigError, InvalidRequest
from baton.messages.generation import GenerateRequest, PromptEmbeds
from baton.messages.pooling import PoolingRequest
from baton.model_formats.encoder_decoders import encoder_decoder
from baton.models.resolve import with_model_directory
from baton.node.process import log_slow_paths
from baton.node.runner_spec import runner_spec, with_defaults_of_device
from baton.observe.logs import log_to_standard_loggers
from baton.offline.engine import OfflineEngine, RunningRequest, at_prompt
from baton.offline.outputs import EmbeddingOutput, RequestOutput, RequestsFailed, progress_bar
from baton.offline.settings import EngineSettings, SamplingParams, node_config
from baton.runner import load
from baton.text.chat_template import ChatTemplate
from baton.text.constraint_checker import ConstraintChecker
from baton.text.model_template import ModelTemplate
from baton.text.tokenizer import Tokenizer
from router.admission.request import ValidRequest
from router.admission.sampling import longest_answer
from router.admission.validation import validate
from router.cards import card_of_nodes, sampling_defaults
from router.http.bodies.fields import read_as
from router.http.completions.bodies import ChatBody, chat_prompt
from router.http.model import ServedModel

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, or its token ids; or a dictionary, as vLLM takes it, with `prompt` (a text or token ids), `prompt_token_ids`
(a text beside them is what they were made of), or `prompt_embeds` with or without one of the others behind the rows.
The rows are the bytes of a safetensors file, or what numpy makes an array of: [rows, numbers in a row]."""
_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds")
_ONE_OF_KEYS = "prompt, prompt_token_ids or prompt_embeds"


def is_prompt(value: object) -> bool:
    """Whether this is one prompt."""
    return isinstance(value, str | Mapping) or _is_ids(value)


def taken_apart(prompt: object) -> tuple[str | Sequence[int] | None, Sequence[PromptEmbeds]]:
    """A prompt without its rows, and its rows; raises InvalidRequest for anything else."""
    if not isinstance(prompt, Mapping):
        if not (isinstance(prompt, str) or _is_ids(prompt)):
            raise InvalidRequest("prompt", f"must be a text, a list of token ids, or a dictionary with {_ONE_OF_KEYS}")
        return prompt, ()  # type: ignore[return-value]  # it has been checked
    given = {name: value for name, value in prompt.items() if value is not None}
    if not given or any(name not in _KEYS for name in given):
        raise InvalidRequest("prompt", f"a dictionary has {_ONE_OF_KEYS}, and nothing else")
    ids, text, rows = given.get("prompt_token_ids"), given.get("prompt"), given.get("prompt_embeds")
    if ids is not None and not _is_ids(ids):
        raise InvalidRequest("prompt_token_ids", "must be a list of token ids")
    if text is not None and not isinstance(text, str) and not _is_ids(text):
        raise InvalidRequest("prompt", "must be a text or a list of token ids")
    content: Any = text if ids is None else ids
    if rows is None:
        return content, ()
    return content or None, (PromptEmbeds(bytes(rows) if isinstance(rows, bytes | bytearray) else _as_file(rows)),)


def text_of(prompt: object) -> str | None:
    """The text of a prompt; None if it is given as token ids, or as rows alone."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _is_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], int)


def _as_file(rows: object) -> bytes:
    """The rows in the bytes of a safetensors file, in float32, which has all numbers of the other dtypes."""
    try:
        array = np.ascontiguousarray(rows, np.dtype("<f4"))
    except (TypeError, ValueError, RuntimeError) as error:
        reason = f"are no array of numbers ({str(error).splitlines()[0]:.100}); torch's bfloat16 needs .float()"
        raise InvalidRequest("prompt_embeds", reason) from error
    entry = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [0, array.nbytes]}
    header = json.dumps({"prompt_embeds": entry}).encode()
    return struct.pack("<Q", len(header)) + header + array.tobytes()


Message = Mapping[str, Any]
"""A message of a chat, as OpenAI's API has it: `role`, and `content` as a text or as text parts."""
Result = TypeVar("Result", RequestOutput, EmbeddingOutput)


class LLM:
    """A model in this process: it generates, chats and embeds. A context manager, which closes it.

    A request has the same tokens as the same request to a cluster of the same model, dtype and kind of processor, alone
    or in a list of others. Calls from several threads take turns.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        seed: int | None = None,
        generation_config: Literal["auto", "none"] = "auto",
        **settings: Unpack[EngineSettings],
    ) -> None:
        """Load the model that `model` names as `baton up --model` does, and its KV cache.

        That is a directory of transformers (config, tokenizer, safetensors), a GGUF file, a model by name (smollm2), or
        ORG/NAME[@REVISION] of the Hugging Face Hub; what is not here yet is fetched and converted once, which stderr
        tells.

        `seed`: from it are drawn the seeds of requests that set none, in the order of the prompts; None: by chance.
        `generation_config`: whether requests that do not set temperature, top_p, top_k, min_p or repetition_penalty get
        the model's own (auto), as the router's setting of this name. `settings`: the engine's settings of `baton
        node`, by the same names (docs/configuration.md). No configuration file is read, and of the environment only
        where models are kept (XDG_CACHE_HOME, and HF_* for the hub). Raises ConfigError, which says what is missing or
        wrong, also for a model with an encoder and a decoder, and AdapterRefused for an adapter in `lora_modules` that
        can't be used.
        """
        log_to_standard_loggers()
        config = with_defaults_of_device(with_model_directory(node_config(model, settings)))
        # A directory without a configuration is refused below, with what it lacks first.
        if (config.model / "config.json").is_file() and (architecture := encoder_decoder(config.model)) is not None:
            raise ConfigError(
                f"{config.model} has an encoder and a decoder ({architecture.source}), which LLM does not compute: "
                "serve it with baton up --model"
            )
        self._codec = Tokenizer.load(config.model)
        self._template = template = ModelTemplate.load(config.model)
        runner = load(runner_spec(config))
        log_slow_paths(runner.model)
        self._engine = OfflineEngine(config, runner)
        described = self._engine.description
        defaults = sampling_defaults(config.model, generation_config)
        pooling = runner.model.pooling
        card = card_of_nodes([described], described.max_model_len, defaults, pooling=pooling)
        self._card = replace(card, adapters=self._engine.adapters)
        self._chats = ServedModel(
            lambda: self._card,
            self._codec,
            template,
            datetime.now,
            # The template is the caller's own, so it needs no limits.
            partial(ChatTemplate.of_request, template.special_tokens),
        )
        self._constraints = ConstraintChecker()
        self._rng = Random(seed)
        self._turn = threading.Lock()
        self._is_closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        adapter: str = "",
    ) -> list[RequestOutput]:
        """Generate from one prompt or from a list; the results are in the order of the prompts.

        `sampling_params`: one for all prompts, or a list with one for each. `adapter`: the name of an adapter (setting
        `lora_modules`); empty: the model alone. `use_tqdm`: show a progress bar, if stderr
        is a terminal. All prompts are checked before the first is computed: raises InvalidRequest, whose field is
        `prompts[INDEX]`. Raises RequestsFailed, which has the results of the others, if requests failed while they ran.
        Ctrl-C (KeyboardInterrupt) ends all requests of the call; the engine can be used again.
        """
        listed = _listed(prompts)
        params = _one_each(sampling_params, len(listed))

        def request(index: int) -> GenerateRequest:
            prompt, embeds = taken_apart(listed[index])
            return replace(params[index].request(prompt or ""), prompt=prompt, prompt_embeds=embeds, model=adapter)

        return self._run(len(listed), request, lambda index, ended: _generated(ended, listed[index]), use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        adapter: str = "",
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one chat or of a list of chats, with the model's chat template.

        `chat_template`: a template in Jinja to use instead of the model's. `chat_template_kwargs`: further variables
        for the template. All else is as in `generate`, except that an output may have as many tokens as the model takes
        if `max_tokens` is not set.
        """
        chats = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        params = _one_each(sampling_params, len(chats))
        options = {
            "add_generation_prompt": add_generation_prompt,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
        }

        def request(index: int) -> GenerateRequest:
            body = read_as(ChatBody, {"messages": chats[index], **options})
            prompt = chat_prompt(body, self._chats)
            given = replace(params[index].request(prompt), model=adapter)
            if given.max_tokens is not None:
                return given
            num_sequences = max(given.n or 1, given.best_of or 0)
            return replace(given, max_tokens=longest_answer(self._card, len(prompt), num_sequences, given.logprobs))

        return self._run(len(chats), request, lambda index, running: _generated(running), use_tqdm=use_tqdm)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True, adapter: str = ""
    ) -> list[EmbeddingOutput]:
        """Embed one text or a list of texts; the results are in the order of the texts. `adapter`: as in `generate`.

        Raises what `generate` raises, and InvalidRequest if the model computes no embeddings.
        """
        listed = _listed(prompts)

        def request(index: int) -> GenerateRequest:
            prompt, embeds = taken_apart(listed[index])
            return GenerateRequest(prompt, model=adapter, prompt_embeds=embeds, pooling=PoolingRequest())

        return self._run(len(listed), request, lambda index, running: _embedded(running), use_tqdm=use_tqdm)

    @property
    def spec_decoding(self) -> SpecDecodingStats:
        """What became of the drafts of all calls so far (setting `speculative_config`)."""
        return self._engine.scheduler.make_stats().spec_decoding

    def close(self) -> None:
        """End the engine's thread and free the KV cache; later calls raise ConfigError. Idempotent."""
        with self._turn:
            if self._is_closed:
                return
            self._is_closed = True
            self._engine.close()
            self._constraints.close()
            self._template.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        count: int,
        request: Callable[[int], GenerateRequest],
        result: Callable[[int, RunningRequest], Result],
        *,
        use_tqdm: bool,
    ) -> list[Result]:
        """Check all requests, compute them, and return their results."""
        with self._turn:
            if self._is_closed:
                raise ConfigError("this LLM is closed; make another one")
            requests = [self._validated(index, request) for index in range(count)]
            running = [RunningRequest(item, self._codec, self._engine.description) for item in requests]
            with progress_bar(count, is_wanted=use_tqdm) as on_progress:
                self._engine.run(running, on_progress)
        results = [item.error or result(index, item) for index, item in enumerate(running)]
        good = [item for item in results if not isinstance(item, BatonError)]
        if len(good) < len(results):
            raise RequestsFailed(results)
        return good

    def _validated(self, index: int, request: Callable[[int], GenerateRequest]) -> ValidRequest:
        try:
            valid = validate(request(index), self._card, self._codec, self._rng, max_prompt_embeds=sys.maxsize)
            if (constraint := valid.sampling_params.constraint) is not None:
                self._constraints.check(*constraint)
            return valid
        except InvalidRequest as error:
            raise at_prompt(index, error) from None


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[object]:
    if is_prompt(prompts):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise InvalidRequest("prompts", "must be a text, a list of token ids, or a list of such")
    return prompts


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    """The parameters of each prompt; raises InvalidRequest if there are not as many as prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequest("sampling_params", f"has {len(params)} entries, but there are {count} prompts")
    if not all(isinstance(item, SamplingParams) for item in params):
        raise InvalidRequest("sampling_params", "must be baton.SamplingParams, or a list of them")
    return params


def _generated(finished: RunningRequest, prompt: object = None) -> RequestOutput:
    request, finish = finished.request, finished.finish
    return RequestOutput(
        request.request_id,
        text_of(prompt),
        request.prompt_token_ids,
        finished.outputs(),
        request.sampling_params.seed,
        finish.timings.cached_tokens if finish is not None else 0,
        finished.prompt_logprobs,
        finished.draft_counts.num_drafted,
        finished.draft_counts.num_accepted,
    )


def _embedded(finished: RunningRequest) -> EmbeddingOutput:
    vector = finished.finish.embedding if finished.finish is not None else b""
    return EmbeddingOutput(finished.request.prompt_token_ids, np.frombuffer(vector, dtype="<f4").astype(np.float32))
