"""How the workers of one replica share a model: tensor-parallel ranks within pipeline stages."""
