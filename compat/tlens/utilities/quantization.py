"""Not served here: it guards TransformerBridge against packed weights; models run unconverted here."""

from compat.tlens.utilities._left_out import refuse_names

__getattr__ = refuse_names(__name__, __doc__)
