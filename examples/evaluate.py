"""A task of your own for lm-eval, scored by an engine: what its questions share is computed once.

    pip install ".[demo]" "lm-eval[hf]>=0.4.13"
    python examples/evaluate.py

Tasks of lm-eval's run without a script: compiled-llm lm-eval run --model compiled_llm --tasks arc_easy ...
"""

from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask

import compiled_llm
from compiled_llm.integrations.lm_eval.model import CompiledLM

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Greece": "Athens", "Egypt": "Cairo"}
EXAMPLES = "The capital of Japan is Tokyo. The capital of Norway is Oslo. "


class Capitals(ConfigurableTask):
    VERSION = 1

    def __init__(self) -> None:
        super().__init__(
            config={
                "task": "capitals",
                "test_split": "test",
                "output_type": "multiple_choice",
                "doc_to_text": EXAMPLES + "The capital of {{country}} is",
                "doc_to_choice": [*CAPITALS.values()],
                "doc_to_target": "{{capital}}",
                "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
            }
        )

    def download(self, dataset_kwargs: object = None, **options: object) -> None:
        rows = [{"country": country, "capital": capital} for country, capital in CAPITALS.items()]
        self.dataset = {"test": Dataset.from_list(rows)}


model, tokenizer = compiled_llm.demo()  # or AutoModelForCausalLM.from_pretrained(...) and its tokenizer
lm = CompiledLM(pretrained=compiled_llm.wrap(model), tokenizer=tokenizer, device=str(model.device))
found = simple_evaluate(model=lm, tasks=[Capitals()], bootstrap_iters=0)
print(f"right: {found['results']['capitals']['acc,none']:.0%}")
print(f"tokens that were there already: {lm.engine.stats().cached_tokens}")
lm.engine.close()
