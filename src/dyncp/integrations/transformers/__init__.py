"""Transformers models under dyncp: `attach(model)`, then `model(**local_data, dyncp_step=step)`.

Needs the extra `transformers`. Nothing happens at import; `attach` registers an attention and a
mask function by Transformers' own interfaces.
"""

from dyncp.integrations.transformers.attach import Attached, attach

__all__ = ["Attached", "attach"]
