"""Arguments of a model's chat template (`data.chat_template_kwargs`), such as `enable_thinking: false` of Qwen3.

A Jinja template ignores arguments that it does not read, so a name that it does not contain is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta

from mm_grpo.errors import ConfigError, UserError, did_you_mean

FIELD = "data.chat_template_kwargs"
OURS = ("messages", "add_generation_prompt", "tools", "documents", "raise_exception", "strftime_now")
"""Names that every rendering sets, or that a run has no use for."""
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
"""A tag that only transformers' Jinja knows."""


@lru_cache(maxsize=8)
def names_read(template: str) -> frozenset[str]:
    """Return the names that a chat template reads and does not set itself. TemplateSyntaxError if it is no Jinja."""
    syntax = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
    return frozenset(meta.find_undeclared_variables(syntax))


def check_arguments(
    arguments: Mapping[str, Any], template: str, where: str = FIELD, error: type[UserError] = ConfigError
) -> dict[str, Any]:
    """Copy the arguments, which stand at `where`. Raise `error` for a name that the model's template does not read."""
    if not arguments:
        return {}
    try:
        legal = sorted(names_read(template) - set(OURS))
    except TemplateSyntaxError as fault:
        raise ConfigError(f"model.path: the chat template is not valid Jinja ({fault})") from None
    for name in arguments:
        if name in OURS:
            raise error(f"{where}.{name}: is set for every prompt by the run; leave it out")
        if name not in legal:
            raise error(
                f"{where}.{name}: the chat template of model.path does not read {name!r}, so it would change "
                f"nothing; {did_you_mean(name, legal)}it reads: {', '.join(legal) or 'none'}. Leave it out, or "
                "use a model whose template has it"
            )
    return dict(arguments)
