"""Other ways to sample and train with MLX, each driven as its own users would. One module for each package."""
