"""The Python client: generate and stream over gRPC, and an operator's view. Loads neither torch nor any role."""

from baton.client.async_generation import AsyncGenerationClient
from baton.client.generation import GenerationClient
from baton.client.operator import OperatorClient
from baton.messages.generation import Accepted, Chunk, Finished, GenerateEvent, GenerateRequest, SequenceFinished
from baton.security.access import Access

__all__ = [
    "Accepted",
    "Access",
    "AsyncGenerationClient",
    "Chunk",
    "Finished",
    "GenerateEvent",
    "GenerateRequest",
    "GenerationClient",
    "OperatorClient",
    "SequenceFinished",
]
