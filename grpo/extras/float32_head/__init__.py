"""The head of a model in float32 (ScaleRL, arXiv 2510.13786). Door: `model.head_dtype`, by `model.head`."""
