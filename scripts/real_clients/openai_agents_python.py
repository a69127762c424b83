"""OpenAI's Agents SDK: a tool's whole round over responses and chats, whole and streamed, a structured answer."""

import asyncio
import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

NAME = os.environ["BATON_MODEL"]
QUESTION = "What is the weather in Paris?"
called = []


class City(BaseModel):
    """The structured answer that is asked for."""

    name: str
    country: str


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    called.append(city)
    return "sunny, 21 degrees"


async def main() -> None:
    """Run an agent with the models for both APIs."""
    client = AsyncOpenAI(base_url=f"{os.environ['BATON_URL']}/v1", api_key="any")
    for api, kind in (("responses", OpenAIResponsesModel), ("chats", OpenAIChatCompletionsModel)):
        model = kind(model=NAME, openai_client=client)
        # The SDK demands the first call alone (reset_tool_choice).
        demanded = ModelSettings(temperature=0, max_tokens=60, tool_choice="weather")
        agent = Agent(
            "assistant", instructions="Answer briefly.", model=model, tools=[weather], model_settings=demanded
        )
        called.clear()
        whole = await Runner.run(agent, QUESTION)
        assert len(called) == 1 and len(whole.raw_responses) == 2 and whole.final_output
        streamed = Runner.run_streamed(agent, QUESTION)
        async for _ in streamed.stream_events():
            pass
        assert len(called) == 2 and streamed.final_output == whole.final_output
        print(f"works: a tool's whole round over {api}, whole and streamed")
        settings = ModelSettings(temperature=0, max_tokens=80)
        structured = Agent("geographer", model=model, output_type=City, model_settings=settings)
        assert isinstance((await Runner.run(structured, "What is the capital of France?")).final_output, City)
        print(f"works: a structured answer over {api}")


set_tracing_disabled(True)
asyncio.run(main())
