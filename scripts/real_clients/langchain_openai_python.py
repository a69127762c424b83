"""LangChain's ChatOpenAI: invoke, stream, batch, a structured answer."""

import os

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
city = chat.with_structured_output(City, method="json_schema").invoke("What is the capital of France?")
assert isinstance(city, City)
print("works: with_structured_output (json_schema)")
