"""The base of an adapter in 4 or 8 bits. Door: `model.quantization`, by `model.quantizer`."""
