"""Agents and libraries of others call tools and read objects from `fastspec serve`.

The model is scripted: it thinks, calls the tool Weather, and answers after the tool's result. Where the answer must be
JSON or a call, a grammar leads it to the same arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.agent_pair import agent_pair
from tests.helpers.clients import Other, gets_what_it_asks_for, served

AGENTS = """
import asyncio
from typing import Literal
import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner
from agents import OpenAIConversationsSession, function_tool, set_tracing_disabled
from pydantic import BaseModel
set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url="{url}", api_key="key")
class Weather(BaseModel):
    city: str
    unit: Literal["C", "F"]
@function_tool(name_override="Weather")
def weather(city: str, unit: Literal["C", "F"]) -> str:
    '''Tells the weather of a city.'''
    return f"rain in {city} at 9 {unit}"
async def main():
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind("demo", client)
        agent = Agent(name="a", instructions="Be brief.", tools=[weather], model=model)
        result = await Runner.run(agent, "Will it rain in Paris?")
        told = [one.output for one in result.new_items if one.type == "tool_call_output_item"]
        print(kind.__name__, "agent:", result.final_output, told)
        streamed = Runner.run_streamed(agent, "Will it rain in Paris?")
        kinds = [one.type async for one in streamed.stream_events()]
        print(kind.__name__, "streamed:", streamed.final_output, "raw_response_event" in kinds)
        typed = Agent(name="b", model=model, output_type=Weather)
        print(kind.__name__, "typed:", (await Runner.run(typed, "Where?")).final_output)
        forced = Agent(name="c", model=model, tools=[weather], model_settings=ModelSettings(tool_choice="required"))
        print(kind.__name__, "required:", (await Runner.run(forced, "Where?")).final_output)
        more = await Runner.run(agent, [*result.to_input_list(), dict(role="user", content="And now?")])
        print(kind.__name__, "more:", more.final_output)
    agent = Agent(name="d", tools=[weather], model=OpenAIResponsesModel("demo", client))
    session = OpenAIConversationsSession(openai_client=client)
    for _ in range(2):
        result = await Runner.run(agent, "Will it rain in Paris?", session=session)
    kept = [item.get("type") for item in await session.get_items()]
    print("session:", result.final_output, len(kept), kept.count("function_call"))
    await session.clear_session()
asyncio.run(main())
"""
INSTRUCTOR = """
import instructor, openai
from typing import Literal
from pydantic import BaseModel
class Weather(BaseModel):
    city: str
    unit: Literal["C", "F"]
server = openai.OpenAI(base_url="{url}", api_key="key")
asked = dict(model="demo", response_model=Weather, messages=[dict(role="user", content="Where?")])
for name in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"):
    client = instructor.from_openai(server, mode=instructor.Mode[name])
    print(name, client.chat.completions.create(**asked))
client = instructor.from_openai(server, mode=instructor.Mode.TOOLS)
*_, last = client.chat.completions.create_partial(**asked)
print("partial", last)
"""
PYDANTIC_AI = """
from typing import Literal
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
class Weather(BaseModel):
    city: str
    unit: Literal["C", "F"]
provider = OpenAIProvider(base_url="{url}", api_key="key")
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind("demo", provider=provider)
    for name, output in (("tool", Weather), ("native", NativeOutput(Weather))):
        print(kind.__name__, name, repr(Agent(model, output_type=output).run_sync("Where?").output))
    agent = Agent(model)
    @agent.tool_plain(name="Weather")
    def weather(city: str, unit: Literal["C", "F"]) -> str:
        '''Tells the weather of a city.'''
        return f"rain in {city} at 9 {unit}"
    result = agent.run_sync("Will it rain?")
    print(kind.__name__, "agent", result.output)
    print(kind.__name__, "more", agent.run_sync("And now?", message_history=result.all_messages()).output)
"""
LANGCHAIN = """
from typing import Literal
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
class Weather(BaseModel):
    '''Tells the weather of a city.'''
    city: str
    unit: Literal["C", "F"]
@tool("Weather", args_schema=Weather)
def weather(city: str, unit: str) -> str:
    '''Tells the weather of a city.'''
    return f"rain in {city} at 9 {unit}"
