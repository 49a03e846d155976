"""GRPO of TRL, whose rollouts an engine samples: one copy of the weights, and nothing to synchronise.

pip install ".[demo]" "trl==1.16.*" datasets
python examples/grpo.py
"""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import compiled_llm
from compiled_llm import Engine
from compiled_llm.trl import sample_with

STEPS = 4


def short(completions: list[str], **_: object) -> list[float]:
    """Reward answers of few characters."""
    return [-float(len(text)) for text in completions]


model, tokenizer = compiled_llm.demo()  # or AutoModelForCausalLM.from_pretrained(...) and its tokenizer
model = compiled_llm.wrap(model)
config = GRPOConfig(
    "grpo",
    max_steps=STEPS,
    per_device_train_batch_size=4,
    num_generations=4,  # answers to a prompt
    max_completion_length=24,
    temperature=0.9,
    learning_rate=1e-5,
    bf16=False,  # the weights are in the type that they train in
    logging_steps=1,
    report_to=[],
    save_strategy="no",
)
prompts = Dataset.from_list([{"prompt": f"{number} plus {number} is"} for number in range(4 * STEPS)])
trainer = GRPOTrainer(model, short, args=config, train_dataset=prompts, processing_class=tokenizer)

with Engine(model, tokenizer=tokenizer, logprobs_mode="processed_logprobs") as engine:
    sample_with(engine, trainer, sleep=True)
    trainer.train()
for log in trainer.state.log_history:
    if "reward" in log:
        print(f"reward {log['reward']:.1f}, ratio {log['sampling/importance_sampling_ratio/mean']:.4f}")
