"""Offline use: a model in this process, without a router, Redis or ports, with the tokens that a cluster gives."""

from baton.offline.llm import LLM
from baton.offline.outputs import CompletionOutput, EmbeddingOutput, RequestOutput, RequestsFailed
from baton.offline.settings import EngineSettings, SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineSettings",
    "RequestOutput",
    "RequestsFailed",
    "SamplingParams",
]
