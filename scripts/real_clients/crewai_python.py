"""CrewAI: an agent of a crew calls a tool and answers."""

import os

from crewai import LLM, Agent, Crew, Task
from crewai.hooks import before_llm_call
from crewai.tools import tool

called = []


@tool("weather")
def weather(city: str) -> str:
    """The weather in a city."""
    called.append(city)
    return "sunny, 21 degrees"


@before_llm_call
def first_call_demanded(context):
    """The first request has to call the tool. CrewAI itself has no setting for that."""
    context.llm.additional_params["extra_body"] = {} if called else {"tool_choice": "required"}


llm = LLM(
    model=f"openai/{os.environ['BATON_MODEL']}",
    base_url=f"{os.environ['BATON_URL']}/v1",
    api_key="any",
    temperature=0,
    max_tokens=80,
)
agent = Agent(
    role="forecaster", goal="Tell the weather", backstory="You know it.", llm=llm, tools=[weather], max_iter=2
)
task = Task(description="What is the weather in Paris?", expected_output="The weather.", agent=agent)
answer = Crew(agents=[agent], tasks=[task]).kickoff()
assert called and answer.raw
print("works: a tool's whole round")
