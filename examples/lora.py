"""Two LoRA adapters of PEFT on one wrapped model, switched between calls without compiling again.

pip install ".[demo]" peft
python examples/lora.py
"""

import tempfile
from pathlib import Path

from peft import LoraConfig, PeftModel, get_peft_model

import compiled_llm

model, tokenizer = compiled_llm.demo()  # or AutoModelForCausalLM.from_pretrained(...) and its tokenizer
folders = Path(tempfile.mkdtemp())

# In place of adapters of your own: two with random weights, saved as PEFT saves them.
config = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=64, init_lora_weights=False)
random = get_peft_model(model, config, adapter_name="first")
random.add_adapter("second", config)
random.save_pretrained(folders)
model = random.unload()

model = compiled_llm.wrap(model)
adapted = PeftModel.from_pretrained(model, folders / "first", adapter_name="first")
adapted.load_adapter(folders / "second", adapter_name="second")
inputs = tokenizer("The capital of France is", return_tensors="pt").to(model.device)


def answer() -> str:
    return tokenizer.decode(adapted.generate(**inputs, max_new_tokens=8, do_sample=False)[0])


for name in ("first", "second", "first"):
    adapted.set_adapter(name)
    print(f"{name}: {answer()!r}")
with adapted.disable_adapter():
    print(f"none: {answer()!r}")
print(f"{model.compiled.stats().graphs} graphs: prompts and steps, with an adapter and without")
