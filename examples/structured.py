"""Texts to objects of a class of pydantic's: every answer is valid by its schema.

pip install ".[demo,structured]"
python examples/structured.py
"""

from typing import Literal

from pydantic import BaseModel

import compiled_llm
from compiled_llm import Engine, SamplingParams, StructuredOutputsParams


class Ticket(BaseModel):
    kind: Literal["bug", "question", "refund"]
    urgent: bool


TEXTS = [
    "The app crashes whenever I open it, and I have to give a talk in an hour!",
    "Could you tell me where I find my invoices?",
    "It arrived broken. I want my money back.",
]

model, tokenizer = compiled_llm.demo()  # or AutoModelForCausalLM.from_pretrained(...) and its tokenizer
form = StructuredOutputsParams(json=Ticket, disable_any_whitespace=True)
params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=form)

with Engine(compiled_llm.wrap(model), tokenizer=tokenizer) as engine:
    chats = [[{"role": "user", "content": f"Sort this ticket, as JSON: {text}"}] for text in TEXTS]
    for text, output in zip(TEXTS, engine.generate(chats, params), strict=True):
        print(Ticket.model_validate_json(output.text), text, sep="  # ")
