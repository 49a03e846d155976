"""A model that calls functions of yours, over OpenAI's API.

pip install ".[demo,server]" openai
compiled-llm serve Qwen/Qwen3-0.6B        # in another terminal: a model whose chat template writes tools
python examples/tools.py "What is 17 times 23?"
"""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
model = client.models.list().data[0].id


def multiply(a: float, b: float) -> float:
    return a * b


NUMBER = {"type": "number"}
MULTIPLY = {
    "name": "multiply",
    "description": "The product of two numbers",
    "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
    "strict": True,  # arguments follow the schema, whatever the model would write
}
FUNCTIONS = {"multiply": multiply}

messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(4):  # turns: a model may call again once it has seen what came back
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[{"type": "function", "function": MULTIPLY}],
        max_completion_tokens=400,
    )
    message = answer.choices[0].message
    if not message.tool_calls:
        print(message.content)
        break
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
        print(f"{call.function.name}({call.function.arguments}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
