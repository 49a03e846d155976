"""`compiled-llm lm-eval`: lm-eval's own command, which then knows the model `compiled_llm`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from compiled_llm.commands.errors import readable_errors

if TYPE_CHECKING:
    from compiled_llm.commands import lm_eval as this
    from compiled_llm.commands.app import CommandsPart

    checked: CommandsPart = this

NAME = "compiled_llm"
MODEL = "compiled_llm.integrations.lm_eval.model:CompiledLM"


def register(app: typer.Typer) -> None:
    """Add the command."""
    # Every argument is lm-eval's, --help among them.
    app.command(
        name="lm-eval",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(lm_eval)


def lm_eval(context: typer.Context) -> None:
    """Evaluate with lm-eval: all arguments are those of its own command, which knows the model compiled_llm."""
    with readable_errors():
        add_to_registry()
    from lm_eval.__main__ import cli_evaluate

    sys.argv = [f"{context.find_root().info_name} {context.info_name}", *context.args]
    cli_evaluate()


def add_to_registry() -> None:
    """Let lm-eval find our model by its name.

    Raises:
        ValueError: lm-eval is not installed, or has no registry that takes names.
    """
    # lm-eval looks for no entry points. A name that is there before its own are fills its registry, which it takes for
    # filled then: so its own come first.
    try:
        import lm_eval.models  # noqa: F401
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise ValueError(
            f"lm-eval 0.4.13 or newer is needed, and cannot be imported ({error}): pip install 'lm-eval[hf]>=0.4.13'"
        ) from None
    if NAME not in model_registry:
        model_registry.register(NAME, target=MODEL)
