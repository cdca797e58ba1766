"""Unmodified clients against a running server: openai, anthropic, ollama, litellm, langchain-openai, instructor, and for HTTP/2 curl and h2.

    python testing/clients/clients.py --base-url http://127.0.0.1:8000 [--key KEY] [--model NAME] [--mock]

With --mock the answers of the mock server are checked exactly; without it any model works, and only the
structure of the responses is checked.
"""

import argparse
import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import traceback
import urllib.parse

import openai

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
parser = argparse.ArgumentParser()
parser.add_argument("--base-url", default="http://127.0.0.1:8000")
parser.add_argument("--key", default="none")
parser.add_argument("--model")
parser.add_argument("--mock", action="store_true")
parser.add_argument("--quick", action="store_true", help="the openai, anthropic, ollama and h2 packages only, and short answers")
args = parser.parse_args()
BASE = args.base_url.rstrip("/") + "/v1"
client = openai.OpenAI(base_url=BASE, api_key=args.key, max_retries=0, timeout=120)
MODEL = args.model or client.models.list().data[0].id
HELLO = [{"role": "user", "content": "Say hello, in Grüße and 世界."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
LONG = 200 if args.mock or not args.quick else 60
tests = []


def test(function):
    tests.append(function)
    return function


@test
def openai_models():
    assert client.models.retrieve(MODEL).id == MODEL


@test
def openai_chat():
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=40, seed=1)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    if args.mock:
        assert answer.choices[0].message.content.startswith("You said: “Say hello"), answer


@test
def openai_stream_equals_complete_response():
    ask = dict(model=MODEL, messages=HELLO, max_tokens=60, temperature=0, seed=1)
    whole = client.chat.completions.create(**ask).choices[0].message.content
    text, usage = "", None
    for chunk in client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    ):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        usage = chunk.usage or usage
    assert text == whole, (text, whole)
    assert usage.completion_tokens > 0


@test
def openai_stream_helper():
    with client.chat.completions.stream(model=MODEL, messages=HELLO, max_tokens=LONG) as stream:
        for _ in stream:
            pass
        try:
            assert stream.get_final_completion().choices[0].message.content
        except openai.LengthFinishReasonError:
            pass  # raised by this helper if the answer was truncated


@test
def openai_choices_stops_and_logprobs():
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=8, n=2, logprobs=True, top_logprobs=3,
        stop=["\n\n\n"], logit_bias={"5": -100}, presence_penalty=0.1, frequency_penalty=0.1,
    )
    assert len(answer.choices) == 2
    for choice in answer.choices:
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 3 and entry.logprob <= 0


@test
def openai_completions():
    answer = client.completions.create(model=MODEL, prompt=["Once", "Twice"], max_tokens=4, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    text = ""
    for chunk in client.completions.create(model=MODEL, prompt="Once", max_tokens=4, stream=True):
        text += chunk.choices[0].text if chunk.choices else ""
    echoed = client.completions.create(model=MODEL, prompt="Once", max_tokens=2, echo=True)
    assert echoed.choices[0].text.startswith("Once")


@test
def openai_embeddings():
    texts = ["A cat sat on the mat.", "A kitten lay on the rug.", "Interest rates rose again."]
    made = client.embeddings.create(model=MODEL, input=texts)
    assert [one.index for one in made.data] == [0, 1, 2]
    width = len(made.data[0].embedding)
    assert made.usage.prompt_tokens == made.usage.total_tokens > 3
    for one in made.data:
        assert len(one.embedding) == width and abs(sum(x * x for x in one.embedding) - 1) < 1e-3
    # The client requests base64 by default; the numbers must be the same.
    plain = client.embeddings.create(model=MODEL, input=texts[1], encoding_format="float", dimensions=width)
    assert max(abs(a - b) for a, b in zip(plain.data[0].embedding, made.data[1].embedding)) < 1e-2
    try:
        client.embeddings.create(model=MODEL, input="x", dimensions=width - 1)
    except openai.BadRequestError as e:
        assert e.param == "dimensions", e
    else:
        raise AssertionError("a narrower vector was accepted")


@test
def openai_json_schema():
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        people: int

    answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "A city"}], response_format=City, max_tokens=200, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, City)
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, response_format={"type": "json_object"}, max_tokens=LONG
    )
    if answer.choices[0].finish_reason == "stop":
        json.loads(answer.choices[0].message.content)


