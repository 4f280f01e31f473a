"""What tensors are called in Hugging Face's files: transformers has renamed some in its models since."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightRenaming, rename_source_key


def names_in_exports(model: PreTrainedModel) -> dict[str, str]:
    """The tensors of ``model`` that ``save_pretrained`` calls otherwise, and how."""
    renamings = [each for each in _renamings(model, add_legacy=False) if not isinstance(each, PrefixChange)]
    back = [each.reverse_transform() for each in reversed(renamings)]
    names = {name: rename_source_key(name, back, [])[0] for name in model.state_dict()}
    return {name: there for name, there in names.items() if name != there}


def found_under(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """What each tensor of ``model`` is called among the ``stored``, as ``from_pretrained`` would find it.

    They may be those of its base model, or of a model that has it as its base, or have names of older versions.
    """
    own, renamings, prefix = model.state_dict(), _renamings(model, add_legacy=True), model.base_model_prefix
    found = {}
    for there in stored:
        name = rename_source_key(there, renamings, [], prefix, own)[0]
        if name not in own and there in own:
            name = there
        if name in own:
            found[name] = there
    return found


def _renamings(model: PreTrainedModel, add_legacy: bool) -> list[Any]:
    known = get_model_conversion_mapping(model, add_legacy=add_legacy)
    return [each for each in known if isinstance(each, WeightRenaming)]
