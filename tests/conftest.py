"""Before any test imports MLX, give it the BLAS the product gives it."""

from mlxrl_runs import backend

backend.prepare()
