"""The masks that a model's layers need, by name, made of the masks of samples."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dyncp.integrations.transformers.layers import LayerMask
from dyncp.masks import Mask, MaskFunction, NamedMasks, named, within


@dataclass(frozen=True)
class SampleMasks:
    """Calls a function of a sample once, and cuts its mask for all kinds of layers. One that gives
    masks by name has to give all that the layers need."""

    function: Callable[[Any], Any]
    layers: tuple[LayerMask, ...]

    def __call__(self, sample: Any) -> dict[str, Mask]:
        found = self.function(sample)
        if not isinstance(found, Mapping):
            return {layer.name: _near(found, layer) for layer in self.layers}
        _check_names(found, self.layers)
        return dict(found)


def model_masks(mask_fn: Any, layers: Iterable[LayerMask]) -> Callable[[Any], Any]:
    """A mask function for layers of these kinds. What takes lengths goes on taking them."""
    layers = tuple(layers)
    if isinstance(mask_fn, MaskFunction):
        return named(**{layer.name: _near(mask_fn, layer) for layer in layers})
    if isinstance(mask_fn, NamedMasks):
        _check_names(mask_fn.functions, layers)
        return mask_fn
    if not callable(mask_fn):
        raise ValueError(
            f"mask_fn is {type(mask_fn).__name__}; allowed is a function of a sample, such as "
            "masks.causal"
        )
    return SampleMasks(mask_fn, layers)


def _near(mask: Any, layer: LayerMask) -> Any:
    if layer.size is None:
        return mask
    return within(mask, window=layer.window, chunk=layer.chunk)


def _check_names(found: Iterable[str], layers: Iterable[LayerMask]) -> None:
    missing = [layer.name for layer in layers if layer.name not in found]
    if missing:
        raise ValueError(
            f"the mask function gives masks named {', '.join(found)}; the model's layers need "
            f"{', '.join(missing)}, too. Give one mask, and they are made of it"
        )
