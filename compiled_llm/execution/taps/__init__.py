"""Who watches the steps of a model: one file each, which `compiled_llm.features` lists."""
