"""Transformers models under dyncp: `attach(model)`, then `model(**local_data, dyncp_step=step)`.

Requires the extra `transformers`. Importing this package changes nothing; `attach` registers an
attention function and a mask function through Transformers' own interfaces.
"""

from dyncp.integrations.transformers.attach import Attached, attach
from dyncp.integrations.transformers.layers import layer_masks, model_masks

__all__ = ["Attached", "attach", "layer_masks", "model_masks"]
