"""job=check: pairs of ways to compute the same, measured against each other on the model and machine at hand."""