for responses in (False, True):
    model = ChatOpenAI(model="demo", base_url="{url}", api_key="key", use_responses_api=responses, stream_usage=True)
    called = model.bind_tools([weather]).invoke("Will it rain?")
    print(responses, "tools:", called.tool_calls[0]["args"])
    chunks = list(model.bind_tools([weather], tool_choice="Weather").stream("Will it rain?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    print(responses, "streamed:", whole.tool_calls[0]["args"], whole.usage_metadata["total_tokens"] > 0)
    for method in ("function_calling", "json_schema"):
        print(responses, method, repr(model.with_structured_output(Weather, method=method).invoke("Where?")))
    result = create_agent(model, [weather]).invoke(dict(messages=[HumanMessage("Will it rain?")]))
    print(responses, "agent:", result["messages"][-1].text)
    for form in (Weather, ToolStrategy(Weather), ProviderStrategy(Weather)):
        result = create_agent(model, [], response_format=form).invoke(dict(messages=[HumanMessage("Where?")]))
        print(responses, "form:", repr(result["structured_response"]))
"""
SMOLAGENTS = """
from smolagents import OpenAIServerModel, ToolCallingAgent, tool
@tool
def Weather(city: str, unit: str) -> str:
    '''Tells the weather of a city.

    Args:
        city: the city.
        unit: the unit.
    '''
    return f"rain in {city} at 9 {unit}"
model = OpenAIServerModel("demo", api_base="{url}", api_key="key")
agent = ToolCallingAgent([Weather], model, max_steps=1)
print("agent:", agent.run("Will it rain?"))
print("observed:", [step.observations for step in agent.memory.steps if getattr(step, "observations", None)])
streaming = ToolCallingAgent([Weather], model, max_steps=1, stream_outputs=True)
events = list(streaming.run("Will it rain?", stream=True))
print("streamed:", any("rain in Paris at 9 C" in str(getattr(event, "observations", "")) for event in events))
"""
LLAMA_INDEX = """
from typing import Literal
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
import asyncio
class Weather(BaseModel):
    '''Tells the weather of a city.'''
    city: str
    unit: Literal["C", "F"]
def weather(city: str, unit: Literal["C", "F"]) -> str:
    '''Tells the weather of a city.'''
    return f"rain in {city} at 9 {unit}"
asked = dict(model="demo", api_base="{url}", api_key="key", context_window=3000)
asked |= dict(is_chat_model=True, is_function_calling_model=True)
model = OpenAILike(**asked)
print("structured:", repr(model.as_structured_llm(Weather).complete("Where?").raw))
print("chat:", repr(model.as_structured_llm(Weather).chat([ChatMessage(role="user", content="Where?")]).raw))
native = OpenAILike(**asked, should_use_structured_outputs=True)
print("native:", repr(native.as_structured_llm(Weather).complete("Where?").raw))
tools = [FunctionTool.from_defaults(weather, name="Weather")]
print("tools:", model.predict_and_call(tools, "Will it rain?").response)
async def run():
    agent = FunctionAgent(tools=tools, llm=model)
    return await agent.run("Will it rain?")
print("agent:", asyncio.run(run()))
"""
LITELLM = """
import json, litellm
from pydantic import BaseModel
from typing import Literal
class Weather(BaseModel):
    city: str
    unit: Literal["C", "F"]
tool = dict(type="function", function=dict(name="Weather", parameters=Weather.model_json_schema()))
server = dict(model="openai/demo", api_base="{url}", api_key="key")
asked = dict(**server, messages=[dict(role="user", content="Will it rain?")])
def arguments(answer):
    return json.loads(answer.choices[0].message.tool_calls[0].function.arguments)
for choice in ("auto", "required", dict(type="function", function=dict(name="Weather"))):
    answer = litellm.completion(**asked, tools=[tool], tool_choice=choice)
    print("call:", answer.choices[0].finish_reason, arguments(answer))
chunks = list(litellm.completion(**asked, tools=[tool], stream=True))
whole = litellm.stream_chunk_builder(chunks)
print("streamed:", arguments(whole), whole.choices[0].message.reasoning_content)
answer = litellm.completion(**asked, response_format=Weather)
print("structured:", Weather.model_validate_json(answer.choices[0].message.content))
flat = dict(type="function", name="Weather", parameters=Weather.model_json_schema())
answer = litellm.responses(**server, input="Will it rain?", tools=[flat])
print("responses:", [item.type for item in answer.output], json.loads(answer.output[-1].arguments))
events = list(litellm.responses(**server, input="Will it rain?", tools=[flat], stream=True))
print("events:", str(events[0].type), str(events[-1].type))
"""
DSPY = """
import dspy
from typing import Literal
class Weather(dspy.Signature):
    '''Tells the weather.'''
    question: str = dspy.InputField()
    city: str = dspy.OutputField()
    unit: Literal["C", "F"] = dspy.OutputField()
class Call(dspy.Signature):
    '''Calls a tool.'''
    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()
def weather(city: str, unit: Literal["C", "F"]) -> str:
    '''Tells the weather of a city.'''
    return f"rain in {city} at 9 {unit}"
tool = dspy.Tool(weather, name="Weather")
model = dspy.LM("openai/gpt-4o-mini", api_base="{url}", api_key="key", cache=False, max_tokens=400)
with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
    made = dspy.Predict(Weather)(question="Where?")
    print("structured:", made.city, made.unit)
with dspy.context(lm=model, adapter=dspy.ChatAdapter(use_native_function_calling=True)):
    made = dspy.Predict(Call)(question="Will it rain?", tools=[tool])
    print("call:", made.calls.tool_calls[0].name, made.calls.tool_calls[0].args)
"""
AI_SDK = """
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText, tool, Output, stepCountIs } from "ai";
import { z } from "zod";
const openai = createOpenAI({ baseURL: "{url}", apiKey: "key" });
const shape = z.object({ city: z.string(), unit: z.enum(["C", "F"]) });
const Weather = tool({
  description: "Tells the weather of a city.",
  inputSchema: shape,
  execute: async ({ city, unit }) => `rain in ${city} at 9 ${unit}`,
});
for (const [name, model] of [["responses", openai("demo")], ["chat", openai.chat("demo")]]) {
  const asked = { model, maxRetries: 0, providerOptions: { openai: { store: false } } };
  const run = { ...asked, prompt: "Will it rain?", tools: { Weather }, stopWhen: stepCountIs(3) };
  const agent = await generateText(run);
  console.log(name, "agent:", agent.text, JSON.stringify(agent.steps[0].toolResults.map((one) => one.output)));
  const stream = streamText(run);
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  console.log(name, "streamed:", text, JSON.stringify((await stream.steps)[0].toolCalls[0].input));
  const object = await generateText({ ...asked, prompt: "Where?", output: Output.object({ schema: shape }) });
  console.log(name, "object:", JSON.stringify(object.output));
  const forced = await generateText({ ...asked, prompt: "x", tools: { Weather }, toolChoice: "required" });
  console.log(name, "required:", JSON.stringify(forced.toolCalls[0].input));
}
"""
OPENAI_NODE = """
import OpenAI from "openai";
import { zodTextFormat, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
const client = new OpenAI({ baseURL: "{url}", apiKey: "key", maxRetries: 0 });
const shape = z.object({ city: z.string(), unit: z.enum(["C", "F"]) });
const properties = { city: { type: "string" }, unit: { enum: ["C", "F"] } };
const parameters = { type: "object", properties, required: ["city", "unit"], additionalProperties: false };
const tools = [{ type: "function", name: "Weather", parameters, strict: true }];
const first = await client.responses.create({ model: "demo", input: "Will it rain?", tools });
const call = first.output.at(-1);
const result = { type: "function_call_output", call_id: call.call_id, output: "rain" };
const input = [{ role: "user", content: "Will it rain?" }, ...first.output, result];
console.log("turns:", call.arguments, (await client.responses.create({ model: "demo", input, tools })).output_text);
const stream = client.responses.stream({ model: "demo", input: "Will it rain?", tools });
const kinds = new Set();
for await (const event of stream) kinds.add(event.type);
console.log("streamed:", (await stream.finalResponse()).output.at(-1).arguments, kinds.size);
const text = { format: zodTextFormat(shape, "Weather") };
const parsed = await client.responses.parse({ model: "demo", input: "Where?", text });
console.log("parsed:", JSON.stringify(parsed.output_parsed));
const messages = [{ role: "user", content: "Where?" }];
const response_format = zodResponseFormat(shape, "Weather");
const made = await client.chat.completions.parse({ model: "demo", messages, response_format });
console.log("chat:", JSON.stringify(made.choices[0].message.parsed));
const tool = { type: "function", function: { name: "Weather", parameters, strict: true } };
const runner = client.chat.completions.stream({ model: "demo", messages, tools: [tool] });
console.log("calls:", (await runner.finalChatCompletion()).choices[0].message.tool_calls[0].function.arguments);
"""
OBJECT = r'\{"city":"Paris","unit":"C"\}'
WEATHER = r"Weather\(city='Paris', unit='C'\)"
ARGUMENTS = r"\{'city': 'Paris', 'unit': 'C'\}"
CLIENTS = (
    Other(
        "openai-agents",
        ("openai-agents",),
        ("main.py",),
        (
            *(
                f"{kind} {shown}"
                for kind in ("OpenAIResponsesModel", "OpenAIChatCompletionsModel")
                for shown in (
                    r"agent: Rain comes\. \['rain in Paris at 9 C'\]",
                    r"streamed: Rain comes\. True",
                    "typed: city='Paris' unit='C'",
                    r"required: Rain comes\.",
                    r"more: Rain comes\.",
                )
            ),
            r"session: Rain comes\. 12 2",
        ),
        {"main.py": AGENTS},
    ),
    Other(
        "instructor",
        ("instructor",),
        ("main.py",),
        tuple(
            f"{mode} city='Paris' unit='C'"
            for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS", "partial")
        ),
        {"main.py": INSTRUCTOR},
    ),
    Other(
        "pydantic-ai",
        ("pydantic-ai-slim[openai]",),
        ("main.py",),
        tuple(
            f"{kind} {shown}"
            for kind in ("OpenAIChatModel", "OpenAIResponsesModel")
            for shown in (f"tool {WEATHER}", f"native {WEATHER}", r"agent Rain comes\.", r"more Rain comes\.")
        ),
        {"main.py": PYDANTIC_AI},
    ),
    Other(
        "langchain",
        ("langchain", "langchain-openai"),
        ("main.py",),
        tuple(
            f"{responses} {shown}"
            for responses in (False, True)
            for shown in (
                f"tools: {ARGUMENTS}",
                f"streamed: {ARGUMENTS} True",
                f"function_calling {WEATHER}",
                f"json_schema {WEATHER}",
                r"agent: Rain comes\.",
                f"form: {WEATHER}\\n{responses} form: {WEATHER}\\n{responses} form: {WEATHER}",
            )
        ),
        {"main.py": LANGCHAIN},
    ),
    Other(
        "smolagents",
        ("smolagents[openai]",),
        ("main.py",),
        (r"observed: \['rain in Paris at 9 C'\]", "streamed: True"),
        {"main.py": SMOLAGENTS},
    ),
    Other(
        "llama-index",
        ("llama-index-llms-openai-like", "llama-index-core"),
        ("main.py",),
        (
            *(f"{kind}: {WEATHER}" for kind in ("structured", "chat", "native")),
            "tools: rain in Paris at 9 C",
            r"agent: Rain comes\.",
        ),
        {"main.py": LLAMA_INDEX},
    ),
    Other(
        "litellm",
        ("litellm",),
        ("main.py",),
        (
            f"(call: tool_calls {ARGUMENTS}\\n){{3}}",
            f"streamed: {ARGUMENTS} They ask\\.",
            "structured: city='Paris' unit='C'",
            rf"responses: \['reasoning', 'message', 'function_call'\] {ARGUMENTS}",
            "events: .*RESPONSE_CREATED .*RESPONSE_COMPLETED",
        ),
        {"main.py": LITELLM},
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    Other(
        "dspy",
        ("dspy",),
        ("main.py",),
        ("structured: Paris C", f"call: Weather {ARGUMENTS}"),
        {"main.py": DSPY},
        {"DSPY_CACHEDIR": "{folder}/cache", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    Other(
        "ai-sdk",
        ("ai", "@ai-sdk/openai", "zod"),
        ("main.mjs",),
        tuple(
            f"{path} {shown}"
            for path in ("responses", "chat")
            for shown in (
                r'agent: Rain comes\. \["rain in Paris at 9 C"\]',
                rf"streamed: I look\.Rain comes\. {OBJECT}",
                f"object: {OBJECT}",
                f"required: {OBJECT}",
            )
        ),
        {"main.mjs": AI_SDK},
    ),
    Other(
        "openai-node",
        ("openai", "zod"),
        ("main.mjs",),
        (
            rf"turns: {OBJECT} Rain comes\.",
            f"streamed: {OBJECT} 13",
            f"parsed: {OBJECT}",
            f"chat: {OBJECT}",
            f"calls: {OBJECT}",
        ),
        {"main.mjs": OPENAI_NODE},
    ),
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of /v1 of a server of the scripted pair. DSPY sends schemas to models with a name that it knows."""
    folder = tmp_path_factory.mktemp("server")
    target, draft = map(str, agent_pair(folder))
    names = ("--name", "demo", "--name", "gpt-4o-mini")
    with served(folder, target, "--draft", draft, "--max-length", "8000", "--response-store", "20", *names) as url:
        yield url


@pytest.mark.integration
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_an_agent_gets_calls_and_objects(client: Other, url: str, tmp_path: Path) -> None:
    gets_what_it_asks_for(client, url, tmp_path)
