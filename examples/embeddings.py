"""A search by meaning: a question's vector, and those of all texts, which an engine computes in one go.

pip install ".[demo]"
python examples/embeddings.py "How do I get my money back?"
"""

import sys

import compiled_llm
from compiled_llm import Engine

TEXTS = [
    "Invoices are under Account, Billing.",
    "Refunds take five working days once a parcel has come back.",
    "The app needs Android 12 or newer.",
    "Parcels within Europe take three days.",
]

# The demo's model was not made for it. Load AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-Embedding-0.6B") and its
# tokenizer, leave pooling out, since its files say how, and give embed(question, prompt_name="query").
model, tokenizer = compiled_llm.demo()

with Engine(compiled_llm.wrap(model), tokenizer=tokenizer) as engine:
    vectors = engine.embed(TEXTS, pooling="last")  # [texts, numbers], each of length 1
    (question,) = engine.embed(sys.argv[1], pooling="last")

for score, text in sorted(zip((vectors @ question).tolist(), TEXTS, strict=True), reverse=True):
    print(f"{score:.3f}  {text}")
