#!/usr/bin/env python3
"""Frameworks that use the server through their own clients, unmodified.

    frameworks.py URL NAME...    runs the tests with these names

Small models rarely choose to call a tool, so a test that needs a call demands one.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

import requests

URL = sys.argv[1]
V1 = URL + "/v1"
MODEL = requests.get(V1 + "/models", timeout=10).json()["data"][0]["id"]
WEATHER = "What is the weather in Paris? Call the weather tool."


def weather(city: str) -> str:
    """The weather in a city."""
    return "sunny in " + city


def city_type():
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        people: int

    return City


def pydantic_ai():
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    City = city_type()
    provider = OpenAIProvider(base_url=V1, api_key="none")
    settings = {"max_tokens": 300, "temperature": 0}
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=provider)
        # A type is a tool that must be called; a native type is a schema.
        for output in (City, NativeOutput(City)):
            made = Agent(model, output_type=output, model_settings=settings).run_sync("Paris")
            assert isinstance(made.output, City)
        agent = Agent(model, tools=[weather], model_settings=settings)
        assert agent.run_sync(WEATHER).output


def openai_agents():
    import openai
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel
    from agents import Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)

    async def run():
        client = openai.AsyncOpenAI(base_url=V1, api_key="none")
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            settings = ModelSettings(max_tokens=100, temperature=0, tool_choice="required")
            tools, model = [function_tool(weather)], kind(MODEL, client)
            agent = Agent(name="a", tools=tools, model=model, model_settings=settings)
            made = await Runner.run(agent, WEATHER)
            kinds = [type(item).__name__ for item in made.new_items]
            assert "ToolCallOutputItem" in kinds, kinds
            # The client takes an answer that the token limit cuts for an error.
            settings = ModelSettings(max_tokens=400, temperature=0)
            agent = Agent(name="b", model=model, model_settings=settings)
            made = Runner.run_streamed(agent, "Say hello.")
            assert [event async for event in made.stream_events()]
            assert made.final_output

    asyncio.run(run())


def outlines():
    import openai
    import outlines as package

    City = city_type()
    model = package.from_vllm(openai.OpenAI(base_url=V1, api_key="none"), MODEL)
    assert model("Paris is in", max_tokens=5)
    City.model_validate_json(model("Paris", City, max_tokens=300, temperature=0))
    assert model("Good or bad?", Literal["good", "bad"], max_tokens=5, temperature=0) in ("good", "bad")
    digits = model("A number", package.types.Regex(r"[0-9]{3}"), max_tokens=5)
    assert len(digits) == 3 and digits.isdigit()


def dspy():
    import dspy as package

    options = {"max_tokens": 200, "temperature": 0, "cache": False}
    lm = package.LM("openai/" + MODEL, api_base=V1, api_key="none", **options)
    package.configure(lm=lm)
    assert lm("Say hello.")[0]
    assert package.Predict("question -> answer")(question="The capital of France?").answer


def haystack():
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack.utils import Secret

    generator = OpenAIChatGenerator(
        model=MODEL,
        api_key=Secret.from_token("none"),
        api_base_url=V1,
        generation_kwargs={"max_tokens": 100, "temperature": 0},
    )
    hello = [ChatMessage.from_user("Say hello.")]
    assert generator.run(hello)["replies"][0].text
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = Tool("weather", "The weather in a city.", schema, weather)
    made = generator.run(
        [ChatMessage.from_user(WEATHER)],
        tools=[tool],
        generation_kwargs={"tool_choice": "required"},
    )
    assert made["replies"][0].tool_calls[0].tool_name == "weather"
    pieces = []
    generator.run(hello, streaming_callback=lambda piece: pieces.append(piece.content))
    assert "".join(pieces)


def semantic_kernel():
    import openai
    from semantic_kernel import Kernel
    from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatPromptExecutionSettings as Settings
    from semantic_kernel.contents import ChatHistory
    from semantic_kernel.functions import kernel_function

    class Plugin:
        @kernel_function(description="The weather in a city.")
        def weather(self, city: str) -> str:
            return weather(city)

    async def run():
        client = openai.AsyncOpenAI(base_url=V1, api_key="none")
        service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)
        kernel = Kernel()
        kernel.add_plugin(Plugin(), "plugin")
        history = ChatHistory()
        history.add_user_message(WEATHER)
        behavior = FunctionChoiceBehavior.Required(auto_invoke=True)
        settings = Settings(max_tokens=100, temperature=0, function_choice_behavior=behavior)
        await service.get_chat_message_content(history, settings, kernel=kernel)
        assert any(message.role == "tool" for message in history.messages)
        hello = ChatHistory()
        hello.add_user_message("Say hello.")
        pieces = service.get_streaming_chat_message_contents(hello, Settings(max_tokens=20))
        assert [piece async for piece in pieces]

    asyncio.run(run())


def llama_index():
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    City = city_type()
    common = {"model": MODEL, "api_base": V1, "api_key": "none", "max_tokens": 100}
    chat = OpenAILike(
        is_chat_model=True, is_function_calling_model=True, temperature=0, context_window=2048, **common
    )
    hello = [ChatMessage(role="user", content="Say hello.")]
    assert chat.chat(hello).message.content
    assert list(chat.stream_chat(hello))
    tools = [FunctionTool.from_defaults(weather)]
    made = chat.chat_with_tools(tools, user_msg=WEATHER, tool_required=True)
    assert chat.get_tool_calls_from_response(made)[0].tool_name == "weather"
    assert isinstance(chat.as_structured_llm(City).complete("Paris").raw, City)
    assert OpenAILike(is_chat_model=False, **common).complete("Paris is").text


TASK = """task: capitals
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{a}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""
DATA = """{"q": "The capital of France is", "choices": [" Paris", " banana"], "a": 0}
{"q": "Two plus two is", "choices": [" seventeen", " four"], "a": 1}
"""


def lm_eval():
    """Log-likelihoods of a task of two questions, with the server's own tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "data.jsonl").write_text(DATA)
        (Path(folder) / "task.yaml").write_text(TASK.format(data=Path(folder) / "data.jsonl"))
        for tokenized in ("True", "False"):
            model = f"base_url={V1}/completions,model={MODEL},tokenizer_backend=remote"
            command = [str(Path(sys.executable).parent / "lm_eval"), "--model", "local-completions"]
            command += ["--model_args", f"{model},tokenized_requests={tokenized}"]
            command += ["--tasks", "capitals", "--include_path", folder]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
            made = subprocess.run(command, env=environment, capture_output=True, text=True)
            row = [line for line in made.stdout.splitlines() if line.startswith("|capitals")]
            assert row and float(row[0].split("|")[7]) == 1, made.stdout + made.stderr


failed = 0
for name in sys.argv[2:]:
    try:
        globals()[name]()
        print(f"ok     {name}", flush=True)
    except Exception as error:  # A client may raise anything.
        failed += 1
        print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
sys.exit(failed > 0)
