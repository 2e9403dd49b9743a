"""A run that ends when a metric of its evaluations no longer improves. Door: `callbacks=[default,early_stopping]`."""
