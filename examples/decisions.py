"""Typed questions about texts, answered with the probability of every answer; each text is computed once.

    pip install ".[demo]" "transformers>=5.24"
    python examples/decisions.py

`compiled-llm serve` answers the same questions: POST /v1/systemone, and /v1/decisions.
"""

import compiled_llm
from compiled_llm import Engine

QUESTIONS = {
    "team": {
        "type": "choice",
        "instructions": "Who handles this message?",
        "criteria": {"billing": "payments and invoices", "shipping": "parcels", "support": "anything else"},
    },
    "urgency": {
        "type": "score",
        "instructions": "How urgent is it?",
        "criteria": ["It can wait", "This week", "Today"],
    },
    "refund": {"type": "noul", "instructions": "Does the customer ask for money back?"},
}
TEXTS = [
    "I was charged twice for one order, and want the second payment back today.",
    "My parcel has not moved for a week. Where is it?",
    "Could you tell me how I change my password? There is no hurry.",
]

model, tokenizer = compiled_llm.demo()  # or AutoModelForCausalLM.from_pretrained(...) and its tokenizer

with Engine(compiled_llm.wrap(model), tokenizer=tokenizer) as engine:
    for text in TEXTS:
        answers = engine.decide(text, QUESTIONS)
        team, urgency, refund = (answers[name] for name in QUESTIONS)
        likely = team["probabilities"][team["choice"]]
        print(text)
        print(f"  {team['choice']} ({likely:.0%}), urgency {urgency['score']:.1f} of 2, a refund: {refund['noul']:.0%}")
        # Where this is small, the model would rather have said something else than one of the answers.
        print(f"  of all that it might say: {answers.diagnostics['team'].label_mass:.0%} are teams")
        print(f"  {answers.cached_tokens} of {answers.prompt_tokens} tokens were there already")
