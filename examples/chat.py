"""A chat in the terminal, whose every turn computes only what is new.

pip install ".[demo]"
python examples/chat.py
"""

from transformers import TextStreamer

import compiled_llm

model, tokenizer = compiled_llm.demo()  # or AutoModelForCausalLM.from_pretrained(...) and its tokenizer
model = compiled_llm.wrap(model)
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
cache = model.compiled.new_cache()  # keeps keys and values of the turns before
messages = []

while question := input("> ").strip():  # an empty line ends the chat
    messages.append({"role": "user", "content": question})
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    output = model.generate(**inputs, cache=cache, max_new_tokens=100, do_sample=False, streamer=streamer)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": answer})
