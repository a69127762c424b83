"""Requests of the engine, and legs for nodes, by fields of their own and of their specification alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from baton.engine.request import Request
from baton.messages.node import Submit
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams

_OF_SPEC = frozenset(field.name for field in fields(RequestSpec))


def request_of(request_id: str, prompt: Sequence[int], params: SamplingParams, **own: Any) -> Request:
    of_spec = {name: own.pop(name) for name in _OF_SPEC & own.keys()}
    return Request(request_id, RequestSpec(prompt, params, **of_spec), **own)


def changed(submit: Submit, **own: Any) -> Submit:
    """The leg with other fields."""
    of_spec = {name: own.pop(name) for name in _OF_SPEC & own.keys()}
    return replace(submit, spec=replace(submit.spec, **of_spec), **own)
