"""The endpoints /tokenize and /detokenize: what tokens a text or a chat becomes, and back. Fields are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from baton.errors import InvalidRequest
from baton.messages.generation import ModelCard
from baton.messages.request_limits import MAX_TOKEN_IDS
from router.admission.validation import check_model, check_token_ids
from router.http.bodies.fields import Strict, TokenIds, read_as
from router.http.client import Client
from router.http.completions.bodies import ChatPrompt, chat_prompt
from router.http.endpoint import Handler, in_thread_if_large, render_chat
from router.http.json_body import parse_json, read_body
from router.http.model import ServedModel


class TokenizeText(Strict):
    """POST /tokenize for a text"""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatPrompt):
    """POST /tokenize for the messages of a chat"""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Strict):
    """POST /detokenize"""

    tokens: TokenIds
    model: str | None = None


class _TokenEndpoint:
    """The common part of both endpoints: an ASGI application, whose exceptions the front turns into answers.

    The body is parsed, and then all of the work is done at once, each in a thread if it may take long.
    """

    def __init__(self, handler: Handler, model: ServedModel) -> None:
        self._handler = handler
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        content = await read_body(scope, receive)
        async with Client(receive, send) as client:
            found = await in_thread_if_large(self._handler, content, parse_json, content)
            work = partial(self._answer, found, self._model.card)
            if found.get("messages") is None:
                answer = await in_thread_if_large(self._handler, content, work)
            else:
                answer = await render_chat(self._handler, content, found, work)
            name = scope["state"]["request_id"].encode()
            await client.answer(200, [(b"content-type", b"application/json"), (b"x-request-id", name)], answer)

    def _answer(self, found: Mapping[str, Any], card: ModelCard) -> bytes:
        """The JSON of the answer to the JSON of a request; raises InvalidRequest. May be called in a thread."""
        raise NotImplementedError


class Tokenize(_TokenEndpoint):
    """POST /tokenize"""

    def _answer(self, found: Mapping[str, Any], card: ModelCard) -> bytes:
        if (found.get("prompt") is None) == (found.get("messages") is None):
            raise InvalidRequest("prompt", "or messages is required, and not both")
        if found.get("messages") is None:
            body: TokenizeText | TokenizeChat = read_as(TokenizeText, found)
        else:
            body = read_as(TokenizeChat, found)
        check_model(body.model or "", card)
        if isinstance(body, TokenizeText):
            field, tokens = "prompt", self._model.encode(body.prompt, special=body.add_special_tokens is not False)
        else:
            field, tokens = "messages", chat_prompt(body, self._model)
        if len(tokens) > MAX_TOKEN_IDS:
            raise InvalidRequest(field, f"has {len(tokens)} tokens; at most {MAX_TOKEN_IDS} are returned")
        spelling = self._model.spelling
        answer = {
            "count": len(tokens),
            "max_model_len": card.max_model_len,
            "tokens": tokens,
            "token_strs": [spelling(one).decode(errors="replace") for one in tokens]
            if body.return_token_strs
            else None,
        }
        return json.dumps(answer, ensure_ascii=False).encode()


class Detokenize(_TokenEndpoint):
    """POST /detokenize"""

    def _answer(self, found: Mapping[str, Any], card: ModelCard) -> bytes:
        body = read_as(DetokenizeBody, found)
        check_model(body.model or "", card)
        if len(body.tokens) > card.max_model_len:
            message = f"has {len(body.tokens)} token ids; at most {card.max_model_len} are taken, as many as it reads"
            raise InvalidRequest("tokens", message)
        check_token_ids("tokens", body.tokens, card.vocab_size)
        return json.dumps({"prompt": self._model.decode(body.tokens)}, ensure_ascii=False).encode()
