"""Talk to `dacapo serve` with the openai package: pip install openai; python examples/openai_chat.py"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("DACAPO_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("DACAPO_API_KEY", "none"),
)
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
    temperature=0,
    stream=True,
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
print()
