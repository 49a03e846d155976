"""Families of models with an example of each on the hub, and the tables of docs/reference/models.md.

``python tests/support/huggingface/models_page.py`` writes the tables again, from the families that tests run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from support.huggingface import families, recurrent_families

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "models.md"
BETWEEN = re.compile(
    r"(?<=<!-- written by tests/support/huggingface/models_page.py -->\n\n).*(?=\n<!-- end -->)", re.DOTALL
)


class Example(NamedTuple):
    """How people know a family."""

    name: str  # as its makers write it
    hub: str  # an id on the hub
    remark: str = ""  # what else is known, or why it is refused


OWN = {
    "Llama": Example("Llama", "HuggingFaceTB/SmolLM2-135M-Instruct", "real weights (this one's), all modes, CUDA"),
    "MiniMaxM3VL": Example("MiniMax-M3, text alone", "MiniMaxAI/MiniMax-M3", "experts; chosen blocks of each prompt"),
    "Qwen3": Example("Qwen3", "Qwen/Qwen3-0.6B", "windows, all modes, options and paths, CUDA"),
}
"""Families that most tests run, and not those of the families alone."""

_LATER = "refused before transformers 5.24: attention did not go through its interface"
_SHARED = "layers that share keys and values, which pages hold of each"
TESTED = {
    "AXK1": Example("A.X K1", "skt/A.X-K1", "latents in pages"),
    "Arcee": Example("Arcee", "arcee-ai/AFM-4.5B"),
    "Cohere": Example("Command R", "CohereLabs/c4ai-command-r-v01"),
    "Cohere2": Example("Command R7B", "CohereLabs/c4ai-command-r7b-12-2024"),
    "DeepseekV2": Example("DeepSeek-V2", "deepseek-ai/DeepSeek-V2-Lite-Chat", "latents in pages"),
    "DeepseekV3": Example("DeepSeek-V3, R1, V3.1", "deepseek-ai/DeepSeek-V3", "latents in pages"),
    "DeepseekV32": Example("DeepSeek-V3.2", "deepseek-ai/DeepSeek-V3.2-Exp", "latents in pages, chosen tokens"),
    "Exaone4": Example("EXAONE 4.0", "LGAI-EXAONE/EXAONE-4.0-1.2B"),
    "CodeGen": Example("CodeGen", "Salesforce/codegen-350M-mono", _LATER),
    "GPT2LMHead": Example("GPT-2", "openai-community/gpt2"),
    "GPTBigCode": Example("SantaCoder, StarCoder", "bigcode/gpt_bigcode-santacoder"),
    "GPTJ": Example("GPT-J", "EleutherAI/gpt-j-6b", _LATER),
    "GPTNeoX": Example("GPT-NeoX, Pythia", "EleutherAI/pythia-160m"),
    "Gemma": Example("Gemma", "google/gemma-2b-it"),
    "Gemma2": Example("Gemma 2", "google/gemma-2-2b-it"),
    "Gemma3": Example("Gemma 3, text alone", "google/gemma-3-1b-it"),
    "Gemma3n": Example("Gemma 3n, text alone", "google/gemma-3n-E2B-it", _SHARED),
    "Gemma4": Example("Gemma 4, text alone", "google/gemma-4-E2B-it", _SHARED),
    "Glm": Example("GLM-4", "zai-org/glm-4-9b-chat-hf"),
    "Glm4": Example("GLM-4-0414", "zai-org/GLM-4-9B-0414"),
    "Glm4MoeLite": Example("GLM-4.7-Flash", "zai-org/GLM-4.7-Flash", "latents in pages"),
    "GlmMoeDsa": Example("GLM-5", "zai-org/GLM-5", "latents in pages, chosen tokens"),
    "GptOss": Example("gpt-oss", "openai/gpt-oss-20b", "weights in MXFP4: not tried"),
    "Granite": Example("Granite", "ibm-granite/granite-3.3-2b-instruct"),
    "Helium": Example("Helium", "kyutai/helium-1-2b"),
    "MiniCPM3": Example("MiniCPM3", "openbmb/MiniCPM3-4B", "latents in pages"),
    "Ministral": Example("Ministral", "mistralai/Ministral-8B-Instruct-2410"),
    "Mistral": Example("Mistral", "mistralai/Mistral-7B-Instruct-v0.3"),
    "Mixtral": Example("Mixtral", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "OPT": Example("OPT", "facebook/opt-125m"),
    "Olmo": Example("OLMo", "allenai/OLMo-1B-hf"),
    "Olmo2": Example("OLMo 2", "allenai/OLMo-2-0425-1B-Instruct"),
    "Olmo3": Example("OLMo 3", "allenai/Olmo-3-7B-Instruct"),
    "Olmoe": Example("OLMoE", "allenai/OLMoE-1B-7B-0924"),
    "Persimmon": Example("Persimmon", "adept/persimmon-8b-chat"),
    "Phi": Example("Phi-1, Phi-2", "microsoft/phi-2"),
    "Phi3": Example("Phi-3, Phi-4", "microsoft/Phi-3-mini-4k-instruct", "refused with `longrope`: 128k, Phi-4-mini"),
    "Phimoe": Example("Phi MoE", "microsoft/Phi-tiny-MoE-instruct", "refused with `longrope`: Phi-3.5-MoE"),
    "Qwen2": Example("Qwen2, Qwen2.5", "Qwen/Qwen2.5-0.5B-Instruct"),
    "Qwen2Moe": Example("Qwen1.5-MoE, Qwen2-MoE", "Qwen/Qwen1.5-MoE-A2.7B-Chat"),
    "Qwen3Moe": Example("Qwen3-MoE", "Qwen/Qwen3-30B-A3B"),
    "SeedOss": Example("Seed-OSS", "ByteDance-Seed/Seed-OSS-36B-Instruct"),
    "SmolLM3": Example("SmolLM3", "HuggingFaceTB/SmolLM3-3B"),
    "Starcoder2": Example("StarCoder2", "bigcode/starcoder2-3b"),
    "Youtu": Example("Youtu-LLM", "tencent/Youtu-LLM-2B", "latents in pages"),
}
RECURRENT = {
    "BailingHybrid": Example(
        "Ling 3.0", "inclusionAI/Ling-3.0-Flash", "gated delta nets, decays of channels; latents in pages"
    ),
    "Bamba": Example("Bamba", "ibm-ai-platform/Bamba-9B-v2", "Mamba 2"),
    "FalconH1": Example("Falcon-H1", "tiiuae/Falcon-H1-1.5B-Deep-Instruct", "Mamba 2"),
    "FalconMamba": Example("Falcon Mamba", "tiiuae/falcon-mamba-7b", "Mamba 1 alone"),
    "GraniteMoeHybrid": Example("Granite 4.0 H", "ibm-granite/granite-4.0-h-tiny", "Mamba 2"),
    "Jamba": Example("Jamba", "ai21labs/Jamba-v0.1", "Mamba 1"),
    "KimiLinear": Example(
        "Kimi Linear",
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        "gated delta nets, decays of channels; latents in pages",
    ),
    "Lfm2": Example("LFM2", "LiquidAI/LFM2-1.2B", "short convolutions"),
    "Lfm2Moe": Example("LFM2-MoE", "LiquidAI/LFM2-8B-A1B", "short convolutions"),
    "Lfm3": Example("LFM3", "LiquidAI/LFM3-1.7B", "short convolutions"),
    "Mamba": Example("Mamba", "state-spaces/mamba-130m-hf", "Mamba 1 alone"),
    "Mamba2": Example("Mamba 2, Codestral Mamba", "mistralai/Mamba-Codestral-7B-v0.1", "Mamba 2 alone"),
    "NemotronH": Example("Nemotron-H", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Mamba 2"),
    "OlmoHybrid": Example("OLMo hybrid", "allenai/Olmo-Hybrid-7B", "gated delta nets"),
    "Qwen3Next": Example("Qwen3-Next", "Qwen/Qwen3-Next-80B-A3B-Instruct", "gated delta nets"),
    "Qwen3_5": Example("Qwen3.5, text alone", "Qwen/Qwen3.5-27B", "gated delta nets"),
    "Qwen3_5Moe": Example("Qwen3.5-MoE, text alone", "Qwen/Qwen3.5-35B-A3B", "gated delta nets"),
}
"""Families with recurrent layers, and what these are."""
WITH_IMAGES = {
    "AyaVision": Example("Aya Vision", "CohereLabs/aya-vision-8b"),
    "Cohere2Vision": Example("Command A Vision", "CohereLabs/command-a-vision-07-2025"),
    "Gemma3": Example("Gemma 3", "google/gemma-3-4b-it"),
    "Gemma4": Example("Gemma 4", "google/gemma-4-E2B-it", _SHARED),
    "Gemma4Unified": Example("Gemma 4 unified", "google/gemma-4-12B-it"),
    "Glm46V": Example("GLM-4.6V", "zai-org/GLM-4.6V-Flash"),
    "Glm4v": Example("GLM-4.1V", "zai-org/GLM-4.1V-9B-Thinking"),
    "GlmOcr": Example("GLM-OCR", "zai-org/GLM-OCR"),
    "GotOcr2": Example("GOT-OCR 2.0", "stepfun-ai/GOT-OCR-2.0-hf"),
    "Idefics3": Example("Idefics3", "HuggingFaceM4/Idefics3-8B-Llama3"),
    "InternVL": Example("InternVL3", "OpenGVLab/InternVL3-1B-hf"),
    "Kimi_K25": Example("Kimi-K2.5, Kimi-K2.6", "moonshotai/Kimi-K2.6"),
    "Llava": Example("LLaVA", "llava-hf/llava-1.5-7b-hf"),
    "Lfm2Vl": Example("LFM2-VL", "LiquidAI/LFM2-VL-1.6B", "short convolutions"),
    "LlavaNext": Example("LLaVA-NeXT", "llava-hf/llava-v1.6-mistral-7b-hf"),
    "LlavaOnevision": Example("LLaVA-OneVision", "llava-hf/llava-onevision-qwen2-0.5b-ov-hf"),
    "Mistral3": Example("Mistral Small 3.1", "mistralai/Mistral-Small-3.1-24B-Instruct-2503"),
    "PaliGemma": Example("PaliGemma", "google/paligemma-3b-mix-224", "prompts seen both ways: `generate` alone"),
    "Qwen2VL": Example("Qwen2-VL", "Qwen/Qwen2-VL-2B-Instruct"),
    "Qwen2_5_VL": Example("Qwen2.5-VL", "Qwen/Qwen2.5-VL-3B-Instruct"),
    "Qwen3VL": Example("Qwen3-VL", "Qwen/Qwen3-VL-4B-Instruct"),
    "Qwen3VLMoe": Example("Qwen3-VL-MoE", "Qwen/Qwen3-VL-30B-A3B-Instruct", "experts"),
    "Qwen3_5": Example("Qwen3.5", "Qwen/Qwen3.5-27B", "gated delta nets"),
    "Qwen3_5Moe": Example("Qwen3.5-MoE", "Qwen/Qwen3.5-35B-A3B", "gated delta nets, experts"),
    "SmolVLM": Example("SmolVLM", "HuggingFaceTB/SmolVLM2-2.2B-Instruct"),
    "VipLlava": Example("ViP-LLaVA", "llava-hf/vip-llava-7b-hf"),
}
_BYPASS = "attention does not go through transformers' interface"
_DROPS = "`forward` does not hand keyword arguments to attention"
REFUSED = {
    "Bert": Example("BERT", "google-bert/bert-base-uncased", "an encoder"),
    "Bloom": Example("BLOOM", "bigscience/bloom-560m", _BYPASS),
    "DeepseekV4": Example("DeepSeek-V4", "deepseek-ai/DeepSeek-V4-Flash-Base", "compressed tokens in its own cache"),
    "Falcon": Example("Falcon", "tiiuae/falcon-7b", _BYPASS),
    "Inkling": Example("Inkling", "thinkingmachines/Inkling-NVFP4", "`position_bias` of its own in attention"),
    "Llama4": Example("Llama 4", "meta-llama/Llama-4-Scout-17B-16E-Instruct", "attention in chunks"),
    "LongcatFlash": Example(
        "LongCat-Flash", "meituan-longcat/LongCat-Flash-Chat", "experts are looped over on the host, by tokens they get"
    ),
    "MiniMax": Example("MiniMax-Text", "MiniMaxAI/MiniMax-Text-01-hf", "layers without softmax attention"),
    "Moshi": Example("Moshi", "kmhf/hf-moshika", "a window that its cache alone knows"),
    "Mpt": Example("MPT", "mosaicml/mpt-7b", _BYPASS),
    "Nemotron": Example("Nemotron", "nvidia/Minitron-4B-Base", _DROPS),
    "StableLm": Example("StableLM", "stabilityai/stablelm-2-1_6b", _DROPS),
    "T5": Example("T5", "google-t5/t5-small", "an encoder-decoder"),
    "XGLM": Example("XGLM", "facebook/xglm-564M", _BYPASS),
}


CLASSES = {**families.CLASSES, "Bert": "BertLMHeadModel", "T5": "T5ForConditionalGeneration"}
"""Those that are not named as the others."""
EXAMPLES = [example for group in (OWN, TESTED, RECURRENT, WITH_IMAGES, REFUSED) for example in group.values()]


def class_of(family: str) -> str:
    """The class that is wrapped, or refused."""
    return CLASSES.get(family, f"{family}ForCausalLM")


def compared(family: str) -> str:
    """What is compared with HuggingFace of a family that the tests of families run."""
    options = {**families.FAMILIES, **families.LATER}[family]
    found = ["eager", "compiled"]
    if "sliding_window" in options:
        found.append("windows")
    if any("experts" in name for name in options):
        found.append("experts")
    return ", ".join(found)


def line(example: Example, kind: str, said: str) -> str:
    return f"| {example.name}<br>`{kind}` | [`{example.hub}`](https://huggingface.co/{example.hub}) | {said} |"


def text_models() -> Iterator[str]:
    for family, example in OWN.items():
        yield line(example, class_of(family), f"eager, compiled, {example.remark}")
    for family, example in TESTED.items():
        remark = f"; {example.remark}" if example.remark else ""
        yield line(example, class_of(family), compared(family) + remark)


def recurrent_models() -> Iterator[str]:
    for family, example in RECURRENT.items():
        experts = ", experts" if family in recurrent_families.WITH_EXPERTS else ""
        yield line(example, class_of(family), f"eager{experts}; {example.remark}")


def models_that_see() -> Iterator[str]:
    for family, example in WITH_IMAGES.items():
        remark = f"; {example.remark}" if example.remark else ""
        yield line(example, f"{family}ForConditionalGeneration", f"text, images{remark}")


def refused_models() -> Iterator[str]:
    for family, example in REFUSED.items():
        yield line(example, class_of(family), example.remark)


def table(title: str, column: str, lines: Iterable[str]) -> str:
    rows = sorted(lines, key=lambda row: row.partition("<br>")[0].lower())
    return "\n".join([f"## {title}", "", f"| model | for example | {column} |", "|---|---|---|", *rows, ""])


def tables() -> str:
    parts = [
        table("Text", "compared with HuggingFace", text_models()),
        table("Recurrent layers", "compared with HuggingFace", recurrent_models()),
        table("Text and images", "compared with HuggingFace", models_that_see()),
        table("Refused", "because", refused_models()),
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(BETWEEN.sub(lambda _: tables(), PAGE.read_text()))
