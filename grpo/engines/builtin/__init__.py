"""The built-in engine: samples from the model that is being trained."""