@test
def openai_tools():
    # With sampling, a small model may fill a string up to the token limit.
    ask = dict(model=MODEL, tools=[WEATHER], max_tokens=200, temperature=0)
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = client.chat.completions.create(**ask, messages=question, tool_choice=choice)
        call = answer.choices[0].message.tool_calls[0]
        assert call.function.name == "weather"
        assert "city" in json.loads(call.function.arguments)
    if not args.mock:
        return
    answer = client.chat.completions.create(**ask, messages=question)
    call = answer.choices[0].message.tool_calls[0]
    assert answer.choices[0].finish_reason == "tool_calls"
    history = question + [
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    told = client.chat.completions.create(**ask, messages=history)
    assert told.choices[0].message.content == "The tool says: rain"
    pieces = list(client.chat.completions.create(**ask, messages=question, stream=True))
    text = "".join(
        call.function.arguments or ""
        for chunk in pieces
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
    )
    assert json.loads(text) == {"city": "Paris"}


@test
def openai_errors():
    for ask, kind, param in [
        (dict(model="no-such-model", messages=HELLO), openai.NotFoundError, "model"),
        (dict(model=MODEL, messages=HELLO, temperature=9), openai.BadRequestError, "temperature"),
        (dict(model=MODEL, messages=[]), openai.BadRequestError, "messages"),
        (dict(model=MODEL, messages=[{"role": "user", "content": "x" * 10_000_000}]), openai.APIStatusError, None),
    ]:
        try:
            client.chat.completions.create(**ask)
        except kind as e:
            assert param is None or e.param == param, e
        else:
            raise AssertionError(f"{kind} was not raised")
    if args.key != "none":
        try:
            openai.OpenAI(base_url=BASE, api_key="wrong", max_retries=0).models.list()
        except openai.AuthenticationError:
            pass
        else:
            raise AssertionError("a wrong key was accepted")


@test
def openai_async_many_at_once():
    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=BASE, api_key=args.key, max_retries=0) as many:
            async def one(i):
                text = ""
                stream = await many.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": f"Number {i}"}], max_tokens=24, stream=True
                )
                async for chunk in stream:
                    text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                return text

            return await asyncio.gather(*(one(i) for i in range(32)))

    texts = asyncio.run(all_at_once())
    assert all(texts)
    if args.mock:
        assert all(f"“Number {i}"[:12] in text for i, text in enumerate(texts)), texts


@test
def openai_early_disconnect():
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=LONG, stream=True)
    next(iter(stream))
    stream.close()
    assert client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)


@test
def openai_responses():
    most = 1000 if args.mock else LONG
    answer = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=most, temperature=0)
    assert answer.status in ("completed", "incomplete") and answer.output_text
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    if args.mock:
        assert answer.output_text.startswith("You said: “Say hello"), answer
    # The stream makes the same text, and the next response continues the kept one.
    text, last = "", None
    for event in client.responses.create(
        model=MODEL, input="Say hello.", max_output_tokens=most, temperature=0, stream=True
    ):
        if event.type == "response.output_text.delta":
            text += event.delta
        last = event
    assert last.type in ("response.completed", "response.incomplete") and text == answer.output_text
    with client.responses.stream(model=MODEL, input="Say hello.", max_output_tokens=most, temperature=0) as stream:
        for _ in stream:
            pass
        # This helper knows no answer that the token limit cut.
        assert last.type == "response.incomplete" or stream.get_final_response().output_text == text
    again = client.responses.create(
        model=MODEL, input="Again.", previous_response_id=answer.id, max_output_tokens=8, store=False
    )
    assert again.usage.input_tokens > answer.usage.input_tokens
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    client.responses.delete(answer.id)
    try:
        client.responses.create(model=MODEL, input="x", previous_response_id=answer.id)
    except openai.NotFoundError as e:
        assert e.param == "previous_response_id", e
    else:
        raise AssertionError("a deleted response was continued")


