"""Pydantic AI: a tool's whole round, whole and streamed, structured answers, and a prompt that is too long."""

import os

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, RunContext
from pydantic_ai.exceptions import ModelContextWindowExceededError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

NAME, URL = os.environ["BATON_MODEL"], os.environ["BATON_URL"]


class City(BaseModel):
    """The structured answer that is asked for."""

    name: str
    country: str


def first_call_demanded(context: RunContext) -> dict:
    """The settings of a request: the first one of a run has to call the tool."""
    demanded = {"tool_choice": ["weather"]} if context.run_step == 1 else {}
    return {"temperature": 0, "max_tokens": 60, **demanded}


openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="any")
models = {
    "chats": OpenAIChatModel(NAME, provider=openai),
    "responses": OpenAIResponsesModel(NAME, provider=openai),
    "messages": AnthropicModel(NAME, provider=AnthropicProvider(base_url=URL, api_key="any")),
}
for api, model in models.items():
    called = []
    agent = Agent(model, instructions="Answer briefly.", model_settings=first_call_demanded)

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather in a city."""
        called.append(city)  # noqa: B023  (used within the same turn of the loop)
        return "sunny, 21 degrees"

    answer = agent.run_sync("What is the weather in Paris?")
    assert called and answer.usage.requests == 2 and answer.output
    with agent.run_stream_sync("What is the weather in Paris?") as streamed:
        assert streamed.get_output() == answer.output and len(called) == 2
    print(f"works: a tool's whole round over {api}, whole and streamed")

for output in (City, NativeOutput(City)):
    structured = Agent(models["chats"], output_type=output, model_settings={"temperature": 0, "max_tokens": 80})
    assert isinstance(structured.run_sync("What is the capital of France?").output, City)
print("works: structured answers, as a tool's arguments and as a format of the text")

for api, model in models.items():
    try:
        Agent(model, model_settings={"max_tokens": 60}).run_sync("word " * 10_000)
    except ModelContextWindowExceededError:
        print(f"works: a prompt that is too long is ModelContextWindowExceededError over {api}")
