"""An engine process's figures as Prometheus knows them: fields of its ``Stats``, and their meanings."""

GAUGES = {
    "running": "Requests that run",
    "waiting": "Requests that wait",
    "connections": "Clients of the engine process",
    "cuda_graphs": "CUDA graphs that steps are replayed from",
}
COUNTERS = {
    "finished": "Requests that have ended",
    "steps": "Steps of the engine",
    "mixed_steps": "Steps that ran prompts and running requests in one launch",
    "preemptions": "Requests that gave their pages to others",
    "prompt_tokens": "Tokens of prompts",
    "cached_tokens": "Tokens of prompts that the prefix cache had",
    "new_tokens": "Tokens of answers",
    "cold_starts": "Steps that compiled or captured something",
}
WAITS = {
    "queue_seconds": "Until a request first runs, of recent requests",
    "first_token_seconds": "Until its first token, of recent requests",
    "inter_token_seconds": "Between two tokens, of recent requests",
}
QUANTILES = {"0.5": "p50", "0.99": "p99"}
PAGES = "Pages of the key-value cache"
STATES = ("used", "free", "cached")
