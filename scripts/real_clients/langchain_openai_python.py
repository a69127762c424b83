"""LangChain's ChatOpenAI: invoke, stream, batch, structured answers, an agent with a tool, and a text too long."""

import os

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    """The structured answer that is asked for."""

    name: str
    country: str


chat = ChatOpenAI(
    model=os.environ["BATON_MODEL"],
    base_url=f"{os.environ['BATON_URL']}/v1",
    api_key="any",
    temperature=0,
    max_tokens=60,
)
whole = chat.invoke([("system", "Answer briefly."), ("human", "What is the capital of France?")])
assert whole.content and whole.usage_metadata["output_tokens"] > 0
streamed = "".join(
    piece.content for piece in chat.stream([("system", "Answer briefly."), ("human", "What is the capital of France?")])
)
assert streamed == whole.content
print("works: invoke and stream, equal")
assert len(chat.batch(["Name a colour.", "Name a fruit.", "Name a city."])) == 3
print("works: batch")
for method in ("json_schema", "function_calling"):
    city = chat.with_structured_output(City, method=method).invoke("What is the capital of France?")
    assert isinstance(city, City)
print("works: with_structured_output (json_schema, function_calling)")


def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}, 21 degrees"


@wrap_model_call
def first_call_demanded(request, handler):
    """The first request of a run has to call the tool."""
    done = any(isinstance(message, ToolMessage) for message in request.messages)
    return handler(request if done else request.override(tool_choice="weather"))


question = {"messages": [("human", "What is the weather in Paris?")]}
for api in ("chats", "responses"):
    model = chat.model_copy(update={"use_responses_api": api == "responses"})
    agent = create_agent(model, [weather], middleware=[first_call_demanded])
    kinds = [message.type for message in agent.invoke(question)["messages"]]
    assert kinds[:4] == ["human", "ai", "tool", "ai"], kinds
    streamed = list(agent.stream(question, stream_mode="messages"))
    assert any(isinstance(message, ToolMessage) for message, _ in streamed)
    print(f"works: create_agent, a tool's whole round over {api}, whole and streamed")
    try:
        model.invoke("word " * 10_000)
    except ContextOverflowError:
        print(f"works: a prompt that is too long is ContextOverflowError over {api}")
