"""smolagents: a ToolCallingAgent and a CodeAgent with the model for OpenAI-compatible servers."""

import os

from smolagents import ActionStep, CodeAgent, OpenAIModel, ToolCallingAgent, tool

called = []


@tool
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The name of the city.
    """
    called.append(city)
    return "sunny, 21 degrees"


model = OpenAIModel(
    model_id=os.environ["BATON_MODEL"],
    api_base=f"{os.environ['BATON_URL']}/v1",
    api_key="any",
    temperature=0,
    max_tokens=80,
)
for stream in (False, True):
    called.clear()
    agent = ToolCallingAgent([weather], model, stream_outputs=stream, verbosity_level=0)
    # The second answer is the final one, which is asked for without tools.
    answer = agent.run("Call the tool weather for the city Paris.", max_steps=1)
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    assert called and answer and all(step.error is None or "max steps" in str(step.error) for step in steps), steps
    print(f"works: ToolCallingAgent, a tool's whole round, {'streamed' if stream else 'whole'}")

assert CodeAgent([weather], model, verbosity_level=0, use_structured_outputs_internally=True).run(
    "What is the weather in Paris?", max_steps=1
)
print("works: CodeAgent, with structured answers inside")
