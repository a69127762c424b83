"""Asks an endpoint which model it serves, before any load is sent."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.bench.load.endpoint import Target
from baton.client import Access, GenerationClient
from baton.errors import BatonError, ConfigError, Unreachable
from baton.text.tokenizer import Tokenizer

_TIMEOUT_S = 10.0
_UNKNOWN_VOCAB = 256
"""Token ids below it are in every vocabulary. OpenAI's API does not say a vocabulary's size."""


@dataclass(frozen=True, slots=True)
class Served:
    """What an endpoint serves."""

    target: Target
    """The target, completed with a model and the size of its vocabulary."""
    max_model_len: int | None


def probe(target: Target) -> Served:
    """Asks the target for its models; raises Unreachable, ConfigError, or BatonError for an unusable answer."""
    if target.backend == "baton":
        return _probe_grpc(target)
    return _probe_http(target)


def _probe_grpc(target: Target) -> Served:
    if target.is_tls and not target.tls_ca:
        raise ConfigError("gRPC with TLS needs the certificate authority to trust: name its file with --tls-ca")
    access = Access(target.api_key, Path(target.tls_ca) if target.is_tls else None)
    with GenerationClient(target.address, access=access) as client:
        models = client.list_models()
    wanted = next((card for card in models if not target.model or card.name == target.model), None)
    if wanted is None:
        raise BatonError(f"{target.address} serves {', '.join(card.name for card in models) or 'no model'}")
    return Served(
        replace(target, model=wanted.name, vocab_size=target.vocab_size or wanted.vocab_size), wanted.max_model_len
    )


def _probe_http(target: Target) -> Served:
    card = _model_card(target)
    vocab_size = target.vocab_size
    if not vocab_size and target.tokenizer:
        vocab_size = Tokenizer.load(Path(target.tokenizer)).vocab_size
    max_model_len = card.get("max_model_len")
    return Served(
        replace(target, model=str(card["id"]), vocab_size=vocab_size or _UNKNOWN_VOCAB),
        max_model_len if isinstance(max_model_len, int) else None,
    )


def _model_card(target: Target) -> dict[str, Any]:
    host, port = target.address.rsplit(":", 1)
    tls = target.tls()
    connection = (
        http.client.HTTPSConnection(host, int(port), timeout=_TIMEOUT_S, context=tls)
        if tls is not None
        else http.client.HTTPConnection(host, int(port), timeout=_TIMEOUT_S)
    )
    with closing(connection):
        try:
            connection.request("GET", "/v1/models", headers=target.key_header)
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{target.address} can't be reached: {error}") from None
    if response.status != 200:
        raise BatonError(f"{target.address}: GET /v1/models was answered with {response.status}: {body[:200]!r}")
    try:
        cards = json.loads(body)["data"]
        wanted = next((card for card in cards if not target.model or card["id"] == target.model), None)
    except (ValueError, KeyError, TypeError):
        raise BatonError(f"{target.address} is not an OpenAI endpoint: GET /v1/models gave {body[:80]!r}") from None
    if not isinstance(wanted, dict):
        raise BatonError(f"{target.address} serves {', '.join(str(card['id']) for card in cards) or 'no model'}")
    return wanted
