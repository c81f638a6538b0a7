from transformer_engine.common import recipe as recipe
