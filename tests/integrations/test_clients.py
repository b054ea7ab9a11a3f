"""Clients and load generators of others talk to `fastspec serve`, each in an environment of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastspec import demo_pair
from tests.helpers.clients import Other, gets_what_it_asks_for, served

TARGET = str(demo_pair()[0])


LITELLM = """
import asyncio, json, litellm
asked = dict(model="openai/demo", api_base="{url}", api_key="key", max_tokens=16,
             messages=[dict(role="user", content="Add two numbers.")])
whole = litellm.completion(**asked, user="me", metadata=dict(a="b")).choices[0].message.content
chunks = litellm.completion(**asked, stream=True, stream_options=dict(include_usage=True))
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
awaited = asyncio.run(litellm.acompletion(**asked)).choices[0].message.content
print("equal:", whole == streamed == awaited, len(whole) > 0)
text = litellm.text_completion(model="text-completion-openai/demo", api_base="{url}", api_key="key",
                               prompt="def main():", max_tokens=8)
print("text:", len(text.choices[0].text) > 0)
asked["model"] = "hosted_vllm/demo"
schema = dict(type="object", properties=dict(a=dict(enum=[1, 2])), required=["a"], additionalProperties=False)
form = dict(type="json_schema", json_schema=dict(name="a", schema=schema, strict=True))
answer = litellm.completion(**asked | dict(max_tokens=60), response_format=form)
print("json:", json.loads(answer.choices[0].message.content))
"""
DSPY = """
import dspy
chat, text = ("openai/demo", "chat", "Read a file."), ("text-completion-openai/demo", "text", "def f():")
for model, kind, asked in (chat, text):
    model = dspy.LM(model, api_base="{url}", api_key="key", model_type=kind, max_tokens=16, cache=False)
    print(kind, len(model(asked)[0]) > 0)
"""
INSPECT = """
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
task = Task(dataset=[Sample(input="Read a file.", target="#")], solver=generate(max_tokens=16), scorer=includes())
for model, more in (("openai-api/demo/demo", dict()), ("vllm/demo", dict(logprobs=True, top_logprobs=2))):
    url = None if model.startswith("openai") else "{url}"
    (log,) = eval(task, model=model, model_base_url=url, log_dir="{folder}/logs", display="none", **more)
    print(model, log.status, len(log.samples[0].output.completion) > 0)
"""
PROMPTFOO = """
import promptfoo from "promptfoo";
const properties = { city: { enum: ["Paris", "Rome"] } };
const shape = { type: "object", properties, required: ["city"], additionalProperties: false };
const config = { apiBaseUrl: "{url}", apiKey: "key", max_tokens: 60, max_output_tokens: 60 };
const name = "Weather", parameters = shape, schema = shape, type = "function";
const called = { ...config, tools: [{ type, function: { name, parameters } }] };
called.tool_choice = { type, function: { name } };
const flat = { ...config, tools: [{ type, name, parameters }], tool_choice: { type, name } };
const formed = { ...config, response_format: { type: "json_schema", json_schema: { name, schema, strict: true } } };
const providers = [
  { id: "openai:chat:demo", label: "calls", config: called },
  { id: "openai:chat:demo", label: "object", config: formed },
  { id: "openai:responses:demo", label: "responses", config: flat },
  { id: "openai:completion:demo", label: "text", config },
];
const named = { type: "javascript", value: 'JSON.stringify(output).includes("city")' };
const asserted = {
  calls: [{ type: "is-valid-openai-tools-call" }, named],
  object: [{ type: "is-json", value: shape }],
  responses: [named],
  text: [{ type: "javascript", value: "output.length > 0" }],
};
const vars = { place: "Rome" }, prompts = ["Weather in {{place}}?"];
const tests = Object.entries(asserted).map(([label, assert]) => ({ vars, providers: [label], assert }));
const made = await promptfoo.evaluate({ prompts, providers, tests, writeLatestResults: false }, { cache: false });
for (const one of (await made.toEvaluateSummary()).results)
  console.log(one.provider.label, "passes:", one.success, one.error ?? "");
process.exit(0);  // it leaves its database open
"""
CLIENTS = (
    Other(
        "litellm",
        ("litellm",),
        ("main.py",),
        ("equal: True True", "text: True", r"json: \{'a': [12]\}"),
        {"main.py": LITELLM},
    ),
    Other(
        "llm",
        ("llm",),
        ("llm", "-m", "demo", "-o", "max_tokens", "16", "--key", "key", "Read a file."),
        (r"\w{3}",),
        {"extra-openai-models.yaml": '- model_id: demo\n  model_name: demo\n  api_base: "{url}"\n'},
        {"LLM_USER_PATH": "{folder}"},
    ),
    Other(
        "dspy",
        ("dspy",),
        ("main.py",),
        ("chat True", "text True"),
        {"main.py": DSPY},
        {"DSPY_CACHEDIR": "{folder}/cache"},
    ),
    Other(
        "inspect-ai",
        ("inspect-ai", "openai"),
        ("main.py",),
        ("openai-api/demo/demo success True", "vllm/demo success True"),
        {"main.py": INSPECT},
        {"DEMO_API_KEY": "key", "DEMO_BASE_URL": "{url}", "VLLM_API_KEY": "key"},
    ),
    Other(
        "guidellm",
        ("guidellm>=0.8",),
        (
            *("guidellm", "run", "--disable-progress", "--backend", "kind=openai_http,target={root}"),
            *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=16"),
            *("--tokenizer", "kind=huggingface_auto,model={target}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
            *("--output", "kind=json,path={folder}/report.json"),
        ),
        (r"\| 16 +\| 0 +\| 0 +\|",),
    ),
    Other(
        "aiperf",
        ("aiperf",),
        (
            *("aiperf", "profile", "--model", "demo", "--url", "{root}", "--endpoint-type", "chat", "--streaming"),
            *("--request-count", "6", "--concurrency", "2", "--tokenizer", "{target}", "--ui", "none"),
            *("--synthetic-input-tokens-mean", "30", "--output-tokens-mean", "8"),
            *("--output-artifact-dir", "{folder}/report"),
        ),
        (r"Request Error Rate \(%\) │ +0\.00", r"Request Count \(requests\) │ +6\.00"),
    ),
    Other(
        "promptfoo",
        ("promptfoo", "@libsql/linux-x64-gnu"),  # its database's program is an optional package
        ("main.mjs",),
        tuple(f"{label} passes: true" for label in ("calls", "object", "responses", "text")),
        {"main.mjs": PROMPTFOO},
        {"PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1", "PROMPTFOO_CONFIG_DIR": "{folder}/home"},
    ),
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of /v1 of a server of the shipped pair."""
    with served(tmp_path_factory.mktemp("server"), "--max-length", "900") as url:
        yield url


@pytest.mark.integration
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_gets_what_it_asks_for(client: Other, url: str, tmp_path: Path) -> None:
    gets_what_it_asks_for(client, url, tmp_path, target=TARGET)
