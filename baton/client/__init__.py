"""The Python client: generate and stream over gRPC, and an operator's view. Loads neither torch nor any role."""

from baton.client.async_generation import AsyncGenerationClient
from baton.client.generation import GenerationClient
from baton.client.operator import OperatorClient
from baton.security.access import Access

__all__ = ["Access", "AsyncGenerationClient", "GenerationClient", "OperatorClient"]