@test
def openai_responses_tools_and_schemas():
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        people: int

    parsed = client.responses.parse(model=MODEL, input="A city", text_format=City, max_output_tokens=200, temperature=0)
    assert isinstance(parsed.output_parsed, City)
    tool = dict(WEATHER["function"], type="function", strict=True)
    ask = dict(model=MODEL, tools=[tool], max_output_tokens=200, temperature=0)
    answer = client.responses.create(**ask, input="What is the weather in Paris?", tool_choice="required")
    call = next(item for item in answer.output if item.type == "function_call")
    assert call.name == "weather" and "city" in json.loads(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    told = client.responses.create(**ask, input=[result], previous_response_id=answer.id)
    if args.mock:
        assert told.output_text == "The tool says: rain", told


@test
def anthropic_messages():
    import anthropic

    claude = anthropic.Anthropic(base_url=args.base_url, api_key=args.key, max_retries=0, timeout=120)
    ask = dict(model=MODEL, max_tokens=LONG, messages=HELLO, extra_body={"temperature": 0})
    answer = claude.messages.create(**ask, system="Be brief.")
    assert answer.role == "assistant" and answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.content[0].text and answer.usage.output_tokens > 0
    with claude.messages.stream(**ask, system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text == answer.content[0].text, (text, answer)
    assert final.usage.output_tokens == answer.usage.output_tokens
    count = claude.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.")
    usage = answer.usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    weather = {
        "name": "weather", "description": "The weather in a city",
        "input_schema": WEATHER["function"]["parameters"],
    }
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    tools = dict(model=MODEL, max_tokens=200, tools=[weather], extra_body={"temperature": 0})
    asked = claude.messages.create(**tools, messages=question, tool_choice={"type": "any"})
    call = next(block for block in asked.content if block.type == "tool_use")
    assert call.name == "weather" and "city" in call.input and asked.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    history = question + [
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in asked.content]},
        {"role": "user", "content": [result]},
    ]
    told = claude.messages.create(**tools, messages=history)
    if args.mock:
        assert told.content[0].text == "The tool says: rain", told
        thought = claude.messages.create(
            model=MODEL, max_tokens=2000, messages=[{"role": "user", "content": "please think"}],
            thinking={"type": "enabled", "budget_tokens": 1024},
        )
        assert [block.type for block in thought.content] == ["thinking", "text"], thought
    for wrong, kind in [
        (dict(ask, model="claude-none"), anthropic.NotFoundError),
        (dict(ask, max_tokens=0), anthropic.BadRequestError),
    ]:
        try:
            claude.messages.create(**wrong)
        except kind as e:
            assert e.body["type"] == "error", e.body
        else:
            raise AssertionError(f"{kind} was not raised")


@test
def ollama_client():
    import ollama
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        people: int

    headers = {} if args.key == "none" else {"Authorization": f"Bearer {args.key}"}
    local = ollama.Client(host=args.base_url, headers=headers, timeout=120)
    assert local.list().models[0].model == MODEL
    options = {"temperature": 0, "num_predict": LONG}
    answer = local.chat(model=MODEL, messages=HELLO, options=options)
    assert answer.message.content and answer.done and answer.eval_count > 0
    text = "".join(part.message.content or "" for part in local.chat(model=MODEL, messages=HELLO, options=options, stream=True))
    assert text == answer.message.content, (text, answer)
    said = local.generate(model=MODEL, prompt="Once", raw=True, options={"num_predict": 4})
    assert said.response and said.done_reason in ("stop", "length")
    shaped = local.chat(
        model=MODEL, messages=[{"role": "user", "content": "A city"}], format=City.model_json_schema(),
        options={"temperature": 0, "num_predict": 200},
    )
    City.model_validate_json(shaped.message.content)
    made = local.embed(model=MODEL, input=["a", "b"])
    assert len(made.embeddings) == 2
    if args.mock:
        def weather(city: str) -> str:
            """The weather in a city.

            Args:
                city: the city
            """
            return city

        asked = local.chat(model=MODEL, messages=[{"role": "user", "content": "weather?"}], tools=[weather])
        call = asked.message.tool_calls[0].function
        assert call.name == "weather" and call.arguments == {"city": "Paris"}, asked
    try:
        local.chat(model="no-such-model", messages=HELLO)
    except ollama.ResponseError as e:
        assert e.status_code == 404 and "no-such-model" in e.error, e
    else:
        raise AssertionError("an unknown model was accepted")


@test
def openai_extensions_of_vllm():
    # As outlines and others send them.
    ask = dict(model=MODEL, messages=HELLO, max_tokens=40, temperature=0)
    for extra, allowed in [
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"guided_regex": "(a|b)"}, ("a", "b")),
    ]:
        answer = client.chat.completions.create(**ask, extra_body=extra)
        assert args.mock or answer.choices[0].message.content in allowed, answer
    raw = client.chat.completions.with_raw_response.create(**ask, extra_body={"no_such_field": 1})
    assert raw.headers["x-ignored-fields"] == "no_such_field"
    try:
        client.chat.completions.create(**ask, extra_body={"bad_words": ["x"]})
    except openai.BadRequestError as e:
        assert e.param == "bad_words", e
    else:
        raise AssertionError("bad_words was ignored")


