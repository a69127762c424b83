"""The Python client: text generation over gRPC, and the operator's calls. Importing it does not import torch."""

from baton.client.async_generation import AsyncGenerationClient
from baton.client.generation import GenerationClient
from baton.client.operator import OperatorClient
from baton.messages.generation import (
    Accepted,
    Chunk,
    Finished,
    GenerateEvent,
    GenerateRequest,
    PromptEmbeds,
    PromptLogprobs,
    SequenceFinished,
)
from baton.messages.pooling import EmbedInput, EmbedRequest, EmbedResponse, EmbedResult, EmbedTask, Pooling
from baton.security.access import Access

__all__ = [
    "Accepted",
    "Access",
    "AsyncGenerationClient",
    "Chunk",
    "EmbedInput",
    "EmbedRequest",
    "EmbedResponse",
    "EmbedResult",
    "EmbedTask",
    "Finished",
    "GenerateEvent",
    "GenerateRequest",
    "GenerationClient",
    "OperatorClient",
    "Pooling",
    "PromptEmbeds",
    "PromptLogprobs",
    "SequenceFinished",
]
