"""TensorBoard, Weights & Biases, MLflow, trackio. Door: `logger`."""