@test
def http2_curl():
    """curl upgrades requests without a body, and is answered in HTTP/1 for the others."""
    if shutil.which("curl") is None:
        print("skipped: curl is not installed")
        return
    features = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout
    if "HTTP2" not in features:
        print("skipped: this curl has no HTTP/2")
        return
    body = json.dumps({"messages": HELLO, "max_tokens": 5})
    post = ["-H", "Content-Type: application/json", "-d", body, BASE + "/chat/completions"]
    for flag, what, version in [
        ("--http2", [BASE + "/models"], "2"),
        # The second request is stream 3.
        ("--http2", [BASE + "/models", BASE + "/models"], "2"),
        ("--http2", post, "1.1"),
        ("--http2-prior-knowledge", post, "2"),
    ]:
        command = ["curl", "-sS", "-f", flag, "-w", "\n%{http_version} %{response_code}\n", "-H", f"Authorization: Bearer {args.key}"]
        said = subprocess.run(command + what, capture_output=True, text=True, timeout=120)
        assert said.returncode == 0, said
        lines = said.stdout.splitlines()
        assert lines[-1] == f"{version} 200", lines
        assert MODEL in said.stdout, said


@test
def http2_upgrade():
    """The package h2 upgrades a connection and goes on with it."""
    import h2.connection
    import h2.events

    where = urllib.parse.urlsplit(args.base_url)
    wire = socket.create_connection((where.hostname, where.port), timeout=120)
    http = h2.connection.H2Connection()
    settings = http.initiate_upgrade_connection().decode()
    key = f"Bearer {args.key}"
    wire.sendall(
        f"GET /v1/models HTTP/1.1\r\nHost: {where.netloc}\r\nAuthorization: {key}\r\n"
        f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: {settings}\r\n\r\n".encode()
    )
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += wire.recv(1)
    assert head.startswith(b"HTTP/1.1 101 "), head

    def answer(stream):
        status, body = None, b""
        wire.sendall(http.data_to_send())
        while True:
            for event in http.receive_data(wire.recv(65536)):
                if isinstance(event, h2.events.ResponseReceived) and event.stream_id == stream:
                    status = dict(event.headers)[b":status"]
                elif isinstance(event, h2.events.DataReceived):
                    http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    body += event.data
                elif isinstance(event, h2.events.StreamEnded) and event.stream_id == stream:
                    wire.sendall(http.data_to_send())
                    assert status == b"200", (status, body)
                    return json.loads(body)
            wire.sendall(http.data_to_send())

    assert answer(1)["data"][0]["id"] == MODEL
    body = json.dumps({"messages": HELLO, "max_tokens": 5}).encode()
    stream = http.get_next_available_stream_id()
    http.send_headers(stream, [
        (":method", "POST"), (":scheme", "http"), (":authority", where.netloc), (":path", "/v1/chat/completions"),
        ("authorization", key), ("content-type", "application/json"),
    ])
    http.send_data(stream, body, end_stream=True)
    assert stream == 3 and answer(stream)["choices"][0]["message"]["role"] == "assistant"
    wire.close()


@test
def litellm_chat():
    import litellm

    litellm.telemetry = False
    ask = dict(model=f"openai/{MODEL}", api_base=BASE, api_key=args.key, messages=HELLO, max_tokens=12)
    assert litellm.completion(**ask).choices[0].message.content
    text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ask, stream=True))
    assert text


@test
def langchain_chat():
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(base_url=BASE, api_key=args.key, model=MODEL, max_tokens=40, temperature=0)
    assert llm.invoke("Say hello").content
    assert "".join(part.content for part in llm.stream("Say hello"))

    @tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return city

    bound = ChatOpenAI(base_url=BASE, api_key=args.key, model=MODEL, max_tokens=200).bind_tools(
        [weather], tool_choice="weather"
    )
    assert bound.invoke("Weather in Paris?").tool_calls[0]["name"] == "weather"


@test
def instructor_models():
    import instructor
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        person = instructor.from_openai(client, mode=mode).chat.completions.create(
            model=MODEL, response_model=Person, max_retries=1, max_tokens=200, temperature=0,
            messages=[{"role": "user", "content": "Ada is 36 years old."}],
        )
        assert isinstance(person, Person)


if args.quick:
    quick = ("openai_", "anthropic_", "ollama_", "http2_")
    tests = [one for one in tests if one.__name__.startswith(quick)]
failed = 0
for one in tests:
    try:
        one()
        print("ok    ", one.__name__)
    except Exception:
        failed += 1
        print("FAILED", one.__name__)
        traceback.print_exc()
print(f"{len(tests) - failed} of {len(tests)} passed")
sys.exit(failed > 0)
