"""The endpoints /tokenize and /detokenize: what tokens a text or a chat becomes, and back. Fields are vLLM's."""

from __future__ import annotations

import json

from baton.errors import InvalidRequest
from baton.messages.request_limits import MAX_TOKEN_IDS
from router.admission.checks import check_model, check_token_ids
from router.http.bodies.fields import Strict, TokenIds, read_as
from router.http.client import Client
from router.http.completions.bodies import ChatPrompt, chat_prompt
from router.http.endpoint import JSON, BodyEndpoint, HttpCall


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


class _TokenEndpoint(BodyEndpoint):
    """The common part of both endpoints: all of the work on a parsed body is done at once."""

    async def _answer(self, client: Client, call: HttpCall) -> None:
        renders = call.found.get("messages") is not None
        answer = await (call.rendered if renders else call.in_thread)(self._json, call)
        await client.answer(200, [JSON, *self.error_form.id_headers(call.request_id)], answer)

    def _json(self, call: HttpCall) -> bytes:
        """The answer; raises InvalidRequest. May be called in a thread."""
        raise NotImplementedError


class Tokenize(_TokenEndpoint):
    """POST /tokenize"""

    def _json(self, call: HttpCall) -> bytes:
        parsed, card = call.found, call.card
        if (parsed.get("prompt") is None) == (parsed.get("messages") is None):
            raise InvalidRequest("prompt", "or messages is required, and not both")
        if parsed.get("messages") is None:
            body: TokenizeText | TokenizeChat = read_as(TokenizeText, parsed)
        else:
            body = read_as(TokenizeChat, parsed)
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
            "token_strs": [spelling(token).decode(errors="replace") for token in tokens]
            if body.return_token_strs
            else None,
        }
        return json.dumps(answer, ensure_ascii=False).encode()


class Detokenize(_TokenEndpoint):
    """POST /detokenize"""

    def _json(self, call: HttpCall) -> bytes:
        body, card = read_as(DetokenizeBody, call.found), call.card
        check_model(body.model or "", card)
        if len(body.tokens) > card.max_model_len:
            message = f"has {len(body.tokens)} token ids; at most {card.max_model_len} are taken, as many as it reads"
            raise InvalidRequest("tokens", message)
        check_token_ids("tokens", body.tokens, card.vocab_size)
        return json.dumps({"prompt": self._model.decode(body.tokens)}, ensure_ascii=False).encode()
