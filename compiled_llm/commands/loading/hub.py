"""Asks HuggingFace's hub once whether it has a model: transformers asks many times before it gives up."""

from __future__ import annotations

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

_CONFIGS = ("config.json", "adapter_config.json")


def check_on_hub(model: str) -> None:
    """Raise RuntimeError if a model is not downloaded, and the hub lacks it, cannot be reached or hands nothing out."""
    if any(isinstance(try_to_load_from_cache(model, name), str) for name in _CONFIGS):
        return
    try:
        get_hf_file_metadata(hf_hub_url(model, _CONFIGS[0]))
    except EntryNotFoundError:
        return  # an adapter, or nothing that can be loaded; transformers says what is missing
    except GatedRepoError as error:
        raise RuntimeError(f"{model} cannot be loaded: {_without_request(error)}") from error
    except RepositoryNotFoundError as error:
        raise RuntimeError(
            f"{model} cannot be loaded: there is no folder or file of that name here, and no model on the hub; if it "
            "is private, log in with `hf auth login`"
        ) from error
    except Exception as error:  # each version of huggingface_hub has errors of its own for a network that fails
        raise RuntimeError(
            f"{model} cannot be loaded: there is no folder or file of that name here, and the hub cannot be asked "
            f"({_without_request(error)}); without a network, name a folder, or `demo` if it was downloaded before"
        ) from error


def _without_request(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line and "Request ID" not in line]
    return " ".join(lines) or type(error).__name__
